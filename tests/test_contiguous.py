"""Attention over keys and values that lie in a row, as an encoder's do: no cache, no pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_step import check, kernels, make_planner, run, step_of
from tests.support import make_contiguous_case

LENGTHS = [17, 1, 100, 63]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 12])
def test_every_token_sees_every_token_of_its_request(kernels, dtype, window, device):
    case = make_contiguous_case(LENGTHS, LENGTHS, q_heads=6, kv_heads=2, dtype=dtype, device=device)
    check(case, kernels=kernels, num_decodes=0, causal=False, window=window)


@kernels
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(56, 56), (192, 128), (256, 256)])
def test_head_sizes(kernels, head_dim, head_dim_v, device):
    case = make_contiguous_case([33, 5], [33, 5], head_dim=head_dim, head_dim_v=head_dim_v, device=device)
    check(case, kernels=kernels, num_decodes=0, causal=False)


@kernels
def test_queries_and_keys_of_unlike_lengths(kernels, device):
    # cross attention without a cache; a request without keys gives zeros
    case = make_contiguous_case([30, 2, 90, 1], [7, 50, 140, 0], device=device)
    check(case, kernels=kernels, num_decodes=0, causal=False)


@kernels
def test_causal_and_short_queries_through_the_decode_kernel(kernels, device):
    case = make_contiguous_case([1, 4, 40], [70, 300, 40], q_heads=8, kv_heads=2, device=device)
    check(case, kernels=kernels, num_decodes=2, planner_options={"max_decode_query": 4})


@kernels
def test_options(kernels, device):
    case = make_contiguous_case(LENGTHS, LENGTHS, device=device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1], device=device)
    check(
        case,
        kernels=kernels,
        num_decodes=0,
        causal=False,
        sinks=sinks,
        soft_cap=2.0,
        alibi_slopes=slopes,
        window=30,
    )


@kernels
def test_too_few_rows_are_refused(kernels, device):
    case = make_contiguous_case(LENGTHS, LENGTHS, device=device)
    schedule = make_planner(case, kernels=kernels).plan(step_of(case, 0, causal=False))
    case.k_pages = case.k_pages[:100]
    with pytest.raises(ValueError, match="181 tokens; keys and values have 100, 196 rows"):
        run(case, schedule, scale=0.1)

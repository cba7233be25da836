"""Which keys a query sees: causal by request, windows to both sides, spans, each against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernel_step import check, kernels, make_planner, run, step_of
from tests.support import make_paged_case

# in a decode's past, at a short query, in a chunk that prefills and begun in its cached prefix; (0, 0) is padding
QUERY_LENS, SEQ_LENS = [1, 3, 70, 150], [40, 63, 130, 150]
SPANS = [
    [(5, 30), (0, 0), (0, 0)],
    [(58, 63), (0, 0), (0, 0)],
    [(50, 71), (90, 125), (0, 0)],
    [(0, 9), (20, 20), (60, 149)],
]


@kernels
@pytest.mark.parametrize("window", [-1, 0, 10, 40])
@pytest.mark.parametrize("clamp", [False, True])
def test_spans(kernels, window, clamp, device):
    case = make_paged_case(QUERY_LENS, SEQ_LENS, q_heads=6, kv_heads=2, device=device)
    spans = torch.tensor(SPANS, dtype=torch.int32, device=device)
    options = {"kernels": kernels, "window": window, "planner_options": {"max_decode_query": 3}}
    check(case, num_decodes=2, spans=spans, clamp_spans=clamp, **options)
    check(case, num_decodes=0, spans=spans, clamp_spans=clamp, **options)


@kernels
def test_a_span_past_the_keys_so_far(kernels, device):
    # a chunk ends inside an image: its other tokens are not there yet
    case = make_paged_case([20], [60], device=device)
    spans = torch.tensor([[(30, 500)]], dtype=torch.int32, device=device)
    check(case, kernels=kernels, num_decodes=0, spans=spans, window=8)


@kernels
def test_a_step_planned_for_spans_serves_layers_without_them(kernels, device):
    """Some layers of a model look at images causally: they get the same schedule, and no spans."""
    case = make_paged_case(QUERY_LENS, SEQ_LENS, device=device)
    options = {"kernels": kernels, "window": 10, "max_decode_query": 3, "general": True}
    plain = make_planner(case, **options).plan(step_of(case, 2))
    planned = make_planner(case, **options).plan(step_of(case, 2, has_spans=True))
    out, _ = run(case, plain, scale=0.1)
    again, _ = run(case, planned, scale=0.1)
    torch.testing.assert_close(out, again, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_causal_by_request(kernels, window, dtype, device):
    case = make_paged_case([1, 4, 4, 50, 50], [40, 63, 63, 90, 70], device=device)
    causal = torch.tensor([False, True, False, True, False], device=device).to(dtype)
    for num_decodes in (0, 3):
        check(
            case, kernels=kernels, num_decodes=num_decodes, causal=causal, window=window,
            planner_options={"max_decode_query": 4},
        )  # fmt: skip


@kernels
@pytest.mark.parametrize("window", [0, 7, 33])
def test_a_window_without_causal_hides_both_sides(kernels, window, device):
    """NaN right of every query's window, as left of it, must not reach the output."""
    query_lens, seq_lens = [1, 60], [200, 180]
    case = make_paged_case(query_lens, seq_lens, device=device, seed=window)
    for request, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        hidden = torch.arange(max(length - queries - window, 0))
        page = case.block_table[request].cpu().long()[hidden // 16]
        for cache in (case.k_pages, case.v_pages):
            cache[page.to(device), (hidden % 16).to(device)] = math.nan
    check(case, kernels=kernels, num_decodes=1, window=window, causal=False)


@kernels
def test_alibi_with_square_roots(kernels, device):
    case = make_paged_case([1, 2, 40], [70, 300, 130], q_heads=6, kv_heads=2, device=device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.3, 0.7, 1.5], device=device)
    options = {"kernels": kernels, "num_decodes": 2, "alibi_slopes": slopes, "alibi_sqrt": True}
    options["planner_options"] = {"max_decode_query": 2}
    for causal in (True, False):
        check(case, causal=causal, **options)
    check(case, soft_cap=2.0, window=50, **options)

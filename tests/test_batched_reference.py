"""The batched reference is the specification, number for number."""

from __future__ import annotations

import math
import random

import pytest
import torch

from numa_attention import reference
from tests import batched_reference
from tests.support import LAYOUTS, PagedCase, make_contiguous_case, make_paged_case, poison_tokens, put_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def draw(generator: random.Random) -> tuple[tuple, dict]:
    """Positional arguments and options of any attention that the specification defines."""
    requests, kv_heads, group = generator.randint(1, 4), generator.randint(1, 3), generator.choice((1, 2, 5))
    query_lens = [generator.choice((0, 1, 2, generator.randint(3, 20))) for _ in range(requests)]
    # no keys at all, fewer keys than queries, and cached prefixes
    seq_lens = [
        generator.choice((0, n // 2, n, n + 1, n + generator.randint(0, 60)))
        if n
        else generator.choice((0, 9))
        for n in query_lens
    ]
    make_case = generator.choice((make_paged_case, make_paged_case, make_contiguous_case))
    case = make_case(
        query_lens, seq_lens, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=16,
        head_dim_v=generator.choice((16, 8)), page_size=generator.choice((16, 48)), kv_dtype=generator.choice(DTYPES),
        layout=generator.choice(LAYOUTS), seed=generator.randrange(1 << 30),
    )  # fmt: skip
    case = PagedCase(*case.arguments())
    for request, length in enumerate(seq_lens):
        token = torch.tensor(
            generator.sample(range(length), min(length, generator.randint(0, 2))), dtype=torch.int64
        )
        if generator.random() < 0.7:
            poison_tokens(case, request, token)
        elif case.v_pages.dtype != torch.float8_e4m3fn:  # which has no infinity
            infinite = torch.full((len(token), *case.v_pages.shape[2:]), math.inf)
            infinite[:, :, ::3] = -math.inf
            put_tokens(case.v_pages, case.block_table[request], token, infinite)
    numbers = torch.Generator().manual_seed(generator.randrange(1 << 30))
    heads = group * kv_heads
    options = {
        "scale": generator.choice((0.25, 1.7)),
        "causal": generator.choice((True, False, torch.rand(requests, generator=numbers) < 0.5)),
        "window": generator.choice((-1, -1, 0, 3, 20)),
        "soft_cap": generator.choice((0.0, 0.0, 3.0)),
        "sinks": generator.choice((None, torch.randn(heads, generator=numbers))),
        "alibi_slopes": generator.choice((None, torch.rand(heads, generator=numbers))),
        "alibi_sqrt": generator.random() < 0.3,
    }
    if generator.random() < 0.3:
        ends = [sorted(generator.sample(range(80), 2)) for _ in range(2 * requests)]
        options["spans"] = torch.tensor(ends, dtype=torch.int32).view(requests, 2, 2)
        options["clamp_spans"] = generator.random() < 0.5
    if generator.random() < 0.5:
        options["q_scale"] = generator.uniform(0.5, 2)
        options |= {name: torch.tensor([generator.uniform(0.5, 2)]) for name in ("k_scale", "v_scale")}
    return case.arguments(), options


@pytest.mark.parametrize("part", range(3))
def test_random_draws(part):
    generator, with_nan, without_keys = random.Random(part), 0, 0
    for _ in range(50):
        arguments, options = draw(generator)
        expected, expected_lse = reference.attention(*arguments, **options)
        with_nan += bool(expected.isnan().any() and expected.isfinite().any())
        without_keys += bool((expected_lse == -math.inf).any())
        for block_bytes in (
            1,
            40_000,
            batched_reference.BLOCK_BYTES,
        ):  # blocks of one row, some rows, all rows
            out, lse = batched_reference.attention(*arguments, **options, block_bytes=block_bytes)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert with_nan >= 5 and without_keys >= 5, "the draws have lost what they are for"


def test_scores_far_from_one_another():
    """Weights are 0 or 1, and 0 times an infinity is NaN."""
    case = make_paged_case([5, 40], [90, 40])
    case.q *= 1e4
    put_tokens(case.v_pages, case.block_table[0], torch.tensor([3]), torch.full((1, 2, 64), math.inf))
    for found, expected in zip(
        batched_reference.attention(*case.arguments(), scale=1.0),
        reference.attention(*case.arguments(), scale=1.0),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_rows_see_no_numbers_but_their_own():
    """NaN that only other rows see, and NaN that no row of the request sees."""
    case = make_paged_case([3], [70])
    options = {"scale": 0.1, "window": 20}
    clean, _ = batched_reference.attention(*case.arguments(), **options)
    poison_tokens(case, 0, torch.tensor([0, 5, 46, 69]))
    out, lse = batched_reference.attention(*case.arguments(), **options)
    assert torch.equal(out[:2], clean[:2]) and not lse[:2].isnan().any()
    assert out[2].isnan().all() and lse[2].isnan().all()

"""Random steps on a small pretended MI450, kernels and order of events drawn at random, against the float64 reference.

`NUMA_TEST_SEED` draws others, `NUMA_TEST_CASES` more: docs/decode-gfx1250.md has the command.
"""

from __future__ import annotations

import random

import pytest
import torch

from numa_attention.decode import cdna5_variant
from tests.gluon.cdna5_step import check_decode, check_prefill
from tests.random_draws import SEED, share_of_draws
from tests.support import LAYOUTS, PagedCase, make_paged_case

GROUPS = (1, 2, 3, 4, 6, 8, 16)
HEAD_DIMS = ((40, 40), (64, 64), (64, 64), (64, 64), (80, 80), (128, 128), (128, 64))


def draw_case(generator: random.Random, query_lens: list[int], longest: int) -> tuple[PagedCase, dict]:
    """A step of these query lengths over caches of any type and layout, and the options of the layer's call."""
    dtype = generator.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    kv_dtype = generator.choice((dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2))
    group = generator.choice(GROUPS)
    kv_heads = generator.choice((1, 1, 2)) if group < 8 else 1
    head_dim, head_dim_v = generator.choice(HEAD_DIMS)
    seq_lens = [n and n + generator.choice((0, 1, 15, generator.randint(0, longest))) for n in query_lens]
    case = make_paged_case(
        query_lens, seq_lens, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
        page_size=generator.choice((16, 32, 48, 64, 128)), dtype=dtype, kv_dtype=kv_dtype,
        layout=generator.choice(LAYOUTS), seed=generator.randrange(1 << 30),
    )  # fmt: skip
    numbers = torch.Generator().manual_seed(generator.randrange(1 << 30))
    options = {"soft_cap": generator.choice((0.0, 0.0, 4.0)), "causal": generator.random() < 0.8}
    if generator.random() < 0.3:
        options["sinks"] = torch.randn(case.q.shape[1], generator=numbers)
    if generator.random() < 0.3:
        options["alibi_slopes"] = 0.1 * torch.rand(case.q.shape[1], generator=numbers)
    if kv_dtype != dtype:
        for name in ("k_scale", "v_scale"):
            options[name] = torch.tensor([generator.uniform(0.5, 2)])
    return case, options


def draw_decode(generator: random.Random) -> None:
    query_lens = [generator.choice((0, 1, 1, 1, 2, 3)) for _ in range(generator.randint(1, 3))]
    case, options = draw_case(generator, query_lens, longest=130)
    if case.q.shape[0] == 0:
        return
    domains = generator.choice((1, 1, 2))
    check_decode(
        case,
        form=generator.choice(cdna5_variant.FORMS),
        block_n=64 if case.k_pages.dtype != case.q.dtype else 32,
        units=domains * generator.choice((1, 2)),
        domains=domains,
        window=generator.choice((-1, -1, 0, 20)),
        seed=generator.randrange(1 << 30),
        **options,
    )


def draw_prefill(generator: random.Random) -> None:
    query_lens = [generator.randint(1, 20) for _ in range(generator.randint(1, 2))]
    case, options = draw_case(generator, query_lens, longest=70)
    rows = case.q.shape[1] // case.k_pages.shape[2] * max(query_lens)
    check_prefill(
        case,
        block_m=16 if rows <= 32 else 32 if rows <= 64 else 64,  # some three tiles of each request
        domains=generator.choice((1, 2, 3)),
        window=generator.choice((-1, -1, 0, 20)),
        seed=generator.randrange(1 << 30),
        **options,
    )


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("draw", [draw_decode, draw_prefill], ids=["decode", "prefill"])
def test_random_steps(draw, part):
    generator = random.Random(SEED * 1000 + part)
    for _ in range(share_of_draws(75, 5)):
        draw(generator)

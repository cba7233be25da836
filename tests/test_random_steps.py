"""Random steps with every feature mixed, against the float64 reference. `NUMA_TEST_SEED` draws others.

Without a GPU the sweep is small; with one it draws NUMA_TEST_CASES (1,000) cases from few compiled variants.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.kernel_step import check
from tests.support import LAYOUTS, make_paged_case

HAS_GPU = torch.cuda.is_available()
SEED = int(os.environ.get("NUMA_TEST_SEED", "0"))
CASES = int(os.environ.get("NUMA_TEST_CASES", "1000" if HAS_GPU else "24"))

# q heads, KV heads, head_dim, head_dim_v, page size, window, soft cap, sinks, ALiBi, dtype, cache dtype, decode queries
VARIANTS = (
    (8, 1, 128, 128, 16, -1, 0.0, False, False, torch.bfloat16, None, 1),
    (32, 8, 128, 128, 64, -1, 0.0, False, False, torch.bfloat16, None, 4),
    (9, 3, 64, 64, 16, -1, 0.0, False, False, torch.float16, None, 1),
    (14, 2, 64, 64, 16, 100, 0.0, True, False, torch.bfloat16, None, 2),
    (8, 4, 256, 256, 32, 50, 30.0, False, False, torch.bfloat16, None, 1),
    (64, 1, 128, 128, 64, -1, 0.0, False, False, torch.bfloat16, None, 1),
    (6, 6, 80, 80, 48, -1, 0.0, False, True, torch.float32, None, 1),
    (24, 1, 192, 128, 528, -1, 0.0, False, False, torch.bfloat16, None, 1),
    (16, 2, 128, 128, 16, -1, 0.0, False, False, torch.bfloat16, torch.float8_e4m3fn, 1),
    (5, 1, 56, 56, 16, 7, 5.0, True, True, torch.float32, None, 8),
)


def draw(generator: random.Random, variant: tuple, device: torch.device) -> None:
    """Draw one step of a variant's shape, run it and compare."""
    (
        q_heads,
        kv_heads,
        head_dim,
        head_dim_v,
        page_size,
        window,
        cap,
        with_sinks,
        alibi,
        dtype,
        kv_dtype,
        queries,
    ) = variant
    longest = 3000 if HAS_GPU else 300
    decodes, prefills = generator.randint(0, 5), generator.randint(0, 2)
    if decodes + prefills == 0:
        decodes = 1
    query_lens = [generator.randint(0, queries) for _ in range(decodes)]
    query_lens += [generator.randint(1, longest // 4) for _ in range(prefills)]
    seq_lens = [
        n + generator.choice((0, 1, 15, generator.randint(0, longest))) if n else 0 for n in query_lens
    ]
    case = make_paged_case(
        query_lens, seq_lens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
        page_size=page_size, dtype=dtype, kv_dtype=kv_dtype, layout=generator.choice(LAYOUTS), device=device,
        seed=generator.randrange(1 << 30),
    )  # fmt: skip
    if case.q.shape[0] == 0:
        return
    numbers = torch.Generator().manual_seed(generator.randrange(1 << 30))
    options = {}
    if with_sinks:
        options["sinks"] = torch.randn(q_heads, generator=numbers).to(device)
    if alibi:
        options["alibi_slopes"] = (0.1 * torch.rand(q_heads, generator=numbers)).to(device)
    if kv_dtype is not None:
        options["k_scale"], options["v_scale"] = (
            torch.tensor([generator.uniform(0.5, 2)], device=device) for _ in range(2)
        )
    check(
        case, kernels="triton", num_decodes=decodes, window=window, soft_cap=cap,
        planner_options={"max_decode_query": queries}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("index", range(len(VARIANTS)))
def test_random_steps(index, device):
    print(f"NUMA_TEST_SEED={SEED}")
    generator = random.Random(SEED * 1000 + index)
    for _ in range(-(-CASES // len(VARIANTS))):
        draw(generator, VARIANTS[index], device)


@pytest.mark.gpu
def test_ten_thousand_replays_are_bit_identical(device):
    from tests.kernel_step import make_planner, run, step_of

    case = make_paged_case(
        [1] * 5,
        [1, 700, 4000, 63, 20_000],
        q_heads=32,
        kv_heads=4,
        head_dim=128,
        dtype=torch.bfloat16,
        device=device,
    )
    schedule = make_planner(case, kernels="triton").plan(step_of(case, 5))
    run(case, schedule, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(case, schedule, scale=0.1)
    graph.replay()
    first, differences = out.clone(), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(10_000):
        graph.replay()
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differences) == 0

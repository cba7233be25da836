"""Random steps with every feature mixed, against the float64 reference. `NUMA_TEST_SEED` draws others.

Without a GPU the sweep is small; with one it draws NUMA_TEST_CASES (1,000) steps from few compiled kernels.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernel_step import check
from tests.random_draws import SEED, Layer, draw_step, share_of_draws
from tests.support import make_paged_case

HAS_GPU = torch.cuda.is_available()

LAYERS = (
    Layer(1, 8, 128, 16),
    Layer(8, 4, 128, 64, queries=4, aligned=False),
    Layer(3, 3, 64, 16, dtype=torch.float16),
    Layer(2, 7, 64, 16, window=100, sinks=True, queries=2, aligned=False),
    Layer(4, 2, 256, 32, window=50, soft_cap=30.0),
    Layer(1, 64, 128, 64),
    Layer(6, 1, 80, 48, alibi=True, dtype=torch.float32, aligned=False),
    Layer(1, 24, 192, 528, 128),
    Layer(2, 8, 128, 16, kv_dtype=torch.float8_e4m3fn),
    Layer(1, 5, 56, 16, window=7, soft_cap=5.0, sinks=True, alibi=True, dtype=torch.float32, queries=8),
)


def check_random_step(generator: random.Random, layer: Layer, device: torch.device) -> None:
    """Draw requests that decode and requests that prefill, run them and compare with the reference."""
    longest = 3000 if HAS_GPU else 300
    decodes, prefills = generator.randint(0, 5), generator.randint(0, 2)
    query_lens = [generator.randint(0, layer.queries) for _ in range(decodes)]
    query_lens += [generator.randint(1, longest // 4) for _ in range(prefills)]
    if not any(query_lens):
        query_lens.append(longest // 4)
    case, options = draw_step(generator, layer, query_lens, longest, device)
    check(
        case, kernels="triton", num_decodes=decodes, window=layer.window,
        planner_options={"max_decode_query": layer.queries}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_random_steps(index, device):
    generator = random.Random(SEED * 1000 + index)
    for _ in range(share_of_draws(1000 if HAS_GPU else 24, len(LAYERS))):
        check_random_step(generator, LAYERS[index], device)


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

"""Random steps of chosen layers: how many from which seed, what is drawn, and few kernels to compile for all of it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support import LAYOUTS, PagedCase, make_paged_case, poison_left_of_windows

SEED = int(os.environ.get("NUMA_TEST_SEED", "0"))


@dataclass(frozen=True)
class Layer:
    """A layer and the options of its calls: what one compiled kernel is made for."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    causal: bool = True
    form: str | None = None
    queries: int = 1  # most query tokens of a request that decodes
    aligned: bool = True  # whether the strides of block table and LSE are multiples of 16


def share_of_draws(default: int, tests: int) -> int:
    """The draws of one of so many tests, NUMA_TEST_CASES (`default`) together; prints them and the seed."""
    draws = -(-int(os.environ.get("NUMA_TEST_CASES", default)) // tests)
    print(f"NUMA_TEST_SEED={SEED}, {draws} draws", flush=True)
    return draws


def draw_step(
    generator: random.Random,
    layer: Layer,
    query_lens: Sequence[int],
    longest: int,
    device: torch.device | str,
) -> tuple[PagedCase, dict]:
    """A step of these query lengths, and the options of its call in `kernel_step.check_planned`.

    Drawn are the cache's layout, cached prefixes of up to `longest` tokens, a few requests with fewer keys than
    queries, numbers, and whether what windows hide is NaN.
    """
    seq_lens = []
    for n in query_lens:
        context = generator.choice((0, 1, 15, 63, *(generator.randint(0, longest) for _ in range(3))))
        seq_lens.append(generator.randint(0, n) if generator.random() < 0.03 else n and n + context)
    q_heads, seed = layer.kv_heads * layer.group, generator.randrange(1 << 30)
    case = make_paged_case(
        query_lens, seq_lens, q_heads=q_heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim,
        head_dim_v=layer.head_dim_v, page_size=layer.page_size, dtype=layer.dtype, kv_dtype=layer.kv_dtype,
        layout=generator.choice(LAYOUTS), columns=_wide(-(-max(seq_lens) // layer.page_size), layer.aligned),
        device=device, seed=seed,
    )  # fmt: skip
    if layer.window >= 0 and layer.causal and generator.random() < 0.5:
        poison_left_of_windows(case, layer.window)
    numbers = torch.Generator().manual_seed(seed)
    options = {
        "causal": layer.causal,
        "soft_cap": layer.soft_cap,
        "lse_columns": _wide(sum(query_lens), layer.aligned),
    }
    if layer.sinks:
        options["sinks"] = torch.randn(q_heads, generator=numbers).to(device)
    if layer.alibi:
        options["alibi_slopes"] = (0.1 * torch.rand(q_heads, generator=numbers)).to(device)
    if layer.kv_dtype is not None:
        options |= {
            name: torch.tensor([generator.uniform(0.5, 2)], device=device) for name in ("k_scale", "v_scale")
        }
    return case, options


def _wide(columns: int, aligned: bool) -> int:
    """At least as many columns, a multiple of 16 or one more: Triton compiles one kernel for either."""
    return (columns // 16 + 1) * 16 + (not aligned)

"""Steps on a small pretended MI450, whose kernels the Gluon interpreter runs; what the tests of gfx1250 share."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from numa_attention.decode import cdna5
from numa_attention.prefill import cdna5 as prefill_cdna5
from numa_attention.schedule import Planner, Schedule
from numa_attention.topology import Topology, pretend
from tests.gluon import interpreted as under_interpreter
from tests.kernel_step import check_planned, make_planner
from tests.support import PagedCase, make_paged_case

interpreted = partial(under_interpreter.interpreted, target="gfx1250")


def small_mi450(units: int, domains: int = 1) -> Topology:
    """Decode launches two workgroups a compute unit there."""
    return dataclasses.replace(
        pretend("gfx1250"), compute_units=units, domains=domains, dispatch_domains=domains
    )


def decode_planner(
    case: PagedCase,
    *,
    form: str | None = None,
    units: int = 3,
    domains: int = 1,
    window: int = -1,
    general: bool = False,
    **fields,
) -> Planner:
    """A planner whose decode is that of gfx1250, in its own form or another one."""
    planner = make_planner(
        case,
        window=window,
        general=general,
        kernels="triton",
        topology=small_mi450(units, domains),
        max_decode_query=max(int(case.query_start_loc.diff().max()), 1),
    )
    assert planner.decode_variant.name == "cdna5-decode", planner.decode_variant.describe()
    if form is not None:
        fields["form"] = form
    variant = dataclasses.replace(planner.decode_variant, **fields)
    planner.decode_variant = variant
    planner.decode_buffers = dataclasses.replace(planner.decode_buffers, variant=variant)
    return planner


def mark_of(case: PagedCase) -> torch.dtype | None:
    """Products with a float8 cache are as exact as bfloat16 has them, whatever the query's type."""
    return torch.bfloat16 if case.k_pages.dtype.itemsize == 1 else None


def check_decode(case: PagedCase, *, seed: int = 0, debug: bool = False, **options) -> Schedule:
    """Decode all requests of a case and compare with the reference; returns the schedule."""
    names = ("form", "units", "domains", "window", "general", "block_n")
    chosen = {name: options.pop(name) for name in names if name in options}
    planner = decode_planner(case, **chosen)
    options["mark"] = mark_of(case)
    with interpreted(cdna5._launch, cdna5.decode_kernel, seed=seed, debug=debug) as stand_in:
        schedule = check_planned(case, planner, num_decodes=len(case.seq_lens), **options)
    assert stand_in.launches == 1
    assert not schedule.decode.arrivals.any(), "the counters must be zero again"
    return schedule


def bf16_case(*arguments, **options) -> PagedCase:
    return make_paged_case(*arguments, dtype=torch.bfloat16, **options)


def prefill_planner(
    case: PagedCase,
    *,
    domains: int = 1,
    window: int = -1,
    general: bool = False,
    block_m: int = 32,
    block_n: int | None = None,
) -> Planner:
    """A planner whose prefill is that of gfx1250, in small tiles."""
    planner = make_planner(
        case, window=window, general=general, kernels="triton", topology=small_mi450(domains, domains)
    )
    variant = planner.prefill_variant
    assert variant.name == "cdna5-prefill", variant.describe()
    block_n = block_n or (64 if case.k_pages.dtype.itemsize == 1 else 32)
    planner.prefill_variant = dataclasses.replace(
        variant, block_m=block_m, block_n=block_n, num_warps=min(block_m // 16, 2)
    )
    tiles = case.k_pages.shape[2] * (len(case.q) * planner.shape.group // block_m + len(case.seq_lens))
    planner._tiles = torch.empty(tiles, 4, dtype=torch.int32)
    return planner


def check_prefill(case: PagedCase, *, seed: int = 0, debug: bool = False, **options) -> Schedule:
    """Prefill all requests of a case and compare with the reference; returns the schedule."""
    names = ("domains", "window", "general", "block_m", "block_n")
    planner = prefill_planner(case, **{name: options.pop(name) for name in names if name in options})
    options["mark"] = mark_of(case)
    with interpreted(prefill_cdna5._launch, prefill_cdna5.prefill_kernel, seed=seed, debug=debug) as stand_in:
        schedule = check_planned(case, planner, num_decodes=0, **options)
    assert stand_in.launches == 1
    return schedule

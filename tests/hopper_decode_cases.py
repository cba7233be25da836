"""Small steps of every kind for the sm_90 decode kernel, which run on a GPU and under the Gluon interpreter."""

from __future__ import annotations

import dataclasses
import random

import torch

from numa_attention.schedule import Schedule
from numa_attention.topology import Topology, detect, pretend
from numa_attention.variants import choose_decode
from tests.kernel_step import check_planned, make_planner, shape_of
from tests.random_draws import Layer, draw_step
from tests.support import LAYOUTS, PagedCase, make_paged_case, poison_left_of_windows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def topology_of(device: str, units: int) -> Topology:
    """The GPU itself, or a small pretended one."""
    if device == "cuda":
        return detect(device)
    return dataclasses.replace(pretend("sm_90"), compute_units=units)


def check_decode(
    case: PagedCase, form: str | None, *, device: str = "cpu", units: int = 3, window: int = -1,
    rows: int | None = None, stages: int | None = None, **options,
) -> Schedule:  # fmt: skip
    """Decode all requests of a case and compare with the reference; returns the schedule.

    form: None for the variant's own, with its own ring.
    """
    topology = topology_of(device, units)
    queries = max(int(case.query_start_loc.diff().max()), 1)
    variant = choose_decode(shape_of(case, window), topology, "triton", queries, kernel="hopper-decode")
    rows = rows or variant.block_m
    if form is not None:
        ring = 1 if form == "single" else stages or min(variant.num_stages, 3)
        variant = dataclasses.replace(variant, form=form, block_m=rows, num_stages=ring)
    planner = make_planner(
        case,
        window=window,
        kernels="triton",
        topology=topology,
        max_decode_query=queries,
        decode_variant=variant,
        extend=False,
    )
    # float16 products of bfloat16 queries are as exact as bfloat16 says
    mark = torch.bfloat16 if case.k_pages.dtype.itemsize == 1 else None
    schedule = check_planned(case, planner, num_decodes=len(case.seq_lens), mark=mark, **options)
    assert not schedule.decode.arrivals.any(), "the counters must be zero again"
    return schedule


HEADS_OF_TILES = (2, 12, 24, 48)  # over one KV head, for tiles of 8, 16, 32 and 64 rows


def bf16_case(*arguments, **options) -> PagedCase:
    return make_paged_case(*arguments, dtype=torch.bfloat16, **options)


def check_all(form: str, device: str) -> None:
    """Head sizes, types, layouts, groups, pages, masks, splits, empty requests."""
    on = {"device": device}
    numbers = torch.Generator().manual_seed(1)
    for head_dim, kv_dtype in (
        (64, None),
        (64, E4M3),
        (128, None),
        (256, None),
        (128, E4M3),
        (128, E5M2),
        (256, E4M3),
    ):
        case = bf16_case([1, 1, 1], [1, 150, 300], head_dim=head_dim, kv_dtype=kv_dtype, page_size=32, **on)
        scales = {}
        if kv_dtype is not None:
            scales = {"k_scale": torch.tensor([0.7]).to(device), "v_scale": torch.tensor([1.6]).to(device)}
        check_decode(case, form, **on, **scales)
        print(f"head_dim {head_dim}, {kv_dtype}", flush=True)
    check_decode(make_paged_case([1, 1], [65, 200], dtype=torch.float16, head_dim=128, **on), form, **on)
    for layout in LAYOUTS:
        check_decode(bf16_case([1, 1], [70, 130], layout=layout, head_dim=128, kv_heads=2, **on), form, **on)
    for page_size in (16, 48, 64, 528):
        check_decode(bf16_case([1, 1], [65, 250], page_size=page_size, head_dim=128, **on), form, **on)
    print("layouts and pages", flush=True)
    for group, queries in ((1, 1), (3, 1), (24, 2), (64, 1), (5, 8)):
        case = bf16_case([queries, 1], [100, 63], q_heads=group, kv_heads=1, head_dim=128, **on)
        check_decode(case, form, **on)
        case = bf16_case(
            [queries, 1], [100, 63], q_heads=group, kv_heads=1, head_dim=128, kv_dtype=E4M3, **on
        )
        check_decode(case, form, **on)
    print("groups", flush=True)
    sinks, slopes = (torch.randn(6, generator=numbers).to(device) for _ in range(2))
    case = bf16_case([1, 2], [70, 150], q_heads=6, kv_heads=2, head_dim=128, **on)
    check_decode(case, form, soft_cap=3.0, sinks=sinks, alibi_slopes=slopes.abs() * 0.1, **on)
    for window in (0, 33, 100):
        for kv_dtype in (None, E4M3):
            case = windowed_case([1, 2], [30, 200], window, head_dim=128, kv_dtype=kv_dtype, **on)
            check_decode(case, form, window=window, **on)
    print("masks", flush=True)
    for q_heads in HEADS_OF_TILES:
        case = bf16_case([1], [2500], q_heads=q_heads, kv_heads=1, page_size=64, **on)
        check_decode(case, form, units=10, **on)
    check_decode(bf16_case([1, 0, 1, 0], [70, 0, 0, 0], q_heads=2, kv_heads=1, **on), form, **on)
    print("splits and empty requests", flush=True)


def windowed_case(query_lens: list[int], seq_lens: list[int], window: int, **options) -> PagedCase:
    """A case whose keys left of every window are NaN too."""
    case = bf16_case(query_lens, seq_lens, q_heads=2, kv_heads=1, **options)
    poison_left_of_windows(case, window)
    return case


RANDOM_LAYERS = (
    Layer(8, 8, 128, 16),
    Layer(2, 4, 128, 64, queries=4, aligned=False),
    Layer(3, 3, 64, 16, window=100, sinks=True),
    Layer(1, 64, 128, 64),
    Layer(2, 2, 256, 32, window=50, soft_cap=30.0, queries=2, aligned=False),
    Layer(8, 8, 128, 16, kv_dtype=E4M3),
    Layer(1, 24, 128, 528, kv_dtype=E5M2, sinks=True, queries=8),
    Layer(2, 8, 64, 64, kv_dtype=E4M3, soft_cap=5.0, aligned=False),
    Layer(1, 32, 256, 64, kv_dtype=E4M3, window=7),
    Layer(1, 8, 128, 64, kv_dtype=E4M3),
    Layer(4, 4, 128, 32, dtype=torch.float16, alibi=True, queries=3),
    Layer(2, 5, 64, 48, dtype=torch.float16, kv_dtype=E5M2, sinks=True, alibi=True, aligned=False),
)


def check_random_step(
    generator: random.Random, layer: Layer, device: str, *, longest: int = 3000, **options
) -> None:
    """Draw up to six requests, some without queries, for a layer of RANDOM_LAYERS and compare with the reference."""
    query_lens = [generator.randint(0, layer.queries) for _ in range(generator.randint(1, 6))]
    # always as many, so that the same kernel is chosen
    query_lens[generator.randrange(len(query_lens))] = layer.queries
    case, drawn = draw_step(generator, layer, query_lens, longest, device)
    check_decode(case, None, device=device, window=layer.window, **drawn, **options)

"""Small steps of every kind for the sm_90 prefill kernel, which run on a GPU and under the Gluon interpreter."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

from numa_attention.prefill.hopper_variant import FORM, PLACES, ROWS, ctas_of
from numa_attention.schedule import Planner, PrefillSplits, Schedule, StepBatch
from numa_attention.topology import detect, pretend
from numa_attention.variants import choose_prefill
from tests.kernel_step import check_planned, make_planner, shape_of
from tests.random_draws import Layer, draw_step
from tests.support import LAYOUTS, PagedCase, make_paged_case, poison_left_of_windows


def check_prefill(
    case: PagedCase, form: str = FORM, *, device: str = "cpu", window: int = -1, consumers: int = 2,
    block_n: int | None = None, stages: int | None = None, planner_options: dict | None = None,
    splitting: random.Random | None = None, **options,
) -> Schedule:  # fmt: skip
    """Prefill all requests of a case with one form and compare with the reference; returns the schedule.

    A few queries over a long prefix are prefilled too. splitting: draws into how many parts tiles are split, where the
    planner would decide.
    """
    topology = detect(device) if device == "cuda" else pretend("sm_90")
    variant = choose_prefill(shape_of(case, window), topology, "triton", kernel="hopper-prefill")
    variant = dataclasses.replace(
        variant,
        form=form,
        block_m=consumers * ROWS * ctas_of(form),
        block_n=block_n or variant.block_n,
        num_stages=stages or variant.num_stages,
    )
    planner = make_planner(
        case,
        window=window,
        kernels="triton",
        topology=topology,
        prefill_variant=variant,
        **({"extend": False} | (planner_options or {})),
    )
    if splitting is not None:
        split_at_random(planner, splitting)
    return check_planned(case, planner, num_decodes=0, **options)


def split_at_random(planner: Planner, generator: random.Random) -> None:
    """Make a planner split tiles into up to five parts, whether it pays or not, where a layer's tiles may be split."""

    def split(batch: StepBatch, blocks: np.ndarray, query_lens: np.ndarray) -> PrefillSplits | None:
        splits, block_n = planner.splits, planner.prefill_variant.block_n
        if splits is None:
            return None
        table, rows, place = [], [], 0
        requests = zip(
            blocks.tolist(), query_lens.tolist(), batch.seq_lens[batch.num_decodes :].tolist(), strict=True
        )
        for request, (count, queries, keys) in enumerate(requests):
            least = max(keys - queries, 0) if batch.causal else keys
            parts = min(generator.randint(1, 5), max(least // block_n, 1))
            tiles = [(head, block) for head in range(planner.shape.kv_heads) for block in range(count)]
            if place + len(tiles) * parts > PLACES:
                parts = 1
            table.append((parts, place))
            if parts > 1:
                rows += [(request, *tile, part) for tile in tiles for part in range(1, parts)]
                place += len(tiles) * parts
        generator.shuffle(rows)
        table = torch.tensor([(len(rows), 0), *table], dtype=torch.int32)
        splits.table[: len(table)] = table.to(splits.table.device)
        if rows:
            rows = torch.tensor(rows, dtype=torch.int32)
            splits.rows[PLACES - len(rows) : PLACES] = rows.to(splits.rows.device)
        return splits

    planner._split_tiles = split


def bf16_case(*arguments, **options) -> PagedCase:
    return make_paged_case(*arguments, dtype=torch.bfloat16, **options)


def float8_case(*arguments, **options) -> PagedCase:
    """A step of bfloat16 queries over an e4m3 cache."""
    return bf16_case(*arguments, kv_dtype=torch.float8_e4m3fn, **options)


def windowed_case(query_lens: list[int], seq_lens: list[int], window: int, **options) -> PagedCase:
    """A case whose keys left of every window are NaN too."""
    case = make_paged_case(query_lens, seq_lens, **{"dtype": torch.bfloat16, **options})
    poison_left_of_windows(case, window)
    return case


def check_all(form: str, device: str, **tile: int) -> None:
    """Head sizes, types, layouts, groups, pages, masks, empty requests; prints each kind as it is done."""
    on = {"device": device}
    numbers = torch.Generator().manual_seed(1)

    def check(case: PagedCase, **options) -> None:
        check_prefill(case, form, **on, **(tile | options))

    for page_size in (16, 64, 128):
        check(bf16_case([300, 1, 77], [300, 700, 400], q_heads=8, head_dim=128, page_size=page_size, **on))
    print("head_dim 128", flush=True)
    for head_dim, head_dim_v in ((64, 64), (192, 128), (256, 256)):
        case = bf16_case([200, 33], [333, 33], head_dim=head_dim, head_dim_v=head_dim_v, page_size=64, **on)
        block_n = {"block_n": 64} if head_dim == 256 else {}
        check(case, stages=2, **block_n)
        print(f"head_dim {head_dim}/{head_dim_v}", flush=True)
    check(make_paged_case([150, 5], [200, 300], dtype=torch.float16, head_dim=128, **on))
    for layout in LAYOUTS:
        check(bf16_case([70, 3], [70, 130], layout=layout, head_dim=128, **on))
    for page_size in (48, 528):
        check(bf16_case([100], [700], page_size=page_size, head_dim=128, **on))
    print("layouts and pages", flush=True)
    for group in (1, 3, 5, 16, 64, 128):
        check(bf16_case([130, 9], [1000, 63], q_heads=group, kv_heads=1, head_dim=128, **on))
    print("groups", flush=True)
    sinks, slopes = (torch.randn(6, generator=numbers).to(device) for _ in range(2))
    case = bf16_case([70, 200], [70, 450], q_heads=6, kv_heads=2, head_dim=128, **on)
    check(case, sinks=sinks, alibi_slopes=slopes.abs() * 0.1)
    check(case, sinks=sinks, soft_cap=3.0)
    for window in (0, 33, 300):
        check(windowed_case([170, 1, 700], [400, 500, 700], window, head_dim=128, **on), window=window)
    check(bf16_case([100], [700], head_dim=128, **on), causal=False)
    print("masks", flush=True)
    check(bf16_case([9, 5, 70, 0], [5, 0, 66, 0], head_dim=128, **on))
    check(bf16_case([4000] * 3, [4000] * 3, q_heads=4, kv_heads=4, head_dim=128, page_size=64, **on))
    print("empty requests, and more tiles than units", flush=True)


E4M3 = torch.float8_e4m3fn
# every head size and type of the kernel, and every mask and option with some of them
RANDOM_LAYERS = (
    Layer(8, 8, 128, 16, form=FORM),
    Layer(2, 4, 128, 64, form=f"{FORM} staged", aligned=False),
    Layer(3, 3, 64, 16, window=100, sinks=True, form=FORM),
    Layer(16, 1, 128, 528, form="ahead copied"),
    Layer(2, 2, 256, 32, window=50, soft_cap=30.0, form=FORM),
    Layer(1, 24, 192, 64, 128, sinks=True, form=FORM),
    Layer(2, 5, 128, 128, window=700, form="turns persistent roomy", aligned=False),
    Layer(1, 128, 64, 48, soft_cap=5.0, form=FORM),
    Layer(4, 4, 64, 32, dtype=torch.float16, alibi=True, form=FORM, aligned=False),
    Layer(2, 8, 128, 16, dtype=torch.float16, window=300, soft_cap=20.0, sinks=True, alibi=True, form=FORM),
    Layer(4, 1, 192, 16, 128, dtype=torch.float16, window=0, form="persistent", aligned=False),
    Layer(1, 8, 256, 64, dtype=torch.float16, sinks=True, form=FORM),
    Layer(2, 4, 256, 16, causal=False, form="ahead turns copied", aligned=False),
    Layer(1, 6, 192, 128, 128, soft_cap=15.0, alibi=True, form=FORM),
    Layer(8, 2, 64, 64, causal=False, sinks=True, form=f"{FORM} staged"),
    Layer(2, 16, 128, 80, window=2000, alibi=True, form="", aligned=False),
    Layer(2, 4, 64, 16, kv_dtype=E4M3, form=FORM),
    Layer(1, 8, 128, 64, kv_dtype=E4M3, window=300, sinks=True, form=FORM, aligned=False),
    Layer(2, 3, 192, 48, 128, kv_dtype=E4M3, form=FORM),
    Layer(
        4, 2, 128, 528, dtype=torch.float16, kv_dtype=E4M3, soft_cap=10.0, alibi=True, form="turns persistent"
    ),
)


def check_random_step(
    generator: random.Random,
    layer: Layer,
    device: str,
    *,
    most_queries: int = 800,
    longest: int = 3000,
    **options,
) -> None:
    """Draw up to five requests, some without queries, for a layer of RANDOM_LAYERS and compare with the reference."""
    query_lens = [
        generator.choice((0, 1, *(generator.randint(1, most_queries) for _ in range(4))))
        for _ in range(generator.randint(1, 5))
    ]
    if not any(query_lens):
        query_lens[-1] = most_queries
    case, drawn = draw_step(generator, layer, query_lens, longest, device)
    check_prefill(
        case, layer.form, device=device, window=layer.window, stages=2 if "staged" in layer.form else None,
        # float16 has three bits more than two numbers of e4m3
        mark=None if layer.kv_dtype is None else torch.bfloat16,
        splitting=generator if generator.random() < 0.5 else None, **drawn, **options,
    )  # fmt: skip

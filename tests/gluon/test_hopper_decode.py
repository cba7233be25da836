"""The sm_90 decode kernel under the Gluon interpreter, against the float64 reference."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from numa_attention.decode import (
    hopper,
    hopper_copies,
    hopper_launch,
    hopper_products,
    hopper_splits,
    hopper_variant,
)
from numa_attention.shapes import LayerShape, UnsupportedShape
from numa_attention.testing import hopper_assembly
from numa_attention.testing.gluon import Deadlock, GluonFault, Race
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode
from tests import batched_reference
from tests.gluon.interpreted import interpreted, splits_of
from tests.hopper_decode_cases import (
    E4M3,
    E5M2,
    HEADS_OF_TILES,
    RANDOM_LAYERS,
    bf16_case,
    check_all,
    check_decode,
    check_random_step,
    windowed_case,
)
from tests.random_draws import SEED, share_of_draws
from tests.support import LAYOUTS, make_paged_case

hopper_assembly.register()
forms = pytest.mark.parametrize("form", hopper_variant.FORMS)
CASES = int(os.environ.get("NUMA_TEST_GLUON_CASES", "75"))


def check(case, form: str, *, seed: int = 0, debug: bool = False, **options):
    """Decode all requests of a case under a seed; returns the schedule."""
    with interpreted(hopper_launch, hopper.decode_kernel, "sm_90", seed=seed, debug=debug) as stand_in:
        schedule = check_decode(case, form, **options)
    assert stand_in.launches == 1
    return schedule


@forms
@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2], ids=["bf16", "e4m3", "e5m2"])
def test_split_and_whole_units(form, kv_dtype):
    case = bf16_case([1, 1], [1, 500], q_heads=2, kv_heads=1, head_dim=128, kv_dtype=kv_dtype, page_size=64)
    scales = {}
    if kv_dtype is not None:
        scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    schedule = check(case, form, debug=form == "four-stage", **scales)
    assert splits_of(schedule).max() > 1 and splits_of(schedule).min() == 1


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(64, None), (64, E4M3), (64, E5M2), (256, None), (256, E4M3)]
)
def test_head_sizes(head_dim, kv_dtype):
    check(bf16_case([1], [130], head_dim=head_dim, kv_dtype=kv_dtype, q_heads=2, kv_heads=1), "four-stage")


def test_float16():
    check(make_paged_case([1], [130], dtype=torch.float16, head_dim=128), "two-stage")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts(layout):
    check(bf16_case([1], [130], layout=layout, head_dim=128), "four-stage")


@pytest.mark.parametrize("page_size", [48, 528])
def test_page_sizes(page_size):
    check(bf16_case([1, 1], [65, 250], page_size=page_size, q_heads=2, kv_heads=1, head_dim=128), "two-stage")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("seed", "q_heads"), enumerate(HEADS_OF_TILES))
def test_splits_are_merged_in_two_levels_by_whoever_is_last(seed, q_heads, head_dim):
    case = bf16_case([1], [2500], q_heads=q_heads, kv_heads=1, head_dim=head_dim, page_size=64)
    schedule = check(case, "two-stage", units=10, seed=seed)
    assert splits_of(schedule).max() > hopper_launch.FAN_IN


@pytest.mark.parametrize(("form", "window", "kv_dtype"), [("four-stage", 33, None), ("two-stage", 0, E4M3)])
def test_window_reads_nothing_left_of_it(form, window, kv_dtype):
    case = windowed_case([1, 2], [30, 200], window, head_dim=128, kv_dtype=kv_dtype)
    check(case, form, window=window)


@pytest.mark.parametrize(
    ("queries", "heads", "head_dim", "kv_dtype"), [(3, 5, 128, None), (1, 64, 128, E4M3), (1, 64, 256, E4M3)]
)
def test_several_query_tokens_and_a_wide_group(queries, heads, head_dim, kv_dtype):
    case = bf16_case([queries, 1], [70, 63], q_heads=heads, kv_heads=1, head_dim=head_dim, kv_dtype=kv_dtype)
    # the ring that the dispatcher chooses
    check(case, None if head_dim == 256 else "two-stage")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_what_a_workgroup_keeps_in_shared_memory_fits(dtype, kv_dtype):
    """Queries in the types in which they are multiplied, probabilities, and the rings of keys and values."""
    # for float8 keys, float16 has three terms of a byte
    query_bytes = 3 if (dtype, kv_dtype) == (torch.float16, E4M3) else 2
    for head_dim, rows in itertools.product(hopper_variant.HEAD_DIMS, (8, 16, 32, 64)):
        shape = LayerShape(rows, 1, head_dim, head_dim, dtype, kv_dtype or dtype, 64)
        tile = hopper_variant.tile_of(shape, rows)
        keys = hopper_variant.key_stages_of(shape, rows, tile.stages, tile.block_n)
        ring = (keys + tile.stages) * tile.block_n * head_dim * shape.kv_dtype.itemsize
        used = ring + rows * (query_bytes * head_dim + 2 * tile.block_n) + hopper_variant.BARRIER_BYTES
        share = hopper_variant.SHARED_BYTES // tile.workgroups_per_unit - hopper_variant.RESERVED_BYTES
        assert used <= share, (head_dim, rows, tile, keys)


def test_a_large_float8_tile_of_64_rows_has_a_multiprocessor_to_itself():
    shape = LayerShape(64, 1, 256, 256, torch.bfloat16, E4M3, 64)
    tile = hopper_variant.tile_of(shape, 64)
    assert (tile.workgroups_per_unit, tile.form) == (1, "two-stage") and tile.stages > 2
    assert hopper_variant.registers_of(shape, 64, tile.stages, tile.block_n) == 255
    assert hopper_variant.tile_of(shape, 32).workgroups_per_unit == 2


@forms
def test_soft_cap_sinks_and_alibi(form):
    case = bf16_case([1, 1], [70, 150], q_heads=6, kv_heads=2)
    numbers = torch.Generator().manual_seed(1)
    sinks, slopes = (torch.randn(6, generator=numbers) for _ in range(2))
    check(case, form, soft_cap=3.0, sinks=sinks, alibi_slopes=slopes.abs() * 0.1)


@forms
def test_requests_without_keys_or_queries(form):
    check(bf16_case([1, 0, 1, 0], [70, 0, 0, 0], q_heads=2, kv_heads=1), form)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_a_negative_scale(kv_dtype):
    case = bf16_case([1, 2], [70, 150], q_heads=6, kv_heads=2, head_dim=128, kv_dtype=kv_dtype)
    check(case, "two-stage", scale=-0.2)


def test_queries_beyond_the_range_of_float16():
    case = bf16_case([1], [70], q_heads=2, kv_heads=1, head_dim=128, kv_dtype=E4M3)
    case.q *= 1e6
    check(case, "two-stage", scale=1e-7)


def test_random_steps():
    """Everything mixed, in adversarial orders. NUMA_TEST_SEED and NUMA_TEST_GLUON_CASES draw others and more."""
    print(f"NUMA_TEST_SEED={SEED}, {CASES} draws")
    draw = random.Random(SEED)
    for _ in range(CASES):
        requests, kv_heads = draw.randint(1, 3), draw.choice((1, 1, 2))
        query_lens = [draw.choice((0, 1, 1, 1, 2)) for _ in range(requests)]
        if not any(query_lens):
            query_lens[0] = 1
        seq_lens = [n + draw.choice((0, 1, 62, draw.randint(0, 180))) if n else 0 for n in query_lens]
        kv_dtype = draw.choice((None, None, E4M3, E5M2))
        case = bf16_case(
            query_lens, seq_lens, q_heads=kv_heads * draw.choice((1, 3, 8)), kv_heads=kv_heads,
            head_dim=draw.choice((64, 128)), page_size=draw.choice((16, 64, 80)),
            kv_dtype=kv_dtype, layout=draw.choice(LAYOUTS), seed=draw.randrange(1 << 30),
        )  # fmt: skip
        options = {"window": draw.choice((-1, -1, 20)), "soft_cap": draw.choice((0.0, 0.0, 5.0))}
        if draw.random() < 0.3:
            options["sinks"] = torch.randn(case.q.shape[1])
        if kv_dtype is not None:
            options |= {name: torch.tensor([draw.uniform(0.5, 2)]) for name in ("k_scale", "v_scale")}
        check(
            case, draw.choice(hopper_variant.FORMS), units=draw.randint(1, 3), stages=draw.randint(2, 3),
            seed=draw.randrange(1 << 30), **options,
        )  # fmt: skip


on_sm_90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the GPU is not sm_90"
)


@pytest.mark.gpu
@on_sm_90
@forms
def test_on_a_gpu(form):
    check_all(form, "cuda")


@pytest.mark.gpu
@on_sm_90
@pytest.mark.parametrize("index", range(len(RANDOM_LAYERS)))
def test_random_steps_on_a_gpu(index):
    """NUMA_TEST_CASES (2,000) steps of few compiled kernels over all layouts."""
    generator = random.Random(SEED * 1000 + index)
    for _ in range(share_of_draws(2000, len(RANDOM_LAYERS))):
        check_random_step(generator, RANDOM_LAYERS[index], "cuda")
    kernels = len(set(hopper_launch._launch._compiled.values()))
    print(f"{kernels} compiled kernels in this process")


@pytest.mark.parametrize("index", range(len(RANDOM_LAYERS)))
def test_random_steps_for_gpus(index):
    """A small one of each, against the reference that a GPU's are compared with."""
    with interpreted(hopper_launch, hopper.decode_kernel, "sm_90", seed=index) as stand_in:
        check_random_step(
            random.Random(index),
            RANDOM_LAYERS[index],
            "cpu",
            longest=80,
            attention=batched_reference.attention,
        )
    assert stand_in.launches == 1


RELEASE = "hopper.mbarrier.arrive(empty_v.index(slot), count=1)\n                step += 1\n            slot"


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("hopper.mbarrier.wait(empty_k.index(slot), ((step // KEY_STAGES) & 1) ^ 1)", "pass", GluonFault),
        ("hopper.mbarrier.wait(empty_v.index(slot), ((step // STAGES) & 1) ^ 1)", "pass", GluonFault),
        (
            "wait(full_k.index(key_slot), ((step + 1) //",
            "wait(full_k.index(key_slot), ((step + 2) //",
            GluonFault,
        ),
        ("warpgroup_mma_wait(PARTS, deps", "warpgroup_mma_wait(PARTS + 1, deps", Race),
        ("    hopper.fence_async_shared()\n    if LATE_SUM", "    if LATE_SUM", Race),
        (RELEASE, "pass\n" + RELEASE[RELEASE.index(")") :].split("\n", 1)[1], Deadlock),
    ],
    ids=[
        "keys overwritten",
        "values overwritten",
        "stale keys",
        "scores too early",
        "no fence",
        "never released",
    ],
)
def test_mistakes_in_the_pipeline_are_found(right, wrong, fault, tmp_path, monkeypatch):
    """The kernel with one wrong line."""
    package, changed = tmp_path / "wrong_decode", 0
    package.mkdir()
    for module in (hopper, hopper_copies, hopper_products, hopper_splits):
        source = Path(module.__file__).read_text(encoding="utf-8")
        changed += source.count(right)
        source = source.replace(right, wrong).replace("numa_attention.decode.hopper", "wrong_decode.hopper")
        (package / Path(module.__file__).name).write_text(source, encoding="utf-8")
    assert changed == 1, "the kernel changed: change this test"
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("wrong_decode")]:
        monkeypatch.delitem(sys.modules, name)
    kernel = importlib.import_module("wrong_decode.hopper").decode_kernel
    case = bf16_case([1], [700], q_heads=2, kv_heads=1, page_size=64)
    # with one buffer more for keys than for values, waiting for the values' would do for both
    monkeypatch.setattr(hopper_launch, "key_stages_of", lambda shape, rows, stages, block_n: stages)
    monkeypatch.setattr(hopper_launch, "constants_of", hopper_launch.constants_of.__wrapped__)
    with pytest.raises(fault, match=r"hopper\w*\.py:\d+"):
        for seed in range(4):
            with interpreted(hopper_launch, kernel, "sm_90", seed=seed):
                check_decode(case, "four-stage", units=1, stages=2)


def test_layers_for_other_kernels():
    layer = LayerShape(8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    assert hopper_variant.why_not(layer, (3, 8)) is None
    for change, reason in (
        ({"head_dim": 80, "head_dim_v": 80}, "head sizes"),
        ({"head_dim_v": 64}, "keys and values alike"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "float16 and bfloat16"),
        ({"general": True}, "general kernels"),
    ):
        other = dataclasses.replace(layer, **change)
        assert reason in hopper_variant.why_not(other, (3, 8))
        with pytest.raises(UnsupportedShape, match=reason):
            choose_decode(other, pretend("sm_90"), "triton", 1, kernel="hopper-decode")
        variant = choose_decode(other, pretend("sm_90"), "triton", 1)
        assert variant.name == "portable-decode" and reason in variant.instead_of
    assert "Triton 3.6" in hopper_variant.why_not(layer, (3, 5))
    assert choose_decode(layer, pretend("sm_90"), "triton", 1).name == "hopper-decode"
    assert (
        choose_decode(layer, pretend("sm_90"), "triton", 1, kernel="portable-decode").name
        == "portable-decode"
    )
    assert choose_decode(layer, pretend("sm_100"), "triton", 1).name == "portable-decode"


@pytest.mark.parametrize(
    ("group", "queries", "kv_dtype", "expected"),
    [
        (1, 1, None, (8, 64, "four-stage")), (8, 1, E4M3, (8, 128, "four-stage")), (8, 2, E5M2, (16, 128, "two-stage")),
        (32, 1, E4M3, (32, 128, "two-stage")), (64, 1, None, (64, 64, "four-stage")),
        (64, 1, E4M3, (64, 128, "two-stage")), (16, 8, None, (64, 64, "four-stage")),
    ],
)  # fmt: skip
def test_rows_tile_and_form_by_group(group, queries, kv_dtype, expected):
    layer = LayerShape(group, 1, 128, 128, torch.bfloat16, kv_dtype or torch.bfloat16, 16)
    variant = choose_decode(layer, pretend("sm_90"), "triton", queries)
    assert (variant.block_m, variant.block_n, variant.form) == expected


def test_a_cache_that_tma_cannot_copy_goes_to_the_portable_kernel(caplog):
    case = bf16_case([1], [70])
    pages = torch.full((*case.k_pages.shape[:3], 2 * 64 + 8), float("nan"), dtype=torch.bfloat16)
    for cache, first in ((case.k_pages, 0), (case.v_pages, 68)):
        pages[..., first : first + 64] = cache
    case.k_pages, case.v_pages = pages[..., :64], pages[..., 68:132]
    with caplog.at_level(logging.WARNING):
        check_decode(case, "four-stage", handed_to="portable-decode")
    assert "TMA cannot copy" in caplog.text

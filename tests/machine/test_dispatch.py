"""The dispatcher: mapping from closed form and measurements, workgroups, splits, and that the variants follow it."""

import dataclasses

import numpy as np
import pytest
import torch

from numa_attention import variants
from numa_attention.decode.work_list import SPLITS, TILE_BEGIN, TILE_END, build_on_host
from numa_attention.machine import ModelError, dispatch
from numa_attention.machine.grid import MAPPINGS
from numa_attention.machine.machines import H200, MI300X, MI450, like
from numa_attention.shapes import LayerShape
from numa_attention.topology import pretend


def test_prefill():
    choice = dispatch.explain_prefill(MI300X, 128, 128, 128, 1, 32768, block_m=128)
    assert choice.mapping == "swizzled-head-first" and choice.domains == 8
    times = {row.mapping: row.relative_time for row in choice.rows}
    assert times["block-first"] > 1.4 and times["swizzled-head-first"] == 1
    assert any("block-first takes" in reason for reason in choice.reasons)
    tie = dispatch.explain_prefill(MI300X, 64, 8, 128, 1, 32768, block_m=128)
    assert any("does not matter" in reason for reason in tie.reasons)


def test_measured_times_win():
    rows = dispatch.compare_mappings(H200, 128, 128, 128, 1, 32768)
    assert [row.timed for row in rows] == [True] * 4
    assert {row.mapping: round(row.relative_time, 3) for row in rows} == {
        "block-first": 1.230,
        "swizzled-block-first": 1.230,
        "head-first": 1.0,
        "swizzled-head-first": 1.0,
    }
    assert not any(row.timed for row in dispatch.compare_mappings(H200, 128, 128, 128, 1, 65536))
    # were block-first the faster one on the clock, it would be taken
    swapped = tuple(
        dataclasses.replace(row, tflops={395: 486, 486: 395}.get(row.tflops)) for row in dispatch.MEASURED
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "MEASURED", swapped)
        patch.setattr(dispatch, "CONTEXTS", (32768,))
        choose = dispatch.prefill_mapping.__wrapped__
        patch.setattr(dispatch, "compare_mappings", dispatch.compare_mappings.__wrapped__)
        assert choose(H200, 128, 128, 128) == "block-first"


def test_decode():
    def explain(*shape, **options):
        return dispatch.explain_decode(MI300X, *shape, workgroups=608, block_n=64, **options)

    one = explain(64, 8, 1, 131072)
    assert (one.splits, one.domains_per_acc, one.busy) == (76, 1, 608)
    assert one.splits * one.split_tokens >= 131072
    assert explain(64, 8, 256, 4096).splits == 2  # 2,048 ACCs over 608 workgroups: some are cut
    assert explain(64, 8, 76, 4096).splits == 1
    narrow = explain(8, 1, 1, 131072)
    assert narrow.domains_per_acc == 8 and narrow.splits == 512  # of four tiles each
    # a short step keeps every domain busy
    short = explain(8, 1, 1, 4096)
    assert (short.busy, short.splits, short.domains_per_acc, short.split_tokens) == (32, 32, 8, 128)
    for q_heads, batch, context in ((12, 1, 512), (64, 0, 512), (64, 1, 0)):
        with pytest.raises(ModelError):
            explain(q_heads, 8, batch, context)


def test_placement_by_hardware_is_explained():
    layer = (H200, 128, 128, 128, 1, 32768)
    dealt, placed = (dispatch.explain_prefill(*layer, block_m=128, placed=placed) for placed in (False, True))
    assert (dealt.mapping, dealt.domains) == (placed.mapping, 1) and placed.domains == 2
    streams = [next(row for row in each.rows if row.mapping == each.mapping) for each in (dealt, placed)]
    assert streams[1].streams_per_domain < streams[0].streams_per_domain
    assert "99.1%" in streams[0].measured and streams[1].measured == "not measured"
    assert any("not dealt" in reason for reason in dealt.reasons)
    assert not any("not dealt" in reason for reason in placed.reasons)


def test_workgroups_cover_the_latency():
    assert dispatch.workgroups_per_unit(None, 1) == 2
    assert dispatch.workgroups_per_unit(H200, 64 << 10) == 2
    # 19.6 TB/s x 0.5 us / 256 units = 38 KB on their way
    assert dispatch.workgroups_per_unit(MI450, 16 << 10) == 3
    assert dispatch.workgroups_per_unit(MI450, 1 << 10) == 4


def test_a_detected_device():
    assert like("AMD Instinct MI300X", "gfx942", 304, 8, 8, 32 << 20) is MI300X
    assert like("NVIDIA H100 80GB HBM3", "sm_90", 132, 2, 1, 50 << 20).name == "H100"
    part = like("AMD Instinct MI300X", "gfx942", 38, 1, 1, 4 << 20)
    assert (part.units, part.domains, part.l2_bytes.value) == (38, 1, 4 << 20)
    assert part.memory_bandwidth.value == pytest.approx(MI300X.memory_bandwidth.value / 8)
    assert like("something", "gpu", 100, 1, 1, 1 << 20) is None


@pytest.mark.parametrize("device", ["gfx942", "gfx950", "gfx1250", "sm_90", "sm_100", "cpu"])
def test_variants_follow(device, monkeypatch):
    shape = LayerShape(24, 24, 64, 64, torch.bfloat16, torch.bfloat16, 16)
    topology = pretend(device)
    assert variants.choose_prefill(shape, topology, "triton").mapping == "swizzled-head-first"
    for mapping in MAPPINGS:
        monkeypatch.setattr(dispatch, "prefill_mapping", lambda *key, mapping=mapping: mapping)
        assert variants.choose_prefill(shape, topology, "triton").mapping == mapping
    assert variants.choose_prefill(shape, topology, "triton", "head-first").mapping == "head-first"
    monkeypatch.setattr(dispatch, "workgroups_per_unit", lambda machine, size: 3)
    expected = topology.compute_units * (1 if device == "cpu" else 3)
    # hopper-decode has as many as its shared memory is cut for
    kernel = "portable-decode" if device == "sm_90" else None
    assert variants.choose_decode(shape, topology, "triton", 1, kernel=kernel).workgroups == expected


@pytest.mark.parametrize(
    ("device", "head_dim", "group", "kv_dtype", "prefill", "decode"),
    [
        ("gfx942", 128, 8, torch.bfloat16, (16, 2), (16, 1)),
        ("gfx942", 128, 64, torch.bfloat16, (16, 2), (16, 1)),
        ("gfx942", 64, 8, torch.bfloat16, (0, 1), (16, 1)),  # 32 rows a warp
        ("gfx942", 128, 8, torch.float8_e4m3fnuz, (0, 1), (16, 1)),
        ("gfx950", 128, 8, torch.bfloat16, (16, 1), (16, 1)),
        ("gfx950", 128, 8, torch.float8_e4m3fn, (16, 1), (16, 1)),
        ("sm_90", 128, 8, torch.bfloat16, (0, 1), (0, 1)),
    ],
)
def test_matrix_instructions_fit_the_rows_of_a_warp(device, head_dim, group, kv_dtype, prefill, decode):
    shape = LayerShape(group, 1, head_dim, head_dim, torch.bfloat16, kv_dtype, 16)
    for variant, expected in (
        (variants.choose_prefill(shape, pretend(device), "triton"), prefill),
        (variants.choose_decode(shape, pretend(device), "triton", 1), decode),
    ):
        assert (variant.matrix_rows, variant.kpack) == expected
        # on the CPU the torch kernels know no such thing
        assert variants.choose_prefill(shape, pretend("cpu"), "torch").matrix_rows == 0


@pytest.mark.parametrize(
    ("batch", "context"), [(1, 131072), (8, 16384), (64, 4096), (3, 5000), (200, 700), (5, 1)]
)
def test_the_explained_splits_are_those_of_the_work_list(batch, context):
    choice = dispatch.explain_decode(MI300X, 64, 8, batch, context, workgroups=608, block_n=64)
    ranges, items = build_on_host(
        np.full(batch, context), np.arange(batch + 1), kv_heads=8, group=8, block_m=16, block_n=64, window=-1,
        workgroups=608, min_tiles=dispatch.MIN_TILES, domains=8,
    )  # fmt: skip
    parts = np.concatenate([items[first : first + count] for first, count in ranges[:, :2]])
    assert choice.busy == (ranges[:, 1] > 0).sum()
    assert choice.splits == parts[:, SPLITS].max()
    assert choice.split_tokens >= (parts[:, TILE_END] - parts[:, TILE_BEGIN]).max() * 64

"""Placement, issue and pipeline: the second seed's figures, computed from structure."""

from dataclasses import replace

import pytest

from numa_attention.machine import ModelError, pipeline, seed_two
from numa_attention.machine.placement import CASES, Attention, cost, costs, short_mapping

GROUP = seed_two.LLAMA_70B_GROUP
GIB, MIB = 1 << 30, 1 << 20


def at(case, context=1 << 13, outer=8, inner=8, attention=GROUP):
    return cost(CASES[case - 1], attention, context, outer, inner)


def test_kv_per_unit():
    found = [at(case, 1 << 20).unit_kv_bytes for case in range(1, 7)]
    assert found == [40 * GIB, 5 * GIB, 5 * GIB, 640 * MIB, 640 * MIB, 640 * MIB]


def test_copies_and_writes():
    assert [at(case).copies for case in (1, 3, 4, 5, 6)] == [0, 168, 280, 280, 189]
    assert [at(case).writes for case in (4, 5, 6)] == [8, 8, 1]


def test_copies_follow_the_number_of_units():
    assert at(6, outer=4, inner=4).copies == 15 * 3
    assert at(3, outer=2, inner=4).copies == 2 * 3 * 3
    assert at(4, outer=4, inner=2).copies == 4 * 2 + 2 * 3 * 3


def test_work():
    assert [at(case).unit_tokens for case in (1, 3, 4, 5, 6)] == [8192, 65536, 65536, 65536, 8192]


def test_communication():
    assert at(4, 1 << 20).score_bytes == 160 * MIB
    assert at(6, 1 << 20).score_bytes == 0
    assert at(6, 1 << 20).state_bytes == 63 * 8 * 130 * 4 * 80
    # a merge of the state does not grow with the context, an all-reduce of scores does
    assert at(6, 1 << 13).state_bytes == at(6, 1 << 20).state_bytes
    assert at(4, 1 << 20).score_bytes == 128 * at(4, 1 << 13).score_bytes


def test_a_head_that_does_not_divide():
    with pytest.raises(ModelError, match="head_dim is 100"):
        at(4, attention=replace(GROUP, head_dim=100))
    assert [each.case for each in costs(replace(GROUP, head_dim=100), 8192, 8, 8)] == [1, 2, 3, 6]


def test_short_context_mappings():
    heads = Attention(8, 8, 128, 1)
    one, two, four, eight = (short_mapping(count, heads, 65536, 8, 256e9) for count in (1, 2, 4, 8))
    assert [each.chain_hops for each in (one, two, four, eight)] == [7, 3, 1, 0]
    assert [each.cubes for each in (one, two, four, eight)] == [8, 4, 2, 1]
    assert eight.pe_bytes == 8 * one.pe_bytes == 65536 * 512
    assert eight.cube_kv_bytes == 8 * one.cube_kv_bytes
    with pytest.raises(ModelError, match="3 KV heads a CUBE"):
        short_mapping(3, heads, 65536, 8, 256e9)


def test_commands():
    counts = pipeline.counts_from(96, 426, 16, 94)
    assert counts.primitive_total(128) == 96
    assert counts.primitive_total(16384) == 426
    assert counts.primitive_total(1025) == counts.primitive_total(2048) == 96 + 22
    assert (counts.composite_total(), counts.composite_merge_total()) == (94, 98)
    with pytest.raises(ModelError, match="whole number"):
        pipeline.counts_from(96, 427, 16, 94)


def test_utilisation_follows_from_the_times():
    assert pipeline.utilisation(8192, 1024, 128, 8e12, 794.1e-6) == pytest.approx(0.68, abs=0.005)
    assert pipeline.utilisation(8192, 1024, 128, 8e12, 646.9e-6) == pytest.approx(0.83, abs=0.005)


def test_exposed_latency_of_the_loops():
    stages = pipeline.stages_from(680, 360, 900)
    assert stages.two_stage() == 680
    assert stages.four_stage() == 360
    assert stages.single() > 680
    # a load that one iteration cannot hide shows in two stages first
    slow = replace(stages, load=1600)
    assert slow.two_stage() > 680
    assert slow.four_stage(loads_ahead=2) < slow.two_stage()
    with pytest.raises(ModelError, match="not hidden"):
        pipeline.stages_from(680, 360, 1100)


def test_rows_of_the_report():
    rows = seed_two.rows()
    assert {row.label for row in rows} == {"derived", "calibrated", "contradicts"}
    assert all(row.reason for row in rows)
    for row in rows:
        if row.label == "derived" and row.difference is not None:
            assert abs(row.difference) < 0.01, row.name
    latencies = {row.name: row for row in rows if row.part == "latency"}
    assert latencies["order of the cases that fit, 8k"].ours == "6 < 4 < 5"
    for name in ("case 6, 64k", "case 6, 128k"):
        assert abs(latencies[name].difference) < 0.10
    assert latencies["case 3, 8k"].label == "contradicts"
    times = seed_two.calibrated_times()
    assert min(times.token, times.inner_hop, times.outer_hop) > 0

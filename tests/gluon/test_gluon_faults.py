"""Every planted mistake is found, whatever the schedule, and the message names the line to look at."""

import re

import cluster_kernels
import gluon_cases as cases
import pytest
import tdm_kernels
import tma_kernels

from numa_attention import gluon_compat
from numa_attention.testing.gluon import Deadlock, GluonFault, Race, Refused

SEEDS = range(10)
needs_clusters = pytest.mark.skipif(
    not gluon_compat.HAS_CLUSTERS, reason="this Triton has no cluster barrier"
)


def assert_found(run, kernels, kind: type[GluonFault], *, mentions: str, seeds=SEEDS) -> None:
    """`mentions` is text of the source line that the message must name."""
    with open(kernels.__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    for seed in seeds:
        with pytest.raises(GluonFault) as found:
            run(seed)
        message = str(found.value)
        assert isinstance(found.value, kind), message
        named = [int(number) for number in re.findall(re.escape(kernels.__name__) + r"\.py:(\d+)", message)]
        assert any(mentions in lines[number - 1] for number in named), message


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("fault", ["missing wait", "wait too shallow"])
def test_tdm_wait(fault, buffers):
    assert_found(
        lambda seed: cases.tdm_gemm(fault, seed, buffers),
        tdm_kernels,
        Race,
        mentions="left = buffers_a.index",
    )


@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_tdm_wrong_slot(buffers):
    assert_found(
        lambda seed: cases.tdm_gemm("wrong slot", seed, buffers), tdm_kernels, Race, mentions="buffers_a."
    )


def test_tdm_copies_left_in_flight():
    assert_found(
        lambda seed: cases.tdm_gemm("left in flight", seed),
        tdm_kernels,
        Race,
        mentions="async_load",
        seeds=range(3),
    )


@pytest.mark.parametrize(
    ("fault", "mentions"),
    [
        ("missing wait", "acc = hopper.warpgroup_mma("),
        ("wait too shallow", "tma_load(a, [row, k]"),
        ("result used before its wait", "acc = hopper.warpgroup_mma("),
        ("missing fence", "staged.store"),
    ],
)
def test_tma_gemm(fault, mentions):
    assert_found(lambda seed: cases.tma_gemm(fault, seed), tma_kernels, Race, mentions=mentions)


@pytest.mark.parametrize(
    ("fault", "kind", "mentions"),
    [
        ("missing empty wait", GluonFault, "index(slot)"),
        ("early release", GluonFault, "index(slot)"),
        ("never released", Deadlock, "hopper.mbarrier.wait(empty"),
    ],
)
@pytest.mark.parametrize("slots", [2, 3])
def test_warp_specialisation(fault, kind, mentions, slots):
    run = lambda seed: cases.specialised_sum(fault, seed, slots=slots)  # noqa: E731
    assert_found(run, tma_kernels, kind, mentions=mentions)


@needs_clusters
@pytest.mark.parametrize("fault", ["missing barrier before the read", "missing barrier after the read"])
def test_cluster_barrier_on_gfx1250(fault):
    assert_found(
        lambda seed: cases.tdm_multicast(fault, seed),
        cluster_kernels,
        Race,
        mentions="total += gl.sum(buffer.load",
    )


@needs_clusters
def test_cluster_barrier_on_sm90():
    assert_found(
        lambda seed: cases.tma_multicast("missing cluster barrier", seed),
        cluster_kernels,
        Race,
        mentions="total += gl.sum(buffer.load",
    )


@needs_clusters
@pytest.mark.parametrize(
    ("fault", "mentions"),
    [
        ("released to itself", "total += gl.sum(buffer.load"),
        ("no barrier at the end", "hopper.mbarrier.arrive(empty, count=1)"),
    ],
)
def test_a_barrier_that_a_cluster_shares(fault, mentions):
    assert_found(lambda seed: cases.tma_shared_barrier(fault, seed), cluster_kernels, Race, mentions=mentions)


@needs_clusters
def test_an_arrival_that_may_count_for_the_phase_before():
    assert_found(cases.tma_expects_early, cluster_kernels, GluonFault, mentions="hopper.mbarrier.expect(full")


@needs_clusters
@pytest.mark.parametrize(
    ("fault", "kind", "mentions"),
    [
        ("wait inside the barrier", Refused, "cdna5.tdm.async_wait(0)"),
        ("arrive without a wait", GluonFault, "cdna5.cluster.arrive()"),
    ],
)
def test_what_hangs_in_a_cluster(fault, kind, mentions):
    run = lambda seed: cases.tdm_multicast(fault, seed)  # noqa: E731
    assert_found(run, cluster_kernels, kind, mentions=mentions, seeds=[0])


@needs_clusters
def test_gfx1250_has_no_shared_memory_between_workgroups():
    for run in (
        lambda seed: cases.tdm_multicast(split=(0, 1)),
        lambda seed: cases.convert_between_ctas("gfx1250"),
    ):
        assert_found(run, cluster_kernels, Refused, mentions="gl.", seeds=[0])


def test_what_does_not_compile_names_its_line():
    # the second product's operands have a layout for another instruction
    from triton.experimental.gluon import language as gl

    with pytest.raises(Refused, match=r"tdm_kernels\.py:\d+ in gemm"):
        import torch

        a = torch.zeros(64, 64, dtype=torch.float16)
        from numa_attention.testing import interpret

        interpret(tdm_kernels.gemm)[(1, 1)](
            a, a, a.float(), 64, 64, 64,
            BLOCK=64, BUFFERS=2, ACC=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
            SHARED=cases.padded([64, 64]), FAULT="",
        )  # fmt: skip

"""Kernels for clusters of two workgroups, for releases of Triton that have cluster barriers."""

# ruff: noqa: SIM108, SIM113 - the language has no enumerate, and a choice at compile time is an if

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.gluon_compat import cdna5, cluster_barrier, tma_load


@gluon.jit
def tdm_multicast_sum(
    a,
    out,
    K,
    BM: gl.constexpr,
    BK: gl.constexpr,
    SHARED: gl.constexpr,
    REG: gl.constexpr,
    FAULT: gl.constexpr,
):
    """out [BM] = row sums of a [BM, K], rows split over two workgroups of gfx1250, tiles multicast to both."""
    tiles = cdna5.tdm.make_tensor_descriptor(a, (BM, K), (K, 1), (BM, BK), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [BM, BK], SHARED)
    total = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, REG))
    for k in range(0, K, BK):
        cdna5.tdm.async_load(tiles, [0, k], buffer)
        cdna5.tdm.async_wait(0)
        if FAULT == "wait inside the barrier":
            cdna5.cluster.arrive()
            cdna5.tdm.async_wait(0)
            cdna5.cluster.wait()
        elif FAULT != "missing barrier before the read":
            cdna5.cluster.arrive()
            cdna5.cluster.wait()
        total += gl.sum(buffer.load(REG).to(gl.float32), 1)
        if FAULT != "missing barrier after the read":
            cdna5.cluster.arrive()
            cdna5.cluster.wait()
    if FAULT == "arrive without a wait":
        cdna5.cluster.arrive()
    gl.store(out + gl.arange(0, BM, gl.SliceLayout(1, REG)), total)


@gluon.jit
def convert_between_ctas(out, FROM: gl.constexpr, TO: gl.constexpr):
    values = gl.arange(0, 128, FROM)
    gl.store(out + gl.arange(0, 128, TO), gl.convert_layout(values, TO))


@gluon.jit
def tma_multicast_sum(
    tiles, out, K, BM: gl.constexpr, BK: gl.constexpr, REG: gl.constexpr, FAULT: gl.constexpr
):
    """The same on sm_90; with REG's columns split over the workgroups, the sum crosses them."""
    buffer = gl.allocate_shared_memory(tiles.dtype, [BM, BK], tiles.layout)
    bar = hopper.mbarrier.allocate_mbarrier()
    hopper.mbarrier.init(bar, count=1)
    cluster_barrier()
    total = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, REG))
    step = 0
    for k in range(0, K, BK):
        hopper.mbarrier.expect(bar, tiles.block_type.nbytes)
        tma_load(tiles, [0, k], bar, buffer, multicast=True)
        hopper.mbarrier.wait(bar, step & 1)
        total += gl.sum(buffer.load(REG).to(gl.float32), 1)
        if FAULT != "missing cluster barrier":
            cluster_barrier()
        step += 1
    gl.store(out + gl.arange(0, BM, gl.SliceLayout(1, REG)), total)


@gluon.jit
def tma_shared_barrier_sum(
    tiles, out, K, BM: gl.constexpr, BK: gl.constexpr, REG: gl.constexpr, FAULT: gl.constexpr
):
    """The same with one mbarrier for both workgroups, at which both arrive when they have read a tile."""
    OWN: gl.constexpr = hopper.mbarrier.MBarrierLayout([[1]])
    COMMON: gl.constexpr = hopper.mbarrier.MBarrierLayout([[0]])
    buffer = gl.allocate_shared_memory(tiles.dtype, [BM, BK], tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [2], OWN)
    if FAULT == "released to itself":
        empty = gl.allocate_shared_memory(gl.int64, [2], OWN)
    else:
        empty = gl.allocate_shared_memory(gl.int64, [1], COMMON)
    hopper.mbarrier.init(full, count=1)
    hopper.mbarrier.init(empty, count=1)
    cluster_barrier()
    total = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, REG))
    step = 0
    for k in range(0, K, BK):
        # the second workgroup does not wait here
        hopper.mbarrier.wait(empty, (step & 1) ^ 1)
        hopper.mbarrier.expect(full, tiles.block_type.nbytes)
        tma_load(tiles, [0, k], full, buffer, multicast=True)
        hopper.mbarrier.wait(full, step & 1)
        total += gl.sum(buffer.load(REG).to(gl.float32), 1)
        hopper.mbarrier.arrive(empty, count=1)
        step += 1
    if FAULT != "no barrier at the end":
        cluster_barrier()
    gl.store(out + gl.arange(0, BM, gl.SliceLayout(1, REG)), total)


@gluon.jit
def tma_expects_early(tiles, out, BM: gl.constexpr, BK: gl.constexpr, REG: gl.constexpr):
    """Bytes of a second tile are expected before the first one is known to be there."""
    buffers = gl.allocate_shared_memory(tiles.dtype, [2, BM, BK], tiles.layout)
    full = hopper.mbarrier.allocate_mbarrier()
    hopper.mbarrier.init(full, count=1)
    for step in range(2):
        hopper.mbarrier.expect(full, tiles.block_type.nbytes)
        tma_load(tiles, [0, step * BK], full, buffers.index(step))
    hopper.mbarrier.wait(full, 1)
    rows = gl.arange(0, BM, gl.SliceLayout(1, REG))
    gl.store(out + rows, gl.sum(buffers.index(1).load(REG).to(gl.float32), 1))

"""Kernels for sm_90, right as they stand; FAULT plants one mistake."""

# ruff: noqa: SIM108, SIM113 - the language has no enumerate, and a choice at compile time is an if

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.gluon_compat import tma_load, tma_store


@gluon.jit
def gemm(
    a, b, c, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, ACC: gl.constexpr, BAR: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """c = a @ b with a [M, K], b [K, N] and c [M, N] in float16, all tensor descriptors; two buffers."""
    buffers_a = gl.allocate_shared_memory(a.dtype, [2, BM, BK], a.layout)
    buffers_b = gl.allocate_shared_memory(b.dtype, [2, BK, BN], b.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(2):
        hopper.mbarrier.init(bars.index(i), count=1)
    row = gl.program_id(0) * BM
    column = gl.program_id(1) * BN
    acc = gl.zeros((BM, BN), gl.float32, ACC)
    step = 0
    for k in range(0, K, BK):
        slot = step % 2
        hopper.mbarrier.expect(bars.index(slot), a.block_type.nbytes + b.block_type.nbytes)
        tma_load(a, [row, k], bars.index(slot), buffers_a.index(slot))
        tma_load(b, [k, column], bars.index(slot), buffers_b.index(slot))
        if FAULT != "missing wait":
            hopper.mbarrier.wait(bars.index(slot), (step // 2) & 1)
        acc = hopper.warpgroup_mma(buffers_a.index(slot), buffers_b.index(slot), acc, is_async=True)
        if FAULT == "wait too shallow":
            acc = hopper.warpgroup_mma_wait(2, deps=(acc,))
        else:
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        step += 1
    if FAULT != "result used before its wait":
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    staged = gl.allocate_shared_memory(c.dtype, [BM, BN], c.layout)
    staged.store(acc.to(c.dtype))
    if FAULT != "missing fence":
        hopper.fence_async_shared()
    tma_store(c, [row, column], staged)
    hopper.tma.store_wait(0)


@gluon.jit
def _produce(tiles, full, empty, buffers, K, BK: gl.constexpr, SLOTS: gl.constexpr, FAULT: gl.constexpr):
    for step in range(0, K // BK):
        slot = step % SLOTS
        if FAULT != "missing empty wait":
            hopper.mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
        hopper.mbarrier.expect(full.index(slot), tiles.block_type.nbytes)
        tma_load(tiles, [0, step * BK], full.index(slot), buffers.index(slot))


@gluon.jit
def _consume(
    out, full, empty, buffers, K, BM: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr, REG: gl.constexpr,
    FAULT: gl.constexpr,
):  # fmt: skip
    acc = gl.zeros((BM, BK), gl.float32, REG)
    for step in range(0, K // BK):
        slot = step % SLOTS
        if FAULT == "early release":
            hopper.mbarrier.arrive(empty.index(slot), count=1)
        hopper.mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
        acc += buffers.index(slot).load(REG).to(gl.float32)
        if FAULT != "never released" and FAULT != "early release":
            hopper.mbarrier.arrive(empty.index(slot), count=1)
    rows = gl.arange(0, BM, gl.SliceLayout(1, REG))
    columns = gl.arange(0, BK, gl.SliceLayout(0, REG))
    gl.store(out + rows[:, None] * BK + columns[None, :], acc)


@gluon.jit
def specialised_sum(
    tiles, out, K, BM: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr, REG: gl.constexpr, BAR: gl.constexpr,
    FAULT: gl.constexpr,
):  # fmt: skip
    """out [BM, BK] = the sum of a [BM, K] over blocks of BK columns: one warp loads, the others add."""
    buffers = gl.allocate_shared_memory(tiles.dtype, [SLOTS, BM, BK], tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    for i in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consume, (out, full, empty, buffers, K, BM, BK, SLOTS, REG, FAULT)),
            (_produce, (tiles, full, empty, buffers, K, BK, SLOTS, FAULT)),
        ],
        [1],
        [24],
    )


@gluon.jit
def attention(
    q, k, v, o, N, scale,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, QK: gl.constexpr, PV: gl.constexpr, BAR: gl.constexpr,
):  # fmt: skip
    """o [M, D] = softmax(q k^T) v of one head by blocks of BM rows; q, k, v are descriptors, `scale` is for exp2."""
    shared_q = gl.allocate_shared_memory(q.dtype, [BM, D], q.layout)
    shared_k = gl.allocate_shared_memory(k.dtype, [2, BN, D], k.layout)
    shared_v = gl.allocate_shared_memory(v.dtype, [2, BN, D], v.layout)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], BAR)
    for i in gl.static_range(3):
        hopper.mbarrier.init(bars.index(i), count=1)
    first = gl.program_id(0) * BM
    hopper.mbarrier.expect(bars.index(2), q.block_type.nbytes)
    tma_load(q, [first, 0], bars.index(2), shared_q)
    hopper.mbarrier.expect(bars.index(0), 2 * k.block_type.nbytes)
    tma_load(k, [0, 0], bars.index(0), shared_k.index(0))
    tma_load(v, [0, 0], bars.index(0), shared_v.index(0))
    hopper.mbarrier.wait(bars.index(2), 0)
    m = gl.full((BM,), float("-inf"), gl.float32, gl.SliceLayout(1, QK))
    l = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, QK))  # noqa: E741
    acc = gl.zeros((BM, D), gl.float32, PV)
    for j in range(0, N // BN):
        slot = j % 2
        if (j + 1) * BN < N:
            other = (j + 1) % 2
            hopper.mbarrier.expect(bars.index(other), 2 * k.block_type.nbytes)
            tma_load(k, [(j + 1) * BN, 0], bars.index(other), shared_k.index(other))
            tma_load(v, [(j + 1) * BN, 0], bars.index(other), shared_v.index(other))
        hopper.mbarrier.wait(bars.index(slot), (j // 2) & 1)
        scores = gl.zeros((BM, BN), gl.float32, QK)
        scores = hopper.warpgroup_mma(shared_q, shared_k.index(slot).permute((1, 0)), scores, is_async=True)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,)) * scale
        new_m = gl.maximum(m, gl.max(scores, 1))
        p = gl.exp2(scores - new_m[:, None])
        shrink = gl.exp2(m - new_m)
        l = l * shrink + gl.sum(p, 1)  # noqa: E741
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, PV))[:, None]
        weights = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, PV, 2))
        acc = hopper.warpgroup_mma(weights, shared_v.index(slot), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        m = new_m
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, PV))[:, None]
    rows = first + gl.arange(0, BM, gl.SliceLayout(1, PV))
    columns = gl.arange(0, D, gl.SliceLayout(0, PV))
    gl.store(o + rows[:, None] * D + columns[None, :], acc.to(o.dtype.element_ty))

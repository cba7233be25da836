"""Kernels for gfx1250, right as they stand; FAULT plants one mistake."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention.gluon_compat import cdna5


@gluon.jit
def gemm(
    a, b, c, M, N, K,
    BLOCK: gl.constexpr, BUFFERS: gl.constexpr, ACC: gl.constexpr, SHARED: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """c [M, N] float32 = a [M, K] @ b [K, N], BLOCK cubed a step, through BUFFERS buffers in shared memory."""
    pm = gl.program_id(0)
    pn = gl.program_id(1)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    tiles_a = cdna5.tdm.make_tensor_descriptor(a, (M, K), (K, 1), (BLOCK, BLOCK), SHARED)
    tiles_b = cdna5.tdm.make_tensor_descriptor(b, (K, N), (N, 1), (BLOCK, BLOCK), SHARED)
    buffers_a = gl.allocate_shared_memory(a.dtype.element_ty, [BUFFERS, BLOCK, BLOCK], SHARED)
    buffers_b = gl.allocate_shared_memory(b.dtype.element_ty, [BUFFERS, BLOCK, BLOCK], SHARED)
    for ahead in gl.static_range(BUFFERS - 1):
        cdna5.tdm.async_load(tiles_a, [pm * BLOCK, ahead * BLOCK], buffers_a.index(ahead))
        cdna5.tdm.async_load(tiles_b, [ahead * BLOCK, pn * BLOCK], buffers_b.index(ahead))
    acc = gl.zeros((BLOCK, BLOCK), gl.float32, ACC)
    next_tile = BUFFERS - 1
    for step in range(0, gl.cdiv(K, BLOCK)):
        if FAULT == "wait too shallow":
            cdna5.tdm.async_wait((BUFFERS - 1) * 2)
        elif FAULT != "missing wait":
            cdna5.tdm.async_wait((BUFFERS - 2) * 2)
        left = buffers_a.index(step % BUFFERS).load(LEFT)
        right = buffers_b.index(step % BUFFERS).load(RIGHT)
        if FAULT == "wrong slot":
            slot = (next_tile - 1) % BUFFERS  # a tile that is still to come
        else:
            slot = next_tile % BUFFERS
        cdna5.tdm.async_load(tiles_a, [pm * BLOCK, next_tile * BLOCK], buffers_a.index(slot))
        cdna5.tdm.async_load(tiles_b, [next_tile * BLOCK, pn * BLOCK], buffers_b.index(slot))
        next_tile += 1
        acc = cdna5.wmma(left, right, acc)
    if FAULT != "left in flight":
        cdna5.tdm.async_wait(0)
    rows = pm * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, ACC))
    columns = pn * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, ACC))
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    cdna5.buffer_store(acc, c, rows[:, None] * N + columns[None, :], mask=inside)

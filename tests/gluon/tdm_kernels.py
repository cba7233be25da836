"""Kernels for gfx1250, right as they stand; FAULT plants one mistake."""

# ruff: noqa: SIM108, SIM113 - the language has no enumerate, and a choice at compile time is an if

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


@gluon.jit
def softmax_step(scores, m, l):  # noqa: E741
    new_m = gl.maximum(m, gl.max(scores, 1))
    p = gl.exp2(scores - new_m[:, None])
    shrink = gl.exp2(m - new_m)
    return p, new_m, l * shrink + gl.sum(p, 1), shrink


@gluon.jit
def attention(
    q, k, v, o, N, scale,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ACC: gl.constexpr, SHARED_Q: gl.constexpr,
    SHARED_K: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """o = softmax(q k^T) v by heads (second axis of the grid) and blocks of BM rows; all tensors are [heads, N, D]."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    head = gl.program_id(1) * N * D
    first = gl.program_id(0) * BM
    tiles_q = cdna5.tdm.make_tensor_descriptor(q + head, (N, D), (D, 1), (BM, D), SHARED_Q)
    tiles_k = cdna5.tdm.make_tensor_descriptor(k + head, (N, D), (D, 1), (BN, D), SHARED_K)
    tiles_v = cdna5.tdm.make_tensor_descriptor(v + head, (N, D), (D, 1), (BN, D), SHARED_K)
    shared_q = gl.allocate_shared_memory(q.dtype.element_ty, [BM, D], SHARED_Q)
    shared_k = gl.allocate_shared_memory(k.dtype.element_ty, [2, BN, D], SHARED_K)
    shared_v = gl.allocate_shared_memory(v.dtype.element_ty, [2, BN, D], SHARED_K)
    cdna5.tdm.async_load(tiles_q, [first, 0], shared_q)
    cdna5.tdm.async_load(tiles_k, [0, 0], shared_k.index(0))
    cdna5.tdm.async_load(tiles_v, [0, 0], shared_v.index(0))
    cdna5.tdm.async_wait(2)
    b_q = shared_q.load(LEFT)
    m = gl.full((BM,), float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    l = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, ACC))  # noqa: E741
    acc = gl.zeros((BM, D), gl.float32, ACC)
    rows = first + gl.arange(0, BM, gl.SliceLayout(1, ACC))
    tiles = (first + BM) // BN if CAUSAL else gl.cdiv(N, BN)
    for j in range(0, tiles):
        if j + 1 < tiles:
            cdna5.tdm.async_load(tiles_k, [(j + 1) * BN, 0], shared_k.index((j + 1) % 2))
            cdna5.tdm.async_load(tiles_v, [(j + 1) * BN, 0], shared_v.index((j + 1) % 2))
            cdna5.tdm.async_wait(2)
        else:
            cdna5.tdm.async_wait(0)
        b_k = shared_k.index(j % 2).permute([1, 0]).load(RIGHT)
        scores = cdna5.wmma(b_q, b_k, gl.zeros((BM, BN), gl.float32, ACC)) * scale
        if CAUSAL:
            keys = j * BN + gl.arange(0, BN, gl.SliceLayout(0, ACC))
            scores = gl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
        p, m, l, shrink = softmax_step(scores, m, l)  # noqa: E741
        weights = gl.convert_layout(p.to(v.dtype.element_ty), LEFT)
        acc = cdna5.wmma(weights, shared_v.index(j % 2).load(RIGHT), acc * shrink[:, None])
    columns = gl.arange(0, D, gl.SliceLayout(0, ACC))
    acc = acc / l[:, None]
    cdna5.buffer_store(acc.to(o.dtype.element_ty), o + head, rows[:, None] * D + columns[None, :])

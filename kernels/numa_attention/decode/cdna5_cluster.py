"""Decode for gfx1250 with the keys of a request divided over a cluster of workgroups, merged at the cluster's barrier.

A cluster of CLUSTER workgroups has one unit (request, KV head, row block). A round's tile is CLUSTER * BLOCK_N tokens
of one page, BLOCK_N for each workgroup: TDM brings each its own, and every tensor here has an axis for the workgroups,
along which the cluster is laid out. The pipeline is the four-stage form of `decode/cdna5.py`, with keys and values in
one request where the cache has them side by side. At the end each workgroup writes its softmax state through L2, all
meet at the barrier, and each merges and writes a share of the head's dimensions: no counter, no last arriver, no second
launch.

A unit is never cut between clusters, so that uneven lengths leave clusters waiting; `decode/cdna5.py` balances them.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import amd

from numa_attention.decode.cdna5 import (
    K_WIDTH,
    P_FLOAT8,
    add_sink,
    alibi_distance,
    cut_probabilities,
    natural_lse,
    normalise,
    quantise,
    safe_max,
    score_tile,
    sight,
)
from numa_attention.decode.cdna5_variant import Rows, instruction_depth, rows_of
from numa_attention.direct_launch import Launched
from numa_attention.gluon_compat import cdna5, thread_barrier
from numa_attention.jit import gluon_entry
from numa_attention.portable_launch import ANY_ALIGNMENT, LayerLauncher, block_dim
from numa_attention.shapes import LayerShape
from numa_attention.variants import Variant


@gluon.jit
def float8_factors(b_x):
    """As in decode/cdna5.py, for b_x [C, M, D]: factors [C, M]."""
    b_largest = gl.max(gl.abs(b_x), 2)
    b_exponent = gl.floor(gl.log2(gl.where(b_largest > 0.0, b_largest, 1.0)))
    return gl.exp2(6.0 - gl.minimum(gl.maximum(b_exponent, -100.0), 100.0))


@gluon.jit
def copy_tile(
    cache, page_stride, token_stride, p_table, tile, tile_end, buffer,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CLUSTER: gl.constexpr,
):  # fmt: skip
    """Request tile [CLUSTER, BLOCK_N, BLOCK_D] into `buffer`, a part for each workgroup; nothing from tile_end on."""
    start = gl.minimum(tile, tile_end - 1) * (CLUSTER * BLOCK_N)
    page = gl.load(p_table + gl.maximum(start, 0) // PAGE_SIZE)
    source = cache + page.to(gl.int64) * page_stride
    source += (gl.maximum(start, 0) % PAGE_SIZE).to(gl.int64) * token_stride
    parts = gl.where(tile < tile_end, CLUSTER, 0)
    descriptor = cdna5.tdm.make_tensor_descriptor(
        source,
        (parts, BLOCK_N, HEAD_DIM),
        (token_stride.to(gl.int64) * BLOCK_N, token_stride, 1),
        (CLUSTER, BLOCK_N, BLOCK_D),
        buffer.type.layout,
    )
    cdna5.tdm.async_load(descriptor, [0, 0, 0], buffer)


@gluon.jit
def keys_in(buffers, slot, PAIRED: gl.constexpr, BLOCK_D: gl.constexpr):
    """A tile of keys [CLUSTER, BLOCK_N, BLOCK_D] in LDS."""
    tile = buffers.index(slot)
    if PAIRED:
        tile = tile.slice(0, BLOCK_D, dim=2)
    return tile


@gluon.jit
def values_in(buffers, slot, PAIRED: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr):
    """A tile of values [CLUSTER, BLOCK_N, BLOCK_DV] in LDS."""
    tile = buffers.index(slot)
    if PAIRED:
        tile = tile.slice(BLOCK_D, BLOCK_DV, dim=2)
    return tile


@gluon.jit
def multiply_keys(
    b_q, buffer, CLUSTER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ACC: gl.constexpr
):
    """Raw scores [C, M, N] of a tile of keys in LDS. b_q: a tuple of [C, M, D] that add up to the query."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    b_k = buffer.permute([0, 2, 1]).load(RIGHT)
    b_s = gl.zeros((CLUSTER, BLOCK_M, BLOCK_N), gl.float32, ACC)
    for part in gl.static_range(len(b_q)):
        b_s = cdna5.wmma(b_q[part], b_k, b_s)
    return b_s


@gluon.jit
def begin_softmax(
    b_s, b_m, o_key, o_position, b_first, b_last, b_slope, scale, soft_cap,
    WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
):  # fmt: skip
    """First half of the softmax: scores in base 2 [C, M, N], the new maximum [C, M], what older sums shrink by [C, M].

    o_key: positions [C, N]. A row sees the keys from b_first, where there is a window, to b_last.
    """
    b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP, 0)
    if HAS_ALIBI:
        b_distance = alibi_distance(o_key[:, None, :] - o_position[:, :, None], HAS_ALIBI)
        b_s += (b_slope * 1.4426950408889634)[:, :, None] * b_distance
    m_seen = o_key[:, None, :] <= b_last[:, :, None]
    if WINDOW >= 0:
        m_seen = m_seen & (o_key[:, None, :] >= b_first[:, :, None])
    b_s = gl.where(m_seen, b_s, float("-inf"))
    b_new = gl.maximum(b_m, gl.max(b_s, 2))
    return b_s, b_new, gl.exp2(b_m - safe_max(b_new))


@gluon.jit
def meet(p_fence, CLUSTER: gl.constexpr, FENCE: gl.constexpr):
    """All workgroups of the cluster meet; what each wrote before, all of them read afterwards."""
    # the barrier orders no memory: a release and an acquire do, which change nothing of the zeros at p_fence
    o_workgroup = gl.arange(0, CLUSTER, FENCE)
    b_zero = gl.zeros((CLUSTER,), gl.int32, FENCE)
    thread_barrier()
    gl.atomic_max(p_fence + o_workgroup, b_zero, sem="release", scope="gpu")
    cdna5.cluster.arrive()
    cdna5.cluster.wait()
    gl.atomic_max(p_fence + o_workgroup, b_zero, sem="acquire", scope="gpu")
    thread_barrier()


@gluon.jit(do_not_specialize=["span_count"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def decode_kernel(
    fences,  # int32 [units * CLUSTER], zero
    partial_acc,  # float32 [units * CLUSTER, BLOCK_M, BLOCK_DV]
    partial_ml,  # float32 [units * CLUSTER, 2, BLOCK_M]
    q,  # [tokens, q_heads, head_dim]
    k_pages,  # [page, token, kv_head, head_dim]
    v_pages,  # [page, token, kv_head, head_dim_v]
    out,  # [tokens, q_heads, head_dim_v]
    lse,  # float32 [tokens, q_heads]
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    alibi_slopes,
    causal_flags,  # int32 [R], read with CAUSAL 2
    spans,  # int32 [R, span_count, 2]
    q_scale,
    k_scale,
    v_scale,
    out_scale,
    scale,
    soft_cap,
    span_count,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    block_table_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    CLAMP_SPANS: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_Q_SCALE: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    HAS_OUT_SCALE: gl.constexpr,
    OUT_LARGEST: gl.constexpr,
    KV_HEADS: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    CLUSTER: gl.constexpr,
    BUFFERS: gl.constexpr,
    PAIRED: gl.constexpr,
    ACC: gl.constexpr,
    MERGED: gl.constexpr,
    FENCE: gl.constexpr,
    SHARED_K: gl.constexpr,
    SHARED_V: gl.constexpr,
):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(2, ACC)  # [C, M]
    FLOAT8: gl.constexpr = k_pages.dtype.element_ty.primitive_bitwidth == 8
    COPIES: gl.constexpr = 1 if PAIRED else 2  # TDM requests of one tile of keys and values
    WIDTH: gl.constexpr = 2 * HEAD_DIM if PAIRED else HEAD_DIM  # of keys, or of both
    BLOCK_W: gl.constexpr = 2 * BLOCK_D if PAIRED else BLOCK_D
    unit = gl.program_id(0)
    request = (unit // (KV_HEADS * ROW_BLOCKS)).to(gl.int64)
    kv_head = (unit // ROW_BLOCKS % KV_HEADS).to(gl.int64)
    row_block = unit % ROW_BLOCKS
    k_factor = scale
    v_factor = 1.0 / P_FLOAT8 if FLOAT8 else 1.0
    if HAS_SCALES:
        k_factor = scale * gl.load(k_scale)
        v_factor = v_factor * gl.load(v_scale)
    if HAS_Q_SCALE:
        k_factor = k_factor * gl.load(q_scale)
    query_start = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - query_start
    seq_len = gl.load(seq_lens + request)
    buffers_k = gl.allocate_shared_memory(
        k_pages.dtype.element_ty, [BUFFERS, CLUSTER, BLOCK_N, BLOCK_W], SHARED_K
    )
    buffers_v = buffers_k
    if not PAIRED:
        buffers_v = gl.allocate_shared_memory(
            v_pages.dtype.element_ty, [BUFFERS, CLUSTER, BLOCK_N, BLOCK_DV], SHARED_V
        )

    # the query tile, the same for each workgroup
    o_qc = gl.arange(0, CLUSTER, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    o_qm = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    o_qd = gl.arange(0, BLOCK_D, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    o_qrow = row_block * BLOCK_M + o_qm
    o_qtoken = (query_start + o_qrow // GROUP).to(gl.int64)
    o_q = o_qtoken * q_token_stride + (kv_head * GROUP + o_qrow % GROUP) * q_head_stride
    o_q = (o_qc * 0)[:, None, None] + o_q[None, :, None] + o_qd[None, None, :]
    m_q = (o_qrow // GROUP < query_len)[None, :, None] & (o_qd < HEAD_DIM)[None, None, :]
    b_q = gl.load(q + o_q, mask=m_q & (o_qc >= 0)[:, None, None], other=0.0)

    o_c = gl.arange(0, CLUSTER, gl.SliceLayout(1, ROW))
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, ROW))
    o_row = row_block * BLOCK_M + o_m
    m_row = (o_row // GROUP < query_len)[None, :] & (o_c >= 0)[:, None]
    o_head = kv_head * GROUP + o_row % GROUP
    o_position = gl.where(m_row, seq_len - query_len + (o_row // GROUP)[None, :], -1)  # [C, M]
    qk_scale = k_factor
    if FLOAT8 and not HAS_Q_SCALE:
        b_x = b_q.to(gl.float32)
        b_factors = float8_factors(b_x)
        b_x = b_x * b_factors[:, :, None]
        b_high = b_x.to(gl.float8e4nv)
        b_parts = (b_high, (b_x - b_high.to(gl.float32)).to(gl.float8e4nv))
        qk_scale = gl.convert_layout(k_factor / b_factors, ROW)[:, :, None]
    else:
        b_parts = (b_q,)
    b_slope = gl.zeros((CLUSTER, BLOCK_M), gl.float32, ROW)
    if HAS_ALIBI:
        b_slope = gl.load(alibi_slopes + o_head[None, :] + (o_c * 0)[:, None], mask=m_row, other=0.0)
        b_slope = b_slope.to(gl.float32)

    causal = CAUSAL == 1
    if CAUSAL == 2:
        causal = gl.load(causal_flags + request) != 0
    p_spans = spans
    if HAS_SPANS:
        p_spans = spans + request * (span_count * 2)
    b_first, b_last = sight(
        o_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
    )
    b_last = gl.where(m_row, b_last, -1)
    key_low, _ = sight(
        seq_len - query_len, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
    )
    tile_begin = key_low // (CLUSTER * BLOCK_N)
    tile_end = (seq_len + CLUSTER * BLOCK_N - 1) // (CLUSTER * BLOCK_N)
    tile_end = gl.where(query_len > row_block * BLOCK_M // GROUP, tile_end, tile_begin)

    b_m = gl.full((CLUSTER, BLOCK_M), float("-inf"), gl.float32, ROW)
    b_l = gl.zeros((CLUSTER, BLOCK_M), gl.float32, ROW)
    b_acc = gl.zeros((CLUSTER, BLOCK_M, BLOCK_DV), gl.float32, ACC)
    p_table = block_table + request * block_table_stride
    p_k = k_pages + kv_head * k_head_stride
    p_v = v_pages + kv_head * v_head_stride
    o_kc = gl.arange(0, CLUSTER, gl.SliceLayout(1, gl.SliceLayout(1, ACC)))
    o_kn = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(1, ACC)))
    o_within = (o_kc * BLOCK_N)[:, None] + o_kn[None, :]  # [C, N]
    o_vc = gl.arange(0, CLUSTER, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    o_vn = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    o_vwithin = (o_vc * BLOCK_N)[:, None] + o_vn[None, :]  # [C, N]
    # requested in this order: K0, K1, V0, K2, V1, and then K(i + 3) and V(i + 2) in round i
    copy_tile(
        p_k, k_page_stride, k_token_stride, p_table, tile_begin, tile_end, buffers_k.index(0), WIDTH, BLOCK_W,
        BLOCK_N, PAGE_SIZE, CLUSTER,
    )  # fmt: skip
    for ahead in gl.static_range(2):
        copy_tile(
            p_k, k_page_stride, k_token_stride, p_table, tile_begin + ahead + 1, tile_end,
            buffers_k.index(ahead + 1), WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CLUSTER,
        )  # fmt: skip
        if not PAIRED:
            copy_tile(
                p_v, v_page_stride, v_token_stride, p_table, tile_begin + ahead, tile_end, buffers_v.index(ahead),
                HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CLUSTER,
            )  # fmt: skip
    cdna5.tdm.async_wait(2 * COPIES)
    b_s = multiply_keys(b_parts, keys_in(buffers_k, 0, PAIRED, BLOCK_D), CLUSTER, BLOCK_M, BLOCK_N, ACC)
    b_s, b_m, b_alpha = begin_softmax(
        b_s, b_m, tile_begin * (CLUSTER * BLOCK_N) + o_within, o_position, b_first, b_last, b_slope, qk_scale,
        soft_cap, WINDOW, HAS_CAP, HAS_ALIBI,
    )  # fmt: skip
    for tile in range(tile_begin, tile_end):
        step = tile - tile_begin
        # into the buffers that the round before has read
        copy_tile(
            p_k, k_page_stride, k_token_stride, p_table, tile + 3, tile_end, buffers_k.index((step + 3) % BUFFERS),
            WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CLUSTER,
        )  # fmt: skip
        if not PAIRED:
            copy_tile(
                p_v, v_page_stride, v_token_stride, p_table, tile + 2, tile_end,
                buffers_v.index((step + 2) % BUFFERS), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CLUSTER,
            )  # fmt: skip
        cdna5.tdm.async_wait(2 * COPIES)
        b_next = multiply_keys(
            b_parts, keys_in(buffers_k, (step + 1) % BUFFERS, PAIRED, BLOCK_D), CLUSTER, BLOCK_M, BLOCK_N, ACC
        )  # tile + 1
        b_p = gl.exp2(b_s - safe_max(b_m)[:, :, None])  # tile
        b_l = b_l * b_alpha + gl.sum(b_p, 2)
        b_v = values_in(buffers_v, step % BUFFERS, PAIRED, BLOCK_D, BLOCK_DV).load(RIGHT)
        start = tile * (CLUSTER * BLOCK_N)
        if (start + CLUSTER * BLOCK_N > seq_len) | (start < key_low):
            # the page's rest and what is left of every window may be anything, NaN included
            o_vkey = start + o_vwithin
            m_value = (o_vkey < seq_len) & (o_vkey >= key_low)
            b_v = gl.where(m_value[:, :, None], b_v, gl.zeros_like(b_v))
        if FLOAT8:
            b_weights = cut_probabilities(b_p)
        else:
            b_weights = (b_p.to(b_v.dtype),)
        b_acc = b_acc * b_alpha[:, :, None]
        for part in gl.static_range(len(b_weights)):
            b_acc = cdna5.wmma(gl.convert_layout(b_weights[part], LEFT, assert_trivial=True), b_v, b_acc)
        b_s, b_m, b_alpha = begin_softmax(
            b_next, b_m, start + CLUSTER * BLOCK_N + o_within, o_position, b_first,
            gl.where(tile + 1 < tile_end, b_last, -1), b_slope, qk_scale, soft_cap, WINDOW, HAS_CAP, HAS_ALIBI,
        )  # fmt: skip  # tile + 1
    # copies of tiles past the end still are on their way
    cdna5.tdm.async_wait(0)

    o_slot = (unit * CLUSTER + o_c).to(gl.int64)
    p_ml = partial_ml + (o_slot * (2 * BLOCK_M))[:, None] + o_m[None, :]
    gl.store(p_ml, b_m)
    gl.store(p_ml + BLOCK_M, b_l)
    o_ac = gl.arange(0, CLUSTER, gl.SliceLayout(1, gl.SliceLayout(2, ACC)))
    o_am = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, ACC)))
    o_ad = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, gl.SliceLayout(1, ACC)))
    o_acc = (unit * CLUSTER + o_ac).to(gl.int64) * (BLOCK_M * BLOCK_DV)
    p_acc = partial_acc + o_acc[:, None, None] + (o_am * BLOCK_DV)[None, :, None] + o_ad[None, None, :]
    gl.store(p_acc, b_acc)
    meet(fences + unit * CLUSTER, CLUSTER, FENCE)

    # each workgroup merges a share of the columns
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MERGED))
    o_dv = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, MERGED))
    b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, gl.SliceLayout(1, MERGED))
    b_l = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, MERGED))
    b_acc = gl.zeros((BLOCK_M, BLOCK_DV), gl.float32, MERGED)
    for part in gl.static_range(CLUSTER):
        slot = (unit * CLUSTER + part).to(gl.int64)
        p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
        b_pm = gl.load(p_ml, cache_modifier=".cg")
        b_pl = gl.load(p_ml + BLOCK_M, cache_modifier=".cg")
        p_acc = partial_acc + slot * (BLOCK_M * BLOCK_DV) + o_m[:, None] * BLOCK_DV + o_dv[None, :]
        b_pacc = gl.load(p_acc, cache_modifier=".cg")
        b_new = gl.maximum(b_m, b_pm)
        b_safe = safe_max(b_new)
        b_old, b_part = gl.exp2(b_m - b_safe), gl.exp2(b_pm - b_safe)
        b_l = b_l * b_old + b_pl * b_part
        b_acc = b_acc * b_old[:, None] + b_pacc * b_part[:, None]
        b_m = b_new
    o_row = row_block * BLOCK_M + o_m
    m_row = o_row // GROUP < query_len
    o_token = (query_start + o_row // GROUP).to(gl.int64)
    o_head = kv_head * GROUP + o_row % GROUP
    if HAS_SINK:
        b_sink = gl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(gl.float32)
        b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
    p_out = out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
    b_out = quantise(normalise(b_acc, b_l) * v_factor, out_scale, HAS_OUT_SCALE, OUT_LARGEST)
    gl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :])
    if HAS_LSE:
        p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
        gl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)


def _bases(count: int, *unit: int) -> list[list[int]]:
    """Bases of a layout over `count` warps or workgroups, along the axis whose entry in `unit` is 1."""
    return [[step << bit for step in unit] for bit in range(count.bit_length() - 1)]


def shared_layout(cluster: int, block_n: int, block_d: int, itemsize: int) -> gl.PaddedSharedLayout:
    """A tile [cluster, block_n, block_d] in LDS, one workgroup's part in each; 16 bytes after each row."""
    return gl.PaddedSharedLayout.with_identity_for(
        [[block_d, 16 // itemsize]],
        [cluster, block_n, block_d],
        [2, 1, 0],
        cga_layout=_bases(cluster, 1, 0, 0),
    )


def constants(shape: LayerShape, variant: Variant, rows: Rows) -> dict:
    """The compile-time constants that this kernel declares after those of every kernel."""
    cluster, warps, block_n = variant.cluster, variant.num_warps, variant.block_n
    block_d, block_dv, itemsize = (
        block_dim(shape.head_dim),
        block_dim(shape.head_dim_v),
        shape.kv_dtype.itemsize,
    )
    workgroups = _bases(cluster, 1, 0, 0)
    depth = instruction_depth(shape, block_n)
    return dict(
        KV_HEADS=shape.kv_heads,
        ROW_BLOCKS=variant.row_blocks,
        CLUSTER=cluster,
        BUFFERS=4 if rows.paired else 3,
        PAIRED=rows.paired,
        ACC=amd.AMDWMMALayout(
            3, True, _bases(warps, 0, 1, 0), [], [16, 16, depth], cga_layout=workgroups, rank=3
        ),
        MERGED=gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0], cga_layout=_bases(cluster, 0, 1)),
        FENCE=gl.BlockedLayout([1], [32], [warps], [0], cga_layout=_bases(cluster, 1)),
        SHARED_K=shared_layout(cluster, block_n, 2 * block_d if rows.paired else block_d, itemsize),
        SHARED_V=shared_layout(cluster, block_n, block_dv, itemsize),
    )


_launch = LayerLauncher(gluon_entry(decode_kernel), constants, rows_of)


def decode(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> Launched:
    """Attention of the decoding requests of a `schedule.Schedule`; see `runner.attend` for the rest."""
    plan = schedule.decode
    own = (plan.arrivals, plan.partial_acc, plan.partial_ml)
    clusters = plan.variant.workgroups // plan.variant.cluster
    return _launch(clusters, own, plan.variant, q, k_pages, v_pages, out, schedule, **options)

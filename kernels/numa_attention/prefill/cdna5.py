"""Prefill over a paged cache for gfx1250 (MI450), in Gluon: keys and values come by TDM, matrices by WMMA.

One workgroup computes one tile of the step's list (`prefill/tile_list.py`), as in `prefill/portable.py`: the list's
order places the tiles that read the same keys on one domain, to which the hardware deals workgroups in turn. A KV tile
takes the way that `decode/cdna5.py` describes, with float8 products for float8 caches.

Three buffers, and copies two tiles ahead. The softmax is cut in two: while one tile's scores are multiplied, the tile
before it is exponentiated; while its values are multiplied, the next one's maximum is found. All warps read all keys
and values out of LDS: the more rows a warp has, the fewer bytes an instruction, as far as registers last. Tiles that
every row sees whole skip the mask.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention.decode.cdna5 import (
    K_WIDTH,
    P_FLOAT8,
    add_sink,
    copy_tile,
    cut_query,
    end_softmax,
    float8_factors,
    multiply_keys,
    multiply_values,
    natural_lse,
    normalise,
    pages_of,
    quantise,
    safe_max,
    score_tile,
    shared_layout,
    sight,
)
from numa_attention.decode.cdna5_variant import instruction_depth
from numa_attention.direct_launch import Launched
from numa_attention.gluon_compat import cdna5, wmma_layout
from numa_attention.jit import gluon_entry
from numa_attention.portable_launch import ANY_ALIGNMENT, LayerLauncher, block_dim
from numa_attention.shapes import LayerShape, chunk_of
from numa_attention.variants import Variant

BUFFERS = gl.constexpr(3)


@gluon.jit
def begin_softmax(
    b_s, b_m, tile, masked, o_position, b_first, b_last, b_slope, scale, soft_cap, BLOCK_N: gl.constexpr,
    ACC: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
):  # fmt: skip
    """First half: scores in base 2 [M, N], the new maximum [M], and what older sums shrink by [M]."""
    o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC))
    b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP, HAS_ALIBI)
    if masked:
        m_seen = o_key[None, :] <= b_last[:, None]
        if HAS_FIRST:
            m_seen = m_seen & (o_key[None, :] >= b_first[:, None])
        b_s = gl.where(m_seen, b_s, float("-inf"))
    b_new = gl.maximum(b_m, gl.max(b_s, 1))
    return b_s, b_new, gl.exp2(b_m - safe_max(b_new))


@gluon.jit(
    do_not_specialize=["first_request", "span_count"],
    do_not_specialize_on_alignment=["tiles", *ANY_ALIGNMENT],
)
def prefill_kernel(
    tiles,  # int32 [workgroups, 4]: request, KV head, query block
    first_request,
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
    CHUNK: gl.constexpr,
    ACC: gl.constexpr,
    SHARED_K: gl.constexpr,
    SHARED_V: gl.constexpr,
):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COPIES: gl.constexpr = BLOCK_N // CHUNK  # TDM requests of one tile of keys or of values
    FLOAT8: gl.constexpr = k_pages.dtype.element_ty.primitive_bitwidth == 8
    p_tile = tiles + gl.program_id(0).to(gl.int64) * 4
    listed = gl.load(p_tile)
    buffers_k = gl.allocate_shared_memory(k_pages.dtype.element_ty, [BUFFERS, BLOCK_N, BLOCK_D], SHARED_K)
    buffers_v = gl.allocate_shared_memory(v_pages.dtype.element_ty, [BUFFERS, BLOCK_N, BLOCK_DV], SHARED_V)
    if listed >= 0:
        request = (listed + first_request).to(gl.int64)
        kv_head = gl.load(p_tile + 1).to(gl.int64)
        block = gl.load(p_tile + 2)
        query_start = gl.load(query_start_loc + request)
        query_len = gl.load(query_start_loc + request + 1) - query_start
        seq_len = gl.load(seq_lens + request)
        context_len = seq_len - query_len
        k_factor = scale
        v_factor = 1.0 / P_FLOAT8 if FLOAT8 else 1.0
        if HAS_SCALES:
            k_factor = scale * gl.load(k_scale)
            v_factor = v_factor * gl.load(v_scale)
        if HAS_Q_SCALE:
            k_factor = k_factor * gl.load(q_scale)
        causal = CAUSAL == 1
        if CAUSAL == 2:
            causal = gl.load(causal_flags + request) != 0
        p_spans = spans
        if HAS_SPANS:
            p_spans = spans + request * (span_count * 2)

        o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ACC))
        o_dv = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, ACC))
        o_row = block * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
        o_query = o_row // GROUP
        m_row = o_query < query_len
        o_token = (query_start + o_query).to(gl.int64)
        o_head = kv_head * GROUP + o_row % GROUP
        # rows past the last query get a position left of every key, so that they see none
        o_position = gl.where(m_row, context_len + o_query, -1)
        o_qrow = block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LEFT))
        o_qd = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LEFT))
        o_qtoken = (query_start + o_qrow // GROUP).to(gl.int64)
        o_qhead = kv_head * GROUP + o_qrow % GROUP
        b_q = gl.load(
            q + o_qtoken[:, None] * q_token_stride + o_qhead[:, None] * q_head_stride + o_qd[None, :],
            mask=(o_qrow // GROUP < query_len)[:, None] & (o_qd < HEAD_DIM)[None, :],
            other=0.0,
        )
        qk_scale = k_factor
        if FLOAT8 and not HAS_Q_SCALE:
            b_parts = cut_query(b_q)
            # once more, as rows lie in a result
            b_rows = gl.load(
                q + o_token[:, None] * q_token_stride + o_head[:, None] * q_head_stride + o_d[None, :],
                mask=m_row[:, None] & (o_d < HEAD_DIM)[None, :],
                other=0.0,
            )
            qk_scale = (k_factor / float8_factors(b_rows.to(gl.float32)))[:, None]
        else:
            b_parts = (b_q,)
        b_slope = gl.zeros((BLOCK_M,), gl.float32, ROW)
        if HAS_ALIBI:
            b_slope = gl.load(alibi_slopes + o_head, mask=m_row, other=0.0)

        # the first and last query token of this tile bound the keys it sees, and those that all its rows see
        first_position = context_len + block * BLOCK_M // GROUP
        last_position = context_len + gl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
        key_low, all_see_last = sight(
            first_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
        )
        all_see_low, key_last = sight(
            last_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
        )
        # rows past the last query are masked like the rest and never written
        b_first, b_last = sight(
            o_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
        )
        key_high = key_last + 1
        tile_begin = key_low // BLOCK_N
        tile_end = (key_high + BLOCK_N - 1) // BLOCK_N
        interior_begin = (all_see_low + BLOCK_N - 1) // BLOCK_N
        interior_end = (all_see_last + 1) // BLOCK_N

        b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, ROW)
        b_l = gl.zeros((BLOCK_M,), gl.float32, ROW)
        b_acc = gl.zeros((BLOCK_M, BLOCK_DV), gl.float32, ACC)
        p_table = block_table + request * block_table_stride
        p_k = k_pages + kv_head * k_head_stride
        p_v = v_pages + kv_head * v_head_stride
        # keys from key_high on are not asked for: zeros come in their place
        # requested in this order: K0, K1, V0, K2, V1, and then K(i + 3) and V(i + 2) in round i
        pages_v = pages_of(p_table, tile_begin, key_high, BLOCK_N, PAGE_SIZE, CHUNK)
        copy_tile(
            p_k, k_page_stride, k_token_stride, pages_v, tile_begin, tile_end, key_high, buffers_k.index(0),
            HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, CHUNK,
        )  # fmt: skip
        for ahead in gl.static_range(2):
            pages_k = pages_of(p_table, tile_begin + ahead + 1, key_high, BLOCK_N, PAGE_SIZE, CHUNK)
            copy_tile(
                p_k, k_page_stride, k_token_stride, pages_k, tile_begin + ahead + 1, tile_end, key_high,
                buffers_k.index(ahead + 1), HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            copy_tile(
                p_v, v_page_stride, v_token_stride, pages_v, tile_begin + ahead, tile_end, key_high,
                buffers_v.index(ahead), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            pages_v = pages_k
        pages_k = pages_of(p_table, tile_begin + 3, key_high, BLOCK_N, PAGE_SIZE, CHUNK)
        cdna5.tdm.async_wait(4 * COPIES)
        b_s = multiply_keys(b_parts, buffers_k.index(0), BLOCK_M, BLOCK_N, ACC)
        masked = (tile_begin < interior_begin) | (tile_begin >= interior_end)
        b_s, b_m, b_alpha = begin_softmax(
            b_s, b_m, tile_begin, masked, o_position, b_first, b_last, b_slope, qk_scale, soft_cap, BLOCK_N, ACC,
            WINDOW >= 0, HAS_CAP, HAS_ALIBI,
        )  # fmt: skip
        for tile in range(tile_begin, tile_end):
            step = tile - tile_begin
            # the block table is read a round before its pages are asked for
            pages_next = pages_of(p_table, tile + 4, key_high, BLOCK_N, PAGE_SIZE, CHUNK)
            # into the buffers that the round before has read
            copy_tile(
                p_k, k_page_stride, k_token_stride, pages_k, tile + 3, tile_end, key_high,
                buffers_k.index(step % 3), HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            copy_tile(
                p_v, v_page_stride, v_token_stride, pages_v, tile + 2, tile_end, key_high,
                buffers_v.index((step + 2) % 3), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            cdna5.tdm.async_wait(4 * COPIES)
            b_next = multiply_keys(
                b_parts, buffers_k.index((step + 1) % 3), BLOCK_M, BLOCK_N, ACC
            )  # tile + 1
            b_p, b_l = end_softmax(b_s, b_m, b_l, b_alpha)  # tile
            b_acc = multiply_values(
                b_p, b_acc, b_alpha, buffers_v.index(step % 3), tile, key_low, BLOCK_N, ACC, WINDOW
            )  # tile
            masked = (tile + 1 < interior_begin) | (tile + 1 >= interior_end)
            b_s, b_m, b_alpha = begin_softmax(
                b_next, b_m, tile + 1, masked, o_position, b_first, b_last, b_slope, qk_scale, soft_cap,
                BLOCK_N, ACC, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
            )  # fmt: skip  # tile + 1
            pages_v = pages_k
            pages_k = pages_next
        # copies of tiles past the end, which are zeros, still are on their way
        cdna5.tdm.async_wait(0)

        if HAS_SINK:
            b_sink = gl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(gl.float32)
            b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
        p_out = out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
        b_out = quantise(normalise(b_acc, b_l) * v_factor, out_scale, HAS_OUT_SCALE, OUT_LARGEST)
        gl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :])
        if HAS_LSE:
            p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
            gl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)


def constants(shape: LayerShape, variant: Variant) -> dict:
    """The compile-time constants that this kernel declares after those of every kernel."""
    block_n, itemsize = variant.block_n, shape.kv_dtype.itemsize
    return dict(
        CHUNK=chunk_of(shape.page_size, block_n),
        ACC=wmma_layout(variant.num_warps, 1, (16, 16, instruction_depth(shape, block_n))),
        SHARED_K=shared_layout(block_n, block_dim(shape.head_dim), itemsize),
        SHARED_V=shared_layout(block_n, block_dim(shape.head_dim_v), itemsize),
    )


_launch = LayerLauncher(gluon_entry(prefill_kernel), constants)


def prefill(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> Launched:
    """Attention of the prefilling requests of a `schedule.Schedule`; see `runner.attend` for the rest."""
    plan = schedule.prefill
    own = (plan.tiles, schedule.batch.num_decodes)
    return _launch(plan.tiles.shape[0], own, plan.variant, q, k_pages, v_pages, out, schedule, **options)

"""Portable prefill over a paged cache, in plain Triton: variable lengths, packed GQA, cached prefixes.

One workgroup computes one tile of the step's list (`prefill/tile_list.py`): BLOCK_M rows of the packed tile of one
(request, KV head), a row being (query token, query head of the group), so that a group's heads read K and V once.
The KV tokens a tile sees are walked in three stretches: left edge of the window (masked), interior (no mask at all),
diagonal and end of the sequence (masked).
"""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.direct_launch import Launched
from numa_attention.jit import kernel
from numa_attention.placement_device import take
from numa_attention.portable_launch import ANY_ALIGNMENT, LayerLauncher, shard_constants
from numa_attention.scores import add_sink, natural_lse, normalise, quantise, query_in_float16, sight
from numa_attention.shapes import LayerShape
from numa_attention.variants import Variant
from numa_attention.walk import walk


@kernel(
    do_not_specialize=["first_request", "span_count"],
    do_not_specialize_on_alignment=["tiles", "queues", *ANY_ALIGNMENT],
)
def prefill_kernel(
    tiles,  # int32 [workgroups, 4]: request, KV head, query block
    first_request,
    queues,  # int32 [QUEUES + 1], with hardware placement
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    CLAMP_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr,
    OUT_LARGEST: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    QUEUES: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
):
    row = tl.program_id(0)
    if QUEUES > 0:
        row = take(queues, QUEUES, True)
    p_tile = tiles + row.to(tl.int64) * 4
    listed = tl.load(p_tile)
    if listed >= 0:
        request = (listed + first_request).to(tl.int64)
        kv_head = tl.load(p_tile + 1).to(tl.int64)
        block = tl.load(p_tile + 2)
        query_start = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - query_start
        seq_len = tl.load(seq_lens + request)
        context_len = seq_len - query_len
        if HAS_SCALES:
            qk_scale = scale * tl.load(k_scale)
            v_factor = tl.load(v_scale)
        else:
            qk_scale = scale
            v_factor = 1.0
        if HAS_Q_SCALE:
            qk_scale = qk_scale * tl.load(q_scale)
        causal = CAUSAL == 1
        if CAUSAL == 2:
            causal = tl.load(causal_flags + request) != 0
        p_spans = spans
        if HAS_SPANS:
            p_spans = spans + request * (span_count * 2)
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_dv = tl.arange(0, BLOCK_DV)
        o_row = block * BLOCK_M + o_m
        o_query = o_row // GROUP
        m_row = o_query < query_len
        o_token = (query_start + o_query).to(tl.int64)
        o_head = kv_head * GROUP + o_row % GROUP
        # rows past the last query get a position left of every key, so that they see none
        o_position = tl.where(m_row, context_len + o_query, -1)
        b_q = tl.load(
            q + o_token[:, None] * q_token_stride + o_head[:, None] * q_head_stride + o_d[None, :],
            mask=m_row[:, None] & (o_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        b_factor = tl.full([BLOCK_M], 1.0, tl.float32)
        if IN_FLOAT16:
            b_q, b_factor = query_in_float16(b_q, qk_scale)
        elif HAS_Q_SCALE:
            b_q = b_q.to(tl.float16)  # which holds every number of the float8 types
        if HAS_ALIBI:
            b_slope = tl.load(alibi_slopes + o_head, mask=m_row, other=0.0)
        else:
            b_slope = tl.zeros([BLOCK_M], tl.float32)

        # the first and last query token of this tile bound the keys it sees, and those that all its rows see
        first_position = context_len + block * BLOCK_M // GROUP
        last_position = context_len + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
        key_low, all_see_last = sight(
            first_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS,
            RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        all_see_low, key_last = sight(
            last_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS,
            RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        # rows past the last query are masked like the rest and never written
        b_first, b_last = sight(
            o_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS,
            RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        key_high = key_last + 1
        tile_low = key_low // BLOCK_N
        tile_interior = (all_see_low + BLOCK_N - 1) // BLOCK_N
        tile_high = (key_high + BLOCK_N - 1) // BLOCK_N
        tile_diagonal = tl.maximum((all_see_last + 1) // BLOCK_N, tile_low)
        tile_interior = tl.minimum(tl.maximum(tile_interior, tile_low), tile_diagonal)

        b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        p_table = block_table + request * block_table_stride
        p_k = k_pages + kv_head * k_head_stride + o_d[None, :]
        p_v = v_pages + kv_head * v_head_stride + o_dv[None, :]
        if WINDOW >= 0:
            b_m, b_l, b_acc = walk(
                b_q, b_q, b_factor, b_m, b_l, b_acc, b_slope, o_position, b_first, b_last, p_k, p_v, p_table,
                key_low, key_high, tile_low, tile_interior, qk_scale, soft_cap,
                k_page_stride, k_token_stride, v_page_stride, v_token_stride,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
                IN_FLOAT16, True, RANKS, RANK, INTERLEAVE,
            )  # fmt: skip
            # rows that have seen no key yet meet the interior with m = -inf; there every real row sees every key
            tile_low = tile_interior
        b_m, b_l, b_acc = walk(
            b_q, b_q, b_factor, b_m, b_l, b_acc, b_slope, o_position, b_first, b_last, p_k, p_v, p_table,
            key_low, key_high, tile_low, tile_diagonal, qk_scale, soft_cap,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
            IN_FLOAT16, False, RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        b_m, b_l, b_acc = walk(
            b_q, b_q, b_factor, b_m, b_l, b_acc, b_slope, o_position, b_first, b_last, p_k, p_v, p_table,
            key_low, key_high, tile_diagonal, tile_high, qk_scale, soft_cap,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
            IN_FLOAT16, True, RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        # which rows these are is read and computed again: kept, it would take registers during the walk
        o_row = tl.load(p_tile + 2, volatile=True) * BLOCK_M + o_m
        o_query = o_row // GROUP
        m_row = o_query < query_len
        o_token = (query_start + o_query).to(tl.int64)
        o_head = kv_head * GROUP + o_row % GROUP
        if HAS_SINK:
            b_sink = tl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(tl.float32)
            b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
        b_out = quantise(normalise(b_acc, b_l) * v_factor, out_scale, HAS_OUT_SCALE, OUT_LARGEST)
        tl.store(
            out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :],
            b_out.to(out.dtype.element_ty),
            mask=m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :],
        )
        if HAS_LSE:
            tl.store(
                lse + o_token * lse_token_stride + o_head * lse_head_stride, natural_lse(b_m, b_l), mask=m_row
            )


def constants(shape: LayerShape, variant: Variant) -> dict[str, int]:
    """The compile-time constants that this kernel declares after those of every kernel."""
    return dict(**shard_constants(shape), QUEUES=variant.queues, IN_FLOAT16=variant.in_float16)


_launch = LayerLauncher(prefill_kernel, constants)


def prefill(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> Launched:
    """Attention of the prefilling requests of a `schedule.Schedule`; see `runner.attend` for the rest."""
    plan = schedule.prefill
    own = (plan.tiles, schedule.batch.num_decodes, plan.tiles if plan.queues is None else plan.queues)
    return _launch(plan.tiles.shape[0], own, plan.variant, q, k_pages, v_pages, out, schedule, **options)

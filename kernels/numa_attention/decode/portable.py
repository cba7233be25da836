"""Portable split-k decode over a paged cache, in plain Triton: one launch, splits merged by the last arriver.

A workgroup walks the items of its range (see `decode/work_list.py`). An item is a contiguous range of KV tiles read by
one packed tile: BLOCK_M rows of (query token, query head of the group). A unit that was not split is finished in
registers; otherwise each part goes to the workspace and the workgroup that arrives last merges all parts in the order
of their splits, so that the result does not depend on who that was.
"""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.jit import kernel
from numa_attention.paged import page_rows
from numa_attention.scores import add_sink, natural_lse, normalise, safe_max, score_tile, visible
from numa_attention.variants import next_power_of_2


@kernel
def finish(
    b_m,  # [M]
    b_l,  # [M]
    b_acc,  # [M, DV]
    b_sink,  # [M]
    v_scale,
    p_out,  # [M, DV]
    p_lse,  # [M]
    m_row,  # [M]
    m_out,  # [M, DV]
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write the output and LSE of one unit from its whole softmax state."""
    if HAS_SINK:
        b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
    tl.store(p_out, (normalise(b_acc, b_l) * v_scale).to(p_out.dtype.element_ty), mask=m_out)
    if HAS_LSE:
        tl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)


@kernel
def decode_kernel(
    q,  # [tokens, q_heads, head_dim]
    k_pages,  # [page, token, kv_head, head_dim]
    v_pages,  # [page, token, kv_head, head_dim_v]
    out,  # [tokens, q_heads, head_dim_v]
    lse,  # float32 [tokens, q_heads]
    ranges,  # int32 [workgroups, 2]
    items,  # int32 [capacity, 8]
    arrivals,  # int32 [capacity], zero between launches
    partial_acc,  # float32 [2 * workgroups, BLOCK_M, BLOCK_DV]
    partial_ml,  # float32 [2 * workgroups, 2, BLOCK_M]
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    alibi_slopes,
    k_scale,
    v_scale,
    scale,
    soft_cap,
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
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DOMAINS: tl.constexpr,
    MERGE: tl.constexpr,
):
    # consecutive ranges belong to one domain, to which the hardware deals every DOMAINS-th workgroup
    workgroups = tl.num_programs(0)
    program = tl.program_id(0)
    workgroup = program % DOMAINS * (workgroups // DOMAINS) + program // DOMAINS
    first = tl.load(ranges + workgroup * 2)
    count = tl.load(ranges + workgroup * 2 + 1)
    if HAS_SCALES:
        scale = scale * tl.load(k_scale)
        v_factor = tl.load(v_scale)
    else:
        v_factor = 1.0
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    for index in tl.range(first, first + count):
        p_item = items + index * 8
        request = tl.load(p_item).to(tl.int64)
        kv_head = tl.load(p_item + 1).to(tl.int64)
        row_block = tl.load(p_item + 2)
        tile_begin = tl.load(p_item + 3)
        tile_end = tl.load(p_item + 4)
        split = tl.load(p_item + 5)
        splits = tl.load(p_item + 6)
        first_workgroup = tl.load(p_item + 7)
        query_start = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - query_start
        seq_len = tl.load(seq_lens + request)

        o_row = row_block * BLOCK_M + o_m
        o_query = o_row // GROUP
        m_row = o_query < query_len
        o_token = (query_start + o_query).to(tl.int64)
        o_head = kv_head * GROUP + o_row % GROUP
        # rows past the last query get a position left of every key, so that they see none
        o_position = tl.where(m_row, seq_len - query_len + o_query, -1)
        m_q = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
        b_q = tl.load(
            q + o_token[:, None] * q_token_stride + o_head[:, None] * q_head_stride + o_d[None, :], mask=m_q, other=0.0
        )
        if HAS_ALIBI:
            b_slope = tl.load(alibi_slopes + o_head, mask=m_row, other=0.0)
        else:
            b_slope = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINK:
            b_sink = tl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(tl.float32)
        else:
            b_sink = tl.zeros([BLOCK_M], tl.float32)

        b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        key_low = 0
        if WINDOW >= 0:
            key_low = tl.maximum(seq_len - query_len - WINDOW, 0)
        p_table = block_table + request * block_table_stride
        p_k = k_pages + kv_head * k_head_stride + o_d[None, :]
        p_v = v_pages + kv_head * v_head_stride + o_dv[None, :]
        for tile in tl.range(tile_begin, tile_end):
            start = tile * BLOCK_N
            o_key = start + o_n
            # tokens outside every row's sight are not read: their pages may hold anything, NaN included
            m_key = (o_key < seq_len) & (o_key >= key_low)
            o_k = page_rows(p_table, start, o_n, m_key, k_page_stride, k_token_stride, PAGE_SIZE, ONE_PAGE)
            b_k = tl.load(p_k + o_k[:, None], mask=m_key[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
            b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
            b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP, HAS_ALIBI)
            b_s = tl.where(visible(o_position, o_key, seq_len, CAUSAL, WINDOW), b_s, float("-inf"))
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_safe = safe_max(b_m_new)
            b_p = tl.exp2(b_s - b_safe[:, None])
            b_alpha = tl.exp2(b_m - b_safe)
            b_l = b_l * b_alpha + tl.sum(b_p, 1)
            b_m = b_m_new
            o_v = page_rows(p_table, start, o_n, m_key, v_page_stride, v_token_stride, PAGE_SIZE, ONE_PAGE)
            b_v = tl.load(p_v + o_v[:, None], mask=m_key[:, None] & (o_dv < HEAD_DIM_V)[None, :], other=0.0)
            b_acc = b_acc * b_alpha[:, None]
            b_acc = tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc, input_precision="ieee")

        p_out = out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
        p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
        m_out = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
        if splits == 1:
            finish(b_m, b_l, b_acc, b_sink, v_factor, p_out, p_lse, m_row, m_out, HAS_SINK, HAS_LSE)
        else:
            slot = (2 * (first_workgroup + split) + (split == 0).to(tl.int32)).to(tl.int64)
            p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
            o_acc = o_m[:, None] * BLOCK_DV + o_dv[None, :]
            tl.store(partial_acc + slot * (BLOCK_M * BLOCK_DV) + o_acc, b_acc)
            tl.store(p_ml, b_m)
            tl.store(p_ml + BLOCK_M, b_l)
            # all of this workgroup's stores happen before its one thread announces the part
            tl.debug_barrier()
            arrival = tl.atomic_add(arrivals + index - (first_workgroup + split), 1, sem="acq_rel", scope="gpu")
            if arrival == splits - 1:
                tl.store(arrivals + index - (first_workgroup + split), 0)
                b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
                b_l = tl.zeros([BLOCK_M], tl.float32)
                b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                o_s = tl.arange(0, MERGE)
                for other in tl.range(0, splits, MERGE):
                    o_split = other + o_s
                    m_split = o_split < splits
                    o_slot = (2 * (first_workgroup + o_split) + (o_split == 0).to(tl.int32)).to(tl.int64)
                    p_ml_s = partial_ml + o_slot[:, None] * (2 * BLOCK_M) + o_m[None, :]
                    # past L1: the parts were written by other compute units
                    b_m_s = tl.load(p_ml_s, mask=m_split[:, None], other=float("-inf"), cache_modifier=".cg")
                    b_l_s = tl.load(p_ml_s + BLOCK_M, mask=m_split[:, None], other=0.0, cache_modifier=".cg")
                    p_acc_s = partial_acc + o_slot[:, None, None] * (BLOCK_M * BLOCK_DV) + o_acc[None, :, :]
                    b_acc_s = tl.load(p_acc_s, mask=m_split[:, None, None], other=0.0, cache_modifier=".cg")
                    b_m_new = tl.maximum(b_m, tl.max(b_m_s, 0))
                    b_safe = safe_max(b_m_new)
                    b_weight = tl.exp2(b_m_s - b_safe[None, :])
                    b_alpha = tl.exp2(b_m - b_safe)
                    b_l = b_l * b_alpha + tl.sum(b_l_s * b_weight, 0)
                    b_acc = b_acc * b_alpha[:, None] + tl.sum(b_acc_s * b_weight[:, :, None], 0)
                    b_m = b_m_new
                finish(b_m, b_l, b_acc, b_sink, v_factor, p_out, p_lse, m_row, m_out, HAS_SINK, HAS_LSE)


MERGE_ELEMENTS = 8192  # float32 elements of partial output a merging workgroup holds at once


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of the decoding requests of `schedule` (a `schedule.Schedule`); see `attention.attend` for shapes."""
    shape, plan, batch = schedule.shape, schedule.decode, schedule.batch
    variant = plan.variant
    block_dv = next_power_of_2(max(shape.head_dim_v, 16))
    no_lse = lse is None
    lse = out if no_lse else lse
    decode_kernel[(variant.workgroups,)](
        q,
        k_pages,
        v_pages,
        out,
        lse,
        plan.ranges,
        plan.items,
        plan.arrivals,
        plan.partial_acc,
        plan.partial_ml,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        q if sinks is None else sinks,
        q if alibi_slopes is None else alibi_slopes,
        q if k_scale is None else k_scale,
        q if v_scale is None else v_scale,
        scale,
        soft_cap,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        v_pages.stride(0),
        v_pages.stride(1),
        v_pages.stride(2),
        batch.block_table.stride(0),
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_V=shape.head_dim_v,
        BLOCK_M=variant.block_m,
        BLOCK_N=variant.block_n,
        BLOCK_D=next_power_of_2(max(shape.head_dim, 16)),
        BLOCK_DV=block_dv,
        PAGE_SIZE=shape.page_size,
        WINDOW=shape.window,
        CAUSAL=batch.causal,
        HAS_CAP=soft_cap > 0.0,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_SINK=sinks is not None,
        HAS_LSE=not no_lse,
        HAS_SCALES=k_scale is not None,
        DOMAINS=variant.domains if variant.mapping.startswith("swizzled") else 1,
        MERGE=max(1, MERGE_ELEMENTS // (variant.block_m * block_dv)),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )

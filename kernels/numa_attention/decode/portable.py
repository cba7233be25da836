"""Portable split-k decode over a paged cache, in plain Triton: one launch, splits merged by the last arriver.

A workgroup walks the items of its range (see `decode/work_list.py`). An item is a contiguous range of KV tiles read by
one packed tile: BLOCK_M rows of (query token, query head of the group). A unit that was not split is finished in
registers; otherwise each part goes to the workspace and the workgroup that arrives last merges all parts in the order
of their splits, so that the result does not depend on who that was.
"""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.direct_launch import Launched
from numa_attention.jit import kernel
from numa_attention.placement_device import take
from numa_attention.portable_launch import ANY_ALIGNMENT, LayerLauncher, block_dim, shard_constants
from numa_attention.scores import (
    add_sink,
    natural_lse,
    normalise,
    quantise,
    query_in_float8,
    query_in_float16,
    safe_max,
    sight,
)
from numa_attention.shapes import LayerShape
from numa_attention.variants import Variant, next_power_of_2
from numa_attention.walk import walk
from numa_attention.waves import global_barrier


@kernel
def finish(
    b_m,  # [M]
    b_l,  # [M]
    b_acc,  # [M, DV]
    b_sink,  # [M]
    v_scale,
    out_scale,
    p_out,  # [M, DV]
    p_lse,  # [M]
    m_row,  # [M]
    m_out,  # [M, DV]
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_OUT_SCALE: tl.constexpr,
    OUT_LARGEST: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Write the output and LSE of one unit from its whole softmax state.

    WIDENS: whether the output is float32 and the query is not, as where it is merged across ranks.
    """
    if HAS_SINK:
        b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
    b_out = quantise(normalise(b_acc, b_l) * v_scale, out_scale, HAS_OUT_SCALE, OUT_LARGEST)
    if WIDENS:
        # Triton up to 3.9 breaks its own program where it moves this store's layout conversion into the branches that
        # b_acc comes from; it moves none past a reduction, which here is of single elements
        b_out = tl.sum(b_out[:, :, None], 2)
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_out)
    if HAS_LSE:
        tl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)


@kernel
def part_slot(split, first_workgroup):
    """Where a split's part is kept: a workgroup has at most two, of the unit it ends and of the unit it begins."""
    return (2 * (first_workgroup + split) + (split == 0).to(tl.int32)).to(tl.int64)


@kernel
def store_part(b_m, b_l, b_acc, partial_acc, partial_ml, slot, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write one softmax state (m, l [M], unnormalised acc [M, DV]) to the workspace."""
    o_m = tl.arange(0, BLOCK_M)
    o_dv = tl.arange(0, BLOCK_DV)
    p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
    tl.store(p_ml, b_m)
    tl.store(p_ml + BLOCK_M, b_l)
    tl.store(partial_acc + slot * (BLOCK_M * BLOCK_DV) + o_m[:, None] * BLOCK_DV + o_dv[None, :], b_acc)


@kernel
def arrive_last(p_arrivals, parts):
    """Announce a stored part. True for the workgroup that completes the count, which finds the counter reset."""
    # all stores of this workgroup come before its one thread announces them
    global_barrier()
    last = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(p_arrivals, 0)
    return last


@kernel
def load_part(
    partial_acc, partial_ml, part, parts, first, step, first_workgroup, b_max, BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Part number `part`: its acc [M, DV] and weight [M] under the row maximum b_max [M]; weight 0 past the last."""
    o_m = tl.arange(0, BLOCK_M)
    o_dv = tl.arange(0, BLOCK_DV)
    exists = part < parts
    slot = part_slot(first + tl.minimum(part, parts - 1) * step, first_workgroup)
    # past L1: other compute units wrote it
    b_m = tl.load(partial_ml + slot * (2 * BLOCK_M) + o_m, cache_modifier=".cg")
    p_acc = partial_acc + slot * (BLOCK_M * BLOCK_DV) + o_m[:, None] * BLOCK_DV + o_dv[None, :]
    b_acc = tl.load(p_acc, cache_modifier=".cg")
    return b_acc, tl.where(exists, tl.exp2(b_m - b_max), 0.0)


@kernel
def merge_parts(
    partial_acc, partial_ml, first, parts, step, first_workgroup, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Merge splits first, first + step, ... (`parts` of them, at most PARTS), always in this order: (m, l, acc)."""
    o_m = tl.arange(0, BLOCK_M)
    o_part = tl.arange(0, PARTS)
    m_part = (o_part < parts)[:, None]
    o_slot = part_slot(first + o_part * step, first_workgroup)
    p_ml = partial_ml + o_slot[:, None] * (2 * BLOCK_M) + o_m[None, :]
    b_ms = tl.load(p_ml, mask=m_part, other=float("-inf"), cache_modifier=".cg")  # [PARTS, M]
    b_ls = tl.load(p_ml + BLOCK_M, mask=m_part, other=0.0, cache_modifier=".cg")  # [PARTS, M]
    b_m = tl.max(b_ms, 0)
    b_safe = safe_max(b_m)
    b_l = tl.sum(b_ls * tl.exp2(b_ms - b_safe[None, :]), 0)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # several parts in flight at a time, as many as registers hold: a merge waits for latency, not for bandwidth
    for part in tl.range(0, parts, IN_FLIGHT):
        b_0, b_w0 = load_part(
            partial_acc, partial_ml, part, parts, first, step, first_workgroup, b_safe, BLOCK_M, BLOCK_DV
        )
        if IN_FLIGHT == 4:
            b_1, b_w1 = load_part(
                partial_acc,
                partial_ml,
                part + 1,
                parts,
                first,
                step,
                first_workgroup,
                b_safe,
                BLOCK_M,
                BLOCK_DV,
            )
            b_2, b_w2 = load_part(
                partial_acc,
                partial_ml,
                part + 2,
                parts,
                first,
                step,
                first_workgroup,
                b_safe,
                BLOCK_M,
                BLOCK_DV,
            )
            b_3, b_w3 = load_part(
                partial_acc,
                partial_ml,
                part + 3,
                parts,
                first,
                step,
                first_workgroup,
                b_safe,
                BLOCK_M,
                BLOCK_DV,
            )
            b_acc += b_1 * b_w1[:, None] + b_2 * b_w2[:, None] + b_3 * b_w3[:, None]
        b_acc += b_0 * b_w0[:, None]
    return b_m, b_l, b_acc


@kernel(do_not_specialize=["span_count"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def decode_kernel(
    ranges,  # int32 [workgroups, 16]
    items,  # int32 [capacity, 16]
    arrivals,  # int32 [2, 2 * workgroups], zero between launches
    partial_acc,  # float32 [2 * workgroups, BLOCK_M, BLOCK_DV]
    partial_ml,  # float32 [2 * workgroups, 2, BLOCK_M]
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
    DOMAINS: tl.constexpr,
    FAN_IN: tl.constexpr,
    PARTS: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
    QUEUES: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    STAGED_VALUES: tl.constexpr,
):
    # consecutive ranges belong to one domain, to which the hardware deals every DOMAINS-th workgroup
    workgroups = tl.num_programs(0)
    program = tl.program_id(0)
    workgroup = program % DOMAINS * (workgroups // DOMAINS) + program // DOMAINS
    if QUEUES > 0:
        workgroup = take(queues, QUEUES, False)
    first = tl.load(ranges + workgroup * 16)
    count = tl.load(ranges + workgroup * 16 + 1)
    if HAS_SCALES:
        qk_scale = scale * tl.load(k_scale)
        v_factor = tl.load(v_scale)
    else:
        qk_scale = scale
        v_factor = 1.0
    if HAS_Q_SCALE:
        qk_scale = qk_scale * tl.load(q_scale)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    # what every item computes anew takes registers only while it is needed
    for index in tl.range(first, first + count, disable_licm=True):
        p_item = items + index * 16
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
            q + o_token[:, None] * q_token_stride + o_head[:, None] * q_head_stride + o_d[None, :],
            mask=m_q,
            other=0.0,
        )
        b_factor = tl.full([BLOCK_M], 1.0, tl.float32)
        b_q_rest = b_q
        FLOAT8_KEYS: tl.constexpr = TWO_TERMS and not HAS_Q_SCALE
        if FLOAT8_KEYS:
            b_q, b_q_rest, b_factor = query_in_float8(b_q, qk_scale)
        elif IN_FLOAT16:
            b_q, b_factor = query_in_float16(b_q, qk_scale)
        elif HAS_Q_SCALE:
            b_q = b_q.to(tl.float16)  # which holds every number of the float8 types
        if HAS_ALIBI:
            b_slope = tl.load(alibi_slopes + o_head, mask=m_row, other=0.0)
        else:
            b_slope = tl.zeros([BLOCK_M], tl.float32)

        b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        p_table = block_table + request * block_table_stride
        p_k = k_pages + kv_head * k_head_stride + o_d[None, :]
        p_v = v_pages + kv_head * v_head_stride + o_dv[None, :]
        causal = CAUSAL == 1
        if CAUSAL == 2:
            causal = tl.load(causal_flags + request) != 0
        p_spans = spans
        if HAS_SPANS:
            p_spans = spans + request * (span_count * 2)
        key_low, all_see_last = sight(
            seq_len - query_len, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS,
            RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        all_see_low, key_last = sight(
            seq_len - 1, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS,
            RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        b_first, b_last = sight(
            o_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS,
            RANKS, RANK, INTERLEAVE,
        )  # fmt: skip
        key_high = key_last + 1
        # tiles that every row sees whole need no mask
        interior_end = tl.minimum(tl.maximum((all_see_last + 1) // BLOCK_N, tile_begin), tile_end)
        interior_begin = (all_see_low + BLOCK_N - 1) // BLOCK_N
        interior_begin = tl.minimum(tl.maximum(interior_begin, tile_begin), interior_end)
        if WINDOW >= 0:
            b_m, b_l, b_acc = walk(
                b_q, b_q_rest, b_factor, b_m, b_l, b_acc, b_slope, o_position, b_first, b_last, p_k, p_v, p_table,
                key_low, key_high, tile_begin, interior_begin, qk_scale, soft_cap,
                k_page_stride, k_token_stride, v_page_stride, v_token_stride,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
                IN_FLOAT16, True, RANKS, RANK, INTERLEAVE, FLOAT8_KEYS, STAGED_VALUES,
            )  # fmt: skip
        b_m, b_l, b_acc = walk(
            b_q, b_q_rest, b_factor, b_m, b_l, b_acc, b_slope, o_position, b_first, b_last, p_k, p_v, p_table,
            key_low, key_high, interior_begin, interior_end, qk_scale, soft_cap,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
            IN_FLOAT16, False, RANKS, RANK, INTERLEAVE, FLOAT8_KEYS, STAGED_VALUES,
        )  # fmt: skip
        b_m, b_l, b_acc = walk(
            b_q, b_q_rest, b_factor, b_m, b_l, b_acc, b_slope, o_position, b_first, b_last, p_k, p_v, p_table,
            key_low, key_high, interior_end, tile_end, qk_scale, soft_cap,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, WINDOW >= 0, HAS_CAP, HAS_ALIBI,
            IN_FLOAT16, True, RANKS, RANK, INTERLEAVE, FLOAT8_KEYS, STAGED_VALUES,
        )  # fmt: skip

        whole = splits == 1
        if splits > 1:
            # first among up to FAN_IN neighbours, then among those merged results: a unit in many parts is not
            # merged by one workgroup in one long row
            group_first = split // FAN_IN * FAN_IN
            group_size = tl.minimum(splits - group_first, FAN_IN)
            group_slot = part_slot(group_first, first_workgroup)
            groups = (splits + FAN_IN - 1) // FAN_IN
            store_part(
                b_m, b_l, b_acc, partial_acc, partial_ml, part_slot(split, first_workgroup), BLOCK_M, BLOCK_DV
            )
            if arrive_last(arrivals + group_slot, group_size):
                b_m, b_l, b_acc = merge_parts(
                    partial_acc,
                    partial_ml,
                    group_first,
                    group_size,
                    1,
                    first_workgroup,
                    BLOCK_M,
                    BLOCK_DV,
                    PARTS,
                    IN_FLIGHT,
                )
                whole = groups == 1
                if groups > 1:
                    global_barrier()  # all of this workgroup has read the part that is now overwritten
                    store_part(b_m, b_l, b_acc, partial_acc, partial_ml, group_slot, BLOCK_M, BLOCK_DV)
                    root = arrivals + 2 * workgroups + (2 * first_workgroup + 1)  # slot of split 0
                    whole = arrive_last(root, groups)
                    if whole:
                        b_m, b_l, b_acc = merge_parts(
                            partial_acc,
                            partial_ml,
                            0,
                            groups,
                            FAN_IN,
                            first_workgroup,
                            BLOCK_M,
                            BLOCK_DV,
                            PARTS,
                            IN_FLIGHT,
                        )
        if whole:
            # which rows these are is read and computed again: kept, it would take registers during the walk
            o_row = tl.load(p_item + 2, volatile=True) * BLOCK_M + o_m
            o_query = o_row // GROUP
            m_row = o_query < query_len
            o_token = (query_start + o_query).to(tl.int64)
            o_head = kv_head * GROUP + o_row % GROUP
            b_sink = tl.zeros([BLOCK_M], tl.float32)
            if HAS_SINK:
                b_sink = tl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(tl.float32)
            p_out = (
                out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
            )
            p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
            m_out = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
            finish(
                b_m, b_l, b_acc, b_sink, v_factor, out_scale, p_out, p_lse, m_row, m_out,
                HAS_SINK, HAS_LSE, HAS_OUT_SCALE, OUT_LARGEST,
                out.dtype.element_ty == tl.float32 and q.dtype.element_ty != tl.float32,
            )  # fmt: skip


MERGE_REGISTERS = 16  # float32 values of one part that a thread holds where four parts are in flight
FAN_IN = 16  # parts merged at a time: two levels then serve 256 parts with 16 + 16 reads in a row


def constants(shape: LayerShape, variant: Variant) -> dict[str, int]:
    """The compile-time constants that this kernel declares after those of every kernel."""
    accumulator = variant.block_m * block_dim(shape.head_dim_v)
    return dict(
        **shard_constants(shape),
        DOMAINS=variant.domains if variant.mapping.startswith("swizzled") else 1,
        FAN_IN=FAN_IN,
        # a square of 16 parts and 16 rows is what Triton 3.6 does not compile for gfx942 where the output is float32
        PARTS=max(2 * FAN_IN, next_power_of_2(-(-variant.workgroups // FAN_IN))),
        IN_FLIGHT=4 if accumulator <= 32 * variant.num_warps * MERGE_REGISTERS else 1,
        QUEUES=variant.queues,
        IN_FLOAT16=variant.in_float16,
        TWO_TERMS=variant.two_terms,
        STAGED_VALUES=variant.staged_values,
    )


_launch = LayerLauncher(decode_kernel, constants)


def decode(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> Launched:
    """Attention of the decoding requests of a `schedule.Schedule`; see `runner.attend` for the rest."""
    return _run(schedule.decode, q, k_pages, v_pages, out, schedule, **options)


def extend(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> Launched:
    """Attention of prefilling requests that are few tiles over long prefixes; see `runner.attend` for the rest."""
    return _run(schedule.extend, q, k_pages, v_pages, out, schedule, **options)


def _run(plan, q, k_pages, v_pages, out, schedule, **options) -> Launched:
    own = (plan.ranges, plan.items, plan.arrivals, plan.partial_acc, plan.partial_ml)
    own += (plan.ranges if plan.queues is None else plan.queues,)
    return _launch(plan.variant.workgroups, own, plan.variant, q, k_pages, v_pages, out, schedule, **options)

"""Prefill on sm_90: a warpgroup that multiplies and exponentiates, for 64 rows of the packed tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention import scores
from numa_attention.prefill.hopper_float8 import (
    PROBABILITY_BITS,
    PROBABILITY_SCALE,
    load_rows,
    quantise_queries,
)
from numa_attention.prefill.hopper_parts import merge_parts
from numa_attention.prefill.hopper_rows import copy_layout, product_layout, rows_of
from numa_attention.prefill.hopper_tiles import (
    BLOCK,
    KV_HEAD,
    PART_PLACE,
    QUERY_LEN,
    QUERY_START,
    RECORDS,
    TILE_PART,
    TILE_PARTS,
    field,
    is_tile,
    read_record,
)

# the scoring rule is that of all kernels: these are its plain-Triton functions, compiled by Gluon
score_tile = gluon.jit(scores.score_tile.fn)
visible = gluon.jit(scores.visible.fn)
safe_max = gluon.jit(scores.safe_max.fn)
add_sink = gluon.jit(scores.add_sink.fn)
natural_lse = gluon.jit(scores.natural_lse.fn)
normalise = gluon.jit(scores.normalise.fn)

LOG2_E = gl.constexpr(1.4426950408889634)
PART = gl.constexpr(32)  # rows that a consumer copies or clears at a time


@gluon.jit
def load_queries(
    q, shared, first_row, first_column, kv_head, query_start, query_len, token_stride, head_stride,
    DIM: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Copy a consumer's rows of the packed tile, DIM columns from `first_column`, into shared memory."""
    COPY: gl.constexpr = copy_layout(DIM, C.ctas)
    # a part of a tile that workgroups divide would be one workgroup's
    COUNT: gl.constexpr = PART if C.ctas == 1 else C.rows
    o_column = first_column + gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    for part in gl.static_range(C.rows // COUNT):
        o_token, o_head, m_row = rows_of(
            first_row + part * COUNT, kv_head, query_start, query_len, COUNT, gl.SliceLayout(1, COPY), C
        )
        p_q = q + o_token[:, None] * token_stride + o_head[:, None] * head_stride + o_column[None, :]
        b_q = gl.load(p_q, mask=m_row[:, None], other=0.0)
        shared.slice(part * COUNT, COUNT, dim=0).store(b_q)


@gluon.jit
def multiply_keys(buffers, slot, CONSUMER: gl.constexpr, C: gl.constexpr):
    """Begin the product [M, N] of a consumer's queries with the keys in a buffer."""
    buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v = buffers
    b_s = gl.zeros((C.rows, C.block_n), gl.float32, product_layout(C.block_n, C.depth, C.ctas))
    for part in gl.static_range(C.query_parts):
        rows_q = buffer_q.index(CONSUMER * C.query_parts + part)
        b_s = hopper.warpgroup_mma(
            rows_q, buffer_k.index(slot).permute((1, 0)), b_s, use_acc=part > 0, is_async=True
        )
        if C.second > 0:
            rows_q = buffer_q2.index(CONSUMER * C.query_parts + part)
            b_s = hopper.warpgroup_mma(rows_q, buffer_k2.index(slot).permute((1, 0)), b_s, is_async=True)
    return b_s


@gluon.jit
def multiply_values(b_p, values, b_acc):
    """Begin the product of probabilities with values: the new accumulator."""
    return hopper.warpgroup_mma(b_p, values, b_acc, is_async=True)


@gluon.jit
def wait_for_all(b_acc, b_p, b_other):
    """Wait for all products: the accumulator, b_other. Operands in registers are kept until then."""
    b_acc, b_p, b_other = hopper.warpgroup_mma_wait(0, deps=(b_acc, b_p, b_other))
    return b_acc, b_other


@gluon.jit
def by_row(b_x, C: gl.constexpr):
    """A number a row of the scores [M] for the rows of the accumulator."""
    return gl.convert_layout(b_x, gl.SliceLayout(1, product_layout(C.dim_v, 16, C.ctas)))


@gluon.jit
def factor_of(scale, C: gl.constexpr):
    """What turns the scores that `softmax` sees, and the maxima that it keeps, into base 2; positive.

    One number, or with float8 one a row.
    """
    factor = scale * LOG2_E
    if C.has_cap or C.has_alibi:
        factor = factor * 0.0 + 1.0
    return factor


@gluon.jit
def softmax(
    b_s, b_m, b_l, tile, o_position, b_slope, seq_len, scale, soft_cap, MASKED: gl.constexpr, C: gl.constexpr
):
    """Products of a tile [M, N] -> (probabilities [M, N], new maximum, new sum, what older sums shrink by) [M].

    Where scores are the products times a factor, the maximum is that of the products, so that one multiply-add a score
    is enough.
    """
    o_key = tile * C.block_n + gl.arange(
        0, C.block_n, gl.SliceLayout(0, product_layout(C.block_n, C.depth, C.ctas))
    )
    if C.has_cap or C.has_alibi:
        if C.float8:
            b_s = score_tile(
                b_s * scale[:, None], o_position, o_key, b_slope, 1.0, soft_cap, C.has_cap, C.has_alibi
            )
        else:
            b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, C.has_cap, C.has_alibi)
    if MASKED:
        b_s = gl.where(visible(o_position, o_key, seq_len, C.causal, C.window), b_s, float("-inf"))
    factor = factor_of(scale, C)
    b_new = gl.maximum(b_m, gl.max(b_s, 1))
    b_shift = (safe_max(b_new) if MASKED else b_new) * factor
    b_alpha = gl.exp2(b_m * factor - b_shift)
    if C.float8:
        b_p = gl.exp2(b_s * factor[:, None] - (b_shift - PROBABILITY_BITS)[:, None])
    else:
        b_p = gl.exp2(b_s * factor - b_shift[:, None])
    return b_p, b_new, b_l * b_alpha + gl.sum(b_p, 1), b_alpha


@gluon.jit
def as_operand(b_p, DTYPE: gl.constexpr, C: gl.constexpr):
    """Probabilities [M, N] as the left operand of the product with values: no value changes its thread."""
    return gl.convert_layout(b_p.to(DTYPE), gl.DotOperandLayout(0, product_layout(C.dim_v, 16, C.ctas), 2))


@gluon.jit
def clear_values(buffer, cleared, phase, key_low, seq_len, tile, CONSUMER: gl.constexpr, C: gl.constexpr):
    """Zero the values [block_n, dim_v] of tokens outside of [key_low, seq_len): they may be anything, NaN included.

    The consumers divide the rows, and each waits until all are done.
    """
    COPY: gl.constexpr = copy_layout(C.dim_v, C.ctas, False)
    for part in gl.static_range(C.block_n // PART):
        if part % C.consumers == CONSUMER:
            o_key = tile * C.block_n + part * PART + gl.arange(0, PART, gl.SliceLayout(1, COPY))
            rows = buffer.slice(part * PART, PART, dim=0)
            b_v = rows.load(COPY)
            rows.store(gl.where(((o_key >= key_low) & (o_key < seq_len))[:, None], b_v, 0.0))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(cleared, count=1)
    hopper.mbarrier.wait(cleared, phase)


@gluon.jit
def walk(
    b_e, b_m, b_l, b_acc, begin, end, walked, turns, tile_high, buffers, barriers, o_position, b_slope,
    seq_len, scale, soft_cap, MASKED: gl.constexpr, CONSUMER: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Steps [begin, end) of a tile's walk. Each adds the values of the step before it, whose probabilities b_e are.

    walked, turns: KV tiles before this walk, and turns taken.
    """
    buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v = buffers
    full_q, empty_q, full_k, empty_k, full_v, empty_v, turn, cleared = barriers
    for done in range(begin, end):
        # held in float32 until here: 16-bit values are taken apart and packed again where a loop carries them
        b_p = as_operand(b_e, buffer_v.dtype, C)
        k_count = walked + done
        v_count = k_count - 1
        k_slot, v_slot = k_count % C.stages, v_count % C.value_stages
        hopper.mbarrier.wait(full_k.index(k_slot), (k_count // C.stages) & 1)
        if C.turns:
            hopper.mbarrier.wait(turn.index(CONSUMER), turns & 1)
            turns += 1
        if C.ahead:
            b_s = multiply_keys(buffers, k_slot, CONSUMER, C)
            hopper.mbarrier.wait(full_v.index(v_slot), (v_count // C.value_stages) & 1)
            b_acc = multiply_values(b_p, buffer_v.index(v_slot), b_acc)
            if C.turns:
                hopper.mbarrier.arrive(turn.index((CONSUMER + 1) % C.consumers), count=1)
            b_s = hopper.warpgroup_mma_wait(1, deps=(b_s,))
            hopper.mbarrier.arrive(empty_k.index(k_slot), count=1)
        else:
            hopper.mbarrier.wait(full_v.index(v_slot), (v_count // C.value_stages) & 1)
            b_acc = multiply_values(b_p, buffer_v.index(v_slot), b_acc)
            b_s = multiply_keys(buffers, k_slot, CONSUMER, C)
            if C.turns:
                hopper.mbarrier.arrive(turn.index((CONSUMER + 1) % C.consumers), count=1)
            b_acc, b_s = wait_for_all(b_acc, b_p, b_s)
            hopper.mbarrier.arrive(empty_v.index(v_slot), count=1)
            hopper.mbarrier.arrive(empty_k.index(k_slot), count=1)
        b_e, b_m, b_l, b_alpha = softmax(
            b_s, b_m, b_l, tile_high - 1 - done, o_position, b_slope, seq_len, scale, soft_cap, MASKED, C
        )
        if C.ahead:
            # long fulfilled: this wait keeps the compiler from moving the next one up, before the exponentials
            hopper.mbarrier.wait(full_v.index(v_slot), (v_count // C.value_stages) & 1)
            b_acc, b_e = wait_for_all(b_acc, b_p, b_e)
            hopper.mbarrier.arrive(empty_v.index(v_slot), count=1)
        b_acc = b_acc * by_row(b_alpha, C)[:, None]
    return b_e, b_m, b_l, b_acc, turns


@gluon.jit
def consume(
    arguments, strides, partial, buffers, raw_queries, barriers, ring, CONSUMER: gl.constexpr, C: gl.constexpr
):
    """What a consumer does: attention of its rows of all tiles of this workgroup."""
    q, out, lse, sinks, alibi_slopes, k_scale, v_scale, scale, soft_cap = arguments
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride = (
        strides
    )
    buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v = buffers
    raw_q, raw_q2 = raw_queries
    full_q, empty_q, full_k, empty_k, full_v, empty_v, turn, cleared = barriers
    records, full_records, empty_records = ring
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(C.block_n, C.depth, C.ctas))
    PV: gl.constexpr = product_layout(C.dim_v, 16, C.ctas)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, PV)
    v_factor = 1.0
    if C.has_scales:
        scale = scale * gl.load(k_scale)
        v_factor = v_factor * gl.load(v_scale)
    walked = 0
    number = 0  # of the tile among those of this workgroup
    turns = 0
    clearings = 0
    if C.turns and C.consumers - 1 == CONSUMER:
        hopper.mbarrier.arrive(turn.index(0), count=1)
    while is_tile(ring, number, 4, C):
        (
            request,
            kv_head,
            block,
            query_start,
            query_len,
            seq_len,
            key_low,
            tile_high,
            steps,
            diagonal,
            interior,
        ) = read_record(records, number, 4, C)
        first_row = block * C.block_m + CONSUMER * C.rows
        row_scale = scale
        if C.query_copies:
            hopper.mbarrier.wait(full_q.index(CONSUMER), number & 1)
        if C.float8:
            COPY: gl.constexpr = copy_layout(C.dim, C.ctas)
            COPY2: gl.constexpr = copy_layout(max(C.second, 16), C.ctas)
            b_q2 = gl.zeros((1,), gl.float32, gl.SliceLayout(0, COPY))
            if C.query_copies:
                b_q = raw_q.index(CONSUMER).load(COPY)
                if C.second > 0:
                    b_q2 = raw_q2.index(CONSUMER).load(COPY2)
                hopper.mbarrier.arrive(empty_q.index(CONSUMER), count=1)
            else:
                b_q = load_rows(
                    q, first_row, 0, kv_head, query_start, query_len, q_token_stride, q_head_stride, C.dim, C
                )
                if C.second > 0:
                    b_q2 = load_rows(
                        q, first_row, C.dim, kv_head, query_start, query_len, q_token_stride, q_head_stride,
                        C.second, C,
                    )  # fmt: skip
            row_scale = scale * quantise_queries(b_q, b_q2, buffers, CONSUMER, ROW, C)
        elif not C.query_copies:
            load_queries(
                q, buffer_q.index(CONSUMER), first_row, 0, kv_head, query_start, query_len,
                q_token_stride, q_head_stride, C.dim, C,
            )  # fmt: skip
            if C.second > 0:
                load_queries(
                    q, buffer_q2.index(CONSUMER), first_row, C.dim, kv_head, query_start, query_len,
                    q_token_stride, q_head_stride, C.second, C,
                )  # fmt: skip
            hopper.fence_async_shared()
        o_row = first_row + gl.arange(0, C.rows, ROW)
        o_query = o_row // C.group
        # rows past the last query get a position left of every key, so that they see none
        o_position = gl.where(o_query < query_len, seq_len - query_len + o_query, -1)
        b_slope = gl.zeros((C.rows,), gl.float32, ROW)
        if C.has_alibi:
            o_head = kv_head * C.group + o_row % C.group
            b_slope = gl.load(alibi_slopes + o_head, mask=o_query < query_len, other=0.0).to(gl.float32)
        b_m = gl.full((C.rows,), float("-inf"), gl.float32, ROW)
        b_l = gl.zeros((C.rows,), gl.float32, ROW)
        b_acc = gl.zeros((C.rows, C.dim_v), gl.float32, PV)

        slot, phase = walked % C.stages, (walked // C.stages) & 1
        hopper.mbarrier.wait(full_k.index(slot), phase)
        b_s = multiply_keys(buffers, slot, CONSUMER, C)
        b_s = hopper.warpgroup_mma_wait(0, deps=(b_s,))
        hopper.mbarrier.arrive(empty_k.index(slot), count=1)
        b_e, b_m, b_l, b_alpha = softmax(
            b_s, b_m, b_l, tile_high - 1, o_position, b_slope, seq_len, row_scale, soft_cap, True, C
        )
        left_edge = key_low > (tile_high - steps) * C.block_n
        if not C.float8 and (tile_high * C.block_n > seq_len) | (left_edge & (steps == 1)):
            hopper.mbarrier.wait(full_v.index(slot), phase)
            clear_values(
                buffer_v.index(slot),
                cleared.index(0),
                clearings & 1,
                key_low,
                seq_len,
                tile_high - 1,
                CONSUMER,
                C,
            )
            clearings += 1
        b_e, b_m, b_l, b_acc, turns = walk(
            b_e, b_m, b_l, b_acc, 1, diagonal, walked, turns, tile_high, buffers, barriers,
            o_position, b_slope, seq_len, row_scale, soft_cap, True, CONSUMER, C,
        )  # fmt: skip
        b_e, b_m, b_l, b_acc, turns = walk(
            b_e, b_m, b_l, b_acc, diagonal, interior, walked, turns, tile_high, buffers, barriers,
            o_position, b_slope, seq_len, row_scale, soft_cap, False, CONSUMER, C,
        )  # fmt: skip
        if C.window >= 0:
            b_e, b_m, b_l, b_acc, turns = walk(
                b_e, b_m, b_l, b_acc, interior, steps, walked, turns, tile_high, buffers, barriers,
                o_position, b_slope, seq_len, row_scale, soft_cap, True, CONSUMER, C,
            )  # fmt: skip
        if C.query_copies and not C.float8:
            hopper.mbarrier.arrive(empty_q.index(CONSUMER), count=1)
        walked += steps
        slot = (walked - 1) % C.value_stages
        hopper.mbarrier.wait(full_v.index(slot), ((walked - 1) // C.value_stages) & 1)
        if C.window >= 0 and not C.float8:  # noqa: SIM102 (one is known when compiling)
            if left_edge & (steps > 1):
                clear_values(
                    buffer_v.index(slot), cleared.index(0), clearings & 1, key_low, seq_len, tile_high - steps,
                    CONSUMER, C,
                )  # fmt: skip
                clearings += 1
        b_p = as_operand(b_e, buffer_v.dtype, C)
        b_acc = multiply_values(b_p, buffer_v.index(slot), b_acc)
        b_acc, b_l = wait_for_all(b_acc, b_p, b_l)
        hopper.mbarrier.arrive(empty_v.index(slot), count=1)

        b_m = gl.convert_layout(b_m * factor_of(row_scale, C), OUT_ROW)
        b_l = gl.convert_layout(b_l, OUT_ROW)
        # read again: kept from above they would take registers from the walk
        kv_head = field(records, number, KV_HEAD, 4, C)
        first_row = field(records, number, BLOCK, 4, C) * C.block_m + CONSUMER * C.rows
        query_start = field(records, number, QUERY_START, 4, C)
        query_len = field(records, number, QUERY_LEN, 4, C)
        part = field(records, number, TILE_PART, 4, C)
        parts = field(records, number, TILE_PARTS, 4, C)
        place = field(records, number, PART_PLACE, 4, C)
        hopper.mbarrier.arrive(empty_records.index(number % RECORDS), count=1)
        number += 1
        if C.splits:  # noqa: SIM102 (one is known when compiling)
            if parts > 1:
                last, b_m, b_l, b_acc = merge_parts(b_m, b_l, b_acc, partial, place, part, parts, CONSUMER, C)
                # nobody writes a part's output
                query_len = gl.where(last, query_len, 0)
        o_token, o_head, m_row = rows_of(first_row, kv_head, query_start, query_len, C.rows, OUT_ROW, C)
        if C.float8:
            b_acc = b_acc * (1.0 / PROBABILITY_SCALE)
            b_l = b_l * (1.0 / PROBABILITY_SCALE)
        if C.has_sink:
            b_sink = gl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(gl.float32)
            b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
        if C.has_lse:
            p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
            gl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)
        b_out = (normalise(b_acc, b_l) * v_factor).to(out.dtype.element_ty)
        STORE: gl.constexpr = copy_layout(C.dim_v, C.ctas) if C.staged else b_out.type.layout
        b_out = gl.convert_layout(b_out, STORE)
        o_token, o_head, m_row = rows_of(
            first_row, kv_head, query_start, query_len, C.rows, gl.SliceLayout(1, STORE), C
        )
        o_dv = gl.arange(0, C.dim_v, gl.SliceLayout(0, STORE))
        p_out = out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
        gl.store(p_out, b_out, mask=m_row[:, None])

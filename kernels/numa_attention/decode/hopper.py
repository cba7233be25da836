"""Split-k decode over a paged cache for sm_90 (H100, H200), in Gluon: tiles come by TMA, products by wgmma.

It takes the work list and the workspace of `decode/portable.py` and merges splits like it. One warp copies the tiles of
all items of its workgroup into a ring of shared-memory buffers (`hopper_copies.py`), four warps use them
(`hopper_products.py`), so that copies never stop between items. Pages of any multiple of 16 tokens are boxes of TMA.

FORM says how far products and the softmax overlap; the ring has STAGES tiles, and one more of
keys, which are used first, where there is room (KEY_STAGES):

- "single": a ring of one; a tile is copied, then used;
- "two-stage": copies run ahead; products and softmax of a tile follow one another;
- "four-stage": also, the softmax is cut in two: while one tile's scores are multiplied, the tile before it is
  exponentiated; while its values are multiplied, the next one's maximum is found.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention import scores
from numa_attention.decode.hopper_copies import produce
from numa_attention.decode.hopper_products import multiply_keys, multiply_values, part_dim
from numa_attention.decode.hopper_splits import arrive_last, merge_parts, part_slot, store_part
from numa_attention.gluon_compat import thread_barrier
from numa_attention.scores import LOG2_E

# the scoring rule is that of all kernels: these are its plain-Triton functions, compiled by Gluon
score_tile = gluon.jit(scores.score_tile.fn)
visible = gluon.jit(scores.visible.fn)
safe_max = gluon.jit(scores.safe_max.fn)
add_sink = gluon.jit(scores.add_sink.fn)
natural_lse = gluon.jit(scores.natural_lse.fn)
normalise = gluon.jit(scores.normalise.fn)
power_of_two_below = gluon.jit(scores.power_of_two_below.fn)


@gluon.jit
def load_query(
    q, shared_q, scale, query_start, query_len, kv_head, row_block, q_token_stride, q_head_stride,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, TERMS: gl.constexpr,
    QUERY: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Put a packed query tile into shared memory, in columns; the factors [M] by which its scores are too small.

    Where the scale is negative the query's sign is changed, so that the largest score is that of the largest product.
    For a float8 cache a row is scaled by a power of two, and each of its numbers becomes a sum of TERMS float8 numbers:
    each adds four bits to the significand, so that two are a bfloat16, and three a float16, down to 2^-17 of the row's
    largest number.
    """
    o_row = row_block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, QUERY))
    o_column = gl.arange(0, WIDTH, gl.SliceLayout(0, QUERY))
    m_row = o_row // GROUP < query_len
    o_token = (query_start + o_row // GROUP).to(gl.int64)
    o_head = kv_head * GROUP + o_row % GROUP
    p_row = q + o_token * q_token_stride + o_head * q_head_stride
    if TERMS > 1:
        b_parts = ()
        b_max = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, QUERY))
        for column in gl.static_range(COLUMNS):
            p_q = p_row[:, None] + (column * WIDTH + o_column)[None, :]
            b_q = gl.load(p_q, mask=m_row[:, None], other=0.0).to(gl.float32)
            b_parts = b_parts + (b_q,)
            b_max = gl.maximum(b_max, gl.max(gl.abs(b_q), 1))
        b_factor = power_of_two_below(b_max) / 128.0  # the largest is 128 to 256 of the 448 that float8 has
        b_inverse = gl.where(scale < 0.0, -1.0, 1.0) / b_factor  # exact, as it is a power of two
        for column in gl.static_range(COLUMNS):
            b_left = b_parts[column] * b_inverse[:, None]
            for term in gl.static_range(TERMS):
                b_term = b_left.to(shared_q.dtype)
                shared_q.index(column * TERMS + term).store(b_term)
                b_left = b_left - b_term.to(gl.float32)
        b_factor = gl.convert_layout(b_factor, ROW)
    else:
        # a product: ptxas 12.9 spills the operands of a choice between 16-bit numbers and their negatives
        sign = gl.where(scale < 0.0, -1.0, 1.0).to(q.dtype.element_ty)
        for column in gl.static_range(COLUMNS):
            p_q = p_row[:, None] + (column * WIDTH + o_column)[None, :]
            b_q = gl.load(p_q, mask=m_row[:, None], other=0.0)
            shared_q.index(column).store(b_q * sign)
        b_factor = gl.full((BLOCK_M,), 1.0, gl.float32, ROW)
    hopper.fence_async_shared()
    return b_factor


@gluon.jit
def scores_of(
    step, full_k, empty_k, buffers_k, shared_q,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, KEY_STAGES: gl.constexpr,
    TERMS: gl.constexpr, ROWS_FIRST: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The raw scores of tile number `step` of the ring, once its keys are there, which are then given back."""
    slot = step % KEY_STAGES
    hopper.mbarrier.wait(full_k.index(slot), (step // KEY_STAGES) & 1)
    b_s = multiply_keys(
        buffers_k, slot * COLUMNS, shared_q, BLOCK_M, BLOCK_N, COLUMNS, TERMS, ROWS_FIRST, ACC
    )
    b_s = hopper.warpgroup_mma_wait(0, deps=(b_s,))
    # every warp has read the keys, which one thread gives back
    thread_barrier()
    hopper.mbarrier.arrive(empty_k.index(slot), count=1)
    return b_s


@gluon.jit
def begin_softmax(
    b_s, b_m, tile, interior_begin, interior_end, o_position, b_slope, b_scale, seq_len, soft_cap,
    BLOCK_N: gl.constexpr, SCORES: gl.constexpr, ROWS_FIRST: gl.constexpr, WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr, FLOAT8: gl.constexpr,
    SCALE_LATE: gl.constexpr,
):  # fmt: skip
    """First half: scores in base 2 [M, N], the new maximum [M], and what older sums shrink by [M].

    b_scale > 0: of all scores, or [M] with FLOAT8. With SCALE_LATE the scores lack it and LOG2_E, but not the maximum.
    """
    o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    if not ROWS_FIRST:
        b_s = gl.permute(b_s, (1, 0))
    if not SCALE_LATE:
        scale = b_scale[:, None] if FLOAT8 else b_scale
        b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP, HAS_ALIBI)
    if (tile < interior_begin) | (tile >= interior_end):
        b_s = gl.where(visible(o_position, o_key, seq_len, CAUSAL, WINDOW), b_s, float("-inf"))
    b_top = gl.max(b_s, 1)
    if SCALE_LATE:
        b_top = b_top * (b_scale * LOG2_E)
    b_new = gl.maximum(b_m, b_top)
    return b_s, b_new, gl.exp2(b_m - safe_max(b_new))


@gluon.jit
def fold(b_p):
    """Sums [M, 64] over every 64th key of probabilities [M, N], which a thread has by itself."""
    if b_p.shape[1] > 64:
        b_p = gl.sum(gl.reshape(b_p, (b_p.shape[0], b_p.shape[1] // 64, 64)), 1)
    return b_p


@gluon.jit
def end_softmax(
    b_s, b_m, b_ls, b_alpha, b_scale, shared_p, LATE_SUM: gl.constexpr, FLOAT8: gl.constexpr, SCALE_LATE: gl.constexpr
):  # fmt: skip
    """Second half: probabilities [M, N] into shared memory; the new sums.

    With LATE_SUM they are [M, 64], added up along the keys when all tiles are done: warps need not meet for them.
    Otherwise they are [M]: in tiles of 64 rows, of which each lies in four threads, and where registers are few.
    """
    if SCALE_LATE:
        b_scale = b_scale * LOG2_E
        if FLOAT8:
            b_scale = b_scale[:, None]
        b_s = b_s * b_scale  # one instruction with the subtraction
    b_p = gl.exp2(b_s - safe_max(b_m)[:, None])
    shared_p.store(b_p.to(shared_p.dtype))
    hopper.fence_async_shared()
    if LATE_SUM:
        b_p = fold(b_p)
        return b_ls * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_p.type.layout))[:, None] + b_p
    else:
        return b_ls * b_alpha + gl.sum(b_p, 1)


@gluon.jit
def shrink(b_accs, b_alpha, PARTS: gl.constexpr, ACC: gl.constexpr):
    """All parts [64, M] of the accumulator times b_alpha [M]."""
    b_alpha = gl.convert_layout(b_alpha, gl.SliceLayout(0, ACC))
    results = ()
    for part in gl.static_range(PARTS):
        results = results + (b_accs[part] * b_alpha[None, :],)
    return results


@gluon.jit
def wait_values(b_accs, PARTS: gl.constexpr):
    """The accumulator once its products are there."""
    results = ()
    for part in gl.static_range(PARTS):
        results = results + (hopper.warpgroup_mma_wait(0, deps=(b_accs[part],)),)
    return results


@gluon.jit
def consume(
    q, out, lse, ranges, items, workgroup, workgroups, arrivals, partial_acc, partial_ml,
    sinks, alibi_slopes, k_scale, v_scale, scale, soft_cap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    full_k, full_v, empty_k, empty_v, buffers_k, buffers_v, shared_q, shared_p,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr,
    PARTS: gl.constexpr, KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr, FORM: gl.constexpr, FLOAT8: gl.constexpr, E5M2: gl.constexpr, WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr, HAS_SCALES: gl.constexpr, FAN_IN: gl.constexpr, IN_FLIGHT: gl.constexpr,
    TERMS: gl.constexpr, ROWS_FIRST: gl.constexpr, ACC_S: gl.constexpr, ACC_O: gl.constexpr, QUERY: gl.constexpr,
    COPY: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Attention of all items of a workgroup, from the tiles that `produce` copies."""
    if ROWS_FIRST:
        SCORES: gl.constexpr = ACC_S
    else:
        SCORES: gl.constexpr = gl.permute(gl.zeros((BLOCK_N, BLOCK_M), gl.float32, ACC_S), (1, 0)).type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SCALE_LATE: gl.constexpr = not HAS_CAP and not HAS_ALIBI
    LATE_SUM: gl.constexpr = not ROWS_FIRST and BLOCK_M * PARTS <= 64
    p_range = ranges + workgroup * 16
    first = gl.load(p_range)
    count = gl.load(p_range + 1)
    p_item = p_range + 2  # which holds what the first item does
    qk_scale = scale
    v_factor = 1.0
    if HAS_SCALES:
        qk_scale = scale * gl.load(k_scale)
        v_factor = v_factor * gl.load(v_scale)
    o_m = gl.arange(0, BLOCK_M, ROW)
    step = 0
    for index in range(first, first + count):
        kv_head = gl.load(p_item + 1).to(gl.int64)
        row_block = gl.load(p_item + 2)
        tile_begin = gl.load(p_item + 3)
        tile_end = gl.load(p_item + 4)
        split = gl.load(p_item + 5)
        splits = gl.load(p_item + 6)
        first_workgroup = gl.load(p_item + 7)
        query_start = gl.load(p_item + 8)
        query_len = gl.load(p_item + 9)
        seq_len = gl.load(p_item + 10)
        b_factor = load_query(
            q, shared_q, qk_scale, query_start, query_len, kv_head, row_block, q_token_stride, q_head_stride,
            GROUP, BLOCK_M, COLUMNS, WIDTH, TERMS, QUERY, ROW,
        )  # fmt: skip
        b_scale = gl.maximum(gl.abs(qk_scale), 1e-30)  # of which -inf stays -inf
        if FLOAT8:
            b_scale = b_factor * b_scale
        o_row = row_block * BLOCK_M + o_m
        o_query = o_row // GROUP
        m_row = o_query < query_len
        o_head = kv_head * GROUP + o_row % GROUP
        # rows past the last query get a position left of every key, so that they see none
        o_position = gl.where(m_row, seq_len - query_len + o_query, -1)
        b_slope = gl.zeros((BLOCK_M,), gl.float32, ROW)
        if HAS_ALIBI:
            b_slope = gl.load(alibi_slopes + o_head, mask=m_row, other=0.0).to(gl.float32)

        # tiles that every row sees whole need no mask
        key_low = 0
        interior_begin = tile_begin
        if WINDOW >= 0:
            key_low = gl.maximum(seq_len - query_len - WINDOW, 0)
            interior_begin = (gl.maximum(seq_len - 1 - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N
        if CAUSAL:
            interior_end = (seq_len - query_len + 1) // BLOCK_N
        elif WINDOW >= 0:
            interior_end = gl.minimum(seq_len, seq_len - query_len + WINDOW + 1) // BLOCK_N
        else:
            interior_end = seq_len // BLOCK_N

        b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, ROW)
        if LATE_SUM:
            b_ls = fold(gl.zeros((BLOCK_M, BLOCK_N), gl.float32, SCORES))
        else:
            b_ls = gl.zeros((BLOCK_M,), gl.float32, ROW)
        b_accs = ()
        for _ in gl.static_range(PARTS):
            b_accs = b_accs + (gl.zeros((64, BLOCK_M), gl.float32, ACC_O),)

        if FORM == "four-stage":
            b_s = scores_of(
                step, full_k, empty_k, buffers_k, shared_q,
                BLOCK_M, BLOCK_N, COLUMNS, KEY_STAGES, TERMS, ROWS_FIRST, ACC_S,
            )  # fmt: skip
            b_s, b_m, b_alpha = begin_softmax(
                b_s, b_m, tile_begin, interior_begin, interior_end, o_position, b_slope, b_scale, seq_len,
                soft_cap, BLOCK_N, SCORES, ROWS_FIRST, WINDOW, CAUSAL, HAS_CAP, HAS_ALIBI, FLOAT8, SCALE_LATE,
            )  # fmt: skip
            for tile in range(tile_begin, tile_end - 1):
                slot = step % STAGES
                key_slot = (step + 1) % KEY_STAGES
                hopper.mbarrier.wait(full_k.index(key_slot), ((step + 1) // KEY_STAGES) & 1)
                b_next = multiply_keys(
                    buffers_k,
                    key_slot * COLUMNS,
                    shared_q,
                    BLOCK_M,
                    BLOCK_N,
                    COLUMNS,
                    TERMS,
                    ROWS_FIRST,
                    ACC_S,
                )  # tile + 1
                b_ls = end_softmax(
                    b_s, b_m, b_ls, b_alpha, b_scale, shared_p, LATE_SUM, FLOAT8, SCALE_LATE
                )  # tile
                b_accs = shrink(b_accs, b_alpha, PARTS, ACC_O)
                hopper.mbarrier.wait(full_v.index(slot), (step // STAGES) & 1)
                b_accs = multiply_values(
                    buffers_v, slot * COLUMNS, shared_p, b_accs, tile, key_low, seq_len, tile * BLOCK_N < key_low,
                    BLOCK_N, COLUMNS, WIDTH, FLOAT8, E5M2, ACC_O, COPY, WORDS,
                )  # fmt: skip  # tile
                b_next = hopper.warpgroup_mma_wait(PARTS, deps=(b_next,))
                b_s, b_m, b_alpha = begin_softmax(
                    b_next, b_m, tile + 1, interior_begin, interior_end, o_position, b_slope, b_scale, seq_len,
                    soft_cap, BLOCK_N, SCORES, ROWS_FIRST, WINDOW, CAUSAL, HAS_CAP, HAS_ALIBI, FLOAT8, SCALE_LATE,
                )  # fmt: skip  # tile + 1
                b_accs = wait_values(b_accs, PARTS)
                # every warp has read these buffers, which one thread gives back
                thread_barrier()
                hopper.mbarrier.arrive(empty_k.index(key_slot), count=1)
                hopper.mbarrier.arrive(empty_v.index(slot), count=1)
                step += 1
            slot = step % STAGES
            b_ls = end_softmax(b_s, b_m, b_ls, b_alpha, b_scale, shared_p, LATE_SUM, FLOAT8, SCALE_LATE)
            b_accs = shrink(b_accs, b_alpha, PARTS, ACC_O)
            hopper.mbarrier.wait(full_v.index(slot), (step // STAGES) & 1)
            last = tile_end - 1
            b_accs = multiply_values(
                buffers_v, slot * COLUMNS, shared_p, b_accs, last, key_low, seq_len,
                (last * BLOCK_N < key_low) | (tile_end * BLOCK_N > seq_len),
                BLOCK_N, COLUMNS, WIDTH, FLOAT8, E5M2, ACC_O, COPY, WORDS,
            )  # fmt: skip
            b_accs = wait_values(b_accs, PARTS)
            thread_barrier()
            hopper.mbarrier.arrive(empty_v.index(slot), count=1)
            step += 1
        else:
            for tile in range(tile_begin, tile_end):
                b_s = scores_of(
                    step, full_k, empty_k, buffers_k, shared_q,
                    BLOCK_M, BLOCK_N, COLUMNS, KEY_STAGES, TERMS, ROWS_FIRST, ACC_S,
                )  # fmt: skip
                b_s, b_m, b_alpha = begin_softmax(
                    b_s, b_m, tile, interior_begin, interior_end, o_position, b_slope, b_scale, seq_len,
                    soft_cap, BLOCK_N, SCORES, ROWS_FIRST, WINDOW, CAUSAL, HAS_CAP, HAS_ALIBI, FLOAT8, SCALE_LATE,
                )  # fmt: skip
                b_ls = end_softmax(b_s, b_m, b_ls, b_alpha, b_scale, shared_p, LATE_SUM, FLOAT8, SCALE_LATE)
                b_accs = shrink(b_accs, b_alpha, PARTS, ACC_O)
                slot = step % STAGES
                hopper.mbarrier.wait(full_v.index(slot), (step // STAGES) & 1)
                b_accs = multiply_values(
                    buffers_v, slot * COLUMNS, shared_p, b_accs, tile, key_low, seq_len,
                    (tile * BLOCK_N < key_low) | ((tile + 1) * BLOCK_N > seq_len),
                    BLOCK_N, COLUMNS, WIDTH, FLOAT8, E5M2, ACC_O, COPY, WORDS,
                )  # fmt: skip
                b_accs = wait_values(b_accs, PARTS)
                thread_barrier()
                hopper.mbarrier.arrive(empty_v.index(slot), count=1)
                step += 1
        b_l = gl.convert_layout(gl.sum(b_ls, 1), ROW) if LATE_SUM else b_ls

        # parts are merged among up to FAN_IN neighbours, then those results: one piece of code, which a workgroup
        # that merges twice has in its instruction cache
        whole = splits == 1
        going = splits > 1
        group_first = split // FAN_IN * FAN_IN
        group_slot = part_slot(group_first, first_workgroup)
        groups = (splits + FAN_IN - 1) // FAN_IN
        own_slot = part_slot(split, first_workgroup)
        p_arrivals = arrivals + group_slot
        merged = group_first
        parts = gl.minimum(splits - group_first, FAN_IN)
        stride = 1
        while going:
            store_part(b_m, b_l, b_accs, partial_acc, partial_ml, own_slot, BLOCK_M, PARTS, ACC_O, ROW)
            going = arrive_last(p_arrivals, parts)
            if going:
                b_m, b_l, b_accs = merge_parts(
                    partial_acc, partial_ml, merged, parts, stride, first_workgroup, shared_p,
                    BLOCK_M, PARTS, ACC_O, ROW, FAN_IN, IN_FLIGHT,
                )  # fmt: skip
                going = (stride == 1) & (groups > 1)
                whole = going == 0
                own_slot = group_slot
                p_arrivals = arrivals + 2 * workgroups + (2 * first_workgroup + 1)  # slot of split 0
                merged = 0
                parts = groups
                stride = FAN_IN
                thread_barrier()  # all of this workgroup has read the part that is overwritten next
        if whole:
            write_output(
                b_m, b_l, b_accs, out, lse, sinks, query_start, query_len, kv_head, row_block, v_factor,
                out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
                GROUP, BLOCK_M, WIDTH, PARTS, FLOAT8, HAS_SINK, HAS_LSE, ROW,
            )  # fmt: skip
        p_item = items + (index + 1) * 16


@gluon.jit
def write_output(
    b_m, b_l, b_accs, out, lse, sinks, query_start, query_len, kv_head, row_block, v_factor,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr, FLOAT8: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Write the output and LSE of one unit from its whole softmax state."""
    ACC: gl.constexpr = gl.permute(b_accs[0], (1, 0)).type.layout
    o_row = row_block * BLOCK_M + gl.arange(0, BLOCK_M, ROW)
    m_row = o_row // GROUP < query_len
    o_token = (query_start + o_row // GROUP).to(gl.int64)
    o_head = kv_head * GROUP + o_row % GROUP
    b_sink = gl.full((BLOCK_M,), float("-inf"), gl.float32, ROW)
    if HAS_SINK:
        b_sink = gl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(gl.float32)
    p_out = gl.convert_layout(
        out + o_token * out_token_stride + o_head * out_head_stride, gl.SliceLayout(1, ACC)
    )
    m_out = gl.convert_layout(m_row, gl.SliceLayout(1, ACC))
    o_dim = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    m_state = gl.convert_layout(b_m, gl.SliceLayout(1, ACC))
    l_state = gl.convert_layout(b_l, gl.SliceLayout(1, ACC))
    sink_state = gl.convert_layout(b_sink, gl.SliceLayout(1, ACC))
    for part in gl.static_range(PARTS):
        b_acc = gl.permute(b_accs[part], (1, 0))
        b_total = l_state
        if HAS_SINK:
            _, b_total, b_acc = add_sink(m_state, l_state, b_acc, sink_state)
        b_out = (normalise(b_acc, b_total) * v_factor).to(out.dtype.element_ty)
        gl.store(p_out[:, None] + part_dim(part, o_dim, FLOAT8, WIDTH)[None, :], b_out, mask=m_out[:, None])
    if HAS_LSE:
        if HAS_SINK:
            b_m, b_l, _ = add_sink(b_m, b_l, gl.expand_dims(b_l, 1), b_sink)
        gl.store(
            lse + o_token * lse_token_stride + o_head * lse_head_stride, natural_lse(b_m, b_l), mask=m_row
        )


@gluon.jit
def decode_kernel(
    k_tiles,  # tensor map of the keys, boxes [CHUNK, WIDTH]
    v_tiles,
    q,  # [tokens, q_heads, head_dim]
    out,  # [tokens, q_heads, head_dim]
    lse,  # float32 [tokens, q_heads]
    ranges,  # int32 [workgroups, 16]
    items,  # int32 [capacity, 16]
    arrivals,  # int32 [2, 2 * workgroups], zero between launches
    partial_acc,  # float32 [2 * workgroups, BLOCK_M, head_dim]
    partial_ml,  # float32 [2 * workgroups, 2, BLOCK_M]
    block_table,
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
    block_table_stride,
    k_page_rows,
    k_head_rows,
    k_head_columns,
    v_page_rows,
    v_head_rows,
    v_head_columns,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    FLOAT8: gl.constexpr,
    E5M2: gl.constexpr,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    DOMAINS: gl.constexpr,
    FAN_IN: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    TERMS: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    ACC_S: gl.constexpr,
    ACC_O: gl.constexpr,
    QUERY: gl.constexpr,
    COPY: gl.constexpr,
    WORDS: gl.constexpr,
    SHARED_Q: gl.constexpr,
    SHARED_P: gl.constexpr,
    BARRIER: gl.constexpr,
):
    # consecutive ranges belong to one domain, to which the hardware deals every DOMAINS-th workgroup
    workgroups = gl.num_programs(0)
    program = gl.program_id(0)
    workgroup = program % DOMAINS * (workgroups // DOMAINS) + program // DOMAINS
    buffers_k = gl.allocate_shared_memory(
        k_tiles.dtype, [KEY_STAGES * COLUMNS, BLOCK_N, WIDTH], k_tiles.layout
    )
    buffers_v = gl.allocate_shared_memory(v_tiles.dtype, [STAGES * COLUMNS, BLOCK_N, WIDTH], v_tiles.layout)
    if FLOAT8:
        Q_TYPE: gl.constexpr = gl.float8e4nv
        P_TYPE: gl.constexpr = gl.float16
    else:
        Q_TYPE: gl.constexpr = q.dtype.element_ty
        P_TYPE: gl.constexpr = q.dtype.element_ty
    shared_q = gl.allocate_shared_memory(Q_TYPE, [COLUMNS * TERMS, BLOCK_M, WIDTH], SHARED_Q)
    shared_p = gl.allocate_shared_memory(P_TYPE, [BLOCK_M, BLOCK_N], SHARED_P)
    full_k = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER)
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty_k = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER)
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(KEY_STAGES):
        hopper.mbarrier.init(full_k.index(slot), count=1)
        hopper.mbarrier.init(empty_k.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(full_v.index(slot), count=1)
        hopper.mbarrier.init(empty_v.index(slot), count=1)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q, out, lse, ranges, items, workgroup, workgroups, arrivals, partial_acc, partial_ml,
                    sinks, alibi_slopes, k_scale, v_scale, scale, soft_cap,
                    q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride,
                    lse_head_stride, full_k, full_v, empty_k, empty_v, buffers_k, buffers_v, shared_q, shared_p,
                    GROUP, BLOCK_M, BLOCK_N, COLUMNS, WIDTH, PARTS, KEY_STAGES, STAGES, FORM, FLOAT8, E5M2, WINDOW,
                    CAUSAL, HAS_CAP, HAS_ALIBI, HAS_SINK, HAS_LSE, HAS_SCALES, FAN_IN, IN_FLIGHT, TERMS, ROWS_FIRST,
                    ACC_S, ACC_O, QUERY, COPY, WORDS,
                ),
            ),
            (
                produce,
                (
                    k_tiles, v_tiles, ranges, items, workgroup, block_table,
                    full_k, full_v, empty_k, empty_v, buffers_k, buffers_v, k_page_rows, k_head_rows, k_head_columns,
                    v_page_rows, v_head_rows, v_head_columns, block_table_stride,
                    BLOCK_N, PAGE_SIZE, CHUNK, COLUMNS, WIDTH, KEY_STAGES, STAGES,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip

"""Split-k decode over a paged cache for gfx1250 (MI450), in Gluon: keys and values come by TDM, matrices by WMMA.

It takes the work list and the workspace of `decode/portable.py` and merges splits like it. What differs is the way of
a KV tile. TDM copies it from its pages into LDS, one request a page, and fills rows past the sequence's end and
columns past the head size with zeros. WMMA in its transposed form leaves the scores where the second product wants
them, so that the probabilities never go through LDS. Warps divide the rows of the packed query tile, so that a softmax
needs one warp alone.

A float8 cache is multiplied as it is. Queries and probabilities, which are few, are cut into two float8 numbers whose
sum is theirs to the precision of bfloat16, and each product is made of two: that costs the matrix unit what products
in bfloat16 would, and spares the vector unit the widening of all keys and values.

FORM says how far copies, products and the softmax overlap:

- "single": one buffer; a tile is copied, then used;
- "two-stage": two buffers; the next tile is copied while one is used;
- "four-stage": three buffers and copies two tiles ahead; the softmax is cut in two, and while one tile's scores are
  multiplied, the tile before it is exponentiated; while its values are multiplied, the next one's maximum is found.

TDM goes straight to LDS, past the caches, where a row of its request has WIDE_ROW bytes; a token's key is shorter in
float8. Where the cache's layout lets it, a row is made of more: of the keys and the values of a token (PAIRED: one
request brings both, and there is a buffer more, as values then come as early as keys), and of all tokens of a page
(FLAT_K, FLAT_V: the request is one row).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention import scores
from numa_attention.decode.cdna5_variant import FORMS, Rows, instruction_depth, rows_of
from numa_attention.direct_launch import Launched
from numa_attention.gluon_compat import cdna5, reinterpret, thread_barrier, wmma_layout
from numa_attention.jit import gluon_entry
from numa_attention.portable_launch import ANY_ALIGNMENT, LayerLauncher, block_dim
from numa_attention.shapes import LayerShape, chunk_of
from numa_attention.variants import Variant

FAN_IN = 16  # parts merged at a time, as in decode/portable.py
K_WIDTH = gl.constexpr(8)  # consecutive elements of an operand in one lane: as many as columns of a result
# probabilities are at most 1: this uses the range of float8 e4m3, whose largest number is 448
P_FLOAT8 = gl.constexpr(256.0)

# the scoring rule is that of all kernels: these are its plain-Triton functions, compiled by Gluon
alibi_distance = gluon.jit(scores.alibi_distance.fn)
score_tile = gluon.jit(scores.score_tile.fn)
sight = gluon.jit(scores.sight.fn)
safe_max = gluon.jit(scores.safe_max.fn)
add_sink = gluon.jit(scores.add_sink.fn)
natural_lse = gluon.jit(scores.natural_lse.fn)
quantise = gluon.jit(scores.quantise.fn)
normalise = gluon.jit(scores.normalise.fn)


# ---- float8 operands ----


@gluon.jit
def float8_factors(b_x):
    """Powers of two [M] that bring the largest element of each row of b_x [M, D] between 64 and 256."""
    b_largest = gl.max(gl.abs(b_x), 1)
    b_exponent = gl.floor(gl.log2(gl.where(b_largest > 0.0, b_largest, 1.0)))
    return gl.exp2(6.0 - gl.minimum(gl.maximum(b_exponent, -100.0), 100.0))


@gluon.jit
def cut_query(b_q):
    """Float8 (high, low) of b_q [M, D] times its `float8_factors`.

    Their sum keeps eight bits of every element, and of small ones what lies above 2^-17 of the row's largest.
    """
    b_x = b_q.to(gl.float32)
    b_x = b_x * float8_factors(b_x)[:, None]
    b_high = b_x.to(gl.float8e4nv)
    return b_high, (b_x - b_high.to(gl.float32)).to(gl.float8e4nv)


@gluon.jit
def cut_probabilities(b_p):
    """Float8 (high, low) of b_p * P_FLOAT8: low is e5m2, whose range keeps sums of many small probabilities."""
    b_x = b_p * P_FLOAT8
    b_high = b_x.to(gl.float8e4nv)
    return b_high, (b_x - b_high.to(gl.float32)).to(gl.float8e5)


# ---- one KV tile ----


@gluon.jit
def pages_of(p_table, tile, seq_len, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr):
    """The pages of a tile's BLOCK_N / CHUNK copies, a tuple; for copies past the sequence's end some page."""
    last = gl.maximum(seq_len - 1, 0) // PAGE_SIZE
    pages = ()
    for chunk in gl.static_range(BLOCK_N // CHUNK):
        entry = gl.minimum((tile * BLOCK_N + chunk * CHUNK) // PAGE_SIZE, last)
        pages = pages + (gl.load(p_table + entry),)
    return pages


@gluon.jit
def copy_tile(
    cache, page_stride, token_stride, pages, tile, tile_end, seq_len, buffer,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CHUNK: gl.constexpr, FLAT: gl.constexpr = None,
):  # fmt: skip
    """Request tile [BLOCK_N, BLOCK_D] into `buffer`, in BLOCK_N / CHUNK copies; a tile past the last one is zeros.

    FLAT: the layout of the tile as one row, where its tokens lie one after the other; then HEAD_DIM is BLOCK_D.
    """
    for chunk in gl.static_range(BLOCK_N // CHUNK):
        start = tile * BLOCK_N + chunk * CHUNK
        rows = gl.minimum(gl.maximum(seq_len - start, 0), CHUNK)
        rows = gl.where(tile < tile_end, rows, 0)
        source = cache + pages[chunk].to(gl.int64) * page_stride
        if PAGE_SIZE > CHUNK:
            source += (start % PAGE_SIZE).to(gl.int64) * token_stride
        if FLAT is None:
            descriptor = cdna5.tdm.make_tensor_descriptor(
                source, (rows, HEAD_DIM), (token_stride, 1), (CHUNK, BLOCK_D), buffer.type.layout
            )
            cdna5.tdm.async_load(descriptor, [0, 0], buffer.slice(chunk * CHUNK, CHUNK, dim=0))
        else:
            descriptor = cdna5.tdm.make_tensor_descriptor(
                source, (rows * BLOCK_D,), (1,), (CHUNK * BLOCK_D,), FLAT
            )
            row = reinterpret(buffer, buffer.dtype, [BLOCK_N * BLOCK_D], FLAT)
            cdna5.tdm.async_load(descriptor, [0], row.slice(chunk * CHUNK * BLOCK_D, CHUNK * BLOCK_D, dim=0))


@gluon.jit
def keys_in(buffers, slot, PAIRED: gl.constexpr, BLOCK_D: gl.constexpr):
    """A tile of keys [BLOCK_N, BLOCK_D] in LDS."""
    tile = buffers.index(slot)
    if PAIRED:
        tile = tile.slice(0, BLOCK_D, dim=1)
    return tile


@gluon.jit
def values_in(buffers, slot, PAIRED: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr):
    """A tile of values [BLOCK_N, BLOCK_DV] in LDS."""
    tile = buffers.index(slot)
    if PAIRED:
        tile = tile.slice(BLOCK_D, BLOCK_DV, dim=1)
    return tile


@gluon.jit
def multiply_keys(b_q, buffer, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ACC: gl.constexpr):
    """Raw scores [M, N] of a tile of keys in LDS. b_q: a tuple of [M, D] that add up to the query."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    b_k = buffer.permute([1, 0]).load(RIGHT)
    b_s = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC)
    for part in gl.static_range(len(b_q)):
        b_s = cdna5.wmma(b_q[part], b_k, b_s)
    return b_s


@gluon.jit
def begin_softmax(
    b_s, b_m, tile, o_position, b_first, b_last, b_slope, scale, soft_cap, BLOCK_N: gl.constexpr,
    ACC: gl.constexpr, WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
):  # fmt: skip
    """First half: scores in base 2 [M, N], the new maximum [M], and what older sums shrink by [M].

    A row sees the keys from b_first, where there is a window, to b_last.
    """
    o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC))
    b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP, HAS_ALIBI)
    m_seen = o_key[None, :] <= b_last[:, None]
    if WINDOW >= 0:
        m_seen = m_seen & (o_key[None, :] >= b_first[:, None])
    b_s = gl.where(m_seen, b_s, float("-inf"))
    b_new = gl.maximum(b_m, gl.max(b_s, 1))
    return b_s, b_new, gl.exp2(b_m - safe_max(b_new))


@gluon.jit
def end_softmax(b_s, b_m, b_l, b_alpha):
    """Second half: probabilities [M, N] under the maximum b_m [M], and the new row sums [M]."""
    b_p = gl.exp2(b_s - safe_max(b_m)[:, None])
    return b_p, b_l * b_alpha + gl.sum(b_p, 1)


@gluon.jit
def multiply_values(
    b_p, b_acc, b_alpha, buffer, tile, key_low, BLOCK_N: gl.constexpr, ACC: gl.constexpr, WINDOW: gl.constexpr
):
    """The accumulator [M, DV] with a tile of values in LDS; times P_FLOAT8 if those are float8."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    b_v = buffer.load(RIGHT)
    if WINDOW >= 0:
        # values left of every window may be anything, NaN included
        o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, RIGHT))
        b_v = gl.where((o_key >= key_low)[:, None], b_v, gl.zeros_like(b_v))
    if b_v.dtype.primitive_bitwidth == 8:
        b_weights = cut_probabilities(b_p)
    else:
        b_weights = (b_p.to(b_v.dtype),)
    b_acc = b_acc * b_alpha[:, None]
    for part in gl.static_range(len(b_weights)):
        # transposed scores lie as this operand does: no value changes its lane
        b_acc = cdna5.wmma(gl.convert_layout(b_weights[part], LEFT, assert_trivial=True), b_v, b_acc)
    return b_acc


# ---- splits ----


@gluon.jit
def part_slot(split, first_workgroup):
    """Where a split's part is kept; see decode/portable.py."""
    return (2 * (first_workgroup + split) + (split == 0).to(gl.int32)).to(gl.int64)


@gluon.jit
def store_part(
    b_m,
    b_l,
    b_acc,
    partial_acc,
    partial_ml,
    slot,
    BLOCK_M: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    ACC: gl.constexpr,
):
    """Write one softmax state to the workspace."""
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ACC))
    o_dv = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, ACC))
    p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
    gl.store(p_ml, b_m)
    gl.store(p_ml + BLOCK_M, b_l)
    gl.store(partial_acc + slot * (BLOCK_M * BLOCK_DV) + o_m[:, None] * BLOCK_DV + o_dv[None, :], b_acc)


@gluon.jit
def arrive_last(p_arrivals, parts):
    """Announce a stored part. True for the workgroup that completes the count, which finds the counter reset."""
    # all stores of this workgroup come before its one thread announces them
    thread_barrier()
    last = gl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        gl.store(p_arrivals, 0)
    return last


@gluon.jit
def merge_parts(
    partial_acc, partial_ml, first, parts, step, first_workgroup,
    BLOCK_M: gl.constexpr, BLOCK_DV: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Merge splits first, first + step, ... (`parts` of them), always in this order: (m, l, acc)."""
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ACC))
    o_dv = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, ACC))
    b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    b_l = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, ACC))
    b_acc = gl.zeros((BLOCK_M, BLOCK_DV), gl.float32, ACC)
    for part in range(0, parts):
        slot = part_slot(first + part * step, first_workgroup)
        p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
        # past L1: other compute units wrote it
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
    return b_m, b_l, b_acc


# ---- the kernel ----


@gluon.jit(do_not_specialize=["span_count"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def decode_kernel(
    ranges,  # int32 [workgroups, 16]
    items,  # int32 [capacity, 16]
    arrivals,  # int32 [2, 2 * workgroups], zero between launches
    partial_acc,  # float32 [2 * workgroups, BLOCK_M, BLOCK_DV]
    partial_ml,  # float32 [2 * workgroups, 2, BLOCK_M]
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
    DOMAINS: gl.constexpr,
    FAN_IN: gl.constexpr,
    FORM: gl.constexpr,
    BUFFERS: gl.constexpr,
    PAIRED: gl.constexpr,
    ACC: gl.constexpr,
    SHARED_K: gl.constexpr,
    SHARED_V: gl.constexpr,
    FLAT_K: gl.constexpr,
    FLAT_V: gl.constexpr,
):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    # TDM requests of one tile of keys and values
    COPIES: gl.constexpr = BLOCK_N // CHUNK * (1 if PAIRED else 2)
    # of keys, or of both
    WIDTH: gl.constexpr = 2 * HEAD_DIM if PAIRED else HEAD_DIM
    BLOCK_W: gl.constexpr = 2 * BLOCK_D if PAIRED else BLOCK_D
    FLOAT8: gl.constexpr = k_pages.dtype.element_ty.primitive_bitwidth == 8
    # consecutive ranges belong to one domain, to which the hardware deals every DOMAINS-th workgroup
    workgroups = gl.num_programs(0)
    program = gl.program_id(0)
    workgroup = program % DOMAINS * (workgroups // DOMAINS) + program // DOMAINS
    first = gl.load(ranges + workgroup * 16)
    count = gl.load(ranges + workgroup * 16 + 1)
    k_factor = scale
    v_factor = 1.0 / P_FLOAT8 if FLOAT8 else 1.0
    if HAS_SCALES:
        k_factor = scale * gl.load(k_scale)
        v_factor = v_factor * gl.load(v_scale)
    if HAS_Q_SCALE:
        k_factor = k_factor * gl.load(q_scale)
    buffers_k = gl.allocate_shared_memory(k_pages.dtype.element_ty, [BUFFERS, BLOCK_N, BLOCK_W], SHARED_K)
    buffers_v = buffers_k
    if not PAIRED:
        buffers_v = gl.allocate_shared_memory(
            v_pages.dtype.element_ty, [BUFFERS, BLOCK_N, BLOCK_DV], SHARED_V
        )
    o_m = gl.arange(0, BLOCK_M, ROW)
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ACC))
    o_dv = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, ACC))
    o_qm = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LEFT))
    o_qd = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LEFT))
    for index in range(first, first + count):
        p_item = items + index * 16
        request = gl.load(p_item).to(gl.int64)
        kv_head = gl.load(p_item + 1).to(gl.int64)
        row_block = gl.load(p_item + 2)
        tile_begin = gl.load(p_item + 3)
        tile_end = gl.load(p_item + 4)
        split = gl.load(p_item + 5)
        splits = gl.load(p_item + 6)
        first_workgroup = gl.load(p_item + 7)
        query_start = gl.load(query_start_loc + request)
        query_len = gl.load(query_start_loc + request + 1) - query_start
        seq_len = gl.load(seq_lens + request)

        o_row = row_block * BLOCK_M + o_m
        o_query = o_row // GROUP
        m_row = o_query < query_len
        o_token = (query_start + o_query).to(gl.int64)
        o_head = kv_head * GROUP + o_row % GROUP
        # rows past the last query get a position left of every key, so that they see none
        o_position = gl.where(m_row, seq_len - query_len + o_query, -1)
        o_qrow = row_block * BLOCK_M + o_qm
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
        b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, ROW)
        b_l = gl.zeros((BLOCK_M,), gl.float32, ROW)
        b_acc = gl.zeros((BLOCK_M, BLOCK_DV), gl.float32, ACC)
        p_table = block_table + request * block_table_stride
        p_k = k_pages + kv_head * k_head_stride
        p_v = v_pages + kv_head * v_head_stride
        causal = CAUSAL == 1
        if CAUSAL == 2:
            causal = gl.load(causal_flags + request) != 0
        p_spans = spans
        if HAS_SPANS:
            p_spans = spans + request * (span_count * 2)
        b_first, b_last = sight(
            o_position, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
        )
        # padding rows see nothing, whatever is causal
        b_last = gl.where(m_row, b_last, -1)
        key_low, _ = sight(
            seq_len - query_len, seq_len, causal, p_spans, span_count, CAUSAL, WINDOW, HAS_SPANS, CLAMP_SPANS
        )

        if FORM == "four-stage":
            # requested in this order: K0, K1, V0, K2, V1, and then K(i + 3) and V(i + 2) in round i
            pages_v = pages_of(p_table, tile_begin, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
            copy_tile(
                p_k, k_page_stride, k_token_stride, pages_v, tile_begin, tile_end, seq_len, buffers_k.index(0),
                WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_K,
            )  # fmt: skip
            for ahead in gl.static_range(2):
                pages_k = pages_of(p_table, tile_begin + ahead + 1, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages_k, tile_begin + ahead + 1, tile_end, seq_len,
                    buffers_k.index(ahead + 1), WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_K,
                )  # fmt: skip
                if not PAIRED:
                    copy_tile(
                        p_v, v_page_stride, v_token_stride, pages_v, tile_begin + ahead, tile_end, seq_len,
                        buffers_v.index(ahead), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_V,
                    )  # fmt: skip
                pages_v = pages_k
            pages_k = pages_of(p_table, tile_begin + 3, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
            cdna5.tdm.async_wait(2 * COPIES)
            b_s = multiply_keys(b_parts, keys_in(buffers_k, 0, PAIRED, BLOCK_D), BLOCK_M, BLOCK_N, ACC)
            b_s, b_m, b_alpha = begin_softmax(
                b_s, b_m, tile_begin, o_position, b_first, b_last, b_slope, qk_scale, soft_cap, BLOCK_N, ACC,
                WINDOW, HAS_CAP, HAS_ALIBI,
            )  # fmt: skip
            for tile in range(tile_begin, tile_end):
                step = tile - tile_begin
                # the block table is read a round before its pages are asked for
                pages_next = pages_of(p_table, tile + 4, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                # into the buffers that the round before has read
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages_k, tile + 3, tile_end, seq_len,
                    buffers_k.index((step + 3) % BUFFERS), WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_K,
                )  # fmt: skip
                if not PAIRED:
                    copy_tile(
                        p_v, v_page_stride, v_token_stride, pages_v, tile + 2, tile_end, seq_len,
                        buffers_v.index((step + 2) % BUFFERS), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CHUNK,
                        FLAT_V,
                    )  # fmt: skip
                cdna5.tdm.async_wait(2 * COPIES)
                b_next = multiply_keys(
                    b_parts, keys_in(buffers_k, (step + 1) % BUFFERS, PAIRED, BLOCK_D), BLOCK_M, BLOCK_N, ACC
                )  # tile + 1
                b_p, b_l = end_softmax(b_s, b_m, b_l, b_alpha)  # tile
                values = values_in(buffers_v, step % BUFFERS, PAIRED, BLOCK_D, BLOCK_DV)
                b_acc = multiply_values(
                    b_p, b_acc, b_alpha, values, tile, key_low, BLOCK_N, ACC, WINDOW
                )  # tile
                b_s, b_m, b_alpha = begin_softmax(
                    b_next, b_m, tile + 1, o_position, b_first, gl.where(tile + 1 < tile_end, b_last, -1),
                    b_slope, qk_scale, soft_cap, BLOCK_N, ACC, WINDOW, HAS_CAP, HAS_ALIBI,
                )  # fmt: skip  # tile + 1
                pages_v = pages_k
                pages_k = pages_next
        else:
            AHEAD: gl.constexpr = BUFFERS - 1
            for ahead in gl.static_range(AHEAD):
                pages = pages_of(p_table, tile_begin + ahead, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages, tile_begin + ahead, tile_end, seq_len,
                    buffers_k.index(ahead), WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_K,
                )  # fmt: skip
                if not PAIRED:
                    copy_tile(
                        p_v, v_page_stride, v_token_stride, pages, tile_begin + ahead, tile_end, seq_len,
                        buffers_v.index(ahead), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_V,
                    )  # fmt: skip
            for tile in range(tile_begin, tile_end):
                slot = (tile - tile_begin) % BUFFERS
                copied = (tile - tile_begin + AHEAD) % BUFFERS
                pages = pages_of(p_table, tile + AHEAD, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages, tile + AHEAD, tile_end, seq_len,
                    buffers_k.index(copied), WIDTH, BLOCK_W, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_K,
                )  # fmt: skip
                if not PAIRED:
                    copy_tile(
                        p_v, v_page_stride, v_token_stride, pages, tile + AHEAD, tile_end, seq_len,
                        buffers_v.index(copied), HEAD_DIM_V, BLOCK_DV, BLOCK_N, PAGE_SIZE, CHUNK, FLAT_V,
                    )  # fmt: skip
                cdna5.tdm.async_wait(AHEAD * COPIES)
                b_s = multiply_keys(b_parts, keys_in(buffers_k, slot, PAIRED, BLOCK_D), BLOCK_M, BLOCK_N, ACC)
                b_s, b_m, b_alpha = begin_softmax(
                    b_s, b_m, tile, o_position, b_first, b_last, b_slope, qk_scale, soft_cap, BLOCK_N, ACC,
                    WINDOW, HAS_CAP, HAS_ALIBI,
                )  # fmt: skip
                b_p, b_l = end_softmax(b_s, b_m, b_l, b_alpha)
                values = values_in(buffers_v, slot, PAIRED, BLOCK_D, BLOCK_DV)
                b_acc = multiply_values(b_p, b_acc, b_alpha, values, tile, key_low, BLOCK_N, ACC, WINDOW)
        # copies of tiles past the end, which are zeros, still are on their way
        cdna5.tdm.async_wait(0)

        whole = splits == 1
        if splits > 1:
            # first among up to FAN_IN neighbours, then among those merged results
            group_first = split // FAN_IN * FAN_IN
            group_size = gl.minimum(splits - group_first, FAN_IN)
            group_slot = part_slot(group_first, first_workgroup)
            groups = (splits + FAN_IN - 1) // FAN_IN
            own_slot = part_slot(split, first_workgroup)
            store_part(b_m, b_l, b_acc, partial_acc, partial_ml, own_slot, BLOCK_M, BLOCK_DV, ACC)
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
                    ACC,
                )
                whole = groups == 1
                if groups > 1:
                    thread_barrier()  # all of this workgroup has read the part that is now overwritten
                    store_part(b_m, b_l, b_acc, partial_acc, partial_ml, group_slot, BLOCK_M, BLOCK_DV, ACC)
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
                            ACC,
                        )
        if whole:
            if HAS_SINK:
                b_sink = gl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(gl.float32)
                b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
            p_out = (
                out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
            )
            b_out = quantise(normalise(b_acc, b_l) * v_factor, out_scale, HAS_OUT_SCALE, OUT_LARGEST)
            m_out = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
            gl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
            if HAS_LSE:
                p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
                gl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)


# ---- the launch ----


def shared_layout(block_n: int, block_d: int, itemsize: int) -> gl.PaddedSharedLayout:
    """A tile [block_n, block_d] in LDS with 16 bytes after each row, so that rows begin in different banks."""
    return gl.PaddedSharedLayout.with_identity_for([[block_d, 16 // itemsize]], [block_n, block_d], [1, 0])


def flat_layout(block_n: int, block_d: int, itemsize: int) -> gl.PaddedSharedLayout:
    """The same bytes of LDS as one row [block_n * block_d]."""
    return gl.PaddedSharedLayout.with_identity_for([[block_d, 16 // itemsize]], [block_n * block_d], [0])


def constants(shape: LayerShape, variant: Variant, rows: Rows) -> dict:
    """The compile-time constants that this kernel declares after those of every kernel."""
    block_d, block_dv, block_n = block_dim(shape.head_dim), block_dim(shape.head_dim_v), variant.block_n
    depth = instruction_depth(shape, block_n)
    keys = block_n, 2 * block_d if rows.paired else block_d, shape.kv_dtype.itemsize
    values = block_n, block_dv, shape.kv_dtype.itemsize
    return dict(
        CHUNK=chunk_of(shape.page_size, block_n),
        DOMAINS=variant.domains_used,
        FAN_IN=FAN_IN,
        FORM=variant.form,
        # a tile of keys is under way while the values of three tiles before it are used
        BUFFERS=FORMS.index(variant.form) + 1 + (rows.paired and variant.form == "four-stage"),
        PAIRED=rows.paired,
        ACC=wmma_layout(variant.num_warps, 1, (16, 16, depth)),
        SHARED_K=shared_layout(*keys),
        SHARED_V=shared_layout(*values),
        FLAT_K=flat_layout(*keys) if rows.flat_k else None,
        FLAT_V=flat_layout(*values) if rows.flat_v else None,
    )


_launch = LayerLauncher(gluon_entry(decode_kernel), constants, rows_of)


def decode(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> Launched:
    """Attention of the decoding requests of a `schedule.Schedule`; see `runner.attend` for the rest."""
    plan = schedule.decode
    own = (plan.ranges, plan.items, plan.arrivals, plan.partial_acc, plan.partial_ml)
    return _launch(plan.variant.workgroups, own, plan.variant, q, k_pages, v_pages, out, schedule, **options)

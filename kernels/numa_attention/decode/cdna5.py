"""Split-k decode over a paged cache for gfx1250 (MI450), in Gluon: keys and values come by TDM, matrices by WMMA.

It takes the work list and the workspace of `decode/portable.py` and merges splits like it. What differs is the way of
a KV tile. TDM copies it from its pages into LDS, one request a page, and fills rows past the sequence's end with
zeros. WMMA in its transposed form leaves the scores where the second product wants them, so that the probabilities
never go through LDS. Warps divide the rows of the packed query tile, so that a softmax needs one warp alone.

Pages of at least a tile are best: the compiler lets some ten requests be under way at once, which small pages use up.

FORM says how far copies, products and the softmax overlap:

- "single": one buffer; a tile is copied, then used;
- "two-stage": two buffers; the next tile is copied while one is used;
- "four-stage": three buffers and copies two tiles ahead; the softmax is cut in two, and while one tile's scores are
  multiplied, the tile before it is exponentiated; while its values are multiplied, the next one's maximum is found.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention import scores
from numa_attention.gluon_compat import VERSION, cdna5, thread_barrier, wmma_layout
from numa_attention.shapes import LayerShape, UnsupportedShape

FORMS = ("single", "two-stage", "four-stage")
FAN_IN = 16  # parts merged at a time, as in decode/portable.py
WMMA = (16, 16, 32)  # rows, columns and depth of one instruction on 16-bit operands
K_WIDTH = gl.constexpr(8)  # consecutive elements of a 16-bit operand in one lane
HEAD_DIMS = (64, 128, 256)

# the scoring rule is that of all kernels: these are its plain-Triton functions, compiled by Gluon
score_tile = gluon.jit(scores.score_tile.fn)
visible = gluon.jit(scores.visible.fn)
safe_max = gluon.jit(scores.safe_max.fn)
add_sink = gluon.jit(scores.add_sink.fn)
natural_lse = gluon.jit(scores.natural_lse.fn)
normalise = gluon.jit(scores.normalise.fn)


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
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Request tile [BLOCK_N, HEAD_DIM] into `buffer`, in BLOCK_N / CHUNK copies; a tile past the last one is zeros."""
    for chunk in gl.static_range(BLOCK_N // CHUNK):
        start = tile * BLOCK_N + chunk * CHUNK
        rows = gl.minimum(gl.maximum(seq_len - start, 0), CHUNK)
        rows = gl.where(tile < tile_end, rows, 0)
        source = cache + pages[chunk].to(gl.int64) * page_stride
        if PAGE_SIZE > CHUNK:
            source += (start % PAGE_SIZE).to(gl.int64) * token_stride
        descriptor = cdna5.tdm.make_tensor_descriptor(
            source, (rows, HEAD_DIM), (token_stride, 1), (CHUNK, HEAD_DIM), buffer.type.layout
        )
        cdna5.tdm.async_load(descriptor, [0, 0], buffer.slice(chunk * CHUNK, CHUNK, dim=0))


@gluon.jit
def multiply_keys(b_q, buffer, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ACC: gl.constexpr):
    """Raw scores [M, N] of a tile of keys in LDS."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    b_k = buffer.permute([1, 0]).load(RIGHT).to(b_q.dtype)
    return cdna5.wmma(b_q, b_k, gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC))


@gluon.jit
def begin_softmax(
    b_s, b_m, tile, o_position, b_slope, seq_len, scale, soft_cap, BLOCK_N: gl.constexpr, ACC: gl.constexpr,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
):  # fmt: skip
    """First half: scores in base 2 [M, N], the new maximum [M], and what older sums shrink by [M]."""
    o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC))
    b_s = score_tile(b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP, HAS_ALIBI)
    b_s = gl.where(visible(o_position, o_key, seq_len, CAUSAL, WINDOW), b_s, float("-inf"))
    b_new = gl.maximum(b_m, gl.max(b_s, 1))
    return b_s, b_new, gl.exp2(b_m - safe_max(b_new))


@gluon.jit
def end_softmax(b_s, b_m, b_l, b_alpha):
    """Second half: probabilities [M, N] under the maximum b_m [M], and the new row sums [M]."""
    b_p = gl.exp2(b_s - safe_max(b_m)[:, None])
    return b_p, b_l * b_alpha + gl.sum(b_p, 1)


@gluon.jit
def multiply_values(
    b_p, b_acc, b_alpha, buffer, tile, key_low, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, ACC: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The accumulator [M, D] with a tile of values in LDS."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    b_v = buffer.load(RIGHT).to(DTYPE)
    if WINDOW >= 0:
        # values left of every window may be anything, NaN included
        o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, RIGHT))
        b_v = gl.where((o_key >= key_low)[:, None], b_v, 0.0)
    # transposed scores lie as this operand does: no value changes its lane
    weights = gl.convert_layout(b_p.to(DTYPE), LEFT, assert_trivial=True)
    return cdna5.wmma(weights, b_v, b_acc * b_alpha[:, None])


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
    HEAD_DIM: gl.constexpr,
    ACC: gl.constexpr,
):
    """Write one softmax state to the workspace."""
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ACC))
    o_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ACC))
    p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
    gl.store(p_ml, b_m)
    gl.store(p_ml + BLOCK_M, b_l)
    gl.store(partial_acc + slot * (BLOCK_M * HEAD_DIM) + o_m[:, None] * HEAD_DIM + o_d[None, :], b_acc)


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
    BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Merge splits first, first + step, ... (`parts` of them), always in this order: (m, l, acc)."""
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ACC))
    o_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ACC))
    b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    b_l = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, ACC))
    b_acc = gl.zeros((BLOCK_M, HEAD_DIM), gl.float32, ACC)
    for part in range(0, parts):
        slot = part_slot(first + part * step, first_workgroup)
        p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
        # past L1: other compute units wrote it
        b_pm = gl.load(p_ml, cache_modifier=".cg")
        b_pl = gl.load(p_ml + BLOCK_M, cache_modifier=".cg")
        p_acc = partial_acc + slot * (BLOCK_M * HEAD_DIM) + o_m[:, None] * HEAD_DIM + o_d[None, :]
        b_pacc = gl.load(p_acc, cache_modifier=".cg")
        b_new = gl.maximum(b_m, b_pm)
        b_safe = safe_max(b_new)
        b_old, b_part = gl.exp2(b_m - b_safe), gl.exp2(b_pm - b_safe)
        b_l = b_l * b_old + b_pl * b_part
        b_acc = b_acc * b_old[:, None] + b_pacc * b_part[:, None]
        b_m = b_new
    return b_m, b_l, b_acc


# ---- the kernel ----


@gluon.jit
def decode_kernel(
    q,  # [tokens, q_heads, head_dim]
    k_pages,  # [page, token, kv_head, head_dim]
    v_pages,  # [page, token, kv_head, head_dim]
    out,  # [tokens, q_heads, head_dim]
    lse,  # float32 [tokens, q_heads]
    ranges,  # int32 [workgroups, 2]
    items,  # int32 [capacity, 8]
    arrivals,  # int32 [2, 2 * workgroups], zero between launches
    partial_acc,  # float32 [2 * workgroups, BLOCK_M, HEAD_DIM]
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
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    DOMAINS: gl.constexpr,
    FAN_IN: gl.constexpr,
    FORM: gl.constexpr,
    BUFFERS: gl.constexpr,
    ACC: gl.constexpr,
    SHARED: gl.constexpr,
):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    DTYPE: gl.constexpr = q.dtype.element_ty
    COPIES: gl.constexpr = BLOCK_N // CHUNK  # TDM requests of one tile of keys or of values
    # consecutive ranges belong to one domain, to which the hardware deals every DOMAINS-th workgroup
    workgroups = gl.num_programs(0)
    program = gl.program_id(0)
    workgroup = program % DOMAINS * (workgroups // DOMAINS) + program // DOMAINS
    first = gl.load(ranges + workgroup * 2)
    count = gl.load(ranges + workgroup * 2 + 1)
    qk_scale = scale
    v_factor = 1.0
    if HAS_SCALES:
        qk_scale = scale * gl.load(k_scale)
        v_factor = v_factor * gl.load(v_scale)
    buffers_k = gl.allocate_shared_memory(k_pages.dtype.element_ty, [BUFFERS, BLOCK_N, HEAD_DIM], SHARED)
    buffers_v = gl.allocate_shared_memory(v_pages.dtype.element_ty, [BUFFERS, BLOCK_N, HEAD_DIM], SHARED)
    o_m = gl.arange(0, BLOCK_M, ROW)
    o_dv = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ACC))
    o_qm = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LEFT))
    o_qd = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LEFT))
    for index in range(first, first + count):
        p_item = items + index * 8
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
            mask=(o_qrow // GROUP < query_len)[:, None],
            other=0.0,
        )
        b_slope = gl.zeros((BLOCK_M,), gl.float32, ROW)
        if HAS_ALIBI:
            b_slope = gl.load(alibi_slopes + o_head, mask=m_row, other=0.0)
        b_m = gl.full((BLOCK_M,), float("-inf"), gl.float32, ROW)
        b_l = gl.zeros((BLOCK_M,), gl.float32, ROW)
        b_acc = gl.zeros((BLOCK_M, HEAD_DIM), gl.float32, ACC)
        p_table = block_table + request * block_table_stride
        p_k = k_pages + kv_head * k_head_stride
        p_v = v_pages + kv_head * v_head_stride
        key_low = gl.maximum(seq_len - query_len - WINDOW, 0) if WINDOW >= 0 else 0

        if FORM == "four-stage":
            # requested in this order: K0, K1, V0, K2, V1, and then K(i + 3) and V(i + 2) in round i
            pages_v = pages_of(p_table, tile_begin, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
            copy_tile(
                p_k, k_page_stride, k_token_stride, pages_v, tile_begin, tile_end, seq_len, buffers_k.index(0),
                HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            for ahead in gl.static_range(2):
                pages_k = pages_of(p_table, tile_begin + ahead + 1, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages_k, tile_begin + ahead + 1, tile_end, seq_len,
                    buffers_k.index(ahead + 1), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                copy_tile(
                    p_v, v_page_stride, v_token_stride, pages_v, tile_begin + ahead, tile_end, seq_len,
                    buffers_v.index(ahead), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                pages_v = pages_k
            pages_k = pages_of(p_table, tile_begin + 3, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
            cdna5.tdm.async_wait(4 * COPIES)
            b_s = multiply_keys(b_q, buffers_k.index(0), BLOCK_M, BLOCK_N, ACC)
            b_s, b_m, b_alpha = begin_softmax(
                b_s, b_m, tile_begin, o_position, b_slope, seq_len, qk_scale, soft_cap, BLOCK_N, ACC,
                WINDOW, CAUSAL, HAS_CAP, HAS_ALIBI,
            )  # fmt: skip
            for tile in range(tile_begin, tile_end):
                step = tile - tile_begin
                # the block table is read a round before its pages are asked for
                pages_next = pages_of(p_table, tile + 4, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                # into the buffers that the round before has read
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages_k, tile + 3, tile_end, seq_len,
                    buffers_k.index(step % 3), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                copy_tile(
                    p_v, v_page_stride, v_token_stride, pages_v, tile + 2, tile_end, seq_len,
                    buffers_v.index((step + 2) % 3), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                cdna5.tdm.async_wait(4 * COPIES)
                b_next = multiply_keys(
                    b_q, buffers_k.index((step + 1) % 3), BLOCK_M, BLOCK_N, ACC
                )  # tile + 1
                b_p, b_l = end_softmax(b_s, b_m, b_l, b_alpha)  # tile
                b_acc = multiply_values(
                    b_p, b_acc, b_alpha, buffers_v.index(step % 3), tile, key_low, DTYPE, BLOCK_N, ACC, WINDOW
                )  # tile
                b_s, b_m, b_alpha = begin_softmax(
                    b_next, b_m, tile + 1, o_position, b_slope, gl.where(tile + 1 < tile_end, seq_len, 0),
                    qk_scale, soft_cap, BLOCK_N, ACC, WINDOW, CAUSAL, HAS_CAP, HAS_ALIBI,
                )  # fmt: skip  # tile + 1
                pages_v = pages_k
                pages_k = pages_next
        else:
            AHEAD: gl.constexpr = BUFFERS - 1
            for ahead in gl.static_range(AHEAD):
                pages = pages_of(p_table, tile_begin + ahead, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages, tile_begin + ahead, tile_end, seq_len,
                    buffers_k.index(ahead), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                copy_tile(
                    p_v, v_page_stride, v_token_stride, pages, tile_begin + ahead, tile_end, seq_len,
                    buffers_v.index(ahead), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
            for tile in range(tile_begin, tile_end):
                slot = (tile - tile_begin) % BUFFERS
                copied = (tile - tile_begin + AHEAD) % BUFFERS
                pages = pages_of(p_table, tile + AHEAD, seq_len, BLOCK_N, PAGE_SIZE, CHUNK)
                copy_tile(
                    p_k, k_page_stride, k_token_stride, pages, tile + AHEAD, tile_end, seq_len,
                    buffers_k.index(copied), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                copy_tile(
                    p_v, v_page_stride, v_token_stride, pages, tile + AHEAD, tile_end, seq_len,
                    buffers_v.index(copied), HEAD_DIM, BLOCK_N, PAGE_SIZE, CHUNK,
                )  # fmt: skip
                cdna5.tdm.async_wait(2 * AHEAD * COPIES)
                b_s = multiply_keys(b_q, buffers_k.index(slot), BLOCK_M, BLOCK_N, ACC)
                b_s, b_m, b_alpha = begin_softmax(
                    b_s, b_m, tile, o_position, b_slope, seq_len, qk_scale, soft_cap, BLOCK_N, ACC,
                    WINDOW, CAUSAL, HAS_CAP, HAS_ALIBI,
                )  # fmt: skip
                b_p, b_l = end_softmax(b_s, b_m, b_l, b_alpha)
                b_acc = multiply_values(
                    b_p, b_acc, b_alpha, buffers_v.index(slot), tile, key_low, DTYPE, BLOCK_N, ACC, WINDOW
                )
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
            store_part(b_m, b_l, b_acc, partial_acc, partial_ml, own_slot, BLOCK_M, HEAD_DIM, ACC)
            if arrive_last(arrivals + group_slot, group_size):
                b_m, b_l, b_acc = merge_parts(
                    partial_acc,
                    partial_ml,
                    group_first,
                    group_size,
                    1,
                    first_workgroup,
                    BLOCK_M,
                    HEAD_DIM,
                    ACC,
                )
                whole = groups == 1
                if groups > 1:
                    thread_barrier()  # all of this workgroup has read the part that is now overwritten
                    store_part(b_m, b_l, b_acc, partial_acc, partial_ml, group_slot, BLOCK_M, HEAD_DIM, ACC)
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
                            HEAD_DIM,
                            ACC,
                        )
        if whole:
            if HAS_SINK:
                b_sink = gl.load(sinks + o_head, mask=m_row, other=float("-inf")).to(gl.float32)
                b_m, b_l, b_acc = add_sink(b_m, b_l, b_acc, b_sink)
            p_out = (
                out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
            )
            b_out = (normalise(b_acc, b_l) * v_factor).to(out.dtype.element_ty)
            gl.store(p_out, b_out, mask=m_row[:, None])
            if HAS_LSE:
                p_lse = lse + o_token * lse_token_stride + o_head * lse_head_stride
                gl.store(p_lse, natural_lse(b_m, b_l), mask=m_row)


# ---- the launch ----


def check_shape(shape: LayerShape) -> None:
    """Raises UnsupportedShape for layers that this kernel does not take."""
    shape.check()
    if shape.head_dim not in HEAD_DIMS or shape.head_dim_v != shape.head_dim:
        raise UnsupportedShape(
            f"the gfx1250 decode kernel needs keys and values of one head size out of {HEAD_DIMS}, "
            f"got {shape.head_dim} and {shape.head_dim_v}: use decode/portable.py"
        )
    if shape.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedShape(
            f"the gfx1250 decode kernel needs a query in float16 or bfloat16, got {shape.dtype}"
        )


def chunk_of(page_size: int, block_n: int) -> int:
    """Tokens of one TDM request: a power of two that divides the page and the tile, as large as can be."""
    return min(page_size & -page_size, block_n)


def shared_layout(block_n: int, head_dim: int, itemsize: int) -> gl.PaddedSharedLayout:
    """A tile [block_n, head_dim] in LDS with 16 bytes after each row, so that rows begin in different banks."""
    return gl.PaddedSharedLayout.with_identity_for([[head_dim, 16 // itemsize]], [block_n, head_dim], [1, 0])


def launch_of(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule,
    *,
    scale: float,
    form: str = "four-stage",
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[tuple[int], tuple, dict]:
    """(grid, arguments, constants) of the launch for `schedule`; see `attention.attend` for shapes.

    Raises ValueError for an unknown form, UnsupportedShape.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown: choose one of {', '.join(FORMS)}")
    shape, plan, batch = schedule.shape, schedule.decode, schedule.batch
    check_shape(shape)
    variant = plan.variant
    warps = variant.block_m // WMMA[0]
    has_lse = lse is not None
    lse = lse if has_lse else out
    arguments = (
        *(q, k_pages, v_pages, out, lse),
        *(plan.ranges, plan.items, plan.arrivals, plan.partial_acc, plan.partial_ml),
        *(batch.block_table, batch.query_start_loc, batch.seq_lens),
        *(q if optional is None else optional for optional in (sinks, alibi_slopes, k_scale, v_scale)),
        *(float(scale), float(soft_cap)),
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), lse.stride(0), lse.stride(1)),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        batch.block_table.stride(0),
    )
    constants = dict(
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        BLOCK_M=variant.block_m,
        BLOCK_N=variant.block_n,
        PAGE_SIZE=shape.page_size,
        CHUNK=chunk_of(shape.page_size, variant.block_n),
        WINDOW=shape.window,
        CAUSAL=batch.causal,
        HAS_CAP=soft_cap > 0.0,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_SINK=sinks is not None,
        HAS_LSE=has_lse,
        HAS_SCALES=k_scale is not None,
        DOMAINS=variant.domains if variant.mapping.startswith("swizzled") else 1,
        FAN_IN=FAN_IN,
        FORM=form,
        BUFFERS=FORMS.index(form) + 1,
        ACC=wmma_layout(warps, 1, WMMA),
        SHARED=shared_layout(variant.block_n, shape.head_dim, k_pages.itemsize),
        num_warps=warps,
    )
    return (variant.workgroups,), arguments, constants


def decode(*arguments, **options) -> None:
    """Attention of the decoding requests of a schedule on the GPU; arguments as for `launch_of`.

    Raises also RuntimeError with Triton 3.6, which cannot assemble the kernel.
    """
    if VERSION < (3, 7):
        raise RuntimeError("the gfx1250 decode kernel needs Triton 3.7 or later: use decode/portable.py")
    grid, values, constants = launch_of(*arguments, **options)
    decode_kernel[grid](*values, **constants)

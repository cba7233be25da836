"""The inner loop of the portable kernels: fold a run of KV tiles into the softmax state of one packed query tile."""

from __future__ import annotations

import triton.language as tl

from numa_attention.jit import kernel
from numa_attention.paged import page_rows
from numa_attention.scores import LOG2_E, safe_max, score_tile
from numa_attention.sharding_device import global_position


@kernel
def walk(
    b_q,  # [M, D]
    b_q_rest,  # [M, D], added to b_q with TWO_TERMS
    b_factor,  # [M], of the scores with IN_FLOAT16
    b_m,  # [M]
    b_l,  # [M]
    b_acc,  # [M, DV]
    b_slope,  # [M]
    o_position,  # [M]
    b_first,  # [M]
    b_last,  # [M]
    p_k,  # [1, D]
    p_v,  # [1, DV]
    p_table,
    key_low,
    key_high,
    tile_begin,
    tile_end,
    scale,
    soft_cap,
    k_page_stride,
    k_token_stride,
    v_page_stride,
    v_token_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    MASKED: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TWO_TERMS: tl.constexpr = False,
    STAGED_VALUES: tl.constexpr = False,
):
    """Fold KV tiles [tile_begin, tile_end) into the softmax state (m, l, acc) of one query tile.

    Its rows see the keys from b_first (0 for all unless HAS_FIRST) to b_last, together those of [key_low, key_high);
    without MASKED every row sees every key of the tiles. Keys are tokens of this rank's cache, see `scores.sight`.

    TWO_TERMS: keys stay float8 in their product, see `scores.query_in_float8`. STAGED_VALUES: values of a float8 cache
    are converted before they go to shared memory again.
    """
    # scale and factor of a row are one number, which the exponential's subtraction multiplies by
    FOLDED: tl.constexpr = IN_FLOAT16 and not (HAS_CAP or HAS_ALIBI)
    if FOLDED:
        b_factor = b_factor * (scale * LOG2_E)
    P_TYPE: tl.constexpr = tl.float16 if IN_FLOAT16 else b_q.dtype
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    ONE_PAGE: tl.constexpr = PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_N == 0
    for tile in tl.range(tile_begin, tile_end):
        start = tile * BLOCK_N
        o_key = start + o_n
        if MASKED:
            # tokens outside every row's sight are not read: their pages may hold anything, NaN included
            m_key = (o_key >= key_low) & (o_key < key_high)
        else:
            m_key = o_n < BLOCK_N
        o_k = page_rows(p_table, start, o_n, m_key, k_page_stride, k_token_stride, PAGE_SIZE, ONE_PAGE)
        if MASKED or HEAD_DIM < BLOCK_D:
            b_k = tl.load(p_k + o_k[:, None], mask=m_key[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
        else:
            b_k = tl.load(p_k + o_k[:, None])
        if TWO_TERMS:
            b_s = tl.dot(b_q, tl.trans(b_k))
            b_s = tl.dot(b_q_rest, tl.trans(b_k), b_s)
        else:
            b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
        if not FOLDED:
            if IN_FLOAT16:
                b_s = b_s * b_factor[:, None]
            # only ALiBi asks for the position of a key; masks are in the tokens of this cache
            o_key_position = global_position(o_key, RANKS, RANK, INTERLEAVE) if HAS_ALIBI else o_key
            b_s = score_tile(b_s, o_position, o_key_position, b_slope, scale, soft_cap, HAS_CAP, HAS_ALIBI)
        if MASKED:
            m_seen = o_key[None, :] <= b_last[:, None]
            if HAS_FIRST:
                m_seen = m_seen & (o_key[None, :] >= b_first[:, None])
            b_s = tl.where(m_seen, b_s, float("-inf"))
        b_max = tl.max(b_s, 1)
        if FOLDED:
            b_max = b_max * b_factor
        b_m_new = tl.maximum(b_m, b_max)
        b_safe = safe_max(b_m_new) if MASKED else b_m_new
        if FOLDED:
            b_p = tl.exp2(tl.fma(b_s, b_factor[:, None], -b_safe[:, None]))
        else:
            b_p = tl.exp2(b_s - b_safe[:, None])
        b_alpha = tl.exp2(b_m - b_safe)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_m = b_m_new
        o_v = page_rows(p_table, start, o_n, m_key, v_page_stride, v_token_stride, PAGE_SIZE, ONE_PAGE)
        if MASKED or HEAD_DIM_V < BLOCK_DV:
            b_v = tl.load(p_v + o_v[:, None], mask=m_key[:, None] & (o_dv < HEAD_DIM_V)[None, :], other=0.0)
        else:
            b_v = tl.load(p_v + o_v[:, None])
        b_v = b_v.to(P_TYPE)
        if STAGED_VALUES:
            # Triton would read the operand of mma.sync byte by byte and convert it there; it moves no layout conversion
            # past a reduction, which here is of single elements, so that 16-bit values are stored and read transposed
            b_v = tl.sum(b_v.reshape(BLOCK_N, BLOCK_DV, 1), 2)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(P_TYPE), b_v, b_acc, input_precision="ieee")
    return b_m, b_l, b_acc

"""One scoring rule for every kernel: scale, soft cap, ALiBi, causal mask, sliding window, spans, sink.

Kernels keep scores in base 2: `score_tile` multiplies by log2(e), so that `exp2` is the softmax's exponential, and
`natural_lse` turns the result back into a natural logarithm.
"""

from __future__ import annotations

import triton.language as tl

from numa_attention.jit import kernel
from numa_attention.sharding_device import local_count

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@kernel
def tanh(b_x):
    """Hyperbolic tangent, right to a few float32 roundings everywhere."""
    # exp overflows to inf for large x, which gives the right limit; near 0 the difference would cancel
    b_far = 1.0 - 2.0 / (tl.exp2(b_x * (2.0 * LOG2_E)) + 1.0)
    b_square = b_x * b_x
    b_near = b_x * (1.0 - b_square * (1.0 / 3.0 - b_square * (2.0 / 15.0 - b_square * (17.0 / 315.0))))
    return tl.where(b_square < 0.0625, b_near, b_far)


@kernel
def alibi_distance(b_distance, HAS_ALIBI: tl.constexpr):
    """What a slope is multiplied by. b_distance: key position less query position, of any shape."""
    b_distance = b_distance.to(tl.float32)
    if HAS_ALIBI == 2:
        b_distance = -tl.sqrt(tl.maximum(-b_distance, 0.0))
    return b_distance


@kernel
def power_of_two_below(b_x):
    """The largest power of two that is at most b_x > 0, element by element; 1 for 0 and for numbers below 2^-100."""
    b_power = (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(b_x > 7.9e-31, b_power, 1.0)


@kernel
def query_in_float16(b_q, scale):
    """A bfloat16 query [M, D] for products with a float8 cache: float16, and the factors [M] its scores lack.

    float16 holds every float8 number, and on NVIDIA float8 becomes float16 in one instruction, bfloat16 in many. Each
    row is scaled into the range by a power of two, which rounds nothing but what is 2^-24 of the row's largest number.
    A factor has the sign of `scale`, so that the largest score of a row is that of its largest product.
    """
    b_q = b_q.to(tl.float32)
    b_factor = power_of_two_below(tl.max(tl.abs(b_q), 1))
    b_factor = tl.where(scale < 0.0, -b_factor, b_factor)
    return (b_q / b_factor[:, None]).to(tl.float16), b_factor


@kernel
def query_in_float8(b_q, scale):
    """A bfloat16 query [M, D] as the sum of two in float8_e4m3, and the factors [M] that its scores lack.

    Each term holds four bits of the significand, down to 2^-17 of the row's largest number. Factors: as above.
    """
    b_q = b_q.to(tl.float32)
    b_factor = (
        power_of_two_below(tl.max(tl.abs(b_q), 1)) / 128.0
    )  # the largest is 128 to 256 of the 448 of float8
    b_factor = tl.where(scale < 0.0, -b_factor, b_factor)
    b_q = b_q / b_factor[:, None]
    b_term = b_q.to(tl.float8e4nv)
    return b_term, (b_q - b_term.to(tl.float32)).to(tl.float8e4nv), b_factor


@kernel
def score_tile(
    b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr
):
    """Raw products [M, N] -> scores in base 2, unmasked.

    o_position [M], o_key [N]: token positions. b_slope [M]: the ALiBi slope of each row's query head. scale: softmax
    scale times the scales of queries and keys. HAS_ALIBI: 0 for none, 1 for slope * (key - position), 2 for
    -slope * sqrt(position - key) up to the query's own position and 0 after it.
    """
    if HAS_ALIBI:
        # a product with token positions in 16 bits would round the positions
        b_slope = b_slope.to(tl.float32)
        b_distance = alibi_distance(o_key[None, :] - o_position[:, None], HAS_ALIBI)
    if HAS_CAP:
        b_s = soft_cap * tanh(b_s * (scale / soft_cap))
        if HAS_ALIBI:
            b_s += b_slope[:, None] * b_distance
        b_s = b_s * LOG2_E
    else:
        b_s = b_s * (scale * LOG2_E)
        if HAS_ALIBI:
            b_s += (b_slope * LOG2_E)[:, None] * b_distance
    return b_s


@kernel
def sight(
    o_position,
    seq_len,
    causal,
    p_spans,
    spans,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    CLAMP_SPANS: tl.constexpr,
    RANKS: tl.constexpr = 1,
    RANK: tl.constexpr = 0,
    INTERLEAVE: tl.constexpr = 1,
):
    """The first and the last key that the queries at o_position see, like o_position a number or [M].

    A query sees all keys between the two: where a mask is a union, its parts meet at the query's own position. Both
    grow with the position, so that the first and the last row of a tile bound what the tile sees.

    CAUSAL: 0 for none, 1 for all requests, 2 where `causal` is true. WINDOW: tokens to the left of the query, and to
    its right where it is not causal, that it still sees, -1 for all. p_spans: `spans` pairs int32 of first and last
    token, of spans in which queries see the whole span, those with CLAMP_SPANS only its part inside the window. A
    causal row at a negative position, as padding rows are, sees nothing.

    RANKS, RANK, INTERLEAVE: of a cache sharded over ranks (`sharding.py`), in which the two are tokens of this rank's
    cache. o_position, seq_len and spans are positions in the sequence whatever the sharding.
    """
    b_first = o_position * 0
    b_last = b_first + (seq_len - 1)
    if WINDOW >= 0:
        b_first = tl.maximum(o_position - WINDOW, 0)
        b_last = tl.minimum(o_position + WINDOW, seq_len - 1)
    if CAUSAL == 1:
        b_last = tl.minimum(o_position, seq_len - 1)
    if CAUSAL == 2:
        b_last = tl.where(causal, tl.minimum(o_position, seq_len - 1), b_last)
    if HAS_SPANS:
        for span in tl.range(0, spans):
            begin = tl.load(p_spans + span * 2)
            end = tl.minimum(tl.load(p_spans + span * 2 + 1), seq_len - 1)
            m_inside = (begin <= o_position) & (o_position <= end)
            b_last = tl.where(m_inside, tl.maximum(b_last, end), b_last)
            if not CLAMP_SPANS:
                b_first = tl.where(m_inside, tl.minimum(b_first, begin), b_first)
    if RANKS > 1:
        # a run of positions is a run of the rank's tokens, if an empty one
        b_first = local_count(b_first, RANKS, RANK, INTERLEAVE)
        b_last = local_count(b_last + 1, RANKS, RANK, INTERLEAVE) - 1
    return b_first, b_last


@kernel
def visible(o_position, o_key, kv_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Mask [M, N]: does the query at o_position [M] see the key at o_key [N]?

    For kernels without spans, with the rule of `sight`: a causal row at a negative position sees nothing.
    """
    m_visible = tl.broadcast_to((o_key < kv_len)[None, :], o_position.shape[0], o_key.shape[0])
    if CAUSAL:
        m_visible = m_visible & (o_key[None, :] <= o_position[:, None])
    if WINDOW >= 0:
        m_visible = m_visible & (o_key[None, :] + WINDOW >= o_position[:, None])
        if not CAUSAL:
            m_visible = m_visible & (o_key[None, :] <= o_position[:, None] + WINDOW)
    return m_visible


@kernel
def safe_max(b_m):
    """The row maximum [M] to subtract: 0 where the row has seen no key, so that -inf - -inf never happens."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)


@kernel
def add_sink(b_m, b_l, b_acc, b_sink):
    """Fold a sink (a score in natural units per row [M]) into the softmax state: it adds to the denominator alone."""
    b_sink = b_sink * LOG2_E
    b_new = tl.maximum(b_m, b_sink)
    b_alpha = tl.exp2(b_m - safe_max(b_new))
    return b_new, b_l * b_alpha + tl.exp2(b_sink - safe_max(b_new)), b_acc * b_alpha[:, None]


@kernel
def natural_lse(b_m, b_l):
    """log(sum(exp(score))) [M] in natural units; -inf for rows that saw no key."""
    return tl.where(b_l > 0.0, (b_m + tl.log2(tl.where(b_l > 0.0, b_l, 1.0))) * LN_2, float("-inf"))


@kernel
def quantise(b_out, p_scale, HAS_OUT_SCALE: tl.constexpr, OUT_LARGEST: tl.constexpr):
    """Output [M, D] as it is stored: over its scale, and within the range of a float8 type (OUT_LARGEST > 0)."""
    if HAS_OUT_SCALE:
        out_scale = tl.load(p_scale)
        # div_rn wants two tensors, and Gluon has no zeros_like
        b_out = tl.div_rn(b_out, tl.where(b_out < 0.0, out_scale, out_scale))
    if OUT_LARGEST > 0:
        # a NaN stays a NaN, an overflow must not become one
        b_out = tl.clamp(b_out, -OUT_LARGEST, OUT_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return b_out


@kernel
def normalise(b_acc, b_l):
    """Accumulated output [M, D] over its row sums; rows that saw no key give 0."""
    return b_acc * tl.where(b_l > 0.0, 1.0 / tl.where(b_l > 0.0, b_l, 1.0), 0.0)[:, None]

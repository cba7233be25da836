"""One scoring rule for every kernel: scale, soft cap, ALiBi, causal mask, sliding window, sink.

Kernels keep scores in base 2: `score_tile` multiplies by log2(e), so that `exp2` is the softmax's exponential, and
`natural_lse` turns the result back into a natural logarithm.
"""

from __future__ import annotations

import triton.language as tl

from numa_attention.jit import kernel

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
def score_tile(
    b_s, o_position, o_key, b_slope, scale, soft_cap, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr
):
    """Raw products [M, N] -> scores in base 2, unmasked.

    o_position [M], o_key [N]: token positions. b_slope [M]: the ALiBi slope of each row's query head. scale: softmax
    scale times the key scale.
    """
    if HAS_ALIBI:
        # a product with token positions in 16 bits would round the positions
        b_slope = b_slope.to(tl.float32)
    if HAS_CAP:
        b_s = soft_cap * tanh(b_s * (scale / soft_cap))
        if HAS_ALIBI:
            b_s += b_slope[:, None] * (o_key[None, :] - o_position[:, None])
        b_s = b_s * LOG2_E
    else:
        b_s = b_s * (scale * LOG2_E)
        if HAS_ALIBI:
            b_s += (b_slope * LOG2_E)[:, None] * (o_key[None, :] - o_position[:, None])
    return b_s


@kernel
def visible(o_position, o_key, kv_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Mask [M, N]: does the query at o_position [M] see the key at o_key [N]?

    WINDOW: tokens to the left of the query that it still sees, -1 for all. A causal row at a negative position, as
    padding rows are, sees nothing.
    """
    m_visible = tl.broadcast_to((o_key < kv_len)[None, :], o_position.shape[0], o_key.shape[0])
    if CAUSAL:
        m_visible = m_visible & (o_key[None, :] <= o_position[:, None])
    if WINDOW >= 0:
        m_visible = m_visible & (o_key[None, :] + WINDOW >= o_position[:, None])
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
def normalise(b_acc, b_l):
    """Accumulated output [M, D] over its row sums; rows that saw no key give 0."""
    return b_acc * tl.where(b_l > 0.0, 1.0 / tl.where(b_l > 0.0, b_l, 1.0), 0.0)[:, None]

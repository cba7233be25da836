"""The device form of `sharding.py`. RANKS 1 leaves no instruction behind."""

from __future__ import annotations

import triton.language as tl

from numa_attention.jit import kernel


@kernel
def local_count(b_length, RANKS: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """`Shard.count` of lengths of any shape, of which negative ones count as 0."""
    if RANKS == 1:
        return b_length
    b_length = tl.maximum(b_length, 0)
    b_rest = b_length % (RANKS * INTERLEAVE) - RANK * INTERLEAVE
    b_rest = tl.minimum(tl.maximum(b_rest, 0), INTERLEAVE)
    return b_length // (RANKS * INTERLEAVE) * INTERLEAVE + b_rest


@kernel
def global_position(o_token, RANKS: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """`Shard.position` of tokens of the rank's cache, of any shape."""
    if RANKS == 1:
        return o_token
    return (o_token // INTERLEAVE * RANKS + RANK) * INTERLEAVE + o_token % INTERLEAVE

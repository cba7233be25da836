"""Ranks that share a sequence, and splits inside each rank: one decode step of one layer, and both chosen together.

A GPU reads its part of the context with as many workgroups as have two KV tiles each. More ranks read less each and
hold one copy less of the KV heads, and exchange queries and partials for it; more splits fill the device, and are
merged in one level more. All times are computed, none is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from . import ModelError
from .dispatch import LEAST_WORKGROUPS_PER_UNIT, MIN_TILES
from .machines import US, Machine

BLOCK_N = 64  # KV tokens a tile
FAN_IN = 16  # parts that one level merges, as in decode/portable.py
QUERY_BYTES, STATE_BYTES = 2, 4  # of a number of a query; of a partial, and of an LSE
MERGE_SECONDS = 1.5 * US  # assumed: a level of merging inside a GPU, which waits for its L2 three times
# assumed: a launch that gathers or merges across GPUs, and one way over the link with its flag
EXCHANGE_SECONDS = 5 * US
COLLECTIVE_SECONDS = 10 * US  # assumed: a small collective between GPUs
EXCHANGES, COLLECTIVES = 2, 3  # queries and partials; queries, LSEs and outputs


@dataclass(frozen=True)
class TwoLevels:
    """One decode step of one layer where `ranks` GPUs share each sequence.

    copies: GPUs that hold the same KV. splits: of one (request, KV head) on a GPU, split_tokens: of the longest. busy:
    workgroups that have work. read_bytes: KV that a GPU reads. sent_bytes: queries and partials that it sends. reading,
    merging, exchanging: seconds, and by_collectives instead of exchanging.
    """

    ranks: int
    copies: int
    splits: int
    split_tokens: int
    busy: int
    read_bytes: float
    sent_bytes: float
    reading: float
    merging: float
    exchanging: float
    by_collectives: float

    @property
    def seconds(self) -> float:
        return self.reading + self.merging + self.exchanging


def two_levels(
    machine: Machine,
    ranks: int,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: float,
    context: int,
    gpus: int,
    requests: int = 1,
    workgroups: int | None = None,
    block_n: int = BLOCK_N,
) -> TwoLevels:
    """The step where `ranks` of `gpus` share each sequence and the heads go over the other `gpus / ranks`.

    workgroups: of a GPU's decode launch, None for two a unit. Raises ModelError where the numbers do not divide.
    """
    numbers = {"gpus": gpus, "ranks": ranks, "context": context, "requests": requests, "kv_heads": kv_heads}
    for name, value in numbers.items():
        if value < 1:
            raise ModelError(f"{name} is {value}: it must be at least 1.")
    if gpus % ranks:
        raise ModelError(f"{ranks} ranks do not divide {gpus} GPUs.")
    if q_heads % gpus or q_heads % kv_heads:
        raise ModelError(f"{q_heads} query heads do not divide over {gpus} GPUs and {kv_heads} KV heads.")
    head_parts = gpus // ranks
    heads = ceil(kv_heads / head_parts)
    accs = requests * heads
    tokens = ceil(context / ranks)
    tiles = ceil(tokens / block_n)
    workgroups = workgroups or LEAST_WORKGROUPS_PER_UNIT * machine.units
    busy = min(workgroups, ceil(accs * tiles / MIN_TILES))
    splits = ceil(busy / accs)
    read_bytes = accs * tokens * 2 * head_dim * element_bytes
    # a unit draws its share of the bandwidth and no more
    share = min(1.0, busy / machine.units)
    levels = 0 if splits == 1 else 1 if splits <= FAN_IN else 2
    row_bytes = head_dim * QUERY_BYTES + (head_dim + 1) * STATE_BYTES
    sent_bytes = (ranks - 1) * requests * (q_heads // gpus) * row_bytes
    moving = sent_bytes / machine.link_bandwidth.value
    return TwoLevels(
        ranks,
        max(1, head_parts * heads // kv_heads),
        splits,
        min(ceil(tiles * accs / busy), tiles) * block_n,
        busy,
        read_bytes,
        sent_bytes,
        read_bytes / (machine.memory_bandwidth.value * share),
        levels * MERGE_SECONDS,
        moving + EXCHANGES * EXCHANGE_SECONDS if ranks > 1 else 0.0,
        moving + COLLECTIVES * COLLECTIVE_SECONDS if ranks > 1 else 0.0,
    )


def ways_to_share(machine: Machine, gpus: int, **layer) -> list[TwoLevels]:
    """Every number of ranks that divides `gpus`, with its splits. layer: the other arguments of `two_levels`."""
    return [
        two_levels(machine, ranks, gpus=gpus, **layer) for ranks in range(1, gpus + 1) if gpus % ranks == 0
    ]


def fastest(ways: Sequence[TwoLevels]) -> TwoLevels:
    """The way that takes least time; of equals the one with fewer ranks."""
    return min(ways, key=lambda way: (way.seconds, way.ranks))


def explain(ways: Sequence[TwoLevels], gpus: int) -> str:
    """Why the fastest way is the fastest, in a sentence."""
    best, alone = fastest(ways), ways[0]
    if len(ways) == 1:
        return "One GPU has the whole context."
    if best.ranks == 1:
        nearest = ways[1]
        return (
            f"Each sequence stays on one rank: {nearest.ranks} would read for "
            f"{(alone.reading - nearest.reading) * 1e6:.1f} us less and exchange for "
            f"{nearest.exchanging * 1e6:.1f} us (computed)."
        )
    return (
        f"{best.ranks} ranks of {gpus} share each sequence, {best.splits} splits inside each: they read for "
        f"{(alone.reading - best.reading) * 1e6:.1f} us less than one rank would and exchange for "
        f"{best.exchanging * 1e6:.1f} us, {best.by_collectives * 1e6:.1f} us by collectives (computed)."
    )

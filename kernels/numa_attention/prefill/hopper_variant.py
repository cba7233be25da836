"""Which layers the sm_90 prefill kernel takes, and with which tiles; imports neither Triton nor the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numa_attention.shapes import LayerShape, has_plain_cache

NAME = "hopper-prefill"
OLDEST_TRITON = (3, 6)
OLDEST_TRITON_WITH_CLUSTERS = (3, 8)  # 3.7 cannot name a part of a tile of which each workgroup has a copy
ROWS = 64  # of the packed tile, a consumer in a workgroup
MAX_CONSUMERS = 3
MAX_FLOAT8_CONSUMERS = 2  # the converter's registers are a third one's
FLOAT8_VALUE_STAGES = 2  # buffers of values in float16, which take twice as much as those of a float8 cache
# what the words of a form mean; none of them changes the result, but for the rounding of a float8 cache's
WORDS = {
    "ahead": "a tile's scores are multiplied with the values of the tile before, under which the softmax then runs",
    "turns": "consumers take turns at the matrix unit: one multiplies while the others exponentiate",
    "copied": "the producer copies queries, a tile ahead, where the rows of a group are evenly spaced",
    "persistent": "one workgroup a compute unit, which takes tiles until none is left",
    "staged": "outputs are put in order in shared memory, so that each thread writes 16 bytes",
    "roomy": "the producer gets more registers, and the consumers fewer",
    "cluster": "two workgroups divide a tile of twice the rows, and one copy of keys and values by TMA goes to both",
}
# of a float8 cache alone
FLOAT8_WORDS = {
    "rounded-queries": "queries are one e4m3 number each, not the sum of two: half of the product with keys",
}
FORM = "ahead copied persistent"
# of tiles that are split: parts for which the workspace has room, and further rows of the list
PLACES = 256
LEAST_PART = 2048  # keys
LEAST_SPLIT = 2 * LEAST_PART
SHARED_BYTES = 227 << 10
BARRIER_BYTES = 1 << 10
# tiles, half a walk over the costs of a causal head's blocks: 128/128 heads, 16,384 tokens, 132 SMs
DRIFT = 8


@dataclass(frozen=True)
class HopperTile:
    """KV tokens of a tile, and buffers for tiles of keys, and of values."""

    block_n: int
    stages: int


# by head_dim and head_dim_v. 128 is measured on an H200, the others are chosen by registers and shared memory
TILES = {
    (64, 64): HopperTile(128, 3),
    (128, 128): HopperTile(128, 3),
    (192, 128): HopperTile(128, 2),
    (256, 256): HopperTile(64, 2),
}
# the same for an e4m3 cache, whose values take buffers of two kinds; measured likewise
FLOAT8_TILES = {
    (64, 64): HopperTile(128, 3),
    (128, 128): HopperTile(128, 3),
    (192, 128): HopperTile(64, 3),
}


def takes_float8(shape: LayerShape) -> bool:
    """Whether a layer's products are in float8."""
    return shape.kv_dtype == torch.float8_e4m3fn


def tile_of(shape: LayerShape) -> HopperTile:
    """The tile of a layer that the kernel takes."""
    tiles = FLOAT8_TILES if takes_float8(shape) else TILES
    return tiles[shape.head_dim, shape.head_dim_v]


def why_not(shape: LayerShape, triton: tuple[int, int] | None) -> str | None:
    """What keeps a layer from this kernel under a release of Triton (None: it is not installed); None if nothing."""
    if triton is None or triton < OLDEST_TRITON:
        found = "none" if triton is None else f"{triton[0]}.{triton[1]}"
        return f"needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or later, found {found}"
    if shape.general or not has_plain_cache(shape):
        return "takes none of the options that only the general kernels take"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"takes queries in float16 and bfloat16, not in {shape.dtype}"
    if shape.kv_dtype != shape.dtype and not takes_float8(shape):
        return f"takes a cache in the queries' type or in float8_e4m3fn, not in {shape.kv_dtype}"
    tiles = FLOAT8_TILES if takes_float8(shape) else TILES
    if (shape.head_dim, shape.head_dim_v) not in tiles:
        known = ", ".join(f"{keys}/{values}" for keys, values in tiles)
        return f"takes head sizes (keys/values) {known}, not {shape.head_dim}/{shape.head_dim_v}"
    return None


def ctas_of(form: str) -> int:
    """Workgroups that compute a tile of the list together, as a cluster."""
    return 2 if "cluster" in form.split() else 1


def queues_of(form: str, domains: int) -> int:
    """Queues from which workgroups take tiles: those of hardware placement, or one for all, or none.

    domains: queues of hardware placement, 0 with dispatch. Where there are none, a workgroup has one tile, or clusters,
    which cannot agree on what one of them takes, divide them in turn.
    """
    return domains or int("persistent" in form.split() and ctas_of(form) == 1)


def splits_of(shape: LayerShape, form: str) -> bool:
    """Whether tiles of a layer may be split: not by clusters, nor where a window bounds how long tiles take."""
    return shape.window < 0 and ctas_of(form) == 1


def check_cluster(form: str, queues: int, triton: tuple[int, int] | None) -> None:
    """Raises ValueError where a form asks for clusters, and a release of Triton or hardware placement allows none."""
    if ctas_of(form) == 1:
        return
    if triton is None or triton < OLDEST_TRITON_WITH_CLUSTERS:
        oldest = ".".join(map(str, OLDEST_TRITON_WITH_CLUSTERS))
        found = "none" if triton is None else f"{triton[0]}.{triton[1]}"
        raise ValueError(
            f"{NAME} with the word cluster needs Triton {oldest} or later, found {found}: earlier ones cannot copy "
            f"pages into parts of a tile that both workgroups have. Leave the word out"
        )
    if queues:
        raise ValueError(
            f"{NAME} with the word cluster takes no tiles by hardware placement, whose queues are for single "
            f"workgroups: leave the word out, or NUMA_SWIZZLE_PLACEMENT at dispatch"
        )


def parts_of(form: str) -> int:
    """The e4m3 numbers that a query is the sum of over a float8 cache."""
    return 1 if "rounded-queries" in form.split() else 2


def shared_bytes(shape: LayerShape, consumers: int, block_n: int, stages: int, form: str) -> int:
    """Shared memory of a workgroup, about."""
    rows, size, words = consumers * ROWS, shape.dtype.itemsize, form.split()
    if takes_float8(shape):
        queries = rows * shape.head_dim * (parts_of(form) + (size if "copied" in words else 0))
        converted = 2 * min(stages, FLOAT8_VALUE_STAGES)  # of two bytes
        tiles = block_n * (stages * (shape.head_dim + shape.head_dim_v) + converted * shape.head_dim_v)
    else:
        queries = rows * shape.head_dim * size
        tiles = stages * block_n * (shape.head_dim + shape.head_dim_v) * size
    outputs = rows * shape.head_dim_v * size if "staged" in words else 0
    return queries + tiles + outputs + BARRIER_BYTES


def partitions_of(consumers: int, form: str, float8: bool) -> tuple[list[int], list[int]]:
    """Warps, and registers of a thread, of all partitions but the first consumer, which gets the rest of an SM's.

    Consumers, the converter of a float8 cache's values, the producer. Raises ValueError for more
    consumers than there are registers for.
    """
    if float8 and consumers > MAX_FLOAT8_CONSUMERS:
        raise ValueError(
            f"{NAME} over a float8 cache has two consumers at most: give it at most {MAX_FLOAT8_CONSUMERS * ROWS} rows"
        )
    if float8:
        return [4] * consumers + [1], [232] * (consumers - 1) + [24, 24]
    if consumers == MAX_CONSUMERS:
        consumer, producer = 160, 32
    else:
        consumer, producer = (232, 40) if "roomy" in form.split() else (240, 24)
    return [4] * (consumers - 1) + [1], [consumer] * (consumers - 1) + [producer]


def keep_together(blocks: int, head_bytes: int, units: int, l2_bytes: int) -> bool:
    """Whether clusters that each compute every `units`-th tile find the keys and values of their heads in the L2.

    Some get long tiles first, others short ones: they drift apart by up to DRIFT tiles, and so work on several heads at
    a time, of `blocks` tiles and `head_bytes` bytes of keys and values each. Workgroups that the device dispatches as
    others end stay together, but each begins by waiting for its first tiles.
    """
    return (1 + DRIFT * units / max(blocks, 1)) * head_bytes <= l2_bytes

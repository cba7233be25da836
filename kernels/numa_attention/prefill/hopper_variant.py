"""Which layers the sm_90 prefill kernel takes, and with which tiles; imports neither Triton nor the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numa_attention.shapes import LayerShape, has_plain_cache

NAME = "hopper-prefill"
OLDEST_TRITON = (3, 6)
ROWS = 64  # of the packed tile, a consumer
MAX_CONSUMERS = 3
# what the words of a form mean; none of them changes the result
WORDS = {
    "ahead": "a tile's scores are multiplied with the values of the tile before, under which the softmax then runs",
    "turns": "consumers take turns at the matrix unit: one multiplies while the others exponentiate",
    "copied": "the producer copies queries, a tile ahead, where the rows of a group are evenly spaced",
    "persistent": "one workgroup a compute unit, which computes several tiles",
    "staged": "outputs are put in order in shared memory, so that each thread writes 16 bytes",
    "roomy": "the producer gets more registers, and the consumers fewer",
}
FORM = "ahead turns copied persistent"
SHARED_BYTES = 227 << 10
BARRIER_BYTES = 1 << 10


@dataclass(frozen=True)
class HopperTile:
    """KV tokens of a tile, and buffers for tiles of keys, and of values."""

    block_n: int
    stages: int


# by head_dim and head_dim_v. Not measured yet: chosen by registers and shared memory
TILES = {
    (64, 64): HopperTile(128, 3),
    (128, 128): HopperTile(128, 2),
    (192, 128): HopperTile(128, 2),
    (256, 256): HopperTile(64, 2),
}


def why_not(shape: LayerShape, triton: tuple[int, int] | None) -> str | None:
    """What keeps a layer from this kernel under a release of Triton (None: it is not installed); None if nothing."""
    if triton is None or triton < OLDEST_TRITON:
        found = "none" if triton is None else f"{triton[0]}.{triton[1]}"
        return f"needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or later, found {found}"
    if shape.general or not has_plain_cache(shape):
        return "takes none of the options that only the general kernels take"
    if shape.dtype not in (torch.float16, torch.bfloat16) or shape.kv_dtype != shape.dtype:
        return f"takes queries and a cache both in float16 or both in bfloat16, not {shape.dtype} and {shape.kv_dtype}"
    if (shape.head_dim, shape.head_dim_v) not in TILES:
        known = ", ".join(f"{keys}/{values}" for keys, values in TILES)
        return f"takes head sizes (keys/values) {known}, not {shape.head_dim}/{shape.head_dim_v}"
    return None


def shared_bytes(shape: LayerShape, consumers: int, block_n: int, stages: int, form: str) -> int:
    """Shared memory of a workgroup, about."""
    elements = consumers * ROWS * shape.head_dim + stages * block_n * (shape.head_dim + shape.head_dim_v)
    if "staged" in form.split():
        elements += consumers * ROWS * shape.head_dim_v
    return elements * shape.dtype.itemsize + BARRIER_BYTES


def registers_of(consumers: int, form: str) -> tuple[int, int]:
    """Registers of a thread of a consumer, and of the producer: together those of an SM."""
    if consumers == MAX_CONSUMERS:
        return 160, 32
    return (232, 40) if "roomy" in form.split() else (240, 24)

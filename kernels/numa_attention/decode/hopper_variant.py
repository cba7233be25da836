"""Which layers the sm_90 decode kernel takes, and with which tiles; imports neither Triton nor the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numa_attention.shapes import LayerShape, has_plain_cache

NAME = "hopper-decode"
FORMS = ("single", "two-stage", "four-stage")
OLDEST_TRITON = (3, 6)
HEAD_DIMS = (64, 128, 256)
BLOCK_N = 64  # keys of a tile: the rows of a wgmma
WIDE_BLOCK_N = 128  # of float8, whose tiles are half as large: fewer waits a key
PART = 64  # dimensions of one part of the accumulator, likewise
LEAST_ROWS, MOST_ROWS = 8, 64  # as the right operand of a wgmma, and as the left one
MAX_STAGES = 8
SHARED_BYTES = 227 << 10  # of an SM, for its workgroups
RESERVED_BYTES = 1 << 10  # that each workgroup takes besides its own
BARRIER_BYTES = 2 << 10  # barriers and the scratch of reductions
REGISTERS = {
    1: 255,
    2: 128,
}  # of a thread, by workgroups of an SM: eight warps, of which the four that compute get more
# larger tiles leave no registers for the scores of two: rows x head_dim x keys, by bytes of an element
FOUR_STAGE = {2: 64 * 128 * 64, 1: 8 * 128 * 128}
FLOAT8_HEAD_DIM = 128  # above it unpacked values leave no registers for wide tiles, nor for two


@dataclass(frozen=True)
class HopperTile:
    """KV tokens of a tile, tiles of the ring, the form of the pipeline, and workgroups of an SM."""

    block_n: int
    stages: int
    form: str
    workgroups_per_unit: int


def why_not(shape: LayerShape, triton: tuple[int, int] | None) -> str | None:
    """What keeps a layer from this kernel under a release of Triton (None: it is not installed); None if nothing."""
    if triton is None or triton < OLDEST_TRITON:
        found = "none" if triton is None else f"{triton[0]}.{triton[1]}"
        return f"needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or later, found {found}"
    if shape.general or not has_plain_cache(shape):
        return "takes none of the options that only the general kernels take"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"takes queries in float16 and bfloat16, not {_short(shape.dtype)}"
    if shape.kv_dtype not in (shape.dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return (
            f"takes caches in the query's type, float8_e4m3fn and float8_e5m2, not {_short(shape.kv_dtype)}"
        )
    if shape.head_dim != shape.head_dim_v or shape.head_dim not in HEAD_DIMS:
        return (
            f"takes head sizes {', '.join(map(str, HEAD_DIMS))}, keys and values alike, not {shape.head_dim} and "
            f"{shape.head_dim_v}"
        )
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(packed: int) -> int:
    """Rows of the packed query tile for requests of so many (query token, query head) pairs, a power of two."""
    return min(max(packed, LEAST_ROWS), MOST_ROWS)


def stages_of(shape: LayerShape, rows: int, workgroups_per_unit: int, block_n: int = BLOCK_N) -> int:
    """Tiles of keys and of values that a workgroup's share of the shared memory holds beside queries and weights."""
    tile = block_n * (shape.head_dim + shape.head_dim_v) * shape.kv_dtype.itemsize
    return min(_ring_bytes(shape, rows, workgroups_per_unit, block_n) // tile, MAX_STAGES)


def key_stages_of(shape: LayerShape, rows: int, stages: int, block_n: int) -> int:
    """Tiles of keys beside `stages` of values: one more, if those are not one and the shared memory has room."""
    ring = _ring_bytes(shape, rows, _workgroups_per_unit(shape, rows, stages, block_n), block_n)
    keys, values = (block_n * dim * shape.kv_dtype.itemsize for dim in (shape.head_dim, shape.head_dim_v))
    return stages + (1 < stages < MAX_STAGES and (stages + 1) * keys + stages * values <= ring)


def _ring_bytes(shape: LayerShape, rows: int, workgroups_per_unit: int, block_n: int) -> int:
    """What queries and weights leave of a workgroup's shared memory."""
    share = SHARED_BYTES // workgroups_per_unit - RESERVED_BYTES - BARRIER_BYTES
    # for float8 keys a number in float16 is the sum of three of a byte
    query_bytes = 3 if shape.kv_dtype.itemsize == 1 and shape.dtype == torch.float16 else 2
    return share - rows * (query_bytes * shape.head_dim + 2 * block_n)


def _workgroups_per_unit(shape: LayerShape, rows: int, stages: int, block_n: int) -> int:
    return 2 if stages_of(shape, rows, 2, block_n) >= stages else 1


def tile_of(shape: LayerShape, rows: int) -> HopperTile:
    """The tile for a layer that the kernel takes and packed query tiles of `rows` rows."""
    float8 = shape.kv_dtype.itemsize == 1
    large = float8 and shape.head_dim > FLOAT8_HEAD_DIM
    block_n = WIDE_BLOCK_N if float8 and not large else BLOCK_N
    fits = rows * shape.head_dim * block_n <= FOUR_STAGE[shape.kv_dtype.itemsize]
    form = "four-stage" if fits and not large else "two-stage"
    # two workgroups hide each other's waits, where each can still copy ahead; unpacked values and the accumulator of 64
    # rows want all registers
    for workgroups in (1,) if large and rows == MOST_ROWS else (2, 1):
        stages = stages_of(shape, rows, workgroups, block_n)
        if stages >= 2:
            return HopperTile(block_n, stages, form, workgroups)
    raise ValueError(f"{rows} rows of head_dim {shape.head_dim} leave no room for a tile: take fewer rows")


def registers_of(shape: LayerShape, rows: int, stages: int, block_n: int) -> int:
    """Registers that a thread may have: those of two workgroups an SM, where the shared memory holds two."""
    return REGISTERS[_workgroups_per_unit(shape, rows, stages, block_n)]

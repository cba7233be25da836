"""Which layers the gfx1250 decode kernel takes, and with which tiles; imports neither Triton nor the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from numa_attention.shapes import CONTIGUOUS, LayerShape, chunk_of

FORMS = ("single", "two-stage", "four-stage")
OLDEST_TRITON = (3, 7)  # 3.6 cannot assemble it
OLDEST_TRITON_WITH_CLUSTERS = (3, 8)  # 3.7 takes no product whose batches are divided over a cluster
TILE_BYTES = (
    16 << 10
)  # of keys, and of values: three of both leave room for a second workgroup in 320 KB of LDS
MAX_BLOCK_N = 128
# TDM requests under way at a time: the compiler waits before it lets another one begin
MAX_REQUESTS = 11
PREFILL_WARPS = 4  # one a SIMD
# head size -> rows and KV tokens of a tile: with any options, no registers spill
PREFILL_ROWS = {64: (128, 64), 128: (128, 64), 256: (64, 32)}
MAX_CLUSTER = 16
LEAST_FILL = 0.75  # of the workgroups that a device holds
REQUESTS_AHEAD = 5  # tiles of keys or values that the four-stage form has under way
WIDE_ROW = 256  # bytes of a TDM row that goes straight to LDS, past the caches, at full rate


@dataclass(frozen=True)
class Cdna5Tile:
    """KV tokens of a tile, and the form of the pipeline."""

    block_n: int
    form: str


@dataclass(frozen=True)
class Rows:
    """What a row of a TDM request holds besides the key or value of one token.

    paired: the token's key and value, in one request. flat_k, flat_v: all tokens of the page, one after the other;
    flat_k is of both where they are paired.
    """

    paired: bool = False
    flat_k: bool = False
    flat_v: bool = False


def why_not(shape: LayerShape, triton: tuple[int, int] | None) -> str | None:
    """What keeps a layer from this kernel under a release of Triton (None: it is not installed); None if nothing."""
    if triton is None or triton < OLDEST_TRITON:
        found = "none" if triton is None else f"{triton[0]}.{triton[1]}"
        return f"needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or later, found {found}"
    if shape.page_size == CONTIGUOUS:
        return "takes paged caches, not keys and values in a row"
    if not shape.shard.is_whole:
        return "takes whole sequences, not a cache sharded over ranks"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"takes queries in float16 and bfloat16, not {_short(shape.dtype)}"
    if shape.kv_dtype not in (shape.dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return (
            f"takes caches in the query's type, float8_e4m3fn and float8_e5m2, not {_short(shape.kv_dtype)}"
        )
    shortest = 33 if shape.kv_dtype.itemsize == 1 else 17  # the depth of the instructions
    if min(shape.head_dim, shape.head_dim_v) < shortest:
        return f"takes head sizes from {shortest} on for a cache in {_short(shape.kv_dtype)}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def tile_of(shape: LayerShape) -> Cdna5Tile:
    """The tile for a layer that the kernel takes."""
    itemsize = shape.kv_dtype.itemsize
    block_d = _power_of_2(max(shape.head_dim, shape.head_dim_v))
    fewest = 64 if itemsize == 1 else 32  # the depth of the second product
    block_n = max(min(TILE_BYTES // (block_d * itemsize), MAX_BLOCK_N), fewest)
    while block_n > fewest and REQUESTS_AHEAD * copies_of(shape.page_size, block_n) > MAX_REQUESTS:
        block_n //= 2
    runs_ahead = REQUESTS_AHEAD * copies_of(shape.page_size, block_n) <= MAX_REQUESTS
    # where requests are too small for two tiles ahead, a third buffer would only cost LDS
    return Cdna5Tile(block_n, "four-stage" if runs_ahead else "two-stage")


def prefill_tile_of(shape: LayerShape) -> tuple[int, int, int]:
    """Rows, KV tokens and warps of a prefill tile for a layer that the kernel takes."""
    block_d = _power_of_2(max(shape.head_dim, shape.head_dim_v))
    rows, tokens = PREFILL_ROWS[max(block_d, 64)]
    return rows, max(tokens, 64) if shape.kv_dtype.itemsize == 1 else tokens, PREFILL_WARPS


def cluster_of(shape: LayerShape, units: int, workgroups: int) -> tuple[int, int] | None:
    """(workgroups a cluster, KV tokens a workgroup) of a step of `units` units on a device that holds `workgroups`.

    None where clusters would leave workgroups idle, or where pages are too short: a page must hold a tile of each
    workgroup, as one TDM request brings them all.
    """
    block_n = 64 if shape.kv_dtype.itemsize == 1 else 32
    cluster = 1
    while (
        2 * cluster <= MAX_CLUSTER
        and 2 * cluster * units <= workgroups
        and shape.page_size % (2 * cluster * block_n) == 0
    ):
        cluster *= 2
    if cluster == 1 or units * cluster < LEAST_FILL * workgroups:
        return None
    widest = tile_of(shape).block_n
    while 2 * block_n <= widest and shape.page_size % (2 * cluster * block_n) == 0:
        block_n *= 2
    return cluster, block_n


def copies_of(page_size: int, block_n: int) -> int:
    """TDM requests of one tile of keys or of values."""
    return block_n // chunk_of(page_size, block_n)


def rows_of(k_pages: torch.Tensor, v_pages: torch.Tensor) -> Rows:
    """How to make rows of at least WIDE_ROW bytes, where the layout of a cache [page, token, kv_head, head_dim] can."""
    keys, k_strides = k_pages.shape[-1], k_pages.stride()
    beside = (
        v_pages.storage_offset() - k_pages.storage_offset() == keys
        and k_pages.untyped_storage().data_ptr() == v_pages.untyped_storage().data_ptr()
    )
    # this runs at every launch: all that follows from sizes is kept
    return _rows(keys, v_pages.shape[-1], k_pages.itemsize, k_strides, v_pages.stride(), beside)


@cache
def _rows(
    keys: int,
    values: int,
    itemsize: int,
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    beside: bool,
) -> Rows:
    """The same of head sizes, strides, and whether the first value lies right behind the first key."""
    # heads of other sizes are padded in LDS
    short_keys, short_values = (
        width == _power_of_2(width) and width * itemsize < WIDE_ROW for width in (keys, values)
    )
    if short_keys and keys == values and beside and k_strides == v_strides:
        return Rows(paired=True, flat_k=2 * keys * itemsize < WIDE_ROW and k_strides[1] == 2 * keys)
    return Rows(flat_k=short_keys and k_strides[1] == keys, flat_v=short_values and v_strides[1] == values)


def instruction_depth(shape: LayerShape, block_n: int) -> int:
    """K of the WMMA instructions of both products."""
    if shape.kv_dtype.itemsize == 2:
        return 32
    return min(128, block_n, *(_power_of_2(size) for size in (shape.head_dim, shape.head_dim_v)))

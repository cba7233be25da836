"""Prefill on sm_90: what producer and consumers agree on, the constants of a kernel and the walk of a tile."""

from __future__ import annotations

from dataclasses import dataclass, fields

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # rows of the packed tile that one consumer keeps in a workgroup
QUERY_BYTES = gl.constexpr(2)  # of an element of queries


@dataclass(frozen=True, eq=False)
class Constants:
    """What one compiled kernel is made for: a layer's shape, a variant and the options of a call.

    Compared by identity, as launches do each time.
    """

    group: int
    dim: int  # columns of keys, or the first of two parts
    second: int  # columns of the second part, 0 for none
    dim_v: int
    block_n: int
    page_size: int
    chunk: int  # tokens of one TMA request
    window: int
    causal: bool
    has_cap: bool
    has_alibi: bool
    has_sink: bool
    has_lse: bool
    has_scales: bool
    consumers: int
    ctas: int  # workgroups of a cluster, each of which has all consumers
    stages: int
    value_stages: int  # buffers of values as they are multiplied
    ahead: bool
    turns: bool
    query_copies: bool
    staged: bool
    splits: bool  # whether tiles may be split; see `tile_splits.py`
    queues: int  # from which workgroups take tiles, 0 for none; see `hopper_tiles.py`
    float8: bool  # whether the cache is e4m3, and so the keys that are multiplied
    cache_bytes: int  # of an element of keys and values
    query_parts: int  # numbers that a query is the sum of
    depth: int  # of an instruction of the product with keys
    worker_warps: list[int]  # of all partitions but the first consumer, and the registers of their threads
    worker_registers: list[int]

    def __post_init__(self) -> None:
        # as a kernel sees them
        for field in fields(self):
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))

    @property
    def rows(self) -> gl.constexpr:
        """Rows of the packed tile that one consumer keeps, in all workgroups of a cluster."""
        return ROWS * self.ctas

    @property
    def block_m(self) -> gl.constexpr:
        """Rows of the packed tile."""
        return self.rows * self.consumers


@gluon.jit
def work_of(index, step, C: gl.constexpr):
    """A tile of the list or a part of one: where its rows are, and which of the KV tiles that they see it walks."""
    (
        tiles,
        count,
        first_request,
        query_start_loc,
        seq_lens,
        block_table,
        block_table_stride,
        queues,
        splits,
    ) = step
    p_tile = tiles + index.to(gl.int64) * 4
    listed = gl.load(p_tile)
    kv_head = gl.load(p_tile + 1)
    block = gl.load(p_tile + 2)
    request = (gl.maximum(listed, 0) + first_request).to(gl.int64)
    query_start = gl.load(query_start_loc + request)
    # a padding row of the list has no rows to write
    query_len = gl.where(listed >= 0, gl.load(query_start_loc + request + 1) - query_start, 0)
    seq_len = gl.load(seq_lens + request)
    context_len = seq_len - query_len

    # the first and last query token of this tile bound the keys it sees, and those that all its rows see
    first_position = context_len + block * C.block_m // C.group
    last_position = context_len + gl.minimum((block * C.block_m + C.block_m - 1) // C.group, query_len - 1)
    key_high = seq_len
    all_see_high = seq_len
    if C.causal:
        key_high = gl.minimum(last_position + 1, seq_len)
        all_see_high = gl.minimum(first_position + 1, seq_len)
    # where no row sees a key, one tile is walked all the same, and masked
    tile_high = gl.maximum((key_high + C.block_n - 1) // C.block_n, 1)
    key_low = gl.maximum(first_position - C.window, 0) if C.window >= 0 else 0
    tile_low = gl.minimum(key_low // C.block_n, tile_high - 1)
    tile_interior = tile_low
    if C.window >= 0:
        tile_interior = (gl.maximum(last_position - C.window, 0) + C.block_n - 1) // C.block_n
    tile_diagonal = gl.minimum(gl.maximum(all_see_high, 0) // C.block_n, tile_high)
    # steps of the walk: 0 and those before `diagonal` masked, those before `interior` not, the rest masked again
    steps = tile_high - tile_low
    diagonal = tile_high - tile_diagonal
    interior = tile_high - tile_interior
    part = block * 0
    parts = part + 1
    place = part
    if C.splits:
        part = gl.load(p_tile + 3)
        p_split = splits + 2 + 2 * gl.maximum(listed, 0)
        parts = gl.load(p_split)
        blocks = (query_len * C.group + C.block_m - 1) // C.block_m
        place = gl.load(p_split + 1) + (kv_head * blocks + block) * parts + part
        skipped = steps * part // parts
        steps = steps * (part + 1) // parts - skipped
        tile_high -= skipped
        diagonal -= skipped
        interior -= skipped
    diagonal = gl.minimum(gl.maximum(diagonal, 1), steps)
    interior = gl.minimum(gl.maximum(interior, diagonal), steps)
    return (
        request,
        kv_head,
        block,
        query_start,
        query_len,
        seq_len,
        key_low,
        tile_high,
        steps,
        diagonal,
        interior,
        part,
        parts,
        place,
    )

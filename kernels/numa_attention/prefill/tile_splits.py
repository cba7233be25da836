"""Which tiles of a prefill step are split, and into how many parts: decided on the device, where the lengths are.

A tile of few query tokens on a long prefix takes as long as the prefix is, however many compute units are idle. Tiles
longer than a compute unit's fair share of the step's work are split, so that no part is longer than half of it.

The result is a table int32 [1 + requests, 2], whose first row has the number of further rows in the tile list. Row
1 + r: the parts of each tile of request r, and where they begin in the workspace. The further rows, (request, KV head,
query block, part) of all parts but the first, stand right before the others in the list, as the longest work first.
"""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.direct_launch import Launched
from numa_attention.jit import Launcher, kernel, pointer_traits
from numa_attention.prefill import hopper_variant

PLACES = tl.constexpr(hopper_variant.PLACES)
LEAST_KEYS = tl.constexpr(hopper_variant.LEAST_PART)
MOST_PARTS = tl.constexpr(16)  # of a tile
ROWS = 32  # of the list that a program writes


@kernel(do_not_specialize=["first_request", "requests", "units"])
def splits_kernel(
    query_start_loc,
    seq_lens,
    table,
    rows,
    first_request,
    requests,
    units,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write `table` and the further rows, which end where `rows` int32 [PLACES, 4] ends."""
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < requests
    b_start = tl.load(query_start_loc + first_request + o_r, mask=m_r, other=0)
    b_queries = tl.load(query_start_loc + first_request + o_r + 1, mask=m_r, other=0) - b_start
    b_keys = tl.load(seq_lens + first_request + o_r, mask=m_r, other=0)
    b_cached = tl.maximum(b_keys - b_queries, 0)
    b_blocks = (b_queries * GROUP + BLOCK_M - 1) // BLOCK_M
    b_tiles = KV_HEADS * b_blocks
    b_seen = b_cached + b_queries // 2 if CAUSAL else b_keys
    # all lengths in keys
    share = tl.sum(b_tiles.to(tl.float32) * b_seen.to(tl.float32)) / units
    piece = tl.maximum(share * 0.5, LEAST_KEYS)
    b_parts = tl.ceil(b_keys.to(tl.float32) / piece).to(tl.int32)
    # of every tile of a request, so that none has more parts than KV tiles
    b_least = (b_cached if CAUSAL else b_keys) // BLOCK_N
    b_parts = tl.minimum(tl.minimum(b_parts, MOST_PARTS), b_least)
    b_parts = tl.where((b_keys.to(tl.float32) > 2 * piece) & (b_queries > 0), tl.maximum(b_parts, 1), 1)
    b_places = tl.where(b_parts > 1, b_tiles * b_parts, 0)
    b_parts = tl.where(tl.cumsum(b_places, 0) > PLACES, 1, b_parts)
    b_places = tl.where(b_parts > 1, b_tiles * b_parts, 0)
    b_further = tl.where(b_parts > 1, b_places - b_tiles, 0)
    further = tl.sum(b_further)
    if tl.program_id(0) == 0:
        tl.store(table, further)
        tl.store(table + 2 + 2 * o_r, b_parts, mask=m_r)
        tl.store(table + 3 + 2 * o_r, tl.cumsum(b_places, 0) - b_places, mask=m_r)

    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS) - (PLACES - further)
    b_end = tl.cumsum(b_further, 0)
    # the request of a row is the number of requests whose rows end at or before it
    request = tl.sum((b_end[None, :] <= o_row[:, None]).to(tl.int32), 1)
    m_own = o_r[None, :] == request[:, None]
    begin = tl.sum(tl.where(m_own, (b_end - b_further)[None, :], 0), 1)
    parts = tl.maximum(tl.sum(tl.where(m_own, b_parts[None, :], 0), 1), 2)
    blocks = tl.maximum(tl.sum(tl.where(m_own, b_blocks[None, :], 0), 1), 1)
    at = o_row - begin
    tile = at // (parts - 1)
    p_row = rows + (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * 4
    m_row = o_row >= 0
    tl.store(p_row, request, mask=m_row)
    tl.store(p_row + 1, tile // blocks, mask=m_row)
    tl.store(p_row + 2, blocks - 1 - tile % blocks, mask=m_row)
    tl.store(p_row + 3, 1 + at % (parts - 1), mask=m_row)


_launch = Launcher(splits_kernel)


def build_on_device(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    first_request: int,
    requests: int,
    units: int,
    *,
    kv_heads: int,
    group: int,
    block_m: int,
    block_n: int,
    causal: bool,
) -> Launched:
    """Fill `table` int32 [1 + the most requests, 2] and the end of `rows` int32 [PLACES, 4].

    query_start_loc int32 [R + 1], seq_lens int32 [R]: of all requests of a step, of which `requests` from
    `first_request` on prefill. units: compute units.
    """
    constants = dict(
        KV_HEADS=kv_heads, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal,
        BLOCK_R=1 << (table.shape[0] - 2).bit_length(), ROWS=ROWS,
    )  # fmt: skip
    arguments = (query_start_loc, seq_lens, table, rows, first_request, requests, units)
    key = (table.get_device(), pointer_traits(*arguments[:4]), *constants.values())
    grid = hopper_variant.PLACES // ROWS, 1, 1
    direct = _launch(key, grid, arguments, constants)
    return Launched("splits", direct, grid, (*arguments, *constants.values()))

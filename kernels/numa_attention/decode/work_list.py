"""The work list of a decode step: which workgroup reads which KV tiles of which request.

A *unit* is one (request, KV head, row block): one packed GQA tile and all the KV tiles it reads. A request of n query
tokens has ceil(n * group / block_m) row blocks. Units are laid one after the other, KV head by KV head and in each
request by request, and the line of all their tiles is cut into equal contiguous ranges, one a workgroup. A unit that
lies in several ranges is *split*; its parts are merged by the workgroup that arrives last. Equal ranges balance uneven
lengths, fill the device at batch 1, and leave at most two partial results a workgroup. As every head's stretch of the
line is cut alike, all heads of a token, which lie side by side in its page, are read at about the same time.

Where every range can be a part of one unit, with no more than one tile above the average, units are cut evenly instead,
and no range holds more than one part: to go from one unit to the next costs more than a tile.

The list has two arrays, built by `build_on_device` (one launch, no host synchronisation) or `build_on_host` (the same
definition in numpy):

- ranges int32 [workgroups, 16]: first item, number of items, and the fields of the first item again, which a workgroup
  then need not wait for; domain d runs rows d * (workgroups / domains) and on, and each domain has as many of the
  ranges as the others, give or take one, so that a short step keeps all of them busy. Neighbouring ranges, and with
  them the parts of a unit, share a domain where there are units enough;
- items int32 [capacity, 16]: request, KV head, row block, first tile, end tile, split, splits of the unit, first
  workgroup of the unit, and of the request its first query token, query tokens, and keys. Item u + w is workgroup w's
  part of unit u, so positions need no counting; others are unused.

A row of either is half a cache line, most of it used.

Tile t of a request covers KV tokens [t * block_n, (t + 1) * block_n) of the cache, which may be one rank's shard of the
sequence. Tiles left of every query's window are left out.
"""

from __future__ import annotations

import numpy as np

from numa_attention.mapping import piece_start
from numa_attention.sharding import WHOLE, Shard

ROW_FIELDS = 16  # of a row of either array
FIRST_ITEM, ITEM_COUNT, FIRST_FIELDS = range(3)  # where they are in a row of ranges
ITEM_FIELDS = 11  # used of a row of items
(
    REQUEST, KV_HEAD, ROW_BLOCK, TILE_BEGIN, TILE_END, SPLIT, SPLITS, FIRST_WORKGROUP, QUERY_START, QUERY_LEN, SEQ_LEN,
) = range(ITEM_FIELDS)  # fmt: skip


def capacity(max_requests: int, kv_heads: int, row_blocks: int, workgroups: int) -> int:
    """Items a list for `max_requests` requests can need."""
    return max_requests * kv_heads * row_blocks + workgroups


def partial_slot(split: int, first_workgroup: int) -> int:
    """Where a split's part is kept: a workgroup has at most two, of the unit it ends and of the unit it begins."""
    return 2 * (first_workgroup + split) + (split == 0)


def row_of(workgroup: int, used: int, workgroups: int, domains: int) -> int:
    """The row of `ranges` that holds the range of logical workgroup number `workgroup`, of `used`."""
    domain = next(d for d in range(domains) if workgroup < piece_start(d + 1, used, domains))
    return domain * (workgroups // domains) + workgroup - piece_start(domain, used, domains)


def build_on_host(
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    kv_heads: int,
    group: int,
    block_m: int,
    block_n: int,
    window: int,
    workgroups: int,
    min_tiles: int,
    domains: int = 1,
    first_request: int = 0,
    shard: Shard = WHOLE,
) -> tuple[np.ndarray, np.ndarray]:
    """(ranges, items) for requests of seq_lens int [R] and query_start_loc int [R + 1]; see the module's text.

    min_tiles: the fewest tiles a workgroup is given while another could take them. domains: they divide workgroups.
    first_request: what the items call the first of these requests. shard: the part of each sequence in the cache.
    """
    query_lens = np.diff(query_start_loc)
    blocks = -(-np.maximum(query_lens, 0).astype(np.int64) * group // block_m)
    items = np.full((int(blocks.sum()) * kv_heads + workgroups, ROW_FIELDS), -1, np.int32)
    ranges = np.zeros((workgroups, ROW_FIELDS), np.int32)
    requests = np.flatnonzero(query_lens > 0)  # padding requests have no queries
    if len(requests) == 0:
        return ranges, items
    request_fields = np.stack((query_start_loc[:-1], query_lens, seq_lens), axis=1)
    seq_lens, query_lens = seq_lens[requests].astype(np.int64), query_lens[requests].astype(np.int64)
    begin = (
        shard.count(np.maximum(seq_lens - query_lens - window, 0)) // block_n
        if window >= 0
        else np.zeros_like(seq_lens)
    )
    # a request with queries but no keys still has its output written: it takes one empty tile
    tiles = np.maximum(-(-shard.count(seq_lens) // block_n) - begin, 1)
    blocks = blocks[requests]
    first_unit = np.cumsum(blocks) - blocks  # among those of a head
    head_units = int(blocks.sum())
    total = int((tiles * blocks).sum()) * kv_heads
    parts = -(-tiles // max(-(-total // workgroups), min_tiles))
    one_part_each = int((parts * blocks).sum()) * kv_heads <= workgroups
    # what the line is made of: tiles, or parts of a unit
    steps = parts if one_part_each else tiles
    unit_begin = np.concatenate(([0], np.cumsum(np.tile(np.repeat(steps, blocks), kv_heads))))
    total = int(unit_begin[-1])
    used = total if one_part_each else min(workgroups, -(-total // min_tiles))
    bounds = np.arange(used + 1) * total // used
    first_of = ((unit_begin[:-1] + 1) * used - 1) // total
    last_of = (unit_begin[1:] * used - 1) // total
    for workgroup in range(used):
        low, high = bounds[workgroup], bounds[workgroup + 1]
        first = int(np.searchsorted(unit_begin, low, side="right")) - 1
        last = int(np.searchsorted(unit_begin, high, side="left")) - 1
        unit = np.arange(first, last + 1)
        active = np.searchsorted(first_unit, unit % head_units, side="right") - 1
        from_step = np.maximum(low, unit_begin[unit]) - unit_begin[unit]
        to_step = np.minimum(high, unit_begin[unit + 1]) - unit_begin[unit]
        request = requests[active]
        items[unit + workgroup, :ITEM_FIELDS] = np.stack(
            (
                first_request + request,
                unit // head_units,
                unit % head_units - first_unit[active],
                begin[active] + tiles[active] * from_step // steps[active],
                begin[active] + tiles[active] * to_step // steps[active],
                workgroup - first_of[unit],
                last_of[unit] - first_of[unit] + 1,
                first_of[unit],
                *request_fields[request].T,
            ),
            axis=1,
        )
        row = ranges[row_of(workgroup, used, workgroups, domains)]
        row[[FIRST_ITEM, ITEM_COUNT]] = first + workgroup, last - first + 1
        row[FIRST_FIELDS : FIRST_FIELDS + ITEM_FIELDS] = items[first + workgroup, :ITEM_FIELDS]
    return ranges, items

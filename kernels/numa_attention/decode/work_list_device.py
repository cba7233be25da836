"""The device form of `decode/work_list.py`: one launch, a program a workgroup, nothing read back by the host."""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.jit import kernel
from numa_attention.variants import next_power_of_2


@kernel(do_not_specialize=["num_requests"])
def work_list_kernel(
    seq_lens,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    ranges,  # int32 [workgroups, 2]
    items,  # int32 [capacity, 8]
    num_requests,
    workgroups,
    KV_HEADS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOMAINS: tl.constexpr,
):
    UNITS: tl.constexpr = KV_HEADS * ROW_BLOCKS
    row = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < num_requests
    b_seq = tl.load(seq_lens + o_r, mask=m_r, other=0)
    b_query = tl.load(query_start_loc + o_r + 1, mask=m_r, other=0) - tl.load(
        query_start_loc + o_r, mask=m_r, other=0
    )
    if WINDOW >= 0:
        b_begin = tl.maximum(b_seq - b_query - WINDOW, 0) // BLOCK_N
    else:
        b_begin = tl.zeros_like(b_seq)
    b_active = (b_query > 0).to(tl.int32)
    b_tiles = tl.maximum((b_seq + BLOCK_N - 1) // BLOCK_N - b_begin, 1) * b_active
    b_weight = b_tiles.to(tl.int64) * UNITS
    b_end = tl.cumsum(b_weight, 0)
    b_index = tl.cumsum(b_active, 0) - 1
    total = tl.sum(b_weight, 0)
    used = tl.minimum((total + MIN_TILES - 1) // MIN_TILES, workgroups)
    # the used ranges are divided evenly over the domains, each of which has workgroups / DOMAINS rows
    domain = row // (workgroups // DOMAINS)
    position = row % (workgroups // DOMAINS)
    workgroup = domain * (used // DOMAINS) + tl.minimum(domain, used % DOMAINS) + position
    own = used // DOMAINS + (domain < used % DOMAINS).to(tl.int64)
    workgroup = tl.where(position < own, workgroup, used)
    low = tl.where(workgroup < used, workgroup * total // tl.maximum(used, 1), 0)
    high = tl.where(workgroup < used, (workgroup + 1) * total // tl.maximum(used, 1), 0)
    first = low * 0
    count = low * 0
    tile = low
    while tile < high:
        request = tl.sum((b_end <= tile).to(tl.int32), 0)
        m_own = o_r == request
        tiles = tl.sum(tl.where(m_own, b_tiles, 0), 0)
        begin = tl.sum(tl.where(m_own, b_begin, 0), 0)
        index = tl.sum(tl.where(m_own, b_index, 0), 0)
        request_start = tl.sum(tl.where(m_own, b_end - b_weight, 0), 0)
        unit = (tile - request_start) // tiles
        start = request_start + unit * tiles
        end = start + tiles
        first_workgroup = ((start + 1) * used - 1) // total
        last_workgroup = (end * used - 1) // total
        item = index.to(tl.int64) * UNITS + unit + workgroup
        p_item = items + item * 8
        tl.store(p_item, request)
        tl.store(p_item + 1, (unit // ROW_BLOCKS).to(tl.int32))
        tl.store(p_item + 2, (unit % ROW_BLOCKS).to(tl.int32))
        tl.store(p_item + 3, (begin + tile - start).to(tl.int32))
        tl.store(p_item + 4, (begin + tl.minimum(end, high) - start).to(tl.int32))
        tl.store(p_item + 5, (workgroup - first_workgroup).to(tl.int32))
        tl.store(p_item + 6, (last_workgroup - first_workgroup + 1).to(tl.int32))
        tl.store(p_item + 7, first_workgroup.to(tl.int32))
        first = tl.where(count == 0, item, first)
        count += 1
        tile = end
    tl.store(ranges + row * 2, first.to(tl.int32))
    tl.store(ranges + row * 2 + 1, count.to(tl.int32))


def build_on_device(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    ranges: torch.Tensor,
    items: torch.Tensor,
    *,
    num_requests: int,
    max_requests: int,
    kv_heads: int,
    row_blocks: int,
    block_n: int,
    window: int,
    min_tiles: int,
    domains: int = 1,
) -> None:
    """Fill ranges and items (see `decode/work_list.py`) from seq_lens int32 [R], query_start_loc int32 [R + 1].

    max_requests: the most requests a step has; it sizes the program once, whatever a step brings.
    """
    workgroups = ranges.shape[0]
    work_list_kernel[(workgroups,)](
        seq_lens,
        query_start_loc,
        ranges,
        items,
        num_requests,
        workgroups,
        KV_HEADS=kv_heads,
        ROW_BLOCKS=row_blocks,
        BLOCK_N=block_n,
        WINDOW=window,
        MIN_TILES=min_tiles,
        BLOCK_R=next_power_of_2(max_requests),
        DOMAINS=domains,
        num_warps=4,
    )

"""The device form of `decode/work_list.py`: one launch, a program a workgroup, nothing read back by the host."""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.direct_launch import Launched
from numa_attention.jit import Launcher, kernel, pointer_traits
from numa_attention.sharding import WHOLE, Shard
from numa_attention.sharding_device import local_count
from numa_attention.variants import next_power_of_2


@kernel(do_not_specialize=["num_requests", "first_request"])
def work_list_kernel(
    seq_lens,  # int32 [R]
    query_start_loc,  # int32 [R + 1]
    ranges,  # int32 [workgroups, 16]
    items,  # int32 [capacity, 16]
    first_request,
    num_requests,
    workgroups,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOMAINS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < num_requests
    b_seq = tl.load(seq_lens + first_request + o_r, mask=m_r, other=0)
    p_start = query_start_loc + first_request + o_r
    b_start = tl.load(p_start, mask=m_r, other=0)
    b_query = tl.load(p_start + 1, mask=m_r, other=0) - b_start
    if WINDOW >= 0:
        b_begin = tl.maximum(b_seq - b_query - WINDOW, 0)
        b_begin = local_count(b_begin, RANKS, RANK, INTERLEAVE) // BLOCK_N
    else:
        b_begin = tl.zeros_like(b_seq)
    b_blocks = (b_query * GROUP + BLOCK_M - 1) // BLOCK_M  # 0 for padding requests
    b_held = local_count(b_seq, RANKS, RANK, INTERLEAVE)
    b_tiles = tl.maximum((b_held + BLOCK_N - 1) // BLOCK_N - b_begin, 1)
    total = tl.sum(b_tiles.to(tl.int64) * b_blocks, 0) * KV_HEADS
    used = tl.minimum((total + MIN_TILES - 1) // MIN_TILES, workgroups)
    part_tiles = tl.maximum((total + workgroups - 1) // workgroups, MIN_TILES)
    b_parts = (b_tiles + part_tiles - 1) // part_tiles
    all_parts = tl.sum(b_parts * b_blocks, 0) * KV_HEADS
    # what the line is made of: tiles, or parts of a unit
    if all_parts <= workgroups:
        b_steps = b_parts
        used = all_parts
    else:
        b_steps = b_tiles.to(tl.int64)
    b_weight = b_steps * b_blocks  # of one KV head
    b_end = tl.cumsum(b_weight, 0)
    b_first_unit = tl.cumsum(b_blocks, 0) - b_blocks
    head_steps = tl.sum(b_weight, 0)
    head_units = tl.sum(b_blocks, 0)
    total = head_steps * KV_HEADS
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
    step = low
    while step < high:
        kv_head = step // head_steps
        head_start = kv_head * head_steps
        request = tl.sum((b_end <= step - head_start).to(tl.int32), 0)
        m_own = o_r == request
        tiles = tl.sum(tl.where(m_own, b_tiles, 0), 0).to(tl.int64)
        steps = tl.sum(tl.where(m_own, b_steps, 0), 0)
        begin = tl.sum(tl.where(m_own, b_begin, 0), 0)
        first_unit = tl.sum(tl.where(m_own, b_first_unit, 0), 0)
        request_start = head_start + tl.sum(tl.where(m_own, b_end - b_weight, 0), 0)
        block = (step - request_start) // steps
        start = request_start + block * steps
        end = start + steps
        first_workgroup = ((start + 1) * used - 1) // total
        last_workgroup = (end * used - 1) // total
        item = kv_head * head_units + first_unit + block + workgroup
        query_start = tl.sum(tl.where(m_own, b_start, 0), 0)
        query_len = tl.sum(tl.where(m_own, b_query, 0), 0)
        seq_len = tl.sum(tl.where(m_own, b_seq, 0), 0)
        from_tile = begin + tiles * (step - start) // steps
        to_tile = begin + tiles * (tl.minimum(end, high) - start) // steps
        fields = (
            first_request + request, kv_head, block, from_tile, to_tile, workgroup - first_workgroup,
            last_workgroup - first_workgroup + 1, first_workgroup, query_start, query_len, seq_len,
        )  # fmt: skip
        for field in tl.static_range(len(fields)):
            value = fields[field].to(tl.int32)
            tl.store(items + item * 16 + field, value)
            tl.store(ranges + row * 16 + 2 + field, value, mask=count == 0)
        first = tl.where(count == 0, item, first)
        count += 1
        step = end
    tl.store(ranges + row * 16, first.to(tl.int32))
    tl.store(ranges + row * 16 + 1, count.to(tl.int32))


_launch = Launcher(work_list_kernel)


def build_on_device(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    ranges: torch.Tensor,
    items: torch.Tensor,
    *,
    num_requests: int,
    max_requests: int,
    kv_heads: int,
    group: int,
    block_m: int,
    block_n: int,
    window: int,
    min_tiles: int,
    domains: int = 1,
    first_request: int = 0,
    shard: Shard = WHOLE,
) -> Launched:
    """Fill ranges and items (see `decode/work_list.py`) from seq_lens int32 [R], query_start_loc int32 [R + 1].

    They are those of a step, of whose requests the list has `num_requests` from `first_request` on. max_requests: the
    most requests a step has; it sizes the program once, whatever a step brings.
    """
    workgroups = ranges.shape[0]
    constants = dict(
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=window,
        MIN_TILES=min_tiles,
        BLOCK_R=next_power_of_2(max_requests),
        DOMAINS=domains,
        RANKS=shard.ranks,
        RANK=shard.rank,
        INTERLEAVE=shard.interleave,
    )
    tensors = seq_lens, query_start_loc, ranges, items
    key = (seq_lens.get_device(), workgroups, pointer_traits(*tensors), *constants.values())
    arguments = (*tensors, first_request, num_requests, workgroups)
    grid = workgroups, 1, 1
    direct = _launch(key, grid, arguments, constants, dict(num_warps=4))
    return Launched("work list", direct, grid, (*arguments, *constants.values()))

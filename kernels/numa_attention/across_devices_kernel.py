"""Merging the ranks' partial results in one launch: send, raise a flag, wait for the others' flags, merge.

Each rank has attended all heads over its own part of the context. It sends its partials of other ranks' heads straight
into the memory of the ranks that own these heads, and merges what it gets for its own. Before that, every rank needs
the queries of all: the same launch, with MERGES off, sends each rank's rows to all others. A rank's memory holds

::

    flags     int64   [workgroups, rank]                    launch up to which that rank's workgroup has delivered
    lses      float32 [BUFFERS, rank, row]                  row: (token, own head)
    partials  dtype   [BUFFERS, rank, row, HEAD_DIM_V]

Workgroup w of every rank has the same rows, and waits for workgroup w of the others only. The number of a launch, its
*epoch*, is counted by every workgroup for itself in device memory, so that a replayed graph goes on counting. Flags
only grow: a flag that is ahead of what is waited for says as much, and none is ever reset. Two buffers are enough,
and the fewest: see docs/merge-across-devices.md.
"""

from __future__ import annotations

import triton.language as tl

from numa_attention.across_devices import GONE, STATE_EPOCHS, STATE_PATIENCE, STATE_STOPPED
from numa_attention.clock_device import ticks
from numa_attention.jit import kernel
from numa_attention.scores import LN_2, LOG2_E, normalise, safe_max
from numa_attention.waves import system_barrier

_GONE = tl.constexpr(GONE)
_STOPPED = tl.constexpr(STATE_STOPPED)
_PATIENCE = tl.constexpr(STATE_PATIENCE)
_EPOCHS = tl.constexpr(STATE_EPOCHS)


@kernel
def flag_of(addresses, owner, sender, WORLD: tl.constexpr):
    """Where rank `owner` keeps the flag that this workgroup of rank `sender` raises."""
    flags = tl.load(addresses + owner).to(tl.pointer_type(tl.int64))
    return flags + tl.program_id(0) * WORLD + sender


@kernel
def partials_of(
    addresses, owner, sender, epoch, o_row, o_dv, like,
    WORLD: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BUFFERS: tl.constexpr,
    LSE_BYTES: tl.constexpr, PARTIAL_BYTES: tl.constexpr,
):  # fmt: skip
    """Where rank `owner` keeps rows o_row [R] of rank `sender`: pointers to LSEs [R] and partials [R, DV]."""
    base = tl.load(addresses + owner)
    # the compiler knows nothing of a number that becomes a pointer, and what it is told of one it must not fold away
    lses = tl.multiple_of(base.to(tl.pointer_type(tl.float32)), 16) + LSE_BYTES // 4
    partials = tl.multiple_of(base.to(like.dtype), 16)
    partials += PARTIAL_BYTES // (like.dtype.element_ty.primitive_bitwidth // 8)
    slot = (epoch % BUFFERS * WORLD + sender) * ROWS + o_row.to(tl.int64)
    return lses + slot, partials + slot[:, None] * HEAD_DIM_V + o_dv[None, :]


@kernel
def send_rows(
    out, lse, addresses, rank, epoch, first, rows, out_token_stride, out_head_stride, lse_token_stride,
    lse_head_stride,
    WORLD: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr, BUFFERS: tl.constexpr, LSE_BYTES: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Rows first, first + 1, ... of every rank's heads, to the rank that owns the heads, this one's to itself; without
    MERGES those of this rank's heads, which are all it has, to every rank."""
    o_row = first + tl.arange(0, BLOCK_ROWS)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_row < rows
    m_partial = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
    o_token = (o_row // HEADS).to(tl.int64)
    for step in tl.static_range(WORLD):
        # every rank begins with another one, so that no link gets all at once
        owner = (rank + 1 + step) % WORLD
        o_head = (o_row % HEADS).to(tl.int64)
        if MERGES:
            o_head += owner * HEADS
        p_out = out + o_token[:, None] * out_token_stride + o_head[:, None] * out_head_stride + o_dv[None, :]
        b_partial = tl.load(p_out, mask=m_partial, other=0.0)
        p_lse, p_partial = partials_of(
            addresses, owner, rank, epoch, o_row, o_dv, out,
            WORLD, ROWS, HEAD_DIM_V, BUFFERS, LSE_BYTES, PARTIAL_BYTES,
        )  # fmt: skip
        tl.store(p_partial, b_partial, mask=m_partial)
        if MERGES:
            p_own = lse + o_token * lse_token_stride + o_head * lse_head_stride
            tl.store(p_lse, tl.load(p_own, mask=m_row, other=0.0), mask=m_row)


@kernel
def raise_flags(addresses, rank, value, WORLD: tl.constexpr):
    """Tell the other ranks that this workgroup has delivered up to epoch `value`, or that it is GONE."""
    # all stores of this workgroup come before its one thread announces them
    system_barrier()
    for step in tl.static_range(WORLD - 1):
        owner = (rank + 1 + step) % WORLD
        tl.atomic_xchg(flag_of(addresses, owner, rank, WORLD), value, sem="release", scope="sys")


@kernel
def wait_for_flags(addresses, missing, rank, epoch, patience, WORLD: tl.constexpr):
    """Wait until every other rank has delivered this epoch; False if one gave up or `patience` ticks went by.

    missing int64 [WORLD], host memory: gets the epoch that a rank owes, negative where it said that it gave up.
    """
    looks = epoch * 0
    start = ticks(looks)
    arrived = epoch > 0
    for step in tl.static_range(WORLD - 1):
        sender = (rank + 1 + step) % WORLD
        p_flag = flag_of(addresses, rank, sender, WORLD)
        flag = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
        while (flag < epoch) & (flag >= 0) & (ticks(looks) - start < patience):
            looks += 1
            flag = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
        if flag < epoch:
            arrived = epoch < 0
            tl.store(missing + sender, tl.where(flag < 0, -epoch, epoch))
    return arrived


@kernel
def merge_rows(
    like, merged, merged_lse, addresses, rank, epoch, first, rows, merged_token_stride, merged_head_stride,
    merged_lse_token_stride, merged_lse_head_stride, arrived,
    WORLD: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr, BUFFERS: tl.constexpr, LSE_BYTES: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Rows first, first + 1, ... of this rank's heads from all ranks, in their order; NaN unless all `arrived`."""
    o_row = first + tl.arange(0, BLOCK_ROWS)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_row < rows
    m_partial = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
    b_out = tl.full([BLOCK_ROWS, BLOCK_DV], float("nan"), tl.float32)
    b_lse = tl.full([BLOCK_ROWS], float("nan"), tl.float32)
    if arrived:
        b_m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        for sender in tl.static_range(WORLD):
            p_lse, _ = partials_of(
                addresses, rank, sender, epoch, o_row, o_dv, like,
                WORLD, ROWS, HEAD_DIM_V, BUFFERS, LSE_BYTES, PARTIAL_BYTES,
            )  # fmt: skip
            b_m = tl.maximum(b_m, tl.load(p_lse, mask=m_row, other=float("-inf"), cache_modifier=".cg"))
        b_m = safe_max(b_m)
        b_l = tl.zeros([BLOCK_ROWS], tl.float32)
        b_acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
        for sender in tl.static_range(WORLD):
            p_lse, p_partial = partials_of(
                addresses, rank, sender, epoch, o_row, o_dv, like,
                WORLD, ROWS, HEAD_DIM_V, BUFFERS, LSE_BYTES, PARTIAL_BYTES,
            )  # fmt: skip
            b_from = tl.load(p_lse, mask=m_row, other=float("-inf"), cache_modifier=".cg")
            b_partial = tl.load(p_partial, mask=m_partial, other=0.0, cache_modifier=".cg").to(tl.float32)
            b_weight = tl.exp2((b_from - b_m) * LOG2_E)
            # what an empty part's output holds does not matter, a NaN of any other does
            b_acc += tl.where((b_from == float("-inf"))[:, None], 0.0, b_weight[:, None] * b_partial)
            b_l += b_weight
        b_out = normalise(b_acc, b_l)
        b_lse = tl.where(b_l == 0.0, float("-inf"), b_m + tl.log2(tl.where(b_l == 0.0, 1.0, b_l)) * LN_2)
    o_token = (o_row // HEADS).to(tl.int64)
    o_own = (o_row % HEADS).to(tl.int64)
    p_out = (
        merged + o_token[:, None] * merged_token_stride + o_own[:, None] * merged_head_stride + o_dv[None, :]
    )
    tl.store(p_out, b_out.to(merged.dtype.element_ty), mask=m_partial)
    if HAS_LSE:
        p_lse = merged_lse + o_token * merged_lse_token_stride + o_own * merged_lse_head_stride
        tl.store(p_lse, b_lse, mask=m_row)


@kernel
def gather_rows(
    like, gathered, addresses, rank, epoch, first, rows, token_stride, head_stride, arrived,
    WORLD: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr, BUFFERS: tl.constexpr, LSE_BYTES: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr,
):  # fmt: skip
    """Rows first, first + 1, ... of every rank's heads beside one another; NaN unless all `arrived`."""
    o_row = first + tl.arange(0, BLOCK_ROWS)
    o_dv = tl.arange(0, BLOCK_DV)
    m_partial = (o_row < rows)[:, None] & (o_dv < HEAD_DIM_V)[None, :]
    o_token = (o_row // HEADS).to(tl.int64)
    for sender in tl.static_range(WORLD):
        _, p_from = partials_of(
            addresses, rank, sender, epoch, o_row, o_dv, like,
            WORLD, ROWS, HEAD_DIM_V, BUFFERS, LSE_BYTES, PARTIAL_BYTES,
        )  # fmt: skip
        b_rows = tl.full([BLOCK_ROWS, BLOCK_DV], float("nan"), tl.float32).to(like.dtype.element_ty)
        if arrived:
            b_rows = tl.load(p_from, mask=m_partial, other=0.0, cache_modifier=".cg")
        o_head = (sender * HEADS + o_row % HEADS).to(tl.int64)
        p_rows = gathered + o_token[:, None] * token_stride + o_head[:, None] * head_stride + o_dv[None, :]
        tl.store(p_rows, b_rows, mask=m_partial)


@kernel(do_not_specialize=["tokens", "rank"])
def merge_across_kernel(
    out,  # [tokens, WORLD * HEADS, HEAD_DIM_V], this rank's partials of all heads; without MERGES [tokens, HEADS, ...]
    lse,  # float32 [tokens, WORLD * HEADS]
    merged,  # [tokens, HEADS, HEAD_DIM_V]; without MERGES [tokens, WORLD * HEADS, ...]
    merged_lse,  # float32 [tokens, HEADS]
    addresses,  # int64 [WORLD], of the ranks' memory as this device sees it
    state,  # int64 [STATE_EPOCHS + workgroups]
    missing,  # int64 [WORLD], host memory
    tokens,
    rank,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    merged_token_stride,
    merged_head_stride,
    merged_lse_token_stride,
    merged_lse_head_stride,
    WORLD: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BUFFERS: tl.constexpr,
    LSE_BYTES: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    MERGES: tl.constexpr,
):
    p_epoch = state + _EPOCHS + tl.program_id(0)
    # workgroups that have no rows count too: which of two buffers a launch takes, all of them must agree on
    epoch = tl.load(p_epoch) + 1
    rows = tokens * HEADS
    begin = tl.program_id(0) * BLOCK_ROWS
    stride = tl.num_programs(0) * BLOCK_ROWS
    if begin < rows:
        arrived = tl.load(state + _STOPPED, volatile=True) == 0
        if arrived:
            for first in tl.range(begin, rows, stride):
                send_rows(
                    out, lse, addresses, rank, epoch, first, rows, out_token_stride, out_head_stride,
                    lse_token_stride, lse_head_stride,
                    WORLD, HEADS, HEAD_DIM_V, BLOCK_DV, BLOCK_ROWS, ROWS, BUFFERS, LSE_BYTES, PARTIAL_BYTES, MERGES,
                )  # fmt: skip
            raise_flags(addresses, rank, epoch, WORLD)
            arrived = wait_for_flags(
                addresses, missing, rank, epoch, tl.load(state + _PATIENCE), WORLD
            )  # fmt: skip
        if arrived == 0:
            tl.store(state + _STOPPED, 1)
            raise_flags(addresses, rank, epoch * 0 + _GONE, WORLD)
        for first in tl.range(begin, rows, stride):
            if MERGES:
                merge_rows(
                    out, merged, merged_lse, addresses, rank, epoch, first, rows, merged_token_stride,
                    merged_head_stride, merged_lse_token_stride, merged_lse_head_stride, arrived,
                    WORLD, HEADS, HEAD_DIM_V, BLOCK_DV, BLOCK_ROWS, ROWS, BUFFERS, LSE_BYTES, PARTIAL_BYTES,
                    HAS_LSE,
                )  # fmt: skip
            else:
                gather_rows(
                    out, merged, addresses, rank, epoch, first, rows, merged_token_stride, merged_head_stride,
                    arrived,
                    WORLD, HEADS, HEAD_DIM_V, BLOCK_DV, BLOCK_ROWS, ROWS, BUFFERS, LSE_BYTES, PARTIAL_BYTES,
                )  # fmt: skip
    tl.store(p_epoch, epoch)

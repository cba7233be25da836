"""Decode on sm_90: how the parts of a split unit are kept and merged.

As in decode/portable.py, but the accumulator lies transposed, in parts of 64 dimensions [64, M], and is kept in the
order in which threads hold it: four registers of a thread, then those of the next thread, so that a warp's access is
one stretch of memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention import scores
from numa_attention.gluon_compat import reinterpret, thread_barrier

safe_max = gluon.jit(scores.safe_max.fn)


@gluon.jit
def part_slot(split, first_workgroup):
    """Where a split's part is kept; see decode/portable.py."""
    return (2 * (first_workgroup + split) + (split == 0).to(gl.int32)).to(gl.int64)


@gluon.jit
def by_threads(b_acc, BLOCK_M: gl.constexpr):
    """A part of the accumulator [64, M] as [threads, M / 8, 4 registers]: nothing moves."""
    # rows: four warps, two registers, eight threads; columns: registers, four threads, two registers
    b_split = gl.reshape(b_acc, (4, 2, 8, BLOCK_M // 8, 4, 2))
    return gl.reshape(gl.permute(b_split, (0, 2, 4, 3, 1, 5)), (128, BLOCK_M // 8, 4))


@gluon.jit
def by_rows(b_acc, BLOCK_M: gl.constexpr, ACC: gl.constexpr):
    """The inverse of `by_threads`."""
    b_split = gl.reshape(b_acc, (4, 8, 4, BLOCK_M // 8, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(b_split, (0, 4, 1, 3, 2, 5)), (64, BLOCK_M)), ACC)


@gluon.jit
def accumulator_offsets(slot, part, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, THREADS: gl.constexpr):
    """Offsets [threads, M / 8, 4] in the workspace of one part of a slot's accumulator."""
    o_thread = gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, THREADS)))
    o_eight = gl.arange(0, BLOCK_M // 8, gl.SliceLayout(0, gl.SliceLayout(2, THREADS)))
    o_register = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, THREADS)))
    o_part = o_thread[:, None, None] * 4 + o_eight[None, :, None] * 512 + o_register[None, None, :]
    return (slot * PARTS + part) * (64 * BLOCK_M) + o_part


@gluon.jit
def store_part(
    b_m, b_l, b_accs, partial_acc, partial_ml, slot,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Write one softmax state to the workspace: m and l [M], unnormalised parts [64, M]."""
    p_ml = partial_ml + slot * (2 * BLOCK_M) + gl.arange(0, BLOCK_M, ROW)
    gl.store(p_ml, b_m)
    gl.store(p_ml + BLOCK_M, b_l)
    THREADS: gl.constexpr = by_threads(b_accs[0], BLOCK_M).type.layout
    for part in gl.static_range(PARTS):
        p_acc = partial_acc + accumulator_offsets(slot, part, BLOCK_M, PARTS, THREADS)
        gl.store(p_acc, by_threads(b_accs[part], BLOCK_M))


@gluon.jit
def arrive_last(p_arrivals, parts):
    """Announce a stored part. True for the workgroup that completes the count, which finds the counter reset."""
    # all stores of this workgroup come before its one thread announces them
    thread_barrier()
    last = gl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        gl.store(p_arrivals, 0)
    return last


@gluon.jit
def load_accumulator(partial_acc, slot, part, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr):
    """One part [64, M] of a slot's accumulator."""
    THREADS: gl.constexpr = by_threads(gl.zeros((64, BLOCK_M), gl.float32, ACC), BLOCK_M).type.layout
    p_acc = partial_acc + accumulator_offsets(slot, part, BLOCK_M, PARTS, THREADS)
    # past L1: another compute unit wrote it
    return by_rows(gl.load(p_acc, cache_modifier=".cg"), BLOCK_M, ACC)


@gluon.jit
def merge_parts(
    partial_acc, partial_ml, first, parts, step, first_workgroup, shared_p,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr, ROW: gl.constexpr, FAN_IN: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """Merge splits first, first + step, ... (`parts` of them, at most FAN_IN), always in this order.

    The result is (m [M], l [M], accumulator). shared_p: shared memory for their weights, 4 * FAN_IN * M bytes or more.
    """
    # IN_FLIGHT parts of accumulators are loaded ahead of their use, each into the registers that an earlier one leaves:
    # a merge waits for latency more than for bandwidth
    b_loaded = ()
    for ahead in gl.static_range(IN_FLIGHT):
        slot = part_slot(first + gl.minimum(ahead // PARTS, parts - 1) * step, first_workgroup)
        b_loaded = b_loaded + (load_accumulator(partial_acc, slot, ahead % PARTS, BLOCK_M, PARTS, ACC),)
    # the weights of all splits are found once, each by one thread
    WEIGHTS: gl.constexpr = gl.BlockedLayout([1, BLOCK_M // 8], [FAN_IN // 4, 128 // FAN_IN], [4, 1], [1, 0])
    o_part = gl.arange(0, FAN_IN, gl.SliceLayout(1, WEIGHTS))
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, WEIGHTS))
    m_part = (o_part < parts)[:, None]
    p_ml = (
        partial_ml + part_slot(first + o_part * step, first_workgroup)[:, None] * (2 * BLOCK_M) + o_m[None, :]
    )
    b_m = gl.load(p_ml, mask=m_part, other=float("-inf"), cache_modifier=".cg")
    b_l = gl.load(p_ml + BLOCK_M, mask=m_part, other=0.0, cache_modifier=".cg")
    b_max = gl.max(b_m, 0)
    b_weights = gl.exp2(b_m - safe_max(b_max)[None, :])
    b_l = gl.sum(b_l * b_weights, 0)
    SHAPE: gl.constexpr = [shared_p.shape[1] // 2, BLOCK_M]
    weights = reinterpret(shared_p, gl.float32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights.slice(0, FAN_IN).store(b_weights)
    weights = reinterpret(shared_p, gl.float32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread_barrier()
    b_accs = ()
    for _ in gl.static_range(PARTS):
        b_accs = b_accs + (gl.zeros((64, BLOCK_M), gl.float32, ACC),)
    AT_A_TIME: gl.constexpr = (IN_FLIGHT + PARTS - 1) // PARTS
    gl.static_assert(FAN_IN % AT_A_TIME == 0, "there are weights of FAN_IN splits, and of no more")
    for split in range(0, parts, AT_A_TIME):
        for ahead in gl.static_range(AT_A_TIME):
            b_weight = weights.index(split + ahead).load(gl.SliceLayout(0, ACC))  # 0 past the last split
            for part in gl.static_range(PARTS):
                # both tuples are queues
                b_accs = b_accs[1:] + (b_accs[0] + b_loaded[0] * b_weight[None, :],)
                later = gl.minimum(split + (ahead * PARTS + part + IN_FLIGHT) // PARTS, parts - 1)
                slot = part_slot(first + later * step, first_workgroup)
                b_loaded = b_loaded[1:] + (
                    load_accumulator(partial_acc, slot, (part + IN_FLIGHT) % PARTS, BLOCK_M, PARTS, ACC),
                )
    return gl.convert_layout(b_max, ROW), gl.convert_layout(b_l, ROW), b_accs

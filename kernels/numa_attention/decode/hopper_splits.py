"""Decode on sm_90: how the parts of a split unit are kept and merged.

As in decode/portable.py, but the accumulator lies transposed, in parts of 64 dimensions [64, M], and is kept in the
order in which threads hold it: four registers of a thread, then those of the next thread, so that a warp's access is
one stretch of memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention import scores
from numa_attention.gluon_compat import thread_barrier

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
def merge_parts(
    partial_acc, partial_ml, first, parts, step, first_workgroup,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr, ROW: gl.constexpr, IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """Merge splits first, first + step, ... (`parts` of them), always in this order: (m, l, accumulator)."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    THREADS: gl.constexpr = by_threads(gl.zeros((64, BLOCK_M), gl.float32, ACC), BLOCK_M).type.layout
    o_m = gl.arange(0, BLOCK_M, COLUMN)
    b_max = gl.full((BLOCK_M,), float("-inf"), gl.float32, COLUMN)
    b_l = gl.zeros((BLOCK_M,), gl.float32, COLUMN)
    b_accs = ()
    for _ in gl.static_range(PARTS):
        b_accs = b_accs + (gl.zeros((64, BLOCK_M), gl.float32, ACC),)
    # many parts in flight at a time: a merge waits for latency, not for bandwidth
    for split in range(0, parts, IN_FLIGHT):
        b_ms = ()
        b_ls = ()
        b_loaded = ()
        for ahead in gl.static_range(IN_FLIGHT):
            # past the last part it is loaded again, and weighs nothing
            slot = part_slot(first + gl.minimum(split + ahead, parts - 1) * step, first_workgroup)
            p_ml = partial_ml + slot * (2 * BLOCK_M) + o_m
            # past L1: other compute units wrote it
            b_ms = b_ms + (gl.load(p_ml, cache_modifier=".cg"),)
            b_ls = b_ls + (gl.load(p_ml + BLOCK_M, cache_modifier=".cg"),)
            for part in gl.static_range(PARTS):
                p_acc = partial_acc + accumulator_offsets(slot, part, BLOCK_M, PARTS, THREADS)
                b_part = gl.load(p_acc, cache_modifier=".cg")
                b_loaded = b_loaded + (by_rows(b_part, BLOCK_M, ACC),)
        b_new = b_max
        for ahead in gl.static_range(IN_FLIGHT):
            b_new = gl.maximum(b_new, b_ms[ahead])
        b_safe = safe_max(b_new)
        b_alpha = gl.exp2(b_max - b_safe)
        b_max = b_new
        b_l = b_l * b_alpha
        b_weights = ()
        for ahead in gl.static_range(IN_FLIGHT):
            b_weight = gl.where(split + ahead < parts, gl.exp2(b_ms[ahead] - b_safe), 0.0)
            b_l += b_ls[ahead] * b_weight
            b_weights = b_weights + (b_weight,)
        b_sums = ()
        for part in gl.static_range(PARTS):
            b_acc = b_accs[part] * b_alpha[None, :]
            for ahead in gl.static_range(IN_FLIGHT):
                b_acc += b_loaded[ahead * PARTS + part] * b_weights[ahead][None, :]
            b_sums = b_sums + (b_acc,)
        b_accs = b_sums
    return gl.convert_layout(b_max, ROW), gl.convert_layout(b_l, ROW), b_accs

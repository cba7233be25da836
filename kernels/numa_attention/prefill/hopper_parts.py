"""Prefill on sm_90: tiles of the list that several workgroups compute, each a part of the keys.

Where one request has a prefix so long that its tiles would still be computed when all others are done, they are split
(`tile_splits.py`). Each consumer then keeps the softmax state of its 64 rows in a workspace, and the last one of a tile
to arrive merges the parts, always in their order: results are the same from run to run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention import scores
from numa_attention.gluon_compat import thread_barrier
from numa_attention.prefill.hopper_rows import product_layout
from numa_attention.prefill.hopper_work import ROWS

safe_max = gluon.jit(scores.safe_max.fn)


@gluon.jit
def places_of(partial, place, CONSUMER: gl.constexpr, C: gl.constexpr):
    """Pointers to one part's m [M], l [M] and accumulator [M, dim_v], and to its count; see `PrefillSplits`."""
    PV: gl.constexpr = product_layout(C.dim_v, 16, C.ctas)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, PV))
    o_dv = gl.arange(0, C.dim_v, gl.SliceLayout(0, PV))
    p_part = partial + (place * C.consumers + CONSUMER).to(gl.int64) * (ROWS * (C.dim_v + 3))
    p_acc = p_part + 3 * ROWS + (o_row[:, None] * C.dim_v + o_dv[None, :])
    p_count = (p_part + 2 * ROWS).to(gl.pointer_type(gl.int32), bitcast=True)
    return p_part + o_row, p_part + ROWS + o_row, p_acc, p_count


@gluon.jit
def merge_parts(b_m, b_l, b_acc, partial, place, part, parts, CONSUMER: gl.constexpr, C: gl.constexpr):
    """Keep a part's state: maxima in base 2 and sums [M], accumulator [M, dim_v]. place: of this part in the workspace.

    (whether all parts are there, the state of all of them together), which is nothing of use where they are not.
    """
    p_m, p_l, p_acc, p_count = places_of(partial, place, CONSUMER, C)
    gl.store(p_m, b_m)
    gl.store(p_l, b_l)
    gl.store(p_acc, b_acc)
    # all threads have stored before one of them announces it
    thread_barrier()
    first = place - part
    p_m, p_l, p_acc, p_count = places_of(partial, first, CONSUMER, C)
    last = gl.atomic_add(p_count, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        gl.store(p_count, 0)
        b_m = gl.full(b_m.shape, float("-inf"), gl.float32, b_m.type.layout)
        b_l = gl.zeros_like(b_l)
        b_acc = gl.zeros_like(b_acc)
        for other in range(parts):
            p_m, p_l, p_acc, p_count = places_of(partial, first + other, CONSUMER, C)
            # past L1: other compute units wrote them
            b_m_part = gl.load(p_m, cache_modifier=".cg")
            b_l_part = gl.load(p_l, cache_modifier=".cg")
            b_acc_part = gl.load(p_acc, cache_modifier=".cg")
            b_new = gl.maximum(b_m, b_m_part)
            b_shift = safe_max(b_new)
            b_alpha = gl.exp2(b_m - b_shift)
            b_weight = gl.exp2(b_m_part - b_shift)
            b_l = b_l * b_alpha + b_l_part * b_weight
            b_acc = b_acc * b_alpha[:, None] + b_acc_part * b_weight[:, None]
            b_m = b_new
    return last, b_m, b_l, b_acc

"""Prefill on sm_90: hardware placement of workgroups that compute several tiles each.

A *seat* is a workgroup's number in the list: seat s of W computes tiles s, s + W and on, which all belong to one domain
where the domains divide W. With dispatch placement the seat is the workgroup's id. With hardware placement it is the
next free seat of the domain of the workgroup's SM, or of another domain where its own has none left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention.placement_device import SM_ID

READ_SM = gl.constexpr(SM_ID)


@gluon.jit
def take_seat(queues, QUEUES: gl.constexpr):
    """A seat that no other workgroup of the launch has: in Gluon what `placement_device.take` is with DEALT."""
    workgroups = gl.num_programs(0)
    sm = gl.inline_asm_elementwise(READ_SM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    own = gl.load(queues + (QUEUES + 1) + sm)
    seat = workgroups * 0 - 1
    turn = workgroups * 0
    while seat < 0:
        domain = (own + turn) % QUEUES
        held = (workgroups - domain + QUEUES - 1) // QUEUES
        place = gl.atomic_add(queues + domain, 1, sem="relaxed", scope="gpu")
        seat = gl.where(place < held, place * QUEUES + domain, -1)
        turn += 1
    if gl.atomic_add(queues + QUEUES, 1, sem="relaxed", scope="gpu") == workgroups - 1:
        # all have theirs: nobody counts here before the next launch
        for domain in range(QUEUES + 1):
            gl.store(queues + domain, 0)
    return seat


@gluon.jit
def first_tile(seat, QUEUES: gl.constexpr):
    """Where a workgroup begins in the tile list."""
    first = gl.program_id(0)
    if QUEUES > 0:
        first = seat
    return first

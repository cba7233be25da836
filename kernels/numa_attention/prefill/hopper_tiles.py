"""Prefill on sm_90: which tiles of the list a workgroup computes, and how its warps learn of them.

The producer alone takes tiles. What the others have to know of one it writes into a *record* in shared memory, while
they are still busy with the tile before: so nobody else waits for the device's memory between two tiles.

A workgroup's first tile has its own number. The next ones are, by `C.queues`,

0
    every W-th of W workgroups: also the way of workgroups with one tile each;
1
    the next that nobody has taken, from one queue for the launch, so that short tiles make up for long ones;
more
    hardware placement: the next of the queue of the domain on which the workgroup runs, the first one too, and of
    another domain's where that is empty. Tile i is in queue i mod `C.queues`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.placement_device import SM_ID
from numa_attention.prefill.hopper_rows import barrier_layout, shares
from numa_attention.prefill.hopper_work import work_of

READ_SM = gl.constexpr(SM_ID)
RECORDS = gl.constexpr(2)  # the tile at hand and the next one
FIELDS = gl.constexpr(16)  # of a record: those of `work_of`, and the tile's place in the list
KV_HEAD = gl.constexpr(1)
BLOCK = gl.constexpr(2)
QUERY_START = gl.constexpr(3)
QUERY_LEN = gl.constexpr(4)
STEPS = gl.constexpr(8)
WALK_FIELDS = gl.constexpr(11)  # what nobody needs before the walk is over comes behind them
TILE_PART = gl.constexpr(11)
TILE_PARTS = gl.constexpr(12)
PART_PLACE = gl.constexpr(13)
INDEX = gl.constexpr(14)


# ---- the queues ----


@gluon.jit
def own_domain(queues, C: gl.constexpr):
    """The domain of the SM on which this workgroup runs; 0 without hardware placement."""
    domain = gl.program_id(0) * 0
    if C.queues > 1:
        sm = gl.inline_asm_elementwise(READ_SM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        domain = gl.load(queues + (C.queues + 1) + sm)
    return domain


@gluon.jit
def next_tile(queues, own, index, count, C: gl.constexpr):
    """The tile after `index` (-1: none yet) of this workgroup, of `count` in all; `count` or more where none is left.

    queues int32 [C.queues + 1]: tiles taken of each queue, and workgroups that have found all empty; zero between
    launches. The domain of each SM id follows.
    """
    workgroups = gl.num_programs(0)
    following = gl.where(index < 0, gl.program_id(0), index + workgroups)
    if C.queues == 1:
        if index >= 0:
            following = workgroups + gl.atomic_add(queues, 1, sem="relaxed", scope="gpu")
    elif C.queues > 1:
        following = count
        turn = own * 0
        while turn < C.queues:
            domain = (own + turn) % C.queues
            taken = gl.atomic_add(queues + domain, 1, sem="relaxed", scope="gpu") * C.queues + domain
            turn += 1
            if taken < count:
                following = taken
                turn = own * 0 + C.queues
    return following


@gluon.jit
def leave(queues, C: gl.constexpr):
    """Say that this workgroup takes no more. The last one to say it leaves the queues as the next launch wants them."""
    if C.queues > 0:  # noqa: SIM102 (one is known when compiling)
        if gl.atomic_add(queues + C.queues, 1, sem="relaxed", scope="gpu") == gl.num_programs(0) - 1:
            for queue in range(C.queues + 1):
                gl.store(queues + queue, 0)


# ---- the records ----


@gluon.constexpr_function
def record_layout(warps, ctas=1):
    """One number, which all threads of so many warps hold."""
    return gl.BlockedLayout([1], [32], [warps], [0], shares(ctas, rank=1, split=False))


@gluon.constexpr_function
def place_layout(ctas=1):
    """A number in shared memory, of which each workgroup of a cluster has a copy."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], shares(ctas, rank=1, split=False))


@gluon.jit
def allocate_records(C: gl.constexpr):
    """(records, the barriers that say which are written, and which all have read)."""
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * FIELDS, 1], place_layout(C.ctas))
    BAR: gl.constexpr = barrier_layout(C.ctas)
    full = gl.allocate_shared_memory(gl.int64, [RECORDS, C.ctas], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [RECORDS, C.ctas], BAR)
    for i in gl.static_range(RECORDS):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=C.consumers + C.float8)
    return records, full, empty


@gluon.jit
def field(records, number, FIELD: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr):
    """One field of a workgroup's number-th record."""
    place = records.index(number % RECORDS * FIELDS + FIELD)
    return gl.max(place.load(record_layout(WARPS, C.ctas)), 0)


@gluon.jit
def write_record(ring, number, index, step, C: gl.constexpr):
    """Write tile `index` of the list as a workgroup's number-th; one of no KV tiles where there is no such tile."""
    records, full, empty = ring
    slot = number % RECORDS
    fields = work_of(gl.minimum(index, step[1] - 1), step, C) + (index,)
    hopper.mbarrier.wait(empty.index(slot), ((number // RECORDS) & 1) ^ 1)
    LAYOUT: gl.constexpr = record_layout(1, C.ctas)
    for i in gl.static_range(INDEX + 1):
        value = fields[i].to(gl.int32)
        if i == STEPS:
            value = gl.where(index < step[1], value, 0)
        records.index(slot * FIELDS + i).store(gl.full([1], 0, gl.int32, LAYOUT) + value)
    hopper.mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def read_record(records, number, WARPS: gl.constexpr, C: gl.constexpr):
    """What `work_of` says of a workgroup's number-th tile, as far as its walk needs it."""
    fields = ()
    for i in gl.static_range(WALK_FIELDS):
        fields = fields + (field(records, number, i, WARPS, C),)
    return fields


@gluon.jit
def is_tile(ring, number, WARPS: gl.constexpr, C: gl.constexpr):
    """Wait for a workgroup's number-th record. Whether it is a tile: after one that is none comes no other."""
    records, full, empty = ring
    hopper.mbarrier.wait(full.index(number % RECORDS), (number // RECORDS) & 1)
    return field(records, number, STEPS, WARPS, C) > 0

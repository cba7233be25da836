"""Simulation of the L2 at tile grain: which tiles of K and V are found in the cache, over a whole run.

Workgroups go, in the order of their ids, to the next free unit: one queue, or one per domain where the hardware
deals workgroups to domains in turn. A unit walks the K/V tiles of its workgroup, `COARSE` tiles an event. A request
looks in its domain's cache; on a partitioned L2 next in the partition that is the line's home; then it goes to
memory, one server with a bandwidth and a latency. A fill under way is joined. The older of two random chunks is
replaced. Three things
pull workgroups of one stream apart: a random start delay per workgroup, jitter per tile, and a lasting spread of
the units' speeds. Where workgroups start in waves, a unit waits until all workgroups of the waves before are done.
Q is read and O written once per workgroup, and neither is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from .. import mapping as maps
from . import ModelError
from .closed_form import streams_per_domain
from .grid import Grid
from .machines import Machine

try:
    from numba import njit
except ImportError as error:
    raise ModelError("the L2 simulation needs numba: pip install 'vllm-numa-backend[model]'.") from error

COARSE = 4  # tiles an event: as accurate as one tile, and three times as fast
BUCKETS_PER_EVENT = 64  # resolution of the event queue
BUCKETS = 1 << 13  # its reach, 128 events; what lies further is put at the end
MOST_CHUNKS = 1 << 28  # entries of the table of cached chunks, int32


@dataclass(frozen=True)
class Result:
    """What the simulation counted. Rates are of everything the workgroups ask for: K, V, Q read and O written.

    hbm_bytes: read from memory. tile_visits: K/V tiles walked. streams_per_domain: mean number of K/V streams that
    a domain reads at a time. seconds: time of the launch. per_domain: hit_rate and hbm_bytes of each domain.
    """

    hit_rate: float
    hbm_bytes: float
    hbm_write_bytes: float
    requested_bytes: float
    seconds: float
    streams_per_domain: float
    tile_visits: int
    tflops: float
    per_domain: list[dict[str, float]] = field(default_factory=list)


@njit(cache=True, nogil=True, inline="always")
def _random(state):
    """xorshift64*: a uniform number in [0, 1)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, nogil=True, inline="always")
def _keep(domain, key, available, where, owner, ready, state):
    """Puts a chunk into a cache, in the place of the older of two random ones."""
    slots = owner.shape[1]
    victim = int(_random(state) * slots)
    other = int(_random(state) * slots)
    if ready[domain, other] < ready[domain, victim]:
        victim = other
    if owner[domain, victim] >= 0:
        where[domain, owner[domain, victim]] = -1
    owner[domain, victim] = key
    where[domain, key] = victim
    ready[domain, victim] = available


@njit(cache=True, nogil=True)
def _run(
    wg_acc,
    wg_tiles,
    queue_next,
    queue_step,
    unit_queue,
    unit_domain,
    unit_time,
    coarse,
    chunks,
    where,
    owner,
    ready,
    partitioned,
    joined_is_hit,
    memory_time,
    l2_time,
    block_memory_time,
    miss_latency,
    far_latency,
    depth,
    start_delay,
    jitter,
    in_waves,
    alternate,
    seed,
):
    """Runs the launch. Times in units of one tile's time. Returns (end time, asked, hits, filled) in K/V tiles.

    where: int32 [domains, accs * chunks], the slot of a chunk or -1. owner: int32 [domains, slots], its inverse.
    ready: float64 [domains, slots], when a follower can have walked the chunk. unit_time: of one tile, on each unit.
    """
    units = unit_queue.size
    domains = owner.shape[0]
    workgroups = wg_acc.size
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed * 2654435761 + 88172645463325252)
    asked = np.zeros(domains)
    hits = np.zeros(domains)
    filled = np.zeros(domains)
    l2_free = np.zeros(domains)
    memory_free = 0.0

    buckets = BUCKETS
    width = coarse / BUCKETS_PER_EVENT
    head = np.full(buckets, -1, np.int32)
    following = np.full(units, -1, np.int32)
    time = np.zeros(units)
    wg = np.full(units, -1, np.int64)
    step = np.zeros(units, np.int32)
    for unit in range(units - 1, -1, -1):
        following[unit] = head[0]
        head[0] = unit
    running = units
    now_bucket = 0
    end = 0.0
    root12 = sqrt(12.0)
    # of each queue: the workgroups of one wave, those that are done, and the units that wait for the next one
    wave = max(units // queue_next.size, 1)
    done = np.zeros(queue_next.size, np.int64)
    waiting = np.full(units, -1, np.int32)
    first_waiting = np.full(queue_next.size, -1, np.int32)

    while running > 0:
        unit = head[now_bucket % buckets]
        if unit < 0:
            now_bucket += 1
            continue
        head[now_bucket % buckets] = following[unit]
        now = time[unit]
        domain = unit_domain[unit]
        work = wg[unit]

        if work < 0 or step[unit] * coarse >= wg_tiles[work]:
            # the workgroup is done: the next one of the queue, after a random delay and the load of its Q
            end = max(end, now)
            queue = unit_queue[unit]
            if in_waves and work >= 0:
                done[queue] += 1
                if done[queue] % wave == 0:
                    released = first_waiting[queue]
                    while released >= 0:
                        time[released] = now
                        place = now_bucket % buckets
                        following[released] = head[place]
                        head[place] = released
                        released = waiting[released]
                    first_waiting[queue] = -1
                wg[unit] = -1
            work = queue_next[queue]
            if work >= workgroups:
                running -= 1
                continue
            if in_waves and done[queue] < work // queue_step // wave * wave:
                waiting[unit] = first_waiting[queue]
                first_waiting[queue] = unit
                continue
            queue_next[queue] = work + queue_step
            wg[unit] = work
            step[unit] = 0
            memory_free = max(memory_free, now) + block_memory_time
            now = memory_free + miss_latency + _random(state) * start_delay
        else:
            chunk = step[unit]
            step[unit] = chunk + 1
            position = chunk
            if alternate and work // queue_step // wave % 2 == 1:
                position = (wg_tiles[work] + coarse - 1) // coarse - 1 - chunk
            count = min(coarse, wg_tiles[work] - position * coarse)
            key = wg_acc[work] * chunks + position
            asked[domain] += count
            l2_free[domain] = max(l2_free[domain], now) + l2_time * count
            # the queues hold chunks, but a unit waits tile by tile
            latency = (l2_free[domain] - now) / count
            pace = unit_time[unit]
            # the end of the chunk if nothing is waited for
            end_alone = now + count * pace + sqrt(float(count)) * jitter * root12 * (_random(state) - 0.5)
            slot = where[domain, key]
            if slot >= 0:
                # a chunk whose fill is under way is walked no faster than its tiles arrive
                if joined_is_hit or ready[domain, slot] <= now + count * pace:
                    hits[domain] += count
                now = max(end_alone, ready[domain, slot], now + count * latency / max(depth, 1))
            else:
                home = domain
                if partitioned:
                    # which partition holds a line is a hash of its address
                    home = ((key * 2654435761) >> 16) % domains
                far_slot = where[home, key]
                far_ready = 0.0
                into_home = home != domain and far_slot < 0
                if home != domain:
                    latency += far_latency
                if home != domain and far_slot >= 0:
                    far_ready = ready[home, far_slot]
                else:
                    memory_free = max(memory_free, now) + memory_time * count
                    latency += (memory_free - now) / count + miss_latency
                    filled[domain] += count
                if depth == 0:
                    now = end_alone + count * latency
                else:
                    now = max(end_alone, now + count * latency / depth)
                now = max(now, far_ready)
                # when a follower can have walked the chunk
                available = now - max(0.0, depth * pace - latency)
                _keep(domain, key, available, where, owner, ready, state)
                if into_home:
                    _keep(home, key, available, where, owner, ready, state)

        time[unit] = now
        bucket = int(now / width)
        if bucket < now_bucket:
            bucket = now_bucket
        elif bucket >= now_bucket + buckets:
            bucket = now_bucket + buckets - 1
        following[unit] = head[bucket % buckets]
        head[bucket % buckets] = unit
    return end, asked, hits, filled


def simulate(grid: Grid, machine: Machine, *, seed: int = 1, coarse: int = COARSE) -> Result:
    """Simulates a whole launch of `grid` on `machine`.

    Raises ModelError on an impossible shape, and where the table of cached chunks would not fit into memory.
    """
    grid.check()
    model = machine.cache
    accs = grid.batch * grid.kv_heads
    chunks = -(-grid.tiles // coarse)
    if machine.domains * accs * chunks > MOST_CHUNKS:
        raise ModelError(
            f"{accs} K/V streams of {grid.tiles} tiles are too many to simulate: use the closed form."
        )
    rows = maps.tiles(
        grid.mapping,
        grid.batch,
        grid.q_heads,
        grid.kv_heads,
        grid.blocks,
        grid.domains,
        longest_first=grid.longest_first,
    )
    wg_acc = rows[:, 0] * grid.kv_heads + rows[:, 1] // grid.group
    wg_tiles = np.array(list(grid.walks()), np.int32)[rows[:, 2]]
    del rows

    generator = np.random.default_rng(seed)
    units = machine.units * model.workgroups_per_unit
    # workgroups that share a unit share its speed
    tile_seconds = model.tile_seconds(grid, machine.units) * model.workgroups_per_unit
    queues = machine.dispatch_domains
    unit_domain = np.arange(units, dtype=np.int32) % machine.domains
    if queues == 1:
        # which units belong to which partition follows no order in which workgroups are dispatched
        unit_domain = generator.permutation(unit_domain)
    unit_queue = unit_domain if queues > 1 else np.zeros(units, np.int32)
    slots = max(1, int(machine.l2_bytes.value / machine.domains // (grid.tile_bytes * coarse)))
    where = np.full((machine.domains, accs * chunks), -1, np.int32)
    end, asked, hits, filled = _run(
        wg_acc,
        wg_tiles,
        np.arange(queues, dtype=np.int64),
        queues,
        unit_queue,
        unit_domain,
        1.0 + model.unit_spread * generator.standard_normal(units),
        coarse,
        chunks,
        where,
        np.full((machine.domains, slots), -1, np.int32),
        np.zeros((machine.domains, slots)),
        model.partitioned,
        model.joined_is_hit,
        grid.tile_bytes / model.read_bandwidth / tile_seconds,
        grid.tile_bytes / model.l2_bandwidth / tile_seconds,
        grid.block_bytes / model.read_bandwidth / tile_seconds,
        model.miss_latency / tile_seconds,
        model.far_latency / tile_seconds,
        model.depth,
        model.delay_tiles(grid),
        model.tile_jitter,
        grid.in_waves,
        grid.alternate,
        seed,
    )
    return _summary(grid, end * tile_seconds, streams_per_domain(grid, machine), asked, hits, filled)


def _summary(grid, seconds, streams, asked, hits, filled) -> Result:
    per_domain = [
        {"hit_rate": float(hit / max(ask, 1)), "hbm_bytes": float(fill * grid.tile_bytes)}
        for ask, hit, fill in zip(asked, hits, filled, strict=True)
    ]
    own_bytes = grid.workgroups * grid.block_bytes
    # O is written into the cache (a hit); Q is read from memory (a miss)
    hit_rate = (hits.sum() * grid.tile_bytes + own_bytes) / grid.requested_bytes
    return Result(
        hit_rate=float(hit_rate),
        hbm_bytes=float(filled.sum() * grid.tile_bytes + own_bytes),
        hbm_write_bytes=float(own_bytes),
        requested_bytes=float(grid.requested_bytes),
        seconds=float(seconds),
        streams_per_domain=streams,
        tile_visits=grid.visits,
        tflops=float(grid.flops / seconds / 1e12),
        per_domain=per_domain,
    )

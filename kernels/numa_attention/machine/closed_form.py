"""L2 hit rate of a mapping in closed form, in plain Python: what the dispatcher asks before it chooses.

A stream is the K/V of one ACC. In a window of the workgroups that run at a time, the number of streams and the
workgroups of each follow from the mapping. Two limits are known exactly:

in step      all workgroups of a stream read a tile together: one miss per stream and cache;
phases lost  they read at random places of their streams of NT tiles: the cached share C / (S NT) of the reads hits.

Where a miss makes a workgroup wait, those behind catch up: streams that start together stay together (a convoy).
Where it does not, places diffuse by jitter and drift by the units' speeds. The two limits are blended by the share of
the run, or of the workgroups, that is still within the cached part of its stream. No constant is fitted to a row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, erf, exp, sqrt

from .. import mapping as maps
from . import ModelError
from .grid import Grid
from .machines import Machine

WINDOWS = 5  # places of the launch at which the streams are counted
STEPS = 8  # of the mean over the run
CAPTURE = 2.0  # both a reader and its forerunner must start within the cached part


@dataclass(frozen=True)
class Estimate:
    """hit_rate: of everything that workgroups ask for. hbm_bytes: read from memory. in_step: share of the run in
    which the readers of a stream are still together. streams_per_domain: K/V streams that one domain reads at a time.
    """

    hit_rate: float
    hbm_bytes: float
    requested_bytes: float
    seconds: float
    tflops: float
    streams_per_domain: float
    in_step: float


@dataclass(frozen=True)
class Window:
    """The workgroups that one dispatch queue runs at a time.

    readers: workgroups of each stream. steps: for each workgroup that is not the first of its stream, how many places
    of the queue its forerunner in the stream is before it. heads: query heads (of a request) that they belong to.
    """

    readers: tuple[int, ...]
    steps: tuple[int, ...]
    heads: int

    @property
    def size(self) -> int:
        return sum(self.readers)


def tile_at(grid: Grid, workgroup: int) -> tuple[int, int, int]:
    """(request, query head, query block) of one workgroup, by the definition of the mapping."""
    accs, total = grid.batch * grid.kv_heads, grid.workgroups
    flat = maps.flat_index(workgroup, grid.mapping, True, accs, total, grid.domains)
    request = flat // (grid.q_heads * grid.blocks)
    head, block = maps.head_and_block(
        workgroup,
        flat,
        grid.mapping,
        True,
        grid.longest_first,
        request,
        request * grid.q_heads * grid.blocks,
        grid.blocks,
        accs,
        total,
        grid.q_heads,
        grid.kv_heads,
        grid.domains,
    )
    return request, head, block


def windows(grid: Grid, machine: Machine) -> list[Window]:
    """What runs at a time on one dispatch queue, at some places of the launch."""
    queues = machine.dispatch_domains
    resident = machine.units * machine.cache.workgroups_per_unit // queues
    length = -(-grid.workgroups // queues)  # of the queue
    resident = min(resident, length)
    result = []
    for place in range(WINDOWS):
        queue = place % queues
        # odd fractions, so that windows do not all begin where a head does
        first = int((length - resident) * (place + 0.382) / WINDOWS)
        last_seen: dict[int, int] = {}
        readers: Counter[int] = Counter()
        heads = set()
        steps = []
        for position in range(first, first + resident):
            workgroup = position * queues + queue
            if workgroup >= grid.workgroups:
                break
            request, head, _ = tile_at(grid, workgroup)
            acc = request * grid.kv_heads + head // grid.group
            if acc in last_seen:
                steps.append(position - last_seen[acc])
            last_seen[acc] = position
            heads.add((request, head))
            readers[acc] += 1
        if readers:
            result.append(Window(tuple(readers.values()), tuple(steps), len(heads)))
    return result


def distinct_readers(readers: int, caches: int) -> float:
    """Expected number of caches that the readers of a stream sit behind, one chosen at random for each."""
    return caches * (1.0 - (1.0 - 1.0 / caches) ** readers)


def share_in_step(window_tiles: float, window: Window, grid: Grid, machine: Machine) -> float:
    """Share of a run in which a reader finds what the first one read.

    Readers spread with sigma; within half of the cached part around their mean (the rest is of random age) they hit.
    """
    model = machine.cache
    walk = grid.visits / grid.workgroups
    per_tile = model.tile_jitter**2 + model.delay_tiles(grid) ** 2 / 12 / walk
    if grid.causal and grid.longest_first:
        # who ends late gets a shorter walk, which holds the units together: what is left is one walk's noise, and
        # the difference between the walks that run at a time
        difference = grid.block_m / grid.block_n * window.size / window.heads
        spreads = [sqrt(per_tile * walk + difference**2 / 12)]
    else:
        walked = grid.visits / (machine.units * model.workgroups_per_unit)
        places = [walked * (step + 0.5) / STEPS for step in range(STEPS)]
        spreads = [sqrt(per_tile * place + (model.unit_spread * place) ** 2) for place in places]
    return sum(erf(window_tiles / 4 / (sqrt(2) * sigma)) for sigma in spreads) / len(spreads)


def makes_convoys(grid: Grid, machine: Machine) -> bool:
    """Whether a miss makes a workgroup wait, so that those behind it catch up."""
    model = machine.cache
    return model.miss_latency > model.depth * model.tile_seconds(grid, machine.units)


def kept_rate(cached_share: float) -> float:
    """Share of a stream that is still cached when the next workgroups walk it from its start.

    In between, S NT tiles pass of which the share 1 - kept is filled anew, each in the place of a random tile:
    kept = exp(-(1 - kept) / cached_share), which is 1 where all streams fit.
    """
    if cached_share >= 1.0:
        return 1.0
    kept = 0.0
    for _ in range(64):
        kept = exp(-(1.0 - kept) / cached_share)
    return kept


def captured(cached_tiles: float, grid: Grid, machine: Machine) -> float:
    """Share of the workgroups that keep to their stream's convoy, where a miss makes a workgroup wait.

    The readers of a convoy end together and start together, but for their random delays: those start within the cached
    part of the stream catch up, and a late one that does not is lost to those behind it as well.
    """
    return min(1.0, cached_tiles / machine.cache.delay_tiles(grid)) ** CAPTURE


def lost_rate(window: Window, cached_share: float, streams: float) -> float:
    """Hit rate of readers at random places of their streams.

    A tile stays for W = C / (U y) tile times after it was read, y the miss rate, and readers come every gap =
    S NT / U: one miss per W + gap gives y = 1 - C / (S NT). Readers whose forerunner is just before them in the queue
    follow it as if theirs were the only stream.
    """
    neighbours = sum(step == 1 for step in window.steps) / window.size
    return max(min(1.0, cached_share), neighbours * min(1.0, cached_share * streams))


def kv_hit_rate(window: Window, grid: Grid, machine: Machine) -> tuple[float, float, float]:
    """(hit rate of K and V, share of the run in step, streams of one cache) for one window."""
    caches = machine.domains // machine.dispatch_domains
    capacity = machine.l2_bytes.value / machine.domains / grid.tile_bytes
    walk = grid.visits / grid.workgroups
    streams = sum(distinct_readers(count, caches) for count in window.readers) / caches
    first_readers = caches * streams / window.size
    cached_share = capacity / (streams * walk)
    # workgroups of a stream after those of one window find what is kept
    later = 1.0 - min(1.0, window.size / len(window.readers) / readers_of_a_stream(grid, machine))
    in_step = 1.0 - first_readers * (1.0 - later * kept_rate(cached_share))
    lost = min(lost_rate(window, cached_share, streams), in_step)
    if makes_convoys(grid, machine):
        share = captured(capacity / streams, grid, machine)
    else:
        share = share_in_step(capacity / streams, window, grid, machine)
        # what is kept anyway does not need its readers together
        share = max(share, kept_rate(cached_share))
    return share * in_step + (1 - share) * lost, share, streams


def readers_of_a_stream(grid: Grid, machine: Machine) -> float:
    """Workgroups of one ACC that one dispatch queue gets, in the whole launch."""
    whole = grid.group * grid.blocks
    placed = grid.mapping.startswith("swizzled") and grid.domains == machine.dispatch_domains
    return whole if placed else whole / machine.dispatch_domains


def streams_per_domain(grid: Grid, machine: Machine) -> float:
    """Mean number of K/V streams that one domain reads at a time."""
    caches = machine.domains // machine.dispatch_domains
    counts = [
        sum(distinct_readers(readers, caches) for readers in window.readers) / caches
        for window in windows(grid, machine)
    ]
    return sum(counts) / len(counts)


def estimate(grid: Grid, machine: Machine) -> Estimate:
    """Hit rate, bytes and time of a launch. Raises ModelError on an impossible shape, and for waves."""
    grid.check()
    if grid.in_waves or grid.alternate:
        raise ModelError(
            "the closed form knows neither waves nor alternating directions: simulate the launch."
        )
    found = windows(grid, machine)
    rows = [kv_hit_rate(window, grid, machine) for window in found]
    kv_rate, share, streams = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    caches = machine.domains // machine.dispatch_domains
    kv_bytes = float(grid.visits * grid.tile_bytes)
    own_bytes = float(grid.workgroups * grid.block_bytes)
    missed = kv_bytes * (1 - kv_rate)
    # of the lines that a partition misses, some are found in the partition that is their home
    fetched = missed / (1 + (caches - 1) / caches * kv_rate)
    least = float(grid.batch * grid.kv_heads * grid.tiles * grid.tile_bytes)
    hbm = max(fetched, least) + own_bytes
    hit_rate = (kv_rate * kv_bytes + own_bytes) / grid.requested_bytes
    seconds = run_seconds(grid, machine, kv_rate, hbm)
    return Estimate(
        hit_rate, hbm, float(grid.requested_bytes), seconds, grid.flops / seconds / 1e12, streams, share
    )


def run_seconds(grid: Grid, machine: Machine, kv_rate: float, hbm_bytes: float) -> float:
    """Time of a launch whose units compute, wait where misses are exposed, and share the memory."""
    model = machine.cache
    tile = model.tile_seconds(grid, machine.units)
    # readers in a convoy wait for memory as the first of them does
    waits = model.miss_latency if model.depth == 0 else max(0.0, model.miss_latency / model.depth - tile)
    walk = grid.visits / grid.workgroups
    waves = grid.workgroups / machine.units
    if not grid.causal:
        waves = ceil(waves)  # causal, longest first, leaves no tail
    busy = waves * (walk * (tile + waits) + model.delay_tiles(grid) / 2 * tile)
    return max(busy, hbm_bytes / model.read_bandwidth)

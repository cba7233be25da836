"""Which mapping, and how many workgroups and splits, a layer gets: what `variants.py` asks, and why.

Everything is plain Python. Where a device has been measured, the measurement is in MEASURED, the one table of such
figures, and wins over the closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from ..mapping import piece_start
from . import ModelError
from .closed_form import Estimate, estimate
from .grid import MAPPINGS, Grid
from .machines import Machine

PREFILL_BLOCK_M, PREFILL_BLOCK_N = 128, 64
# a planner serves every length and batch of its layers: its mapping is the one whose worst of these is best
CONTEXTS = (4096, 32768, 131072)
TIE = 0.01  # relative time within which the placed mapping stays
DEFAULT_MAPPING = "swizzled-head-first"  # also where nothing is known; over one domain it is head-first
DECODE_MAPPING = "swizzled-head-first"  # a decode list is head-first by construction
NOT_MEASURED = "not measured"
MIN_TILES = 2  # a split of fewer KV tiles costs more to merge than it saves
# a workgroup asks for nothing while it merges, or waits for its last products: a second one fills the gap
LEAST_WORKGROUPS_PER_UNIT, MOST_WORKGROUPS_PER_UNIT = 2, 4


@dataclass(frozen=True)
class Measured:
    """One prefill launch on a real device. domains: that the mapping swizzles over, 1 for those that do not."""

    machine: str
    mapping: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    domains: int
    hit_rate: float
    tflops: float | None
    source: str


ONE_H200 = "one H200, ncu, plain Triton kernel"
PUBLISHED = "published, MI355X"
MEASURED = (
    #        device    mapping                 B   HQ   HK  length  dom    hits  TFLOP/s  source
    Measured("H200", "block-first", 1, 128, 128, 32768, 1, 0.0021, 395, ONE_H200),
    Measured("H200", "head-first", 1, 128, 128, 32768, 1, 0.9905, 486, ONE_H200),
    Measured("H200", "swizzled-head-first", 1, 128, 128, 32768, 8, 0.6465, None, ONE_H200),
    Measured("H200", "head-first", 1, 128, 128, 131072, 1, 0.6868, None, ONE_H200),
    Measured("H200", "head-first", 1, 128, 128, 131072, 1, 0.9539, None, f"{ONE_H200}, another run"),
    Measured("H200", "block-first", 1, 16, 16, 32768, 1, 0.6695, None, ONE_H200),
    Measured("H200", "block-first", 1, 32, 32, 16384, 1, 0.4662, None, ONE_H200),
    Measured("H200", "block-first", 2, 64, 64, 8192, 1, 0.0386, None, ONE_H200),
    Measured("H200", "block-first", 1, 64, 8, 65536, 1, 0.8431, None, ONE_H200),
    Measured("H200", "head-first", 1, 64, 64, 65536, 1, 0.9822, None, ONE_H200),
    Measured("H200", "head-first", 1, 32, 32, 131072, 1, 0.9669, None, ONE_H200),
    Measured("H200", "swizzled-head-first", 1, 128, 128, 32768, 2, 0.9660, None, ONE_H200),
    Measured("H200", "swizzled-head-first", 1, 64, 8, 32768, 8, 0.8437, None, ONE_H200),
    Measured("H200", "swizzled-head-first", 4, 32, 32, 16384, 4, 0.9359, None, ONE_H200),
    Measured("H200", "swizzled-block-first", 2, 64, 64, 16384, 8, 0.2157, None, ONE_H200),
    Measured("MI355X", "block-first", 1, 64, 64, 65536, 1, 0.024, None, PUBLISHED),
    Measured("MI355X", "head-first", 1, 64, 64, 65536, 1, 0.936, None, f"{PUBLISHED}: 6 % faster"),
)


@dataclass(frozen=True)
class Row:
    """One mapping in one launch: hits by the closed form, time relative to the fastest, the nearest measured point.

    timed: whether relative_time was measured.
    """

    mapping: str
    hit_rate: float
    streams_per_domain: float
    relative_time: float
    timed: bool
    measured: str


@dataclass(frozen=True)
class Choice:
    """mapping, splits and the sentences that explain them, for one step.

    domains: that the mapping places by. workgroups: of the launch. busy: those that have work. splits: parts of each
    ACC (the most, 1 for prefill). split_tokens: of the longest part. domains_per_acc: that an ACC's parts lie on.
    """

    phase: str
    machine: str
    mapping: str
    domains: int
    workgroups: int
    busy: int
    splits: int
    split_tokens: int
    domains_per_acc: int
    rows: list[Row]
    reasons: list[str]


def effective(mapping: str, domains: int) -> str:
    """The mapping's name without a swizzle over one domain, which changes nothing."""
    return mapping.removeprefix("swizzled-") if domains == 1 else mapping


def nearest(machine: Machine, mapping: str, grid: Grid, q_heads: int) -> str:
    """A measured point of the same machine and mapping, nearest in heads and length."""
    points = [
        row
        for row in MEASURED
        if (row.machine, row.mapping, row.domains)
        == (machine.name, effective(mapping, grid.domains), grid.domains)
    ]
    if not points:
        return NOT_MEASURED
    row = min(
        points,
        key=lambda each: (
            abs(each.kv_heads - grid.kv_heads),
            abs(each.q_heads - q_heads),
            abs(each.length - grid.length),
        ),
    )
    return f"{row.hit_rate:.1%} at {row.q_heads}/{row.kv_heads} heads, {row.length} tokens"


def measured_seconds(machine: Machine, grid: Grid, q_heads: int) -> float | None:
    """Relative time of this launch if it was timed: 1 / TFLOP/s."""
    wanted = (machine.name, effective(grid.mapping, grid.domains), grid.batch, q_heads, grid.kv_heads)
    for row in MEASURED:
        launch = (row.machine, row.mapping, row.batch, row.q_heads, row.kv_heads)
        if launch == wanted and row.length == grid.length and row.domains == grid.domains and row.tflops:
            return 1 / row.tflops
    return None


@lru_cache(maxsize=256)
def compare_mappings(
    machine: Machine, q_heads: int, kv_heads: int, head_dim: int, batch: int, context: int
) -> tuple[Row, ...]:
    """The four mappings of a prefill whose workgroups pack the query heads of a KV head.

    Raises ModelError on heads that do not divide and on counts below 1.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ModelError(f"q_heads is {q_heads}: it must be a multiple of kv_heads, which is {kv_heads}.")
    found: dict[str, tuple[Grid, Estimate]] = {}
    for mapping in MAPPINGS:
        grid = Grid(
            mapping,
            batch,
            kv_heads,
            kv_heads,
            context,
            head_dim,
            PREFILL_BLOCK_M,
            PREFILL_BLOCK_N,
            causal=False,
            domains=machine.dispatch_domains if mapping.startswith("swizzled") else 1,
            query_length=context * (q_heads // kv_heads),
        )
        found[mapping] = grid, estimate(grid, machine)
    timed = {mapping: measured_seconds(machine, grid, q_heads) for mapping, (grid, _) in found.items()}
    by_clock = all(timed.values())
    times = timed if by_clock else {mapping: each.seconds for mapping, (_, each) in found.items()}
    fastest = min(times.values())
    return tuple(
        Row(
            mapping,
            each.hit_rate,
            each.streams_per_domain,
            times[mapping] / fastest,
            by_clock,
            nearest(machine, mapping, grid, q_heads),
        )
        for mapping, (grid, each) in found.items()
    )


@lru_cache(maxsize=256)
def prefill_mapping(machine: Machine | None, q_heads: int, kv_heads: int, head_dim: int) -> str:
    """The mapping whose worst time over CONTEXTS is best; of those that tie, the default if it is among them.

    machine None: nothing is known of the device, which gets the default.
    """
    if machine is None:
        return DEFAULT_MAPPING
    launches = [compare_mappings(machine, q_heads, kv_heads, head_dim, 1, context) for context in CONTEXTS]
    worst = {rows[0].mapping: max(row.relative_time for row in rows) for rows in zip(*launches, strict=True)}
    best = min(worst.values())
    tied = [mapping for mapping, time in worst.items() if time <= best + TIE]
    return DEFAULT_MAPPING if DEFAULT_MAPPING in tied else tied[0]


def explain_prefill(
    machine: Machine,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    *,
    block_m: int,
    asked: str | None = None,
    placed: bool = False,
) -> Choice:
    """What a prefill step of `batch` prompts of `context` tokens gets, with rows of `block_m`, and why.

    asked: the mapping that a setting asks for, None where the dispatcher chooses. placed: whether workgroups read where
    they run, so that each domain gets those meant for it however they are dealt.
    """
    by_itself = prefill_mapping(machine, q_heads, kv_heads, head_dim)
    if placed:
        machine = replace(machine, dispatch_domains=machine.domains)
    rows = compare_mappings(machine, q_heads, kv_heads, head_dim, batch, context)
    if placed:
        # what was measured over as many domains was dealt, not placed
        rows = tuple(
            replace(row, measured=NOT_MEASURED) if row.mapping.startswith("swizzled") else row for row in rows
        )
    mapping = asked or by_itself
    own = next(row for row in rows if row.mapping == mapping)
    worst = max(rows, key=lambda row: row.relative_time)
    reasons = [
        f"{mapping}: {own.streams_per_domain:.1f} K/V streams at a time on each of {machine.domains} domains, "
        f"{own.hit_rate:.1%} L2 hits (computed)."
    ]
    if worst.relative_time <= 1 + TIE:
        reasons.append("All four mappings take the same time here: the choice does not matter.")
    else:
        how = "measured" if worst.timed else "computed"
        reasons.append(f"{worst.mapping} takes {worst.relative_time:.2f} times as long ({how}).")
    if asked is not None:
        reasons.append(f"NUMA_SWIZZLE_MAPPING asks for {asked}; by itself the dispatcher takes {by_itself}.")
    elif own.relative_time > 1 + TIE:
        reasons.append(
            f"It takes {own.relative_time:.2f} times as long as the fastest here: one mapping serves all lengths, "
            f"and this one is best at its worst over {', '.join(f'{each:,}' for each in CONTEXTS)} tokens."
        )
    if machine.dispatch_domains == 1:
        reasons.append(
            "Workgroups are not dealt to domains in turn here: swizzled over one domain, a mapping is the naive one."
        )
    workgroups = batch * kv_heads * ceil(context * (q_heads // kv_heads) / block_m)
    return Choice(
        "prefill",
        machine.name,
        mapping,
        machine.dispatch_domains if mapping.startswith("swizzled") else 1,
        workgroups,
        workgroups,
        1,
        context,
        1,
        list(rows),
        reasons,
    )


def bytes_needed(machine: Machine) -> float:
    """Bytes that each unit must have on their way to draw the memory's bandwidth."""
    return machine.memory_bandwidth.value * machine.cache.miss_latency / machine.units


def workgroups_per_unit(machine: Machine | None, bytes_in_flight: int) -> int:
    """Decode workgroups a compute unit, each with `bytes_in_flight` of K and V on their way.

    Enough to cover the memory's latency at its full bandwidth (Little's law), at least two, so that one loads while
    the other computes or merges.
    """
    if machine is None:
        return LEAST_WORKGROUPS_PER_UNIT
    needed = bytes_needed(machine)
    return min(max(ceil(needed / bytes_in_flight), LEAST_WORKGROUPS_PER_UNIT), MOST_WORKGROUPS_PER_UNIT)


def explain_decode(
    machine: Machine,
    q_heads: int,
    kv_heads: int,
    batch: int,
    context: int,
    *,
    workgroups: int,
    block_n: int,
    row_blocks: int = 1,
    asked: str | None = None,
) -> Choice:
    """How a decode launch of `workgroups` workgroups divides `batch` requests of `context` tokens each, and why.

    block_n: KV tokens a tile. row_blocks: packed tiles of one KV head's query rows. asked: the mapping that a
    setting asks for, which decides here only whether it is swizzled. The arithmetic is that of
    decode/work_list.py for equal lengths.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ModelError(f"q_heads is {q_heads}: it must be a multiple of kv_heads, which is {kv_heads}.")
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise ModelError(f"{name} is {value}: it must be at least 1.")
    placed = asked is None or asked.startswith("swizzled")
    domains = machine.dispatch_domains if placed else 1
    accs = batch * kv_heads
    units = accs * row_blocks
    tiles = ceil(context / block_n)
    total = units * tiles
    parts_each = ceil(tiles / max(ceil(total / workgroups), MIN_TILES))
    one_part_each = units * parts_each <= workgroups
    # what the line of the work list is made of: parts of a unit, or tiles
    steps = parts_each if one_part_each else tiles
    line = units * steps
    busy = line if one_part_each else min(workgroups, ceil(total / MIN_TILES))
    ends = [piece_start(domain + 1, busy, domains) for domain in range(domains)]
    parts = [
        (((unit * steps + 1) * busy - 1) // line, ((unit + 1) * steps * busy - 1) // line)
        for unit in range(units)
    ]
    splits = max(last - first + 1 for first, last in parts)
    spread = max(
        sum(end > first for end in ends) - sum(end > last for end in ends) + 1 for first, last in parts
    )
    split_tokens = min(ceil(total / busy), tiles) * block_n
    several = "s" if splits > 1 else ""
    reasons = [
        f"{accs} ACC{'s' * (accs > 1)} (requests x KV heads) of {tiles:,} tiles for {workgroups} workgroups: "
        f"{splits} split{several} of each, of at most {split_tokens:,} tokens."
    ]
    per_unit, bandwidth = workgroups / machine.units, machine.memory_bandwidth.value / 1e12
    reasons.append(
        f"{per_unit:.0f} workgroup{'s' * (per_unit > 1)} a unit: {bytes_needed(machine) / 1e3:.0f} KB must be on their "
        f"way to each to draw {bandwidth:.1f} TB/s (computed), and one loads while another computes."
    )
    if busy < workgroups:
        reasons.append(
            f"{busy} workgroups have work: a split of fewer than {MIN_TILES} tiles costs more to merge than it saves."
        )
    if not placed:
        reasons.append(
            f"NUMA_SWIZZLE_MAPPING asks for {asked}, so workgroups are not placed; by itself the dispatcher takes "
            f"{DECODE_MAPPING}."
        )
        # the hardware deals the splits of an ACC to domains in turn
        spread = min(splits, machine.dispatch_domains)
    elif domains > 1 and spread > 1:
        reasons.append(
            f"An ACC lies on up to {spread} domains: every domain gets the same work, "
            "as one cannot draw the whole memory bandwidth."
        )
    elif splits > 1:
        reasons.append("The splits of an ACC lie on one domain.")
    reasons.append(
        "Every K/V byte is read once, so no mapping saves memory traffic in decode: the hit rate does not decide it."
    )
    return Choice(
        "decode",
        machine.name,
        DECODE_MAPPING if placed else DECODE_MAPPING.removeprefix("swizzled-"),
        domains,
        workgroups,
        busy,
        splits,
        split_tokens,
        spread,
        [],
        reasons,
    )

"""Which mapping and how many splits for a layer: closed form and measured figures, in one table, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from . import ModelError
from .closed_form import Estimate, estimate
from .grid import MAPPINGS, Grid
from .machines import Machine

PREFILL_BLOCK_M, PREFILL_BLOCK_N = 128, 64
TIE = 0.01  # relative time within which the simpler or measured mapping stays
SPLIT_TILES = 4  # a split shorter than this many tiles costs more than it gains


@dataclass(frozen=True)
class Measured:
    """One figure from a real device. domains: that the mapping swizzles over, 1 for those that do not."""

    machine: str
    mapping: str
    q_heads: int
    kv_heads: int
    length: int
    domains: int
    hit_rate: float
    tflops: float | None
    source: str


ONE_H200 = "one H200, ncu, plain Triton kernel"
MEASURED = (
    Measured("H200", "block-first", 128, 128, 32768, 1, 0.0021, 395, ONE_H200),
    Measured("H200", "head-first", 128, 128, 32768, 1, 0.9905, 486, ONE_H200),
    Measured("H200", "swizzled-head-first", 128, 128, 32768, 8, 0.6465, None, ONE_H200),
    Measured("H200", "head-first", 128, 128, 131072, 1, 0.6868, None, ONE_H200),
    Measured("MI355X", "block-first", 64, 64, 65536, 1, 0.024, None, "published, MI355X"),
    Measured("MI355X", "head-first", 64, 64, 65536, 1, 0.936, None, "published, MI355X: 6 % faster"),
)


@dataclass(frozen=True)
class Row:
    """One mapping: what the closed form says, and the nearest measured point if there is one."""

    mapping: str
    hit_rate: float
    streams_per_domain: float
    relative_time: float
    measured: str


@dataclass(frozen=True)
class Choice:
    """mapping, splits and the sentences that explain them. splits: parts of each ACC, 1 for prefill."""

    phase: str
    machine: str
    mapping: str
    domains: int
    workgroups: int
    splits: int
    split_tokens: int
    domains_per_acc: int
    rows: list[Row]
    reasons: list[str]


def nearest(machine: Machine, mapping: str, grid: Grid) -> str:
    """A measured point of the same machine and mapping, nearest in heads and length."""
    points = [
        row
        for row in MEASURED
        if (row.machine, row.mapping, row.domains) == (machine.name, mapping, grid.domains)
    ]
    if not points:
        return "not measured"
    row = min(points, key=lambda each: (abs(each.kv_heads - grid.kv_heads), abs(each.length - grid.length)))
    return f"{row.hit_rate:.1%} at {row.q_heads}/{row.kv_heads} heads, {row.length} tokens"


def choose_prefill(
    machine: Machine, q_heads: int, kv_heads: int, head_dim: int, batch: int, context: int
) -> Choice:
    """The mapping of a prefill whose workgroups pack the query heads of a KV head."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ModelError(f"q_heads is {q_heads}: it must be a multiple of kv_heads, which is {kv_heads}.")
    group = q_heads // kv_heads
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
            query_length=context * group,
        )
        found[mapping] = grid, estimate(grid, machine)
    fastest = min(each.seconds for _, each in found.values())
    rows = [
        Row(
            mapping,
            each.hit_rate,
            each.streams_per_domain,
            each.seconds / fastest,
            nearest(machine, mapping, grid),
        )
        for mapping, (grid, each) in found.items()
    ]
    tied = [row for row in rows if row.relative_time <= 1 + TIE]
    best = max(tied, key=lambda row: (round(row.hit_rate, 3), row.mapping == "swizzled-head-first"))
    reasons = [
        f"{best.mapping}: {best.streams_per_domain:.1f} K/V streams at a time on each of {machine.domains} domains, "
        f"{best.hit_rate:.1%} L2 hits."
    ]
    if len(tied) == len(rows):
        reasons.append("All four mappings take the same time here: the choice does not matter.")
    else:
        worst = max(rows, key=lambda row: row.relative_time)
        reasons.append(f"{worst.mapping} would take {worst.relative_time:.2f} times as long.")
    if machine.dispatch_domains == 1:
        reasons.append(
            "Workgroups are not dealt to domains in turn here, so there is nothing to swizzle over."
        )
    domains = machine.dispatch_domains if best.mapping.startswith("swizzled") else 1
    workgroups = found[best.mapping][0].workgroups
    return Choice("prefill", machine.name, best.mapping, domains, workgroups, 1, context, 1, rows, reasons)


def choose_decode(
    machine: Machine,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    context: int,
    *,
    workgroups: int,
    tile_tokens: int,
) -> Choice:
    """The splits of a decode launch of `workgroups` workgroups that read tiles of `tile_tokens` tokens."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ModelError(f"q_heads is {q_heads}: it must be a multiple of kv_heads, which is {kv_heads}.")
    for name, value in (("batch", batch), ("context", context), ("head_dim", head_dim)):
        if value < 1:
            raise ModelError(f"{name} is {value}: it must be at least 1.")
    accs = batch * kv_heads
    tiles = ceil(context / tile_tokens)
    wanted = max(1, workgroups // accs)
    splits = max(1, min(wanted, tiles // SPLIT_TILES))
    split_tokens = ceil(tiles / splits) * tile_tokens
    spread = ceil(machine.domains / accs) if accs < machine.domains else 1
    reasons = [
        f"{accs} ACC{'s' * (accs > 1)} (requests x KV heads) for {workgroups} workgroups: {splits} "
        f"split{'s' * (splits > 1)} of {split_tokens:,} tokens each."
    ]
    if splits < wanted:
        reasons.append(f"Not {wanted}: a split of fewer than {SPLIT_TILES} tiles costs more than it gains.")
    if spread > 1:
        reasons.append(
            f"Fewer ACCs than the {machine.domains} domains: each is spread over {spread}, "
            "because one domain cannot draw the whole memory bandwidth."
        )
    else:
        reasons.append("The splits of an ACC stay on one domain: they are merged through its L2.")
    reasons.append(
        "Every K/V byte is read once, so no mapping saves memory traffic in decode: the hit rate does not decide it."
    )
    domains = machine.dispatch_domains
    return Choice(
        "decode",
        machine.name,
        "swizzled-head-first",
        domains,
        workgroups,
        splits,
        split_tokens,
        spread,
        [],
        reasons,
    )

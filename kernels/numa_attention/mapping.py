"""Workgroup id -> (request, query head, query block): the four mappings that docs/mapping.md defines.

The unit that is placed is the ACC (attention compute cluster): the workgroups of one (request, KV head), which
all read the same keys and values. Tiles have a natural order, the *flat* index: request, then query head, then
query block. ACCs are contiguous in it. Hardware deals workgroups to NUMA domains in turn (`domain_of`), so a
mapping decides, by the tile it gives a workgroup, which domain reads which keys and values.

The first half of this file is the definition. It is integer arithmetic and nothing else, so numpy arrays and
Triton tensors both go through it: `tiles` runs it on the host, mapping_device.py compiles the same source for
the device. Hence the rules for `DEFINITION`: operators only; one return, at the end; `if` only on `mapping`,
`uniform` and `longest_first`, which the device knows at compile time; calls only to one another; and a negative
operand of // or %, on which numpy and Triton disagree, only in what `pick` then discards.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MAPPINGS = ("block-first", "swizzled-block-first", "head-first", "swizzled-head-first")


# ---- the definition, shared with the device ----


def pick(condition, yes, no):
    """`yes` where the condition holds, else `no`."""
    return no + (yes - no) * condition


def piece_start(domain, length, domains):
    """Where the piece of `domain` starts when `length` items are cut into one contiguous piece per domain.

    The first `length % domains` pieces are one longer: as many items as dealing in turn gives each domain.
    """
    longer = length % domains
    return domain * (length // domains) + pick(domain > longer, longer, domain)


def dealt(workgroup, accs, acc_size, domains):
    """Flat index for equal ACCs: whole ACCs go to the domains in turn, the left-over ones are cut into pieces."""
    domain = workgroup % domains
    position = workgroup // domains
    rounds = accs // domains
    whole = ((position // acc_size) * domains + domain) * acc_size + position % acc_size
    left_over = piece_start(domain, (accs % domains) * acc_size, domains)
    part = rounds * domains * acc_size + left_over + position - rounds * acc_size
    return pick(position < rounds * acc_size, whole, part)


def flat_index(workgroup, mapping, uniform, accs, total, domains):
    """Flat index that tells the workgroup's request; of the workgroup's tile itself if the order is head-first.

    `total`: workgroups of the grid. `uniform`: all requests have the same number of blocks.
    """
    flat = workgroup
    if mapping == "swizzled-head-first" or mapping == "swizzled-block-first":
        if uniform:
            flat = dealt(workgroup, accs, total // accs, domains)
        else:
            flat = piece_start(workgroup % domains, total, domains) + workgroup // domains
    return flat


def dealt_run(workgroup, request, acc_size, accs, kv_heads, domains):
    """The request's whole ACCs on the workgroup's domain, for equal ACCs dealt in turn.

    Returns (first KV head, step between the KV heads, their number, position of the workgroup in their tiles,
    whether the workgroup belongs to them).
    """
    domain = workgroup % domains
    position = workgroup // domains
    rounds = accs // domains
    # the domain holds the ACCs rank * domains + domain; `first` and `end` bound the ranks inside the request
    first = (request * kv_heads + domains - 1 - domain) // domains
    end = ((request + 1) * kv_heads + domains - 1 - domain) // domains
    end = pick(end > rounds, rounds, end)
    first_head = first * domains + domain - request * kv_heads
    return first_head, domains, end - first, position - first * acc_size, position < rounds * acc_size


def cut_run(workgroup, offset, request_start, acc_size, total, kv_heads, domains):
    """The request's whole ACCs on the workgroup's domain, for a flat order cut into contiguous pieces.

    Returns the same as `dealt_run`. `offset`: flat index of the workgroup's tile from the request's first tile.
    """
    domain = workgroup % domains
    start = piece_start(domain, total, domains)
    end = piece_start(domain + 1, total, domains)
    start_offset = pick(start > request_start, start - request_start, 0)
    first = (start_offset + acc_size - 1) // acc_size
    stop = (end - request_start) // acc_size
    stop = pick(stop > kv_heads, kv_heads, stop)
    acc = offset // acc_size
    return first, 1, stop - first, offset - first * acc_size, (acc >= first) * (acc < stop)


def head_and_block(
    workgroup,
    flat,
    mapping,
    uniform,
    longest_first,
    request,
    request_start,
    blocks,
    accs,
    total,
    q_heads,
    kv_heads,
    domains,
):
    """Query head and query block of a workgroup, given its request.

    `flat`: its `flat_index`. `request_start`: flat index of the request's first tile. `blocks`: the request's.
    """
    offset = flat - request_start
    head = offset // blocks
    block = offset % blocks
    if mapping == "block-first":
        head = offset % q_heads
        block = offset // q_heads
    elif mapping == "swizzled-block-first":
        group = q_heads // kv_heads
        acc_size = group * blocks
        if uniform:
            first, step, count, position, inside = dealt_run(
                workgroup, request, acc_size, accs, kv_heads, domains
            )
        else:
            first, step, count, position, inside = cut_run(
                workgroup, offset, request_start, acc_size, total, kv_heads, domains
            )
        width = pick(count > 0, count, 1) * group
        kv_head = first + position % width // group * step
        head = pick(inside, kv_head * group + position % group, head)
        block = pick(inside, position // width, block)
    if longest_first:
        block = blocks - 1 - block
    return head, block


DEFINITION = (pick, piece_start, dealt, flat_index, dealt_run, cut_run, head_and_block)


# ---- the host form ----


def domain_of(workgroup, domains):
    """NUMA domain that a workgroup (an int or an array of them) runs on under round-robin dispatch."""
    return workgroup % domains


def check_mapping(mapping: str) -> None:
    """Raises ValueError when `mapping` is none of MAPPINGS."""
    if mapping not in MAPPINGS:
        raise ValueError(f"unknown mapping {mapping!r}: choose one of {', '.join(MAPPINGS)}.")


def check_grid(batch: int, q_heads: int, kv_heads: int, domains: int) -> None:
    """Raises ValueError when a count is not positive or the query heads are no multiple of the KV heads."""
    for name, value in (("batch", batch), ("q_heads", q_heads), ("kv_heads", kv_heads), ("domains", domains)):
        if index(value) < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1.")
    if q_heads % kv_heads:
        raise ValueError(f"q_heads is {q_heads}: it must be a multiple of kv_heads, which is {kv_heads}.")


def blocks_per_request(batch: int, blocks: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Query blocks of each request, int64 [batch], from one number for all or one number per request."""
    import numpy as np  # only in the host form: the closed form of the machine model needs the definition alone

    counts = np.asarray(blocks)
    if counts.size and not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"blocks has dtype {counts.dtype}: it must hold whole numbers.")
    if counts.ndim == 0:
        counts = np.full(batch, counts)
    if counts.shape != (batch,):
        raise ValueError(
            f"blocks has shape {list(counts.shape)}: give one number, or one per request ({batch})."
        )
    counts = counts.astype(np.int64)
    if (counts < 0).any():
        raise ValueError(f"blocks holds {counts.min()}: a number of blocks must not be negative.")
    return counts


def tiles(
    mapping: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    blocks: int | Sequence[int] | np.ndarray,
    domains: int,
    *,
    longest_first: bool = False,
    uniform: bool | None = None,
) -> np.ndarray:
    """Tiles in workgroup order: int64 [workgroups, 3] of (request, query head, query block).

    mapping: one of MAPPINGS.
    q_heads: tiles along the heads. Kernels that pack a GQA group into one tile pass kv_heads twice.
    blocks: query blocks of every request, or one number per request; a request may have none.
    domains: NUMA domains among which the hardware deals workgroups in turn; naive mappings ignore it.
    longest_first: blocks descend instead of ascend: under a causal mask the most work starts first.
    uniform: deal whole ACCs (True) or cut the flat order (False), as on a device that is told so. None: deal
        where all requests have the same number of blocks.

    Raises ValueError on an unknown mapping, on counts that are not positive, on query heads that are no multiple
    of the KV heads, on a wrong number of blocks, and on `uniform=True` with unequal requests.
    """
    import numpy as np

    check_mapping(mapping)
    check_grid(batch, q_heads, kv_heads, domains)
    # numpy's small integers overflow in products, and its uint64 turns into floating point beside int64
    batch, q_heads, kv_heads, domains = map(index, (batch, q_heads, kv_heads, domains))
    counts = blocks_per_request(batch, blocks)
    equal = bool((counts == counts[0]).all())
    if uniform is None:
        uniform = equal
    elif uniform and not equal:
        raise ValueError(
            "uniform=True needs the same number of blocks in every request: leave it out or pass False."
        )
    total = q_heads * int(counts.sum())
    if total == 0:
        return np.empty((0, 3), np.int64)

    accs = batch * kv_heads
    request_ends = q_heads * counts.cumsum()
    workgroup = np.arange(total, dtype=np.int64)
    flat = flat_index(workgroup, mapping, uniform, accs, total, domains)
    request = np.searchsorted(request_ends, flat, side="right")
    request_blocks = counts[request]
    request_start = (request_ends - q_heads * counts)[request]
    head, block = head_and_block(
        workgroup,
        flat,
        mapping,
        uniform,
        longest_first,
        request,
        request_start,
        request_blocks,
        accs,
        total,
        q_heads,
        kv_heads,
        domains,
    )
    return np.stack((request, head, block), axis=1)


def streams_per_domain(rows: np.ndarray, q_heads: int, kv_heads: int, domains: int, resident: int) -> float:
    """Mean number of K/V streams that one domain reads at a time.

    rows: `tiles(...)`, for the same q_heads and kv_heads.
    resident: workgroups that one domain runs at a time, its compute units x workgroups per unit.

    Each domain runs its workgroups in waves of `resident`. The streams of a wave are its distinct ACCs; waves
    weigh by their workgroups, so that a short last wave counts little. 1.0: all workgroups that a domain runs
    at a time read the same keys and values. 0.0: the grid is empty.

    Raises ValueError on counts that are not positive or heads that do not divide.
    """
    import numpy as np

    check_grid(1, q_heads, kv_heads, domains)
    if index(resident) < 1:
        raise ValueError(f"resident is {resident}: a domain runs at least 1 workgroup at a time.")
    if len(rows) == 0:
        return 0.0
    q_heads, kv_heads, domains, resident = map(index, (q_heads, kv_heads, domains, resident))
    workgroup = np.arange(len(rows))
    wave = (workgroup // domains // resident) * domains + domain_of(workgroup, domains)
    acc = rows[:, 0] * kv_heads + rows[:, 1] // (q_heads // kv_heads)
    accs = acc.max() + 1
    streams = np.bincount(np.unique(wave * accs + acc) // accs)
    return float((streams * np.bincount(wave)).sum() / len(rows))

"""Registers that machine code for NVIDIA reads although nothing has written them, whatever way it came there.

A compiler that emits such a read computes with what another warp has left behind: the kernel compiles, and where it is
interpreted its result is right. A read counts only where *no* path on which a kernel comes there for the first time has
written the register: a write under a predicate is a write, and whatever a branch or a call may reach counts as reached.
What an earlier turn of a loop has written for another use does not count, as most of a kernel lies in a loop.
"""

from __future__ import annotations

import re
from functools import reduce

from numa_attention.testing.sass import EVERY_REGISTER, Instruction, instruction, names

_ENTRY = re.compile(r'\s+\.other\s+(\S+?),@"?STO_CUDA_ENTRY')
_LABEL = re.compile(r"([.$\w]+):\s*$")


def _read(listing: str) -> tuple[list[Instruction], dict[str, int], list[str]]:
    """Instructions in their order, where each label stands among them, and the labels of kernels."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    entries: list[str] = []
    for line in listing.splitlines():
        if each := instruction(line):
            instructions.append(each)
        elif found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _ENTRY.match(line):
            entries.append(found[1])
    return instructions, labels, entries


def _successors(instructions: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Where each instruction may go.

    A return goes behind any call, a barrier of convergence where any that begins one says, and an indirect branch whose
    targets nvdisasm does not list to any label.
    """
    behind_calls = [i + 1 for i, each in enumerate(instructions) if each.opcode == "CALL"]
    meetings = [labels[name] for each in instructions if each.opcode == "BSSY" for name in each.targets]
    successors = []
    for place, each in enumerate(instructions):
        following = [place + 1] if each.falls_through else []
        if each.opcode == "RET":
            following += behind_calls
        elif each.opcode == "BSYNC":
            following += meetings
        elif each.opcode in ("BRX", "BRXU", "JMX", "JMXU") and not each.targets:
            following += labels.values()
        else:
            following += [labels[name] for name in each.targets if name in labels]
        successors.append([i for i in following if i < len(instructions)])
    return successors


def unwritten_reads(listing: str) -> list[str]:
    """Instructions that read registers which no path has written, and those registers. listing: of `nvdisasm -c`.

    Raises ValueError where the listing has no kernel.
    """
    instructions, labels, entries = _read(listing)
    if not entries:
        raise ValueError(
            "the listing names no kernel: this nvdisasm prints it otherwise, or it is none of `nvdisasm -c`."
        )
    starts = [labels[name] for name in entries]
    successors = _successors(instructions, labels)
    order = _in_reverse_postorder(successors, starts)
    first_ways = _without_loops(successors, order, starts)
    # what may be written before each instruction that can be reached
    written = dict.fromkeys(starts, 0)
    changed = True
    while changed:
        changed = False
        for place in order:
            each = instructions[place]
            after = written.get(place, 0) | each.writes
            if each.opcode == "CALL" and not any(name in labels for name in each.targets):
                after = EVERY_REGISTER  # by code that is not here
            for following in first_ways[place]:
                before = written.get(following, 0)
                written[following] = before | after
                changed |= bool(after & ~before)
    return [
        f"{each.text} at {each.address:#x} reads {', '.join(names(missing))}"
        for place, each in enumerate(instructions)
        if place in written and (missing := each.reads & ~written[place])
    ]


def _in_reverse_postorder(successors: list[list[int]], starts: list[int]) -> list[int]:
    """What can be reached, each before what follows it except in loops."""
    finished: list[int] = []
    seen = set(starts)
    for start in starts:
        path = [(start, iter(successors[start]))]
        while path:
            place, following = path[-1]
            step = next((i for i in following if i not in seen), None)
            if step is None:
                finished.append(path.pop()[0])
            else:
                seen.add(step)
                path.append((step, iter(successors[step])))
    return finished[::-1]


def _without_loops(successors: list[list[int]], order: list[int], starts: list[int]) -> list[list[int]]:
    """The successors without those that dominate what they follow: a loop's way back to its beginning.

    Dominators as Cooper, Harvey and Kennedy find them, "A simple, fast dominance algorithm", 2001.
    """
    rank = {place: i for i, place in enumerate(order)}
    before: dict[int, list[int]] = {place: [] for place in order}
    for place in order:
        for following in successors[place]:
            before[following].append(place)
    # kernels in one listing have no way between them: each dominates what it reaches
    dominator = {start: start for start in starts}

    def common(one: int, other: int) -> int:
        while one != other:
            if rank[one] < rank[other]:
                other = dominator[other]
            else:
                one = dominator[one]
        return one

    changed = True
    while changed:
        changed = False
        for place in order:
            if place not in starts:
                nearest = reduce(common, (i for i in before[place] if i in dominator))
                changed |= dominator.get(place) != nearest
                dominator[place] = nearest

    def dominates(place: int, other: int) -> bool:
        while rank[place] < rank[other]:
            other = dominator[other]
        return place == other

    return [
        [i for i in following if not dominates(i, place)] if place in rank else []
        for place, following in enumerate(successors)
    ]

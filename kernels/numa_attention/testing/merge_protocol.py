"""The protocol by which ranks merge, as a model whose every execution is looked at.

A launch of a workgroup is a set of memory accesses in a partial order: what release and acquire order, and no more.
An access happens at once, in the memory of the rank that is written to or waits; accesses that are not ordered happen
in any order, those of the other workgroups and ranks between them. A rank's next launch begins when all workgroups have
ended the one before, as on a stream. `explore` walks through all states that can be reached.

What is written is the launch's number, so that a read that finds another number is a wrong result; a state from which
nobody can go on is a lost flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from numa_attention.across_devices import BUFFERS, GONE


class WrongResult(AssertionError):
    """A workgroup merges something else than what was sent to it in this launch."""


class Stuck(AssertionError):
    """Ranks wait for one another for ever."""


@dataclass(frozen=True)
class Protocol:
    """What is modelled, as built unless a fault is planted.

    words: pieces of a partial that arrive one by one. workgroups: of each rank; which rows a workgroup has differs from
    launch to launch. buffers, release, acquire: as in the kernel. reset: flags are raised to 1 and lowered again by who
    waited, instead of counting launches. exact: a flag that is ahead is not what is waited for.
    impatient: a workgroup that waits may give up at any time. crash: this rank may stop for good at any time.
    carries_on: who gave up merges the next launch again, and tells nobody.
    """

    ranks: int = 2
    launches: int = 4
    words: int = 1
    workgroups: int = 1
    buffers: int = BUFFERS
    release: bool = True
    acquire: bool = True
    reset: bool = False
    exact: bool = False
    impatient: bool = False
    crash: int | None = None
    carries_on: bool = False

    @cached_property
    def accesses(self) -> list[tuple[str, int, int]]:
        """One workgroup's (kind, distance of the other rank, word)."""
        others = range(1, self.ranks)
        return [
            *(("write", other, word) for other in others for word in range(self.words)),
            *(("raise", other, 0) for other in others),
            *(("wait", other, 0) for other in others),
            *(("read", other, word) for other in others for word in range(self.words)),
            *(("lower", other, 0) for other in others if self.reset),
        ]

    @cached_property
    def before(self) -> list[int]:
        """For each access, the set (as bits) of those that must have happened."""
        found = []
        for kind, other, _ in self.accesses:
            ordered = set()
            if kind == "raise" and self.release:
                ordered = {("write", each) for each in range(1, self.ranks)}
            elif kind == "read" and self.acquire or kind == "lower":
                ordered = {("wait", other)}
            found.append(sum(1 << bit for bit, access in enumerate(self.accesses) if access[:2] in ordered))
        return found

    @property
    def whole(self) -> int:
        return (1 << len(self.accesses)) - 1


RUNNING, FAILED = 0, 1  # how a workgroup fares in its launch
# a rank: (launches it has ended, the launch in which it stopped merging or 0, whether it crashed, and of each workgroup
# (bits of accesses, how it fares))
Rank = tuple[int, int, bool, tuple[tuple[int, int], ...]]
# all ranks, flags by (owner, sender, workgroup), words by (owner, buffer, sender, place, word)
State = tuple[tuple[Rank, ...], tuple[int, ...], tuple[int, ...]]


class _Model:
    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol

    def first(self) -> State:
        each = self.protocol
        fresh = ((0, RUNNING),) * each.workgroups
        pairs = each.ranks * each.ranks * each.workgroups
        return (
            ((0, 0, False, fresh),) * each.ranks,
            (0,) * pairs,
            (0,) * (pairs * each.buffers * each.words),
        )

    def flag_place(self, owner: int, sender: int, workgroup: int) -> int:
        return (owner * self.protocol.ranks + sender) * self.protocol.workgroups + workgroup

    def word_place(self, owner: int, sender: int, workgroup: int, launch: int, word: int) -> int:
        each = self.protocol
        place = (workgroup + launch) % each.workgroups  # the rows move between the workgroups
        slot = (owner * each.buffers + launch % each.buffers) * each.ranks + sender
        return (slot * each.workgroups + place) * each.words + word

    def following(self, state: State) -> Iterator[State]:
        """The states after one more access, or one more mishap."""
        each = self.protocol
        for number, (ended, stopped, crashed, workgroups) in enumerate(state[0]):
            if crashed or ended == each.launches:
                continue
            if number == each.crash:
                yield self._with_rank(state, number, (ended, stopped, True, workgroups))
            for workgroup, (done, fares) in enumerate(workgroups):
                if fares == FAILED or done == each.whole:
                    continue
                if stopped and not done:
                    yield self._fail(state, number, workgroup)
                    if stopped <= ended:
                        continue  # it finds out when it begins, but not if it began before
                yield from self._accesses(state, number, workgroup, done)

    def _accesses(self, state: State, number: int, workgroup: int, done: int) -> Iterator[State]:
        each = self.protocol
        _, flags, words = state
        launch = state[0][number][0] + 1
        missing = False
        for bit, (kind, distance, word) in enumerate(each.accesses):
            if done >> bit & 1 or each.before[bit] & ~done:
                continue
            other = (number + distance) % each.ranks
            new_flags, new_words = flags, words
            if kind == "write":
                new_words = _replaced(words, self.word_place(other, number, workgroup, launch, word), launch)
            elif kind == "raise":
                value = 1 if each.reset else launch
                new_flags = _replaced(flags, self.flag_place(other, number, workgroup), value)
            elif kind == "wait":
                flag = flags[self.flag_place(number, other, workgroup)]
                if flag == GONE:
                    missing = True
                    continue
                wanted = 1 if each.reset else launch
                if flag < wanted or (each.exact and flag != wanted):
                    missing = missing or each.impatient
                    continue
            elif kind == "lower":
                new_flags = _replaced(flags, self.flag_place(number, other, workgroup), 0)
            elif words[self.word_place(number, other, workgroup, launch, word)] != launch:
                raise WrongResult(
                    f"rank {number} reads other words of rank {other} than those of launch {launch}"
                )
            yield self._advance(
                (state[0], new_flags, new_words), number, workgroup, (done | 1 << bit, RUNNING)
            )
        raised = sum(1 << bit for bit, access in enumerate(each.accesses) if access[0] == "raise")
        # its own flags come first: a workgroup waits when it has raised them
        if missing and done & raised == raised:
            yield self._fail(state, number, workgroup)

    def _fail(self, state: State, number: int, workgroup: int) -> State:
        """A workgroup gives up: its rows are NaN, its rank merges no more, and its flags say so."""
        each = self.protocol
        ranks, flags, words = state
        ended, stopped, crashed, workgroups = ranks[number]
        if not each.carries_on:
            stopped = stopped or ended + 1
            for other in range(each.ranks):
                if other != number:
                    flags = _replaced(flags, self.flag_place(other, number, workgroup), GONE)
        state = self._with_rank((ranks, flags, words), number, (ended, stopped, crashed, workgroups))
        return self._advance(state, number, workgroup, (each.whole, FAILED))

    def _advance(self, state: State, number: int, workgroup: int, now: tuple[int, int]) -> State:
        """The state with a workgroup at `now`, in the next launch if all of its rank have ended this one."""
        each = self.protocol
        ended, stopped, crashed, workgroups = state[0][number]
        workgroups = _replaced(workgroups, workgroup, now)
        if all(done == each.whole for done, _ in workgroups):
            ended, workgroups = ended + 1, ((0, RUNNING),) * each.workgroups
        return self._with_rank(state, number, (ended, stopped, crashed, workgroups))

    def _with_rank(self, state: State, number: int, rank: Rank) -> State:
        return _replaced(state[0], number, rank), state[1], state[2]


def _replaced(values: tuple, place: int, value) -> tuple:
    return (*values[:place], value, *values[place + 1 :])


def explore(protocol: Protocol) -> int:
    """Look at every state that the protocol can reach; returns how many there are.

    Raises WrongResult where a read finds other words than this launch's, Stuck where ranks that live wait for ever.
    """
    model = _Model(protocol)
    first = model.first()
    known, open_states = {first}, [first]
    while open_states:
        state = open_states.pop()
        goes_on = False
        for after in model.following(state):
            goes_on = goes_on or not _only_crashed(state, after)
            if after not in known:
                known.add(after)
                open_states.append(after)
        if not goes_on and any(
            not crashed and ended < protocol.launches for ended, _, crashed, _ in state[0]
        ):
            at = ", ".join(f"rank {rank} in launch {ended + 1}" for rank, (ended, *_) in enumerate(state[0]))
            raise Stuck(f"nobody can go on: {at}")
    return len(known)


def _only_crashed(state: State, after: State) -> bool:
    """Whether a crash is all that happened, on which no rank that waits can count."""
    return any(now[2] and not then[2] for then, now in zip(state[0], after[0], strict=True))

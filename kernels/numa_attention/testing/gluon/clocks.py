"""Vector clocks: which access is certain to have happened before which.

An agent is one CTA of one partition, or one asynchronous operation of one CTA. Everybody carries a clock, a dict from
agent to the latest tick of it that is known to have happened. An access is (agent, tick); it comes before whatever
is done with a clock that has reached the tick.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

Clock = dict[Hashable, int]
_numbers = itertools.count()


def join(into: Clock, other: Clock) -> None:
    """`into` also knows what `other` knows."""
    for agent, tick in other.items():
        if into.get(agent, 0) < tick:
            into[agent] = tick


def knows(clock: Clock, other: Clock) -> bool:
    """Whether `clock` has reached all that `other` has."""
    return all(clock.get(agent, 0) >= tick for agent, tick in other.items())


def joined(clocks: Iterable[Clock]) -> Clock:
    result: Clock = {}
    for clock in clocks:
        join(result, clock)
    return result


@dataclass(frozen=True)
class Access:
    """One access by one CTA, and how to tell the user about it."""

    agent: Hashable
    tick: int
    text: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.agent, 0) >= self.tick


class Operation:
    """An asynchronous operation, one instance an issuing CTA, all with one effect.

    It knows what its issuer knew at the issue. Whoever waits for it learns that, and that the operation happened.
    """

    def __init__(self, what: str, where: str, issuers: list[Clock], effect: Callable[[], None]) -> None:
        number = next(_numbers)
        self.what = what
        self.where = where
        self.agents = [("operation", number, cta) for cta in range(len(issuers))]
        self.clocks = [{**clock, agent: 1} for clock, agent in zip(issuers, self.agents, strict=True)]
        self.done = False
        self._effect = effect

    def finish(self) -> None:
        """Have the effect, now."""
        if not self.done:
            self._effect()
            self.done = True

    def access(self, cta: int) -> Access:
        return Access(self.agents[cta], 1, f"{self.what} at {self.where}")

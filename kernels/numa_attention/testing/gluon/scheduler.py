"""Partitions take turns: one thread runs at a time, and a seeded random choice says which.

A partition hands over at accesses to shared memory and at waits. Copies that signal a barrier are in flight until the
scheduler lets them land, at a random moment. When nobody can run and nothing is in flight, that is a deadlock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from numa_attention.testing.gluon.clocks import Clock, Operation, join
from numa_attention.testing.gluon.faults import Deadlock


class Partition:
    """A group of warps with its own program counter, in every CTA of the cluster."""

    def __init__(self, name: str, ctas: int) -> None:
        self.name = name
        self.clocks: list[Clock] = [{(name, cta): 1} for cta in range(ctas)]
        self.frames: list = []  # generators of the functions it is in, innermost last
        self.done = False
        self.condition: Callable[[], bool] | None = None
        self.turn = threading.Semaphore(0)
        # what it issued and has not waited for, oldest first
        self.tensor_copies: list[Operation] = []  # TDM
        self.bulk_stores: list[Operation] = []  # TMA
        self.matrix_products: list[Operation] = []  # wgmma
        self.copy_groups: list[list[Operation]] = []  # async_copy, committed
        self.open_group: list[Operation] = []
        self.cluster_arrival: Clock | None = None  # what the cluster's partitions knew at the arrive
        self.cluster_arrival_at = ""

    def agent(self, cta: int) -> tuple[str, int]:
        return (self.name, cta)

    def advance(self) -> None:
        """What it does from now on is not known to those who learnt of it before."""
        for cta, clock in enumerate(self.clocks):
            clock[self.agent(cta)] += 1

    def learn(self, operation: Operation) -> None:
        """The end of a wait for the operation."""
        operation.finish()
        for clock, known in zip(self.clocks, operation.clocks, strict=True):
            join(clock, known)

    def where(self) -> str:
        """The line that it is at, with the lines of its callers."""
        own = [frame for frame in reversed(self.frames) if not frame.in_library]
        places = [frame.place() for frame in own]
        return ", called at ".join(places) if places else "the launch"

    def outstanding(self) -> list[Operation]:
        groups = [operation for group in self.copy_groups for operation in group]
        return self.tensor_copies + self.bulk_stores + self.matrix_products + groups + self.open_group


class Scheduler:
    """Chooses who runs next; the same seed makes the same choices."""

    LAND = 0.3  # how readily copies land
    HAND_OVER = 0.5  # how readily a partition loses its turn

    def __init__(self, seed: int, ctas: int) -> None:
        self.random = random.Random(seed)
        self.ctas = ctas
        self.error: BaseException | None = None
        self.start_program()

    def start_program(self) -> None:
        """A new workgroup or cluster: one partition, nothing in flight."""
        self.current = Partition("main", self.ctas)
        self.partitions = [self.current]
        self.in_flight: list[tuple[Operation, Callable[[], None]]] = []

    def abandon(self) -> None:
        """The program is over: let partitions that an error left waiting end."""
        if len(self.partitions) > 1:
            self.error = self.error or Deadlock("the program ended")
            self._wake_all(self.current)

    def launch(self, operation: Operation, land: Callable[[], None]) -> None:
        """`land` will be called at some later moment."""
        self.in_flight.append((operation, land))

    def may_hand_over(self) -> None:
        """A place where another partition may run, or a copy land."""
        if (len(self.partitions) > 1 or self.in_flight) and self.random.random() < self.HAND_OVER:
            self._hand_over()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Come back when the condition holds."""
        self.current.condition = condition
        me = self.current
        self._hand_over()
        me.condition = None

    def run_in_thread(self, partition: Partition, body: Callable[[], None]) -> None:
        """Add a partition, which starts when its turn comes."""
        self.partitions.append(partition)

        def thread() -> None:
            partition.turn.acquire()
            try:
                if self.error is None:
                    body()
            except BaseException as error:  # noqa: B902 - it is raised again in the thread of the launch
                self.error = self.error or error
            partition.done = True
            if self.error is not None:
                self._wake_all(partition)
                return
            following = self._choose()
            if following is None:
                self._fail_deadlocked()
                self._wake_all(partition)
            else:
                self.current = following
                following.turn.release()

        threading.Thread(target=thread, daemon=True, name=f"gluon partition {partition.name}").start()

    def _hand_over(self) -> None:
        me = self.current
        if self.error is not None:
            raise self.error
        following = self._choose()
        if following is None:
            self._fail_deadlocked()
            self._wake_all(me)
            raise self.error
        if following is me:
            return
        self.current = following
        following.turn.release()
        me.turn.acquire()
        if self.error is not None:
            raise self.error
        self.current = me

    def _choose(self) -> Partition | None:
        while True:
            if self.in_flight and self.random.random() < self.LAND:
                self._land_one()
            runnable = [p for p in self.partitions if not p.done and (p.condition is None or p.condition())]
            if runnable:
                return self.random.choice(runnable)
            if not self.in_flight:
                return None
            self._land_one()

    def _land_one(self) -> None:
        _, land = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
        land()

    def _fail_deadlocked(self) -> None:
        waiting = "; ".join(f"partition {p.name} waits at {p.where()}" for p in self.partitions if not p.done)
        self.error = Deadlock(f"deadlock: {waiting}, and nothing is left that could end a wait")

    def _wake_all(self, but: Partition) -> None:
        for partition in self.partitions:
            if partition is not but:
                partition.turn.release()

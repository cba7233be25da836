"""Launches of several ranks at a time under the interpreter, in an order and with delays that a seed decides.

Every workgroup of every rank is a thread, of which one runs at a time. Before each access to the ranks' shared memory
the seed decides who runs next; who has looked at a flag in vain looks again when something has happened, or when nobody
else can go on. Stores into another rank's memory arrive late, element by element and in any order; an
atomic that releases at system scope waits until all stores of its workgroup have arrived, and so does the end of a
launch. That is what a GPU promises, and no more.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import triton
from triton.runtime import interpreter as upstream

from numa_attention import across_devices
from numa_attention.across_devices_kernel import merge_across_kernel
from numa_attention.peer_memory import PeerMemory
from numa_attention.testing import interpreter

RELEASING = {upstream._ir.MEM_SEMANTIC.RELEASE, upstream._ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
LOOK = upstream._ir.ATOMIC_OP.ADD  # of 0, as the kernel waits
SYSTEM = upstream._ir.MEM_SYNC_SCOPE.SYSTEM


@dataclass(frozen=True)
class Launch:
    """One launch that was recorded instead of run."""

    workgroups: int
    arguments: tuple
    constants: dict


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, `across_devices.merge` only puts its launches on the list."""
    launches: list[Launch] = []
    launch = across_devices._launch
    across_devices._launch = lambda key, grid, arguments, constants, options: launches.append(
        Launch(grid[0], arguments, constants)
    )
    try:
        yield launches
    finally:
        across_devices._launch = launch


class _Dead(BaseException):
    """Ends the thread of a workgroup whose rank died."""


@dataclass
class _Runner:
    """One workgroup of one rank.

    late: stores that have yet to arrive: (builder's store, pointers, values, mask). seen: by address, what it found
    there last. idle: the number of events after which there was nothing for it to do.
    """

    rank: int
    workgroup: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    late: list[list] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    idle: int = -1
    finished: int = 0
    ended: bool = False
    failure: BaseException | None = None


@dataclass(frozen=True)
class Faults:
    """What is planted. ignore_release: atomics do not wait for stores. dies: rank -> accesses after which it stops."""

    ignore_release: bool = False
    dies: dict[int, int] = field(default_factory=dict)


NO_FAULTS = Faults()


class Interleaving:
    """Runs each rank's list of launches, one after another on a rank and the ranks beside one another.

    memories: the ranks' pieces of memory, on the CPU. seed: decides the order, and how fast each workgroup is.
    """

    def __init__(self, memories: Sequence[PeerMemory], seed: int, faults: Faults = NO_FAULTS) -> None:
        self._random = random.Random(seed)
        self._faults = faults
        self._pieces = [
            (memory.own.data_ptr(), memory.own.data_ptr() + memory.own.nbytes) for memory in memories
        ]
        self._runners: list[_Runner] = []
        self._events = 0
        self._accesses: dict[int, int] = dict.fromkeys(range(len(memories)), 0)
        self._local = threading.local()
        self._done = threading.Semaphore(0)

    def run(self, launches: Sequence[Sequence[Launch]]) -> None:
        """launches: by rank. Raises what a kernel raised, and RuntimeError where nobody can go on."""
        self._runners = [
            _Runner(rank, workgroup)
            for rank, own in enumerate(launches)
            if own
            for workgroup in range(own[0].workgroups)
        ]
        # equally fast, or up to a thousand times slower than another
        self._speeds = {id(runner): 10 ** self._random.uniform(-3, 0) for runner in self._runners}
        threads = [
            threading.Thread(target=self._work, args=(runner, launches[runner.rank]), daemon=True)
            for runner in self._runners
        ]
        builder = upstream.interpreter_builder
        kind = builder.__class__
        with interpreter._interpreted_language():
            builder.__class__ = _watching(kind, self)
            try:
                for thread in threads:
                    thread.start()
                self._next().turn.release()
                self._done.acquire()
            finally:
                builder.__class__ = kind
        for runner in self._runners:
            if runner.failure is not None:
                raise runner.failure

    # ---- on the threads of the workgroups ----

    def _work(self, runner: _Runner, launches: Sequence[Launch]) -> None:
        self._local.runner = runner
        runner.turn.acquire()
        try:
            with np.errstate(all="ignore"):
                for number, launch in enumerate(launches):
                    while not self._stream_is_at(runner.rank, number):
                        self._live(runner)
                        runner.idle = self._events
                        self._switch()
                    self._execute(launch)
                    self._deliver(runner, whole=True)
                    runner.finished += 1
                    self._events += 1
        except _Dead:
            self._deliver(runner, whole=False)
        except BaseException as error:
            runner.failure = error
        runner.ended = True
        following = self._next()
        (self._done if following is None else following.turn).release()

    def _live(self, runner: _Runner) -> None:
        """Ends the thread of a workgroup whose rank is dead by now."""
        accesses = self._accesses[runner.rank]
        if accesses > self._faults.dies.get(runner.rank, accesses):
            raise _Dead

    def _stream_is_at(self, rank: int, number: int) -> bool:
        """Whether all earlier launches of a rank are over."""
        return all(other.finished >= number for other in self._runners if other.rank == rank)

    def _execute(self, launch: Launch) -> None:
        kernel = merge_across_kernel
        interpreter._Grid(kernel.rewrite(), kernel.arg_names, (1, 1, 1), [])(
            *launch.arguments, **launch.constants
        )

    def _next(self) -> _Runner | None:
        able = [runner for runner in self._runners if not runner.ended]
        if not able:
            return None
        able = [runner for runner in able if runner.idle != self._events] or able
        return self._random.choices(able, [self._speeds[id(runner)] for runner in able])[0]

    def _switch(self) -> None:
        """Let some workgroup go on, maybe this one."""
        runner = self._local.runner
        following = self._next()
        if following is not runner:
            following.turn.release()
            runner.turn.acquire()

    def access(self) -> _Runner:
        """Called before each access to shared memory."""
        runner = self._local.runner
        self._accesses[runner.rank] += 1
        self._live(runner)
        self._switch()
        for other in self._runners:
            if other.late and self._random.random() < 0.3:
                self._deliver(other, whole=False)
        return runner

    def _deliver(self, runner: _Runner, whole: bool) -> None:
        """Let stores of a workgroup arrive: all, or some elements of some."""
        for entry in runner.late:
            store, pointers, values, mask = entry
            arriving = mask.data.copy()
            if not whole:
                chance = self._random.choice((0.0, 0.3, 1.0))
                arriving &= np.array([self._random.random() < chance for _ in range(arriving.size)]).reshape(
                    arriving.shape
                )
            store(pointers, values, upstream.TensorHandle(arriving, mask.dtype))
            entry[3] = upstream.TensorHandle(mask.data & ~arriving, mask.dtype)
            self._events += bool(arriving.any())
        runner.late = [entry for entry in runner.late if entry[3].data.any()]

    def owner(self, pointers: np.ndarray, mask: np.ndarray) -> int | None:
        """The rank in whose piece of memory the accessed elements are, None for private memory."""
        if not mask.any():
            return None
        address = int(pointers[mask].flat[0])
        for rank, (begin, end) in enumerate(self._pieces):
            if begin <= address < end:
                return rank
        return None

    def release(self, runner: _Runner, sem, scope) -> None:
        """What an atomic of this ordering waits for."""
        if sem in RELEASING and scope == SYSTEM and not self._faults.ignore_release:
            self._deliver(runner, whole=True)

    def looked(self, runner: _Runner, address: int, value: int) -> None:
        """An atomic that changes nothing found this value; the same as the time before is nothing new."""
        if runner.seen.get(address) == value:
            runner.idle = self._events
        runner.seen[address] = value

    def happened(self) -> None:
        """Something that others may wait for."""
        self._events += 1

    @property
    def workgroup(self) -> int:
        return self._local.runner.workgroup

    @property
    def workgroups(self) -> int:
        return 1 + max(runner.workgroup for runner in self._runners if runner.rank == self._local.runner.rank)


def _watching(kind: type, run: Interleaving) -> type:
    """The interpreter's builder, every access of which goes through `run`."""

    class Watching(kind):
        def create_get_program_id(self, axis):
            number = run.workgroup if axis == 0 else 0
            return upstream.TensorHandle(np.array([number], dtype=np.int32), triton.language.int32)

        def create_get_num_programs(self, axis):
            number = run.workgroups if axis == 0 else 1
            return upstream.TensorHandle(np.array([number], dtype=np.int32), triton.language.int32)

        def create_masked_load(self, ptrs, mask, other, *rest):
            if run.owner(ptrs.data, mask.data) is not None:
                run.access()
            return super().create_masked_load(ptrs, mask, other, *rest)

        def create_masked_store(self, ptrs, value, mask, *rest):
            owner = run.owner(ptrs.data, mask.data)
            if owner is None:
                return super().create_masked_store(ptrs, value, mask, *rest)
            runner = run.access()
            if owner == runner.rank:
                return super().create_masked_store(ptrs, value, mask, *rest)
            store = super().create_masked_store
            runner.late.append([lambda p, v, m: store(p, v, m, *rest), ptrs, value, mask])

        def create_atomic_rmw(self, operation, ptr, val, mask, sem, scope):
            runner = run.access()
            run.release(runner, sem, scope)
            found = super().create_atomic_rmw(operation, ptr, val, mask, sem, scope)
            if operation == LOOK:
                run.looked(runner, int(ptr.data.item()), int(found.data.item()))
            else:
                run.happened()
            return found

    return Watching

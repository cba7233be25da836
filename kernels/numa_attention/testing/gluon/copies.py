"""The part of the builder that copies asynchronously between global and shared memory.

A copy poisons its destination when it is issued. What then waits for a wait (TDM, async_copy, TMA stores) has its
effect in that wait and not before; what signals an mbarrier has it at a random moment.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.language._layouts import PaddedSharedLayout

from numa_attention import gluon_compat
from numa_attention.testing.gluon.barriers import Barrier, optional_barrier
from numa_attention.testing.gluon.clocks import Operation, join
from numa_attention.testing.gluon.faults import NotModelled, Refused
from numa_attention.testing.gluon.global_memory import Descriptor
from numa_attention.testing.gluon.memory_operations import MemoryOperations
from numa_attention.testing.gluon.values import SharedView, Value, bits, is_on, poison, present


class Copies(MemoryOperations):
    """TDM of gfx1250, TMA of sm_90, and the copies in commit groups of both."""

    # ---- common to all ----

    def senders(self, view: SharedView, multicast: bool) -> list[list[int]]:
        """For each CTA, the CTAs whose copies land in its shared memory: a zero basis means that all share.

        On sm_90 the first of those that share a tile asks for all of it, on gfx1250 each for a part.
        """
        bases = self.cta_bases(view.type) if multicast else None
        if not bases:
            return [[cta] for cta in range(self.ctas)]
        splitting = sum(1 << bit for bit, basis in enumerate(bases) if any(basis))
        if self.generation.startswith("sm_"):
            return [[cta & splitting] for cta in range(self.ctas)]
        return [
            [other for other in range(self.ctas) if other & splitting == cta & splitting]
            for cta in range(self.ctas)
        ]

    def issue_write(self, view: SharedView, what: str, effect, *, multicast: bool = False) -> Operation:
        """A new operation that writes a view."""
        me = self.scheduler.current
        operation = Operation(what, me.where(), me.clocks, effect)
        me.advance()
        writers = [
            [(operation.access(cta), operation.clocks[cta]) for cta in senders]
            for senders in self.senders(view, multicast)
        ]
        view.allocation.check_write(view.footprint, writers)
        poison(view.view)
        self.forget_old_operations()
        return operation

    def issue_read(self, views: list[SharedView], what: str, effect, *, fenced: bool) -> Operation:
        """A new operation that reads views; `fenced`: through the asynchronous proxy."""
        me = self.scheduler.current
        operation = Operation(what, me.where(), me.clocks, effect)
        me.advance()
        for view in views:
            readers = [(operation.access(cta), clock) for cta, clock in enumerate(operation.clocks)]
            view.allocation.check_read(view.footprint, readers)
            if fenced:
                view.allocation.check_fenced(view.footprint, what, operation.where)
        self.forget_old_operations()
        return operation

    def land_on_barrier(
        self, operation: Operation, barrier: Barrier, senders: list[list[int]], signal
    ) -> None:
        """Let the operation land some time; `signal` is then applied to the barrier."""

        def land() -> None:
            operation.finish()
            for cta, sending in enumerate(senders):
                for sender in sending:
                    join(barrier.arriving[barrier.owners[cta]], operation.clocks[sender])
            signal()
            barrier.complete_if_ready()

        self.scheduler.launch(operation, land)

    def wait_for_all_but(self, queue: list, newest: int) -> list:
        """Wait for the oldest of a queue, all but `newest`; returns what is left."""
        waited = max(len(queue) - newest, 0)
        for operation in queue[:waited]:
            self.scheduler.current.learn(operation)
        return queue[waited:]

    _ISSUES_BETWEEN_SWEEPS = 128

    def forget_old_operations(self) -> None:
        """Now and then drop operations from all clocks that no access refers to any more."""
        self._issues = getattr(self, "_issues", 0) + 1
        if self._issues % self._ISSUES_BETWEEN_SWEEPS:
            return
        needed = {agent for allocation in self.allocations for agent in allocation.agents()}
        clocks = []
        for partition in self.scheduler.partitions:
            clocks += partition.clocks
            for operation in partition.outstanding():
                clocks += operation.clocks
                needed.update(operation.agents)
            if partition.cluster_arrival is not None:
                clocks.append(partition.cluster_arrival)
        for operation, _ in self.scheduler.in_flight:
            clocks += operation.clocks
            needed.update(operation.agents)
        for allocation in self.allocations:
            for barrier in allocation.barriers.values():
                clocks += barrier.arriving + barrier.released
        for clock in clocks:
            for agent in [agent for agent in clock if agent[0] == "operation" and agent not in needed]:
                del clock[agent]

    # ---- TDM ----

    def _load_tile(
        self, descriptor: Descriptor, view: SharedView, what: str, barrier_handle, rows=None
    ) -> None:
        where = self.where()

        def effect() -> None:
            bits(view.view).copy_(bits(descriptor.read(self.memory, view.view.shape, where, rows)))

        # switched off, it still counts
        operation = (
            self.issue_write(view, what, effect, multicast=True)
            if descriptor.enabled
            else Operation(what, where, self.scheduler.current.clocks, lambda: None)
        )
        barrier = optional_barrier(self, barrier_handle)
        if barrier is None:
            self.scheduler.current.tensor_copies.append(operation)
        else:
            self._signal_by_warps(operation, barrier, self.senders(view, True))
        self.scheduler.may_hand_over()

    def _store_tile(
        self, descriptor: Descriptor, view: SharedView, what: str, barrier_handle, rows=None
    ) -> None:
        where = self.where()
        if not gluon_compat.STORES_PADDED_TILES and isinstance(self.layout_of(view.type), PaddedSharedLayout):
            raise Refused(f"{what} from a padded layout, at {where}: this release of Triton cannot")
        operation = self.issue_read(
            [view], what, lambda: descriptor.write(self.memory, view.view, where, rows), fenced=False
        )
        barrier = optional_barrier(self, barrier_handle)
        if barrier is None:
            self.scheduler.current.tensor_copies.append(operation)
        else:
            self._signal_by_warps(operation, barrier, [[cta] for cta in range(self.ctas)])

    def _signal_by_warps(self, operation: Operation, barrier: Barrier, senders) -> None:
        where, warps = self.where(), self.options.num_warps
        # every warp copies a part and arrives when that part is there
        self.land_on_barrier(
            operation, barrier, senders, lambda: barrier.arrive([{}] * self.ctas, warps, where)
        )

    def create_async_tdm_copy_global_to_local(self, source: Value, *rest) -> None:
        # 3.6 and 3.7: (offsets, destination, predicate, mbarrier), 3.8 and 3.9: (destination, mbarrier, ...)
        descriptor = source.descriptor
        if isinstance(rest[0], (list, tuple)):
            offsets, view, predicate, barrier = rest[:4]
            descriptor = descriptor.moved([int(offset.item()) for offset in offsets], clamp=True)
            descriptor = descriptor.switched(is_on(predicate))
        else:
            view, barrier = rest[:2]
        self._load_tile(descriptor, view, "a TDM load", barrier)

    def create_async_tdm_fused_copy_global_to_local(self, sources, views, warps, *hints) -> None:
        for source, view in zip(sources, views, strict=True):
            self._load_tile(source.descriptor, view, "a fused TDM load", None)
        # one instruction, one count
        queue = self.scheduler.current.tensor_copies
        members = queue[len(queue) - len(sources) :]
        del queue[len(queue) - len(sources) :]
        queue.append(_Together(members))

    def create_async_tdm_copy_local_to_global(self, target: Value, *rest) -> None:
        # 3.6: (offsets, source), 3.7: (offsets, source, mbarrier), 3.8 and 3.9: (source, mbarrier, ...)
        descriptor = target.descriptor
        if isinstance(rest[0], (list, tuple)):
            descriptor = descriptor.moved([int(offset.item()) for offset in rest[0]], clamp=True)
            rest = rest[1:]
        barrier = rest[1] if len(rest) > 1 else None
        self._store_tile(descriptor, rest[0], "a TDM store", barrier)

    def create_async_tdm_gather(self, source: Value, rows: Value, *rest) -> None:
        descriptor, view, barrier = self._by_rows(source, rest)
        self._load_tile(descriptor, view, "a TDM gather", barrier, rows.data)

    def create_async_tdm_scatter(self, target: Value, rows: Value, *rest) -> None:
        descriptor, view, barrier = self._by_rows(target, rest)
        self._store_tile(descriptor, view, "a TDM scatter", barrier, rows.data)

    def _by_rows(self, value: Value, rest) -> tuple[Descriptor, SharedView, object]:
        # 3.7: (column, view, mbarrier), 3.8 and 3.9: (view, mbarrier)
        descriptor = value.descriptor
        if not isinstance(rest[0], SharedView):
            descriptor = descriptor.moved([0, int(rest[0].item())], clamp=True)
            rest = rest[1:]
        return descriptor, rest[0], rest[1]

    def create_async_tdm_wait(self, newest: int) -> None:
        me = self.scheduler.current
        if me.cluster_arrival is not None:
            raise Refused(
                f"a wait for TDM copies between cluster.arrive and cluster.wait, at {self.where()}, can hang"
            )
        me.tensor_copies = self.wait_for_all_but(me.tensor_copies, newest)
        self.scheduler.may_hand_over()

    def create_tdm_prefetch(self, source: Value, offsets, predicate, speculative, returns_offsets) -> None:
        if returns_offsets:
            raise NotModelled("the offsets of a TDM prefetch")

    # ---- copies in commit groups ----

    def create_async_copy_global_to_local(
        self, view: SharedView, pointer: Value, mask, other, *hints
    ) -> None:
        self._copy_elements(view, pointer.data, mask, other, pointer.type.pointee, "an async copy")

    def create_buffer_load_to_local(
        self, view: SharedView, pointer: Value, offsets: Value, mask, other, *hints
    ) -> None:
        addresses = self.buffer_addresses(pointer, offsets)
        self._copy_elements(
            view, addresses, mask, other, pointer.type.pointee, "a buffer load to shared memory"
        )

    def _copy_elements(self, view: SharedView, addresses, mask, other, element, what: str) -> None:
        where = self.where()
        mask, other = present(mask), present(other)
        mask, other = mask and mask.data, other and other.data

        def effect() -> None:
            data = self.memory.load(addresses, mask, other, element, where)
            bits(view.view).copy_(bits(data))

        operation = self.issue_write(view, what, effect, multicast=True)
        self.scheduler.current.open_group.append(operation)

    def create_async_copy_local_to_global(self, view: SharedView, pointer: Value, mask, *hints) -> None:
        where, mask = self.where(), present(mask)
        chosen = mask and mask.data
        operation = self.issue_read(
            [view],
            "an async copy to global memory",
            lambda: self.memory.store(pointer.data, view.view, chosen, where),
            fenced=False,
        )
        self.scheduler.current.open_group.append(operation)

    def create_async_commit_group(self) -> None:
        me = self.scheduler.current
        me.copy_groups.append(me.open_group)
        me.open_group = []

    def create_async_wait_group(self, newest: int) -> None:
        me = self.scheduler.current
        waited = max(len(me.copy_groups) - newest, 0)
        for group in me.copy_groups[:waited]:
            for operation in group:
                me.learn(operation)
        me.copy_groups = me.copy_groups[waited:]
        self.scheduler.may_hand_over()

    def create_async_copy_mbarrier_arrive(self, view: SharedView, increments_count: bool) -> None:
        barrier = self.barrier_at(view)
        me = self.scheduler.current
        earlier = [operation for group in me.copy_groups for operation in group] + me.open_group
        where = self.where()
        known = [dict(clock) for clock in me.clocks]
        me.advance()
        if increments_count:
            barrier.pending += 1

        def effect() -> None:
            for operation in earlier:
                operation.finish()
                for clock, more in zip(known, operation.clocks, strict=True):
                    join(clock, more)

        arrival = Operation("an arrival of async copies", where, known, effect)
        self.land_on_barrier(arrival, barrier, [[]] * self.ctas, lambda: barrier.arrive(known, 1, where))

    # ---- TMA ----

    def create_async_tma_copy_global_to_local(
        self, source: Value, coordinates, barrier_view: SharedView, view: SharedView, predicate, *rest
    ) -> None:
        # 3.6: nothing more, 3.7: (multicast), 3.8: (multicast, im2col), 3.9: (multicast, im2col, cache policy)
        multicast = bool(rest and rest[0])
        if len(rest) > 1 and rest[1] is not None:
            raise NotModelled(f"TMA's im2col mode, at {self.where()}")
        if is_on(predicate):
            at = [int(coordinate.item()) for coordinate in coordinates]
            descriptor = source.descriptor.moved(at, clamp=True)
            self._tma_load(descriptor, barrier_view, view, multicast, "a TMA load")

    def create_async_tma_gather(
        self,
        source: Value,
        rows: Value,
        column: Value,
        barrier_view: SharedView,
        view: SharedView,
        predicate,
        *rest,
    ) -> None:
        if is_on(predicate):
            descriptor = source.descriptor.moved([0, int(column.item())], clamp=True)
            multicast = bool(rest and rest[0])
            self._tma_load(descriptor, barrier_view, view, multicast, "a TMA gather", rows.data)

    def _tma_load(
        self,
        descriptor: Descriptor,
        barrier_view: SharedView,
        view: SharedView,
        multicast: bool,
        what: str,
        rows=None,
    ) -> None:
        where = self.where()
        barrier = self.barrier_at(barrier_view)

        def effect() -> None:
            tile = descriptor.read(self.memory, view.view.shape, where, rows)
            bits(view.view).copy_(bits(tile))

        operation = self.issue_write(view, what, effect, multicast=multicast)
        shares = 1 << sum(any(basis) for basis in self.cta_bases(view.type) or [])
        received = view.view.numel() * view.view.itemsize // shares

        def signal() -> None:
            barrier.bytes -= received

        self.land_on_barrier(operation, barrier, self.senders(view, multicast), signal)
        self.scheduler.may_hand_over()

    def create_async_tma_copy_local_to_global(
        self, target: Value, coordinates, view: SharedView, *hints
    ) -> None:
        at = [int(coordinate.item()) for coordinate in coordinates]
        self._tma_store(target.descriptor.moved(at, clamp=True), view, "a TMA store")

    def create_async_tma_scatter(
        self, target: Value, rows: Value, column: Value, view: SharedView, *hints
    ) -> None:
        descriptor = target.descriptor.moved([0, int(column.item())], clamp=True)
        self._tma_store(descriptor, view, "a TMA scatter", rows.data)

    def _tma_store(self, descriptor: Descriptor, view: SharedView, what: str, rows=None) -> None:
        where = self.where()
        operation = self.issue_read(
            [view], what, lambda: descriptor.write(self.memory, view.view, where, rows), fenced=True
        )
        self.scheduler.current.bulk_stores.append(operation)

    def create_async_tma_reduce(self, kind, target: Value, coordinates, view: SharedView) -> None:
        at = [int(coordinate.item()) for coordinate in coordinates]
        descriptor = target.descriptor.moved(at, clamp=True)
        name = str(kind).rsplit(".", 1)[-1].upper()
        combine = {"ADD": torch.add, "MIN": torch.minimum, "MAX": torch.maximum}.get(name)
        if combine is None:
            raise NotModelled(f"the TMA reduction {name}, at {self.where()}")
        where = self.where()

        def effect() -> None:
            before = descriptor.read(self.memory, view.view.shape, where)
            descriptor.write(self.memory, combine(before, view.view), where)

        operation = self.issue_read([view], "a TMA reduction", effect, fenced=True)
        self.scheduler.current.bulk_stores.append(operation)

    def create_async_tma_store_wait(self, newest: int, *read_only) -> None:
        me = self.scheduler.current
        me.bulk_stores = self.wait_for_all_but(me.bulk_stores, newest)


class _Together(Operation):
    """Several operations that count as one."""

    def __init__(self, members: list[Operation]) -> None:
        self.members = members
        self.what, self.where = members[0].what, members[0].where
        self.agents = [agent for member in members for agent in member.agents]
        self.clocks = []
        for per_cta in zip(*(member.clocks for member in members), strict=True):
            clock: dict = {}
            for known in per_cta:
                join(clock, known)
            self.clocks.append(clock)
        self.done = False

    def finish(self) -> None:
        for member in self.members:
            member.finish()
        self.done = True

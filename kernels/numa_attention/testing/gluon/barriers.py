"""mbarriers and the cluster barrier: they carry clocks from those who arrive to those who wait."""

from __future__ import annotations

from numa_attention.testing.gluon.builder_base import BuilderBase
from numa_attention.testing.gluon.clocks import Access, Clock, join, joined, knows
from numa_attention.testing.gluon.faults import GluonFault, NotModelled, Race
from numa_attention.testing.gluon.values import SharedView, Value, is_on, present


class Barrier:
    """An mbarrier, the same in every CTA: it counts arrivals and bytes, and completes a phase when none are left.

    owners: for each CTA, the one at whose barrier it arrives: another one's where several share one. CTAs arrive
    together, which counts once.
    """

    def __init__(self, count: int, owners: list[int]) -> None:
        ctas = len(owners)
        self.owners = owners
        self.from_others: dict[tuple, Access] = {}  # the last arrival of each that is not in the owner's CTA
        self.count = count
        self.pending = count
        self.bytes = 0
        self.phase = 0
        self.arriving: list[Clock] = [{} for _ in range(ctas)]  # what this phase's arrivals know
        self.released: list[Clock] = [{} for _ in range(ctas)]  # what the completed phases' arrivals knew

    def arrive(self, clocks: list[Clock], count: int, where: str) -> None:
        if count > self.pending:
            raise GluonFault(
                f"an mbarrier initialised for {self.count} arrivals gets more than that in one phase, at {where}"
            )
        for owner, clock in zip(self.owners, clocks, strict=True):
            join(self.arriving[owner], clock)
        self.pending -= count

    def complete_if_ready(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            for cta, clock in enumerate(self.arriving):
                join(self.released[cta], clock)
                self.arriving[cta] = {}


class BarrierOperations(BuilderBase):
    """The part of the builder that synchronises partitions and CTAs."""

    def create_barrier(self, *address_spaces) -> None:
        self.scheduler.may_hand_over()

    # ---- mbarriers ----

    def barrier_at(self, view: SharedView) -> Barrier:
        barrier = view.allocation.barriers.get(view.footprint)
        if barrier is None:
            raise GluonFault(f"an mbarrier is used before its init, at {self.where()}")
        return barrier

    def create_mbarrier_init(self, view: SharedView, count: int) -> None:
        view.allocation.barriers[view.footprint] = Barrier(count, self._owners(view))

    def _owners(self, view: SharedView) -> list[int]:
        """For each CTA, the one whose mbarrier it uses: on sm_90 the first of all that share one."""
        own = self.ctas - 1
        if self.generation.startswith("sm_"):
            for bit, basis in enumerate(self.cta_bases(view.type)):
                if not any(basis):
                    own &= ~(1 << bit)
        return [cta & own for cta in range(self.ctas)]

    def check_barriers_outlive_arrivals(self) -> None:
        """At the end of a kernel: nobody may still arrive at a barrier of a CTA that is gone. Raises Race."""
        clocks = self.scheduler.current.clocks
        for allocation in self.allocations:
            for barrier in allocation.barriers.values():
                for (owner, *_), access in barrier.from_others.items():
                    if not access.before(clocks[owner]):
                        raise Race(
                            f"{access.text} may come when CTA {owner}, whose barrier it is, has ended: the kernel's "
                            f"end needs a cluster barrier"
                        )

    def create_mbarrier_inval(self, view: SharedView) -> None:
        self.barrier_at(view)
        del view.allocation.barriers[view.footprint]

    def create_fence_mbarrier_init_release_cluster(self) -> None:
        pass

    def create_mbarrier_expect(self, view: SharedView, bytes_per_cta: int, predicate, from_cta=None) -> None:
        if is_on(predicate):
            barrier = self.barrier_at(view)
            barrier.bytes += bytes_per_cta
            self._arrive(barrier, 1, from_cta)

    def create_mbarrier_arrive(self, view: SharedView, count: int, *rest) -> None:
        # 3.6: (predicate), 3.8: (mask, predicate), 3.9: (predicate, from_cta, multicast mask)
        predicate = next((part for part in rest if isinstance(part, Value)), None)
        position = rest.index(predicate) if predicate is not None else 0
        if any(rest[:position]) or any(rest[position + 2 :]):
            raise NotModelled(f"an arrival at a set of CTAs, at {self.where()}")
        from_cta = rest[position + 1] if position + 1 < len(rest) else None
        self.scheduler.may_hand_over()
        if is_on(predicate):
            self._arrive(self.barrier_at(view), count, from_cta)
            self.scheduler.may_hand_over()

    def _arrive(self, barrier: Barrier, count: int, from_cta: int | None = None) -> None:
        me = self.scheduler.current
        kept_bits = self.ctas - 1 if from_cta is None else from_cta
        clocks = [me.clocks[cta & kept_bits] for cta in range(self.ctas)]
        for cta, (owner, clock) in enumerate(zip(barrier.owners, clocks, strict=True)):
            if not knows(clock, barrier.released[owner]):
                raise Race(
                    f"an arrival at {self.where()} may count for the phase before its own: CTA {cta} does not know "
                    f"that this one is complete"
                )
            if owner != cta:
                agent = me.agent(cta & kept_bits)
                text = f"an arrival at {self.where()}"
                barrier.from_others[owner, agent] = Access(agent, clock[agent], text)
        barrier.arrive(clocks, count, self.where())
        me.advance()
        barrier.complete_if_ready()

    def create_mbarrier_wait(self, view: SharedView, phase: Value, predicate=None, *dependencies) -> None:
        if not is_on(predicate):
            return
        barrier = self.barrier_at(view)
        parity = int(phase.item()) & 1
        me = self.scheduler.current
        self.scheduler.wait_until(lambda: barrier.phase & 1 != parity)
        for cta, owner in enumerate(barrier.owners):
            # whose barrier it is not does not wait
            if owner == cta:
                join(me.clocks[cta], barrier.released[cta])

    # ---- their AMD names ----

    create_lds_barrier_init = create_mbarrier_init

    def create_lds_barrier_arrive(self, view: SharedView, count: int) -> Value:
        barrier = self.barrier_at(view)
        phase = barrier.phase & 1
        self.scheduler.may_hand_over()
        self._arrive(barrier, count)
        return self.integer(phase)

    def create_lds_barrier_wait(self, view: SharedView, phase: Value) -> None:
        self.create_mbarrier_wait(view, phase)

    # ---- the cluster ----

    def create_cluster_arrive(self, relaxed=False) -> None:
        me = self.scheduler.current
        if me.cluster_arrival is not None:
            raise GluonFault(f"a second cluster arrive before the wait, at {self.where()}")
        # a relaxed arrival makes nothing visible
        me.cluster_arrival = {} if relaxed else joined(me.clocks)
        me.cluster_arrival_at = me.where()
        me.advance()

    def create_cluster_wait(self) -> None:
        me = self.scheduler.current
        if me.cluster_arrival is None:
            raise GluonFault(f"a cluster wait without an arrive before it hangs, at {self.where()}")
        for clock in me.clocks:
            join(clock, me.cluster_arrival)
        me.cluster_arrival = None

    def create_cluster_barrier(self, relaxed=False) -> None:
        self.create_cluster_arrive(bool(relaxed))
        self.create_cluster_wait()

    create_amd_cluster_arrive = create_cluster_arrive
    create_amd_cluster_wait = create_cluster_wait

    def create_fence_async_shared(self, *cluster) -> None:
        for allocation in self.allocations:
            allocation.fence()


def optional_barrier(builder: BarrierOperations, handle) -> Barrier | None:
    view = present(handle)
    return builder.barrier_at(view) if isinstance(view, SharedView) else None

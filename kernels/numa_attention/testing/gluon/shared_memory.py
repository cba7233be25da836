"""Shared memory: poisoned at birth, every access checked against all earlier ones that no clock puts before it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch

from numa_attention.testing.gluon.clocks import Access, Clock
from numa_attention.testing.gluon.faults import Race
from numa_attention.testing.gluon.values import poison


@dataclass(eq=False)
class Footprint:
    """The bytes of an allocation that a view covers, with the accesses made through exactly this view."""

    mask: torch.Tensor  # bool [bytes of the allocation]
    writes: list[list[Access]]  # a CTA: the last write of its copy; several where several CTAs send a share
    reads: list[list[Access]]  # a CTA: reads since
    unfenced: str | None = None  # the store that the asynchronous proxy cannot see yet
    overlapping: list[Footprint] = field(default_factory=list)  # all that share a byte, this one first
    inside: list[Footprint] = field(default_factory=list)  # those that this one covers whole, without itself


class Allocation:
    """One `allocate_shared_memory`, with the same shape in every CTA."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], where: str, ctas: int) -> None:
        self.where = where
        self.ctas = ctas
        self.storage = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        self.view = self.storage.view(dtype).view(shape)
        self.barriers: dict = {}  # footprint -> barrier
        self._footprints: dict[tuple, Footprint] = {}
        poison(self.view)

    def footprint(self, view: torch.Tensor) -> Footprint:
        start = view.data_ptr() - self.storage.data_ptr()
        key = (start, view.shape, view.stride(), view.itemsize)
        if key not in self._footprints:
            self._footprints[key] = self._new_footprint(start, view)
        return self._footprints[key]

    def _new_footprint(self, start: int, view: torch.Tensor) -> Footprint:
        mask = torch.zeros(self.storage.numel(), dtype=torch.bool)
        strides = [stride * view.itemsize for stride in view.stride()]
        mask.as_strided((*view.shape, view.itemsize), (*strides, 1), start).fill_(True)
        new = Footprint(mask, [[] for _ in range(self.ctas)], [[] for _ in range(self.ctas)])
        new.overlapping.append(new)
        for other in self._footprints.values():
            common = mask & other.mask
            if not common.any():
                continue
            new.overlapping.append(other)
            other.overlapping.append(new)
            if torch.equal(common, other.mask):
                new.inside.append(other)
            if torch.equal(common, mask):
                other.inside.append(new)
        return new

    def check_read(self, footprint: Footprint, readers: list[tuple[Access, Clock]]) -> None:
        """Readers: one a CTA, each of its own copy. Raises Race."""
        written = False
        for other in footprint.overlapping:
            for cta, (reader, clock) in enumerate(readers):
                for write in other.writes[cta]:
                    written = True
                    if not write.before(clock):
                        self._race(reader, write, cta)
        if not written:
            raise Race(
                f"{readers[0][0].text} of shared memory that was never written, allocated at {self.where}"
            )
        for cta, (reader, _) in enumerate(readers):
            footprint.reads[cta] = [read for read in footprint.reads[cta] if read.agent != reader.agent]
            footprint.reads[cta].append(reader)

    def check_write(self, footprint: Footprint, writers: list[list[tuple[Access, Clock]]]) -> None:
        """Writers: for each CTA's copy, those that write to it. Raises Race."""
        for other in footprint.overlapping:
            for cta, writers_here in enumerate(writers):
                for writer, clock in writers_here:
                    for earlier in itertools.chain(other.writes[cta], other.reads[cta]):
                        if not earlier.before(clock):
                            self._race(writer, earlier, cta)
        # whoever is ordered after this write is ordered after what it covers
        for covered in footprint.inside:
            covered.writes = [[] for _ in range(self.ctas)]
            covered.reads = [[] for _ in range(self.ctas)]
            covered.unfenced = None
        footprint.writes = [[writer for writer, _ in writers_here] for writers_here in writers]
        footprint.reads = [[] for _ in range(self.ctas)]
        footprint.unfenced = None

    def check_fenced(self, footprint: Footprint, what: str, where: str) -> None:
        """The asynchronous proxy is about to read."""
        for other in footprint.overlapping:
            if other.unfenced is not None:
                raise Race(
                    f"{what} at {where} may miss the store at {other.unfenced}: "
                    f"there is no fence_async_shared between them"
                )

    def fence(self) -> None:
        for footprint in self._footprints.values():
            footprint.unfenced = None

    def agents(self) -> set:
        """Agents that a later access may still be checked against."""
        return {
            access.agent
            for footprint in self._footprints.values()
            for per_cta in itertools.chain(footprint.writes, footprint.reads)
            for access in per_cta
        }

    def _race(self, later: Access, earlier: Access, cta: int) -> None:
        in_cta = f" in CTA {cta}" if self.ctas > 1 else ""
        raise Race(
            f"{later.text} is not ordered after {earlier.text}{in_cta} (shared memory allocated at {self.where})"
        )

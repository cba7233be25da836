"""Global memory: the tensors of the launch, read and written with bounds checks."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

import torch

from numa_attention.testing.gluon.faults import OutOfBounds
from numa_attention.testing.gluon.values import Type, bits


class GlobalMemory:
    """Storages of tensors by address. An access must lie in one of them, whichever tensor it belongs to."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._storages: list[torch.Tensor] = []  # uint8

    def add(self, tensor: torch.Tensor) -> int:
        """Make a tensor's storage known; returns the address of its first element."""
        if not tensor.is_cpu:
            raise ValueError(f"the interpreter needs tensors on the CPU, got one on {tensor.device}")
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if storage.nbytes() and start not in self._starts:
            place = bisect.bisect(self._starts, start)
            self._starts.insert(place, start)
            self._storages.insert(place, torch.empty(0, dtype=torch.uint8).set_(storage))
        return tensor.data_ptr()

    def load(self, addresses: torch.Tensor, mask, other, element: Type, where: str) -> torch.Tensor:
        """Elements at `addresses`; where the mask is off `other`, or else 0 (a GPU leaves it undefined)."""
        dtype = element.dtype
        result = torch.zeros(addresses.shape, dtype=dtype)
        if other is not None:
            bits(result).copy_(bits(other).expand(addresses.shape))
        for flat, index, chosen in self._pieces(addresses, mask, dtype, where):
            if chosen is None:
                return flat[index].view(dtype)
            bits(result)[chosen] = flat[index]
        return result

    def store(self, addresses: torch.Tensor, values: torch.Tensor, mask, where: str) -> None:
        values = bits(values).expand(addresses.shape)
        for flat, index, chosen in self._pieces(addresses, mask, values.dtype, where):
            flat[index] = values if chosen is None else values[chosen]

    def _pieces(self, addresses: torch.Tensor, mask, dtype: torch.dtype, where: str):
        """(a storage as integers of the element's size, indices, the elements they are for or None for all)."""
        chosen = None
        if mask is not None:
            chosen = mask.expand(addresses.shape)
            if not chosen.any():
                return
            if chosen.all():
                chosen = None
        wanted = addresses if chosen is None else addresses[chosen]
        low, high = (int(end) for end in torch.aminmax(wanted))
        place = self._place(low, where)
        start, storage = self._starts[place], self._storages[place]
        size = dtype.itemsize
        if high + size <= start + storage.numel():
            if ((wanted - start) % size).any():
                raise OutOfBounds(f"an address that is no multiple of its element's {size} bytes, at {where}")
            yield self._integers(storage, dtype), (wanted - start) // size, chosen
            return
        # pointers into several tensors, or past the end of one
        if chosen is None:
            chosen = torch.ones(addresses.shape, dtype=torch.bool)
        rest = chosen
        while rest.any():
            low = int(addresses[rest].min())
            place = self._place(low, where)
            start, storage = self._starts[place], self._storages[place]
            here = rest & (addresses + size <= start + storage.numel())
            if not here.any():
                raise OutOfBounds(f"an access past the end of its tensor, at {where}")
            yield self._integers(storage, dtype), (addresses[here] - start) // size, here
            rest = rest & ~here

    def _place(self, address: int, where: str) -> int:
        place = bisect.bisect(self._starts, address) - 1
        if place >= 0:
            past = address - self._starts[place] - self._storages[place].numel()
            if past < 0:
                return place
            if past < 1 << 20:
                raise OutOfBounds(f"a global access {past} bytes past the end of its tensor, at {where}")
        raise OutOfBounds(f"a global access at an address in no tensor, at {where}")

    @staticmethod
    def _integers(storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.bool:
            return storage.view(torch.bool)
        whole = storage.numel() // dtype.itemsize * dtype.itemsize
        return bits(storage[:whole].view(dtype))


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor of TDM or TMA; the tile begins at `address`, `bounds` elements are valid from there."""

    address: int
    bounds: tuple[int, ...]
    strides: tuple[int, ...]
    element: Type
    enabled: bool = True
    padding: float = 0.0
    # TMA coordinates may be negative: elements before the tile's start that are valid too
    before: tuple[int, ...] = ()

    def moved(self, offsets: list[int], *, clamp: bool) -> Descriptor:
        """At other offsets; `clamp` shrinks the bounds with the move, else they stay as wide as they were."""
        step = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        before, bounds = self.before, self.bounds
        if clamp:
            bounds = tuple(max(0, bound - offset) for bound, offset in zip(bounds, offsets, strict=True))
            before = tuple(b + o for b, o in zip(before or (0,) * len(offsets), offsets, strict=True))
        return replace(
            self, address=self.address + step * self.element.dtype.itemsize, bounds=bounds, before=before
        )

    def limited(self, bounds: list[int]) -> Descriptor:
        return replace(self, bounds=tuple(bounds), before=())

    def switched(self, on: bool) -> Descriptor:
        return replace(self, enabled=on)

    def tile(self, shape, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses and validity of a tile [*shape]; `rows` replaces the first axis's 0, 1, ... (gather)."""
        if len(shape) != len(self.bounds):
            shape = tuple(shape)[len(shape) - len(self.bounds) :]
        addresses = torch.full(tuple(shape), self.address, dtype=torch.int64)
        valid = torch.ones(tuple(shape), dtype=torch.bool)
        for axis, length in enumerate(shape):
            index = rows.long() if axis == 0 and rows is not None else torch.arange(length)
            index = index.view([-1 if axis == other else 1 for other in range(len(shape))])
            first = -self.before[axis] if self.before else 0
            addresses += index * (self.strides[axis] * self.element.dtype.itemsize)
            valid &= (index >= first) & (index < self.bounds[axis])
        return addresses, valid

    def read(self, memory: GlobalMemory, shape, where: str, rows=None) -> torch.Tensor:
        """The tile, padded where it leaves the tensor."""
        addresses, valid = self.tile(shape, rows)
        padding = torch.full((), self.padding).to(self.element.dtype) if self.padding else None
        return memory.load(addresses, valid, padding, self.element, where).view(tuple(shape))

    def write(self, memory: GlobalMemory, tile: torch.Tensor, where: str, rows=None) -> None:
        """The part of the tile that is inside the tensor."""
        if self.enabled:
            addresses, valid = self.tile(tile.shape, rows)
            memory.store(addresses, tile.reshape(addresses.shape), valid, where)

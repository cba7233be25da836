"""The part of the builder that touches global and shared memory at once, without asynchrony."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numa_attention import gluon_compat
from numa_attention.testing.gluon.builder_base import BuilderBase
from numa_attention.testing.gluon.clocks import Access, Clock
from numa_attention.testing.gluon.faults import NotModelled, OutOfBounds, Refused
from numa_attention.testing.gluon.global_memory import Descriptor
from numa_attention.testing.gluon.values import SharedView, Type, Value, bits, present

_ATOMICS: dict[str, Callable] = {
    "ADD": lambda old, new: old + new,
    "FADD": lambda old, new: old + new,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "UMAX": torch.maximum,
    "UMIN": torch.minimum,
    "AND": lambda old, new: old & new,
    "OR": lambda old, new: old | new,
    "XOR": lambda old, new: old ^ new,
    "XCHG": lambda old, new: new,
}


class MemoryOperations(BuilderBase):
    """Loads, stores, atomics and views."""

    # ---- global memory ----

    def load_global(self, addresses: torch.Tensor, mask, other, element: Type) -> torch.Tensor:
        mask, other = present(mask), present(other)
        return self.memory.load(addresses, mask and mask.data, other and other.data, element, self.where())

    def create_load(self, pointer: Value, *hints) -> Value:
        return self.create_masked_load(pointer, None, None)

    def create_masked_load(self, pointer: Value, mask, other, *hints) -> Value:
        data = self.load_global(pointer.data, mask, other, pointer.type.pointee)
        return Value(data, self.like(pointer.type, pointer.type.pointee))

    def create_store(self, pointer: Value, value: Value, *hints) -> None:
        self.create_masked_store(pointer, value, None)

    def create_masked_store(self, pointer: Value, value: Value, mask, *hints) -> None:
        mask = present(mask)
        self.memory.store(pointer.data, value.data, mask and mask.data, self.where())

    def buffer_addresses(self, pointer: Value, offsets: Value) -> torch.Tensor:
        return pointer.data + offsets.data.to(torch.int64) * pointer.type.pointee.dtype.itemsize

    def create_buffer_load(self, type: Type, pointer: Value, offsets: Value, mask, other, *hints) -> Value:
        addresses = self.buffer_addresses(pointer, offsets)
        return Value(self.load_global(addresses, mask, other, pointer.type.pointee), type)

    def create_buffer_store(self, value: Value, pointer: Value, offsets: Value, mask, *hints) -> None:
        mask = present(mask)
        self.memory.store(
            self.buffer_addresses(pointer, offsets), value.data, mask and mask.data, self.where()
        )

    # ---- atomics: one element after the other, as two may have one address ----

    def _read_modify_write(self, operation, addresses: torch.Tensor, new: torch.Tensor, mask, element: Type):
        name = str(operation).rsplit(".", 1)[-1].upper()
        if name not in _ATOMICS:
            raise NotModelled(f"the atomic operation {name}, at {self.where()}")
        where = self.where()
        old = torch.zeros(addresses.shape, dtype=element.dtype)
        flat_old, flat_new = old.view(-1), new.expand(addresses.shape).reshape(-1)
        enabled = None if mask is None else mask.expand(addresses.shape).reshape(-1)
        for index, address in enumerate(addresses.reshape(-1)):
            if enabled is None or enabled[index]:
                before = self.memory.load(address, None, None, element, where)
                flat_old[index] = before
                after = _ATOMICS[name](before, flat_new[index]).to(element.dtype)
                self.memory.store(address, after, None, where)
        return old

    def create_atomic_rmw(self, operation, pointer: Value, value: Value, mask, *order) -> Value:
        mask = present(mask)
        element = pointer.type.pointee
        old = self._read_modify_write(operation, pointer.data, value.data, mask and mask.data, element)
        return Value(old, self.like(pointer.type, element))

    def create_buffer_atomic_rmw(
        self, operation, pointer: Value, offsets: Value, value: Value, order, scope, mask
    ) -> Value:
        mask = present(mask)
        addresses = self.buffer_addresses(pointer, offsets)
        old = self._read_modify_write(
            operation, addresses, value.data, mask and mask.data, pointer.type.pointee
        )
        return Value(old, value.type)

    def create_atomic_cas(self, pointer: Value, expected: Value, new: Value, *order) -> Value:
        element, where = pointer.type.pointee, self.where()
        old = self.memory.load(pointer.data, None, None, element, where)
        equal = bits(old) == bits(expected.data)
        self.memory.store(pointer.data, torch.where(equal, bits(new.data), bits(old)), None, where)
        return Value(old, self.like(pointer.type, element))

    # ---- shared memory ----

    def present_accesses(self, what: str) -> list[tuple[Access, Clock]]:
        """The access that the running partition makes now, one a CTA."""
        me = self.scheduler.current
        text = f"{what} at {me.where()}"
        return [
            (Access(me.agent(cta), clock[me.agent(cta)], text), clock) for cta, clock in enumerate(me.clocks)
        ]

    def create_local_load(self, type: Type, view: SharedView) -> Value:
        self.scheduler.may_hand_over()
        self._check_own_share(type, view)
        view.allocation.check_read(view.footprint, self.present_accesses("a load"))
        return Value(view.view.clone(memory_format=torch.contiguous_format), type)

    def create_local_store(self, view: SharedView, value: Value) -> None:
        self.scheduler.may_hand_over()
        self._check_own_share(value.type, view)
        accesses = self.present_accesses("a store")
        view.allocation.check_write(view.footprint, [[access] for access in accesses])
        bits(view.view).copy_(bits(value.data))
        view.footprint.unfenced = self.where()

    def create_local_dealloc(self, view: SharedView) -> None:
        pass

    def create_local_gather(self, type: Type, view: SharedView, index: Value, axis: int) -> Value:
        self.scheduler.may_hand_over()
        view.allocation.check_read(view.footprint, self.present_accesses("a gather"))
        data = torch.gather(bits(view.view), axis, index.data.long())
        return Value(data.view(type.dtype), type)

    def create_local_scatter(self, view: SharedView, value: Value, index: Value, axis: int) -> None:
        self.scheduler.may_hand_over()
        accesses = self.present_accesses("a scatter")
        view.allocation.check_write(view.footprint, [[access] for access in accesses])
        bits(view.view).scatter_(axis, index.data.long(), bits(value.data))
        view.footprint.unfenced = self.where()

    def _check_own_share(self, type: Type, view: SharedView) -> None:
        """A CTA reaches its own shared memory: where that holds a share of the tensor, registers need that share."""
        if self.ctas == 1:
            return
        shared, registers = self.cta_bases(view.type), self.cta_bases(type)
        if shared != registers and not gluon_compat.READS_PARTS_OF_COPIES:
            raise Refused(
                f"registers with the CTA steps {registers} meet shared memory with {shared}, at {self.where()}: "
                f"this release of Triton cannot read that"
            )
        for kept, wanted in zip(shared, registers, strict=False):
            if any(kept) and kept != wanted:
                raise Refused(
                    f"registers with the CTA steps {registers} meet shared memory with {shared}, at {self.where()}: "
                    f"a CTA would need another one's shared memory"
                )

    # ---- views of shared memory ----

    def create_memdesc_index(self, type: Type, view: SharedView, index: Value) -> SharedView:
        number = int(index.item())
        if not 0 <= number < view.view.shape[0]:
            raise OutOfBounds(f"index({number}) of {view.view.shape[0]} buffers, at {self.where()}")
        return SharedView(view.view[number], view.allocation, type)

    def create_memdesc_subslice(self, type: Type, view: SharedView, offsets) -> SharedView:
        window = tuple(slice(o, o + n) for o, n in zip(offsets, type.shape, strict=True))
        return SharedView(view.view[window], view.allocation, type)

    def create_memdesc_trans(self, view: SharedView, order) -> SharedView:
        order = tuple(order)
        moved = view.view.permute(order)
        type = self.inferred(
            ("memdesc_trans", order),
            view.type,
            moved.shape,
            lambda real: self.real.create_memdesc_trans(real, list(order)),
            [view.type.allocated[-len(order) :][axis] for axis in order],
        )
        return SharedView(moved, view.allocation, type)

    def create_memdesc_reshape(self, view: SharedView, shape) -> SharedView:
        shape = tuple(shape)
        type = self.inferred(
            ("memdesc_reshape", shape),
            view.type,
            shape,
            lambda real: self.real.create_memdesc_reshape(real, list(shape)),
        )
        return SharedView(view.view.view(shape), view.allocation, type)

    def create_memdesc_reinterpret(self, type: Type, view: SharedView) -> SharedView:
        if not view.view.is_contiguous():
            raise NotModelled(f"a part of a buffer as another type or shape, at {self.where()}")
        reinterpreted = view.view.reshape(-1).view(type.dtype)
        wanted = torch.Size(type.shape).numel()
        if wanted > reinterpreted.numel():
            raise OutOfBounds(f"a reinterpretation needs more bytes than its source has, at {self.where()}")
        return SharedView(reinterpreted[:wanted].view(type.shape), view.allocation, type)

    # ---- tensor descriptors ----

    def create_make_tensor_descriptor(
        self, type: Type, base: Value, shape, strides, padding, *hints
    ) -> Value:
        descriptor = Descriptor(
            address=int(base.item()),
            bounds=tuple(int(extent.item()) for extent in shape),
            strides=tuple(int(stride.item()) for stride in strides),
            element=base.type.pointee,
            padding=float("nan") if "NAN" in str(padding).upper() else 0.0,
        )
        return Value(None, type, descriptor=descriptor)

    def create_update_tensor_descriptor(self, value: Value, offsets, bounds, predicate, clamp: bool) -> Value:
        descriptor = value.descriptor
        if offsets:
            descriptor = descriptor.moved([int(offset.item()) for offset in offsets], clamp=clamp)
        if bounds:
            descriptor = descriptor.limited([int(bound.item()) for bound in bounds])
        predicate = present(predicate)
        if predicate is not None:
            descriptor = descriptor.switched(bool(predicate.item()))
        return Value(None, value.type, descriptor=descriptor)

"""Types and values: what the emulating builder hands out in place of the compiler's.

A value holds its whole tensor (over all CTAs of a cluster) as a torch tensor on the CPU, in the element type that it
has on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numa_attention.testing.gluon.faults import Race

# the compiler's name of an element type -> (torch's type, suffix of the builder's getter)
ELEMENTS = {
    "i1": (torch.bool, "int1"),
    "i8": (torch.int8, "int8"),
    "i16": (torch.int16, "int16"),
    "i32": (torch.int32, "int32"),
    "i64": (torch.int64, "int64"),
    "f16": (torch.float16, "half"),
    "bf16": (torch.bfloat16, "bf16"),
    "f32": (torch.float32, "float"),
    "f64": (torch.float64, "double"),
    "f8e4nv": (torch.float8_e4m3fn, "fp8e4nv"),
    "f8e5": (torch.float8_e5m2, "fp8e5"),
    "f8e4b8": (torch.float8_e4m3fnuz, "fp8e4b8"),
    "f8e5b16": (torch.float8_e5m2fnuz, "fp8e5b16"),
}
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
# torch's type -> Triton's name of it as a kernel argument
ARGUMENTS = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FNUZ = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: float8 tensors can hardly be copied or compared otherwise."""
    return tensor if tensor.dtype == torch.bool else tensor.view(_BITS[tensor.itemsize])


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with ones in every bit of an integer."""
    # all bits set is NaN in every floating point type but those without a negative zero, whose code is NaN
    bits(tensor).fill_(-128 if tensor.dtype in _FNUZ else -1)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Something that torch computes with: float8 as float32."""
    return tensor.float() if tensor.dtype in FLOAT8 else tensor


@dataclass(eq=False)
class Type:
    """An element type, a pointer, a distributed tensor, a view of shared memory or a tensor descriptor."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    layout_attribute: object = None  # the compiler's attribute
    real: object = None  # the compiler's type, None where it is never asked for
    pointee: Type | None = None
    allocated: tuple[int, ...] | None = None  # of shared memory: the shape that a part was cut from
    layout: object = None  # Gluon's layout, filled in on demand

    @property
    def is_shared(self) -> bool:
        return self.allocated is not None


class Value:
    """In place of the compiler's `ir.value`."""

    __slots__ = ("_data", "type", "pending", "descriptor")

    def __init__(self, data: torch.Tensor | None, type: Type, pending=None, descriptor=None) -> None:
        self._data = data
        self.type = type
        self.pending = pending  # the asynchronous operation that produces this value
        self.descriptor = descriptor

    @property
    def data(self) -> torch.Tensor:
        if self.pending is not None and not self.pending.done:
            raise Race(
                f"the result of {self.pending.what} at {self.pending.where} is used before a wait for it"
            )
        return self._data

    def item(self):
        return self.data.item()

    # what the front end asks of an ir.value
    def get_type(self) -> Type:
        return self.type

    def get_loc(self) -> None:
        return None

    def set_loc(self, location) -> None:
        pass

    def set_attr(self, name, value) -> None:
        pass

    def id(self) -> int:
        return id(self)


class SharedView(Value):
    """A view of an allocation in shared memory; `view` is a torch view of the allocation's storage."""

    __slots__ = ("view", "allocation", "footprint")

    def __init__(self, view: torch.Tensor, allocation, type: Type) -> None:
        super().__init__(None, type)
        self.view = view
        self.allocation = allocation
        self.footprint = allocation.footprint(view)


def present(handle) -> Value | None:
    """The value behind an optional operand: the front end passes None, or the compiler's null value."""
    return handle if isinstance(handle, Value) else None


def is_on(predicate) -> bool:
    """Whether an optional scalar predicate lets its operation happen."""
    predicate = present(predicate)
    return predicate is None or bool(predicate.item())

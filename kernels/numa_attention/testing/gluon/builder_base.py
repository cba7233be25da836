"""The emulating builder's foundation: types and layouts.

Layouts are the compiler's own: `get_*_layout` and every question of which layout an operation results in go to a
real builder, so that an error about shapes or layouts is the compiler's own error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from numa_attention import gluon_compat
from numa_attention.testing.gluon.faults import NotModelled
from numa_attention.testing.gluon.global_memory import GlobalMemory
from numa_attention.testing.gluon.scheduler import Scheduler
from numa_attention.testing.gluon.shared_memory import Allocation
from numa_attention.testing.gluon.values import ELEMENTS, SharedView, Type, Value


class BuilderBase:
    """State of one launch, types and layouts."""

    def __init__(self, context, target, options, codegen_functions, module_map, scheduler, memory) -> None:
        self.generation: str = target
        self.options = options
        self.codegen_fns = codegen_functions
        self.module_map = module_map
        self.scheduler: Scheduler = scheduler
        self.memory: GlobalMemory = memory
        self.ctas: int = scheduler.ctas
        self.allocations: list[Allocation] = []
        self.scopes: dict[Callable, dict[str, object]] = {}  # the globals of each function that was called
        self.program = (0, 0, 0)
        self.grid = (1, 1, 1)
        self._types: dict = {}
        self._layouts: dict = {}
        self._inferred: dict = {}
        self._cta_bases: dict[Type, list[tuple[int, ...]]] = {}
        self._open_real_builder(context, options)
        self._elements = {}
        for name, (dtype, getter) in ELEMENTS.items():
            element = Type(dtype, real=getattr(self.real, f"get_{getter}_ty")())
            self._elements[dtype] = self._types[name] = element
            setattr(self, f"get_{getter}_ty", lambda element=element: element)
        for dtype, names in _CONSTANTS.items():
            for name in names:
                setattr(self, f"get_{name}", self._constant_of(self._elements[dtype]))

    def _open_real_builder(self, context, options) -> None:
        # poison values that stand for operands live in an empty function
        self.real = real = gluon_compat.op_builder(context, options)
        real.options = options
        real.set_loc("kernel", 1, 1)
        self._module = module = real.create_module()
        module.set_attr("ttg.num-warps", real.get_int32_attr(options.num_warps))
        module.set_attr("ttg.num-ctas", real.get_int32_attr(self.ctas))
        module.set_attr("ttg.threads-per-warp", real.get_int32_attr(options.warp_size))
        function = real.get_or_insert_function(
            module, "kernel", real.get_function_ty([], []), "public", False
        )
        module.push_back(function)
        real.set_insertion_point_to_start(function.add_entry_block())

    def __getattr__(self, name: str):
        if name.startswith("get_") and name.endswith("_layout"):
            return self._remembered_layout(name)
        if name.startswith(("get_", "to_linear")):
            return getattr(self.real, name)
        if name.startswith("create_"):
            raise NotModelled(
                f"the interpreter has no {name.removeprefix('create_')}, used at {self.where()}"
            )
        raise AttributeError(name)

    def where(self) -> str:
        return self.scheduler.current.where()

    # ---- constants ----

    def _constant_of(self, element: Type) -> Callable[[object], Value]:
        is_integer = not element.dtype.is_floating_point and element.dtype != torch.bool
        size = 8 * element.dtype.itemsize

        def constant(number) -> Value:
            if is_integer:
                number = (int(number) + (1 << size - 1)) % (1 << size) - (1 << size - 1)
            return Value(torch.tensor(number, dtype=element.dtype), element)

        return constant

    def integer(self, number: int) -> Value:
        return Value(torch.tensor(number, dtype=torch.int32), self._types["i32"])

    def get_null_value(self, type: Type) -> Value:
        return Value(torch.zeros(type.shape, dtype=torch.int8).to(type.dtype), type)

    def get_all_ones_value(self, type: Type) -> Value:
        return Value(torch.full(type.shape, -1, dtype=torch.int8).to(type.dtype), type)

    # ---- types ----

    def _unique(self, key: tuple, make: Callable[[], Type]) -> Type:
        if key not in self._types:
            self._types[key] = make()
        return self._types[key]

    def get_ptr_ty(self, element: Type, address_space: int = 1) -> Type:
        return self._unique(
            ("pointer", id(element)),
            lambda: Type(
                torch.int64, real=self.real.get_ptr_ty(element.real, address_space), pointee=element
            ),
        )

    def get_distributed_ty(self, element: Type, shape, attribute) -> Type:
        shape = tuple(shape)
        return self._unique(
            ("distributed", id(element), shape, id(attribute)),
            lambda: Type(
                element.dtype,
                shape,
                attribute,
                self.real.get_distributed_ty(element.real, list(shape), attribute),
                element.pointee,
            ),
        )

    def get_block_ty(self, element: Type, shape) -> Type:
        return Type(element.dtype, tuple(shape), pointee=element.pointee)

    def get_shared_mem_desc_ty(self, element: Type, shape, attribute, allocated) -> Type:
        shape, allocated = tuple(shape), tuple(allocated)

        def make() -> Type:
            real = self.real.get_shared_mem_desc_ty(element.real, list(shape), attribute, list(allocated))
            return Type(element.dtype, shape, attribute, real, allocated=allocated)

        return self._unique(("shared", id(element), shape, id(attribute), allocated), make)

    def get_tensor_descriptor_layout_type(self, block: Type, is_signed: bool, attribute) -> Type:
        return Type(block.dtype, block.shape, attribute)

    def get_void_ty(self) -> None:
        return None

    def element_of(self, type: Type) -> Type:
        return self.get_ptr_ty(type.pointee) if type.pointee is not None else self._elements[type.dtype]

    def like(self, type: Type, element: Type) -> Type:
        """`type` with other elements."""
        if not type.shape:
            return element
        if type.layout_attribute is None:
            return Type(element.dtype, type.shape, pointee=element.pointee)
        return self.get_distributed_ty(element, type.shape, type.layout_attribute)

    def boolean_like(self, type: Type) -> Type:
        return self.like(type, self._types["i1"])

    # ---- layouts ----

    def _remembered_layout(self, name: str):
        make = getattr(self.real, name)

        def layout(*arguments):
            # attributes are compared by identity, so that equal layouts must be one object
            key = (name, *(id(a) if type(a).__name__ == "attribute" else repr(a) for a in arguments))
            if key not in self._layouts:
                self._layouts[key] = (make(*arguments), arguments)
            return self._layouts[key][0]

        return layout

    def layout_of(self, type: Type):
        """Gluon's layout object of a distributed tensor or a view of shared memory."""
        if type.layout is None:
            poison = self.real.create_poison(type.real)
            ask = (
                self.real.get_gluon_layout_from_memdesc
                if type.is_shared
                else self.real.get_gluon_layout_from_tensor
            )
            type.layout = ask(poison)
        return type.layout

    def get_gluon_layout_from_tensor(self, value: Value):
        return self.layout_of(value.type)

    get_gluon_layout_from_memdesc = get_gluon_layout_from_tensor

    def get_shape_from_tensor(self, value: Value) -> list[int]:
        return list(value.type.shape)

    def inferred(self, key: tuple, source: Type, shape, apply: Callable, allocated=None) -> Type:
        """The type that the compiler gives the result of `apply`, called with a value of `source`.

        allocated: of a view of shared memory, the shape that it was cut from, None for its own.
        """
        shape = tuple(shape)
        key = (key, id(source), shape)
        if key not in self._inferred:
            result = apply(self.real.create_poison(source.real))
            if isinstance(result, (tuple, list)):
                result = result[0]
            if source.is_shared:
                layout = self.real.get_gluon_layout_from_memdesc(result)
                allocated = shape if allocated is None else tuple(allocated)
                made = self.get_shared_mem_desc_ty(
                    self.element_of(source), shape, layout._to_ir(self), allocated
                )
            elif not shape:
                made, layout = self.element_of(source), None
            else:
                layout = self.real.get_gluon_layout_from_tensor(result)
                made = self.get_distributed_ty(self.element_of(source), shape, layout._to_ir(self))
            made.layout = made.layout or layout
            self._inferred[key] = made
        return self._inferred[key]

    def cta_bases(self, type: Type) -> list[tuple[int, ...]]:
        """For each bit of a CTA's number in its cluster, its step in the tensor; all zero: both have the same part."""
        if self.ctas == 1 or type.layout_attribute is None:
            return []
        if type not in self._cta_bases:
            layout = self.layout_of(type)
            if type.is_shared and hasattr(layout, "cga_layout"):
                bases = _in_elements(layout.cga_layout, type.shape)
            else:
                bases = self.real.to_linear_layout(type.layout_attribute, list(type.shape)).block_bases
            self._cta_bases[type] = [tuple(basis) for basis in bases]
        return self._cta_bases[type]

    # ---- what only matters for code that is compiled ----

    def get_loc(self) -> None:
        return None

    def set_loc(self, *location) -> None:
        pass

    def create_loc(self, *location) -> None:
        return None

    def create_name_loc(self, *name) -> None:
        return None

    def get_insertion_point(self) -> None:
        return None

    def get_insertion_block(self) -> None:
        return None

    def restore_insertion_point(self, point) -> None:
        pass

    # ---- shared memory ----

    def create_local_alloc(self, type: Type, value: Value | None = None) -> SharedView:
        allocation = Allocation(type.dtype, type.shape, self.where(), self.ctas)
        self.allocations.append(allocation)
        view = SharedView(allocation.view, allocation, type)
        if value is not None:
            self.create_local_store(view, value)
        return view


def _in_elements(cga_layout, shape) -> list[list[int]]:
    """Bases that count CTAs as bases that count elements."""
    blocks = [1] * len(shape)
    for basis in cga_layout:
        blocks = [max(block, 2 * step) for block, step in zip(blocks, basis, strict=True)]
    return [
        [step * (extent // block) for step, extent, block in zip(basis, shape, blocks, strict=True)]
        for basis in cga_layout
    ]


_CONSTANTS = {
    torch.bool: ("int1",),
    torch.int8: ("int8", "uint8"),
    torch.int16: ("int16", "uint16"),
    torch.int32: ("int32", "uint32"),
    torch.int64: ("int64", "uint64"),
    torch.float16: ("fp16",),
    torch.bfloat16: ("bf16",),
    torch.float32: ("fp32",),
    torch.float64: ("fp64",),
}

"""`interpret(kernel)[grid](*arguments)`: run a Gluon kernel on tensors of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.language import core

from numa_attention import gluon_compat
from numa_attention.testing.gluon.builder import EmulatingBuilder
from numa_attention.testing.gluon.faults import GluonFault, NotModelled, Race, Refused
from numa_attention.testing.gluon.generator import EagerGenerator
from numa_attention.testing.gluon.global_memory import Descriptor, GlobalMemory
from numa_attention.testing.gluon.scheduler import Scheduler
from numa_attention.testing.gluon.semantic import EmulatingSemantic
from numa_attention.testing.gluon.values import ARGUMENTS, Type, Value

TARGETS = {
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}


def interpret(kernel, *, target: str = "gfx1250") -> InterpretedGluonKernel:
    """A `@gluon.jit` kernel as something to launch with tensors on the CPU.

    `target` is one of gfx1250, gfx950, gfx942 and sm_90: the compiler's rules for layouts depend on it.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is unknown: choose one of {', '.join(TARGETS)}")
    if not getattr(kernel, "is_gluon", lambda: False)():
        raise TypeError(
            f"{kernel!r} is no @gluon.jit kernel; plain Triton kernels have an interpreter of their own"
        )
    return InterpretedGluonKernel(kernel, target)


@dataclass(frozen=True)
class InterpretedGluonKernel:
    kernel: object
    target: str

    def __getitem__(self, grid) -> Callable:
        """`grid`: workgroups (clusters, where num_ctas > 1) along up to three axes, or a function of the arguments."""

        def launch(*arguments, num_warps=4, num_ctas=1, num_stages=0, seed=0, debug=True, **named) -> None:
            """Run all workgroups one after the other, in an order that `seed` chooses like all other chance.

            `num_stages` says nothing to Gluon, whose kernels are pipelined by hand.
            `debug=False` leaves out device assertions and the check of 32-bit arithmetic for overflow.
            Raises GluonFault where the kernel is wrong.
            """
            bound = self.kernel.signature.bind(*arguments, **named)
            bound.apply_defaults()
            extent = grid(bound.arguments) if callable(grid) else grid
            extent = (extent,) if isinstance(extent, int) else tuple(extent)
            with triton.knobs.compilation.scope():
                # errors of the front end arrive as they are
                triton.knobs.compilation.front_end_debugging = True
                run = _Launch(self.kernel, self.target, num_warps, num_ctas, seed, debug)
                run.all_programs(extent + (1,) * (3 - len(extent)), bound.arguments)

        return launch


class _Launch:
    def __init__(self, kernel, target: str, num_warps: int, num_ctas: int, seed: int, debug: bool) -> None:
        gpu = TARGETS[target]
        backend = make_backend(gpu)
        options = backend.parse_options({"num_warps": num_warps, "num_ctas": num_ctas, "debug": debug})
        if not hasattr(options, "warp_size"):
            object.__setattr__(options, "warp_size", gpu.warp_size)
        self.kernel = kernel
        self.context = ir.context()
        ir.load_dialects(self.context)
        backend.load_dialects(self.context)
        self.memory = GlobalMemory()
        self.scheduler = Scheduler(seed, num_ctas)
        self.order = random.Random(seed)
        self.builder = EmulatingBuilder(
            self.context,
            target,
            options,
            backend.get_codegen_implementation(options),
            backend.get_module_map(),
            self.scheduler,
            self.memory,
        )
        self.semantic = EmulatingSemantic(self.builder)

    def all_programs(self, grid: tuple[int, int, int], arguments: dict) -> None:
        values = {
            parameter.name: self._argument(parameter, arguments[parameter.name])
            for parameter in self.kernel.params
        }
        programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        self.order.shuffle(programs)
        self.builder.grid = grid
        for program in programs:
            self.builder.program = program
            self.builder.allocations = []
            self.scheduler.start_program()
            self._one_program(values)

    def _one_program(self, values: dict) -> None:
        main = self.scheduler.current
        try:
            EagerGenerator(self.kernel, self.builder, self.context).run(values)
            self.builder.check_nothing_outstanding(main)
            self.builder.check_barriers_outlive_arrivals()
            if self.scheduler.in_flight:
                operation, _ = self.scheduler.in_flight[0]
                raise Race(f"{operation.what} at {operation.where} is still in flight when the kernel ends")
        except (GluonFault, NotModelled):
            raise
        except Exception as error:
            place = self.scheduler.current.where()
            raise Refused(f"{type(error).__name__} at {place}: {error}") from error
        finally:
            self.scheduler.abandon()

    def _argument(self, parameter, value):
        """An argument of the launch as the kernel sees it; None, True and 1 are constants, as Triton has it."""
        if (
            parameter.is_constexpr
            or value is None
            or isinstance(value, bool)
            or (type(value) is int and value == 1)
        ):
            return value if isinstance(value, core.constexpr) else core.constexpr(value)
        if isinstance(value, torch.Tensor):
            pointer = tl.str_to_ty("*" + ARGUMENTS[value.dtype], None)
            address = torch.tensor(self.memory.add(value), dtype=torch.int64)
            return core.tensor(Value(address, pointer.to_ir(self.builder)), pointer)
        if hasattr(value, "block_shape"):
            return self._descriptor(value)
        return self.semantic.to_tensor(value)

    def _descriptor(self, value):
        """A tensor descriptor made on the host, for TMA or TDM."""
        element = tl.str_to_ty(ARGUMENTS[value.base.dtype], None)
        emulated = element.to_ir(self.builder)
        shape, strides = ([int(number) for number in numbers] for numbers in (value.shape, value.strides))
        descriptor = Descriptor(
            address=self.memory.add(value.base),
            bounds=tuple(shape),
            strides=tuple(strides),
            element=emulated,
            padding=float("nan") if getattr(value, "padding", "zero") == "nan" else 0.0,
        )
        handle = Value(None, Type(emulated.dtype, tuple(value.block_shape)), descriptor=descriptor)
        shape, strides = (
            [self.semantic.to_tensor(number) for number in numbers] for numbers in (shape, strides)
        )
        block = core.block_type(element, list(value.block_shape))
        if self.builder.generation.startswith("gfx"):
            tdm = gluon_compat.cdna5.tdm
            shape, strides = core.tuple(shape), core.tuple(strides)
            type = tdm.tensor_descriptor_type(block, shape.type, strides.type, value.layout)
            return tdm.tensor_descriptor(handle, shape, strides, type)
        return gluon_compat.hopper.tma.tensor_descriptor(handle, shape, strides, block, value.layout)

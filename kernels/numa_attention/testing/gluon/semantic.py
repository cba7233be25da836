"""Gluon's semantics, but for what cannot run one operation at a time: reductions, scans and warp specialisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language._layouts import SliceLayout
from triton.experimental.gluon.language._semantic import GluonCallerContext, GluonSemantic

from numa_attention.testing.gluon.builder import EmulatingBuilder
from numa_attention.testing.gluon.clocks import join
from numa_attention.testing.gluon.faults import Refused
from numa_attention.testing.gluon.scheduler import Partition
from numa_attention.testing.gluon.values import Value, bits


class EmulatingSemantic(GluonSemantic):
    builder: EmulatingBuilder

    def reduction(self, inputs, axis: int | None, combine: Callable) -> tuple:
        """Combine neighbours until one is left; `combine` calls the kernel's function on an open region."""
        if axis is None:
            inputs = tuple(self.reshape(t, [int(t.numel.value)], can_reorder=False) for t in inputs)
            axis = 0
        if not 0 <= axis < len(inputs[0].shape):
            raise ValueError(f"expected a reduction axis in [0, {len(inputs[0].shape)}) but got {axis}")
        self._refuse_reduction_over_ctas(inputs[0].handle.type, axis)
        parts = [_contiguous(t.handle.data) for t in inputs]
        while parts[0].shape[axis] > 1:
            even = [_every_other(part, axis, 0) for part in parts]
            odd = [_every_other(part, axis, 1) for part in parts]
            parts = self._combined(combine, even + odd)
        return tuple(
            self._without_axis(part.squeeze(axis), t, axis) for part, t in zip(parts, inputs, strict=True)
        )

    def associative_scan(self, inputs, axis: int, combine: Callable, reverse: bool) -> tuple:
        """Running results along an axis, in as many steps as the length has bits."""
        axis %= len(inputs[0].shape)
        parts = [_contiguous(t.handle.data) for t in inputs]
        length = parts[0].shape[axis]
        if reverse:
            parts = [_flip(part, axis) for part in parts]
        distance = 1
        while distance < length:
            earlier = [part.narrow(axis, 0, length - distance) for part in parts]
            later = [part.narrow(axis, distance, length - distance) for part in parts]
            combined = self._combined(combine, earlier + later)
            parts = [
                _concatenate(part.narrow(axis, 0, distance), new, axis)
                for part, new in zip(parts, combined, strict=True)
            ]
            distance *= 2
        if reverse:
            parts = [_flip(part, axis) for part in parts]
        return tuple(
            self.tensor(Value(part, t.handle.type), t.type) for part, t in zip(parts, inputs, strict=True)
        )

    def _combined(self, combine: Callable, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        region = self.builder.open_region(operands)
        combine(region)
        shape = operands[0].shape
        return [result.expand(shape) for result in region.results]

    def _without_axis(self, data: torch.Tensor, source, axis: int):
        scalar = source.type.scalar
        shape = [int(n) for n in data.shape]
        type = (
            gluon_core.distributed_type(scalar, shape, SliceLayout(axis, source.type.layout))
            if shape
            else scalar
        )
        return self.tensor(Value(data, type.to_ir(self.builder)), type)

    def _refuse_reduction_over_ctas(self, type, axis: int) -> None:
        builder = self.builder
        if builder.ctas == 1 or builder.can_exchange_between_ctas():
            return
        if any(basis[axis] for basis in builder.cta_bases(type)):
            raise Refused(
                f"a reduction along an axis that is split over the CTAs of a cluster, at {builder.where()}: "
                f"{builder.no_exchange_reason()}"
            )

    def warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs, generator, *rest):
        """Run the default partition here and every worker as a partition of its own."""
        scheduler = self.builder.scheduler
        parent = scheduler.current
        (default, default_arguments), *workers = functions_and_args
        if len(workers) != len(worker_num_warps):
            raise ValueError(
                f"{len(workers)} worker partitions, but {len(worker_num_warps)} numbers of warps"
            )
        partitions = []
        for number, (function, arguments) in enumerate(workers):
            partition = Partition(f"worker {number}", scheduler.ctas)
            for clock, known in zip(partition.clocks, parent.clocks, strict=True):
                join(clock, known)
            # its place until it starts is its launch
            partition.frames = list(parent.frames)
            context = GluonCallerContext(num_warps=worker_num_warps[number])

            def body(partition=partition, function=function, arguments=arguments, context=context) -> None:
                partition.frames = []
                generator.call_JitFunction(function, list(arguments), {}, caller_context=context)
                self.builder.check_nothing_outstanding(partition)

            scheduler.run_in_thread(partition, body)
            partitions.append(partition)
        parent.advance()
        scheduler.may_hand_over()
        result = generator.call_JitFunction(default, list(default_arguments), {})
        scheduler.wait_until(lambda: all(partition.done for partition in partitions))
        for partition in partitions:
            scheduler.partitions.remove(partition)
            for clock, known in zip(parent.clocks, partition.clocks, strict=True):
                join(clock, known)
        return result


def _contiguous(data: torch.Tensor) -> torch.Tensor:
    return bits(data).contiguous().view(data.dtype)


def _every_other(data: torch.Tensor, axis: int, first: int) -> torch.Tensor:
    window = [slice(None)] * data.dim()
    window[axis] = slice(first, None, 2)
    return data[tuple(window)]


def _flip(data: torch.Tensor, axis: int) -> torch.Tensor:
    return bits(data).flip(axis).view(data.dtype)


def _concatenate(left: torch.Tensor, right: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.cat([bits(left), bits(right)], axis).view(left.dtype)

"""The part of the builder that multiplies matrices: mfma and wmma, their scaled forms, and the asynchronous wgmma."""

from __future__ import annotations

import torch

from numa_attention.testing.gluon.copies import Copies
from numa_attention.testing.gluon.faults import NotModelled
from numa_attention.testing.gluon.values import SharedView, Type, Value, widened

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_FLOAT8_FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_E8M0_BIAS = 127


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product in float32 (float64 for float64, int32 for integers)."""
    if not left.dtype.is_floating_point:
        return (left.double() @ right.double()).to(torch.int32)
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    return left.to(wide) @ right.to(wide)


def _unpack_fp4(packed: torch.Tensor, axis: int) -> torch.Tensor:
    codes = packed.view(torch.uint8).to(torch.int64)
    pairs = torch.stack([_FP4[codes & 15], _FP4[codes >> 4]], dim=axis + 1)
    shape = list(packed.shape)
    shape[axis] *= 2
    return pairs.reshape(shape)


def _as_float(data: torch.Tensor, number_format: str, axis: int, packed_along_k: bool) -> torch.Tensor:
    """Float32 of an operand of a scaled product; `axis` is the one of K."""
    if number_format == "E2M1":
        return _unpack_fp4(data, axis if packed_along_k else 1 - axis)
    if number_format in _FLOAT8_FORMATS and data.itemsize == 1:
        return data.view(_FLOAT8_FORMATS[number_format]).float()
    return widened(data).float()


def _scale_factors(scales: Value | None, k: int) -> torch.Tensor | float:
    """[rows, k] factors of an operand whose rows lie along its outer axis."""
    if scales is None:
        return 1.0
    data = scales.data
    factors = (
        torch.exp2(data.view(torch.uint8).float() - _E8M0_BIAS) if data.dtype == torch.int8 else data.float()
    )
    return factors.repeat_interleave(k // factors.shape[-1], dim=-1)


class MatrixProducts(Copies):
    def create_dot(self, left: Value, right: Value, accumulator: Value, *precision) -> Value:
        result = multiply(left.data, right.data) + accumulator.data
        return Value(result.to(accumulator.type.dtype), accumulator.type)

    def create_dot_scaled(
        self, left, left_scale, left_format, right, right_scale, right_format, fast_math, left_k_pack, right_k_pack,
        accumulator,
    ) -> Value:  # fmt: skip
        a = _as_float(left.data, _format_name(left_format), 1, left_k_pack)
        b = _as_float(right.data, _format_name(right_format), 0, right_k_pack)
        scales = [s if isinstance(s, Value) else None for s in (left_scale, right_scale)]
        a = a * _scale_factors(scales[0], a.shape[1])
        b_factors = _scale_factors(scales[1], b.shape[0])
        b = b * (b_factors.T if isinstance(b_factors, torch.Tensor) else b_factors)
        return Value((a @ b + accumulator.data).to(accumulator.type.dtype), accumulator.type)

    def create_fp4_to_fp(self, source: Value, element: Type, axis: int) -> Value:
        data = _unpack_fp4(source.data, axis).to(element.dtype)
        unscaled = self.inferred(
            ("fp4_to_fp", axis, id(element)),
            source.type,
            data.shape,
            lambda real: self.real.create_fp4_to_fp(real, element.real, axis),
        )
        return Value(data, self.like(unscaled, element))

    # ---- wgmma ----

    def create_warpgroup_mma(
        self,
        left: Value,
        right: Value,
        accumulator: Value,
        use_accumulator: Value,
        precision,
        imprecise,
        is_async,
    ) -> Value:
        shared = [operand for operand in (left, right) if isinstance(operand, SharedView)]
        adds = bool(use_accumulator.item())
        # operands in registers are taken now, those in shared memory are read at some time until the wait
        registers = [None if isinstance(operand, SharedView) else operand.data for operand in (left, right)]
        result = Value(None, accumulator.type)

        def effect() -> None:
            a, b = (
                operand.view if in_registers is None else in_registers
                for operand, in_registers in zip((left, right), registers, strict=True)
            )
            product = multiply(a, b)
            # the accumulator may be the result of the product just before this one
            result._data = (product + accumulator._data if adds else product).to(result.type.dtype)

        operation = self.issue_read(shared, "a warpgroup_mma", effect, fenced=True)
        result.pending = operation
        self.scheduler.current.matrix_products.append(operation)
        if not is_async:
            self.create_warpgroup_mma_wait([], 0)
        return result

    def create_warpgroup_mma_wait(self, dependencies, newest: int) -> list[Value]:
        me = self.scheduler.current
        me.matrix_products = self.wait_for_all_but(me.matrix_products, newest)
        return list(dependencies)


def _format_name(number_format) -> str:
    name = str(number_format).rsplit(".", 1)[-1].upper()
    if name not in {"E4M3", "E5M2", "E2M1", "BF16", "FP16"}:
        raise NotModelled(f"the number format {name}")
    return name

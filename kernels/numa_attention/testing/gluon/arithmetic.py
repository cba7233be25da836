"""The part of the builder that computes on registers."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch

from numa_attention import gluon_compat
from numa_attention.testing.gluon.builder_base import BuilderBase
from numa_attention.testing.gluon.faults import GluonFault, NotModelled, Refused
from numa_attention.testing.gluon.values import FLOAT8, Type, Value, bits, widened

_asm_models: dict[str, Callable] = {}


def register_asm(text: str, model: Callable) -> None:
    """Say what an inline assembly text computes.

    `model` gets the operands as torch tensors, all of one shape, and returns the result, or a tuple of results.
    """
    _asm_models[text.strip()] = model


def _unsigned(tensor: torch.Tensor) -> np.ndarray:
    array = tensor.contiguous().numpy()
    return array if array.dtype == np.bool_ else array.view(f"u{array.itemsize}")


def _signed(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    # numpy makes scalars of arrays without axes
    array = np.asarray(array)
    if array.dtype != np.bool_:
        array = array.view(f"i{array.dtype.itemsize}")
    return torch.from_numpy(array.copy()).to(dtype)


def _binary(compute: Callable) -> Callable:
    def create(self: Arithmetic, left: Value, right: Value) -> Value:
        return Value(compute(left.data, right.data).to(left.type.dtype), left.type)

    return create


def _binary_unsigned(compute: Callable) -> Callable:
    def create(self: Arithmetic, left: Value, right: Value) -> Value:
        result = compute(_unsigned(left.data), _unsigned(right.data))
        return Value(_signed(result, left.type.dtype), left.type)

    return create


def _comparison(compute: Callable, *, unsigned: bool = False) -> Callable:
    def create(self: Arithmetic, left: Value, right: Value) -> Value:
        if unsigned:
            result = torch.from_numpy(np.asarray(compute(_unsigned(left.data), _unsigned(right.data))))
        else:
            result = compute(widened(left.data), widened(right.data))
        return Value(result, self.boolean_like(left.type))

    return create


def _unary(compute: Callable) -> Callable:
    def create(self: Arithmetic, value: Value) -> Value:
        return Value(compute(widened(value.data)).to(value.type.dtype), value.type)

    return create


def _division(compute: Callable) -> Callable:
    def create(self: Arithmetic, left: Value, right: Value) -> Value:
        if (right.data == 0).any():
            raise GluonFault(f"an integer division by zero, at {self.where()}")
        return compute(self, left, right)

    return create


class Arithmetic(BuilderBase):
    """Elementwise operations, conversions, shapes and layouts."""

    create_fadd = create_add = _binary(operator.add)
    create_fsub = create_sub = _binary(operator.sub)
    create_fmul = create_mul = _binary(operator.mul)
    create_fdiv = create_precise_divf = create_approx_divf = _binary(torch.true_divide)
    create_frem = _binary(torch.fmod)
    create_sdiv = _division(_binary(lambda a, b: torch.div(a, b, rounding_mode="trunc")))
    create_srem = _division(_binary(torch.fmod))
    create_udiv = _division(_binary_unsigned(operator.floordiv))
    create_urem = _division(_binary_unsigned(operator.mod))
    create_and = _binary(operator.and_)
    create_or = _binary(operator.or_)
    create_xor = _binary(operator.xor)
    create_shl = _binary(lambda a, b: a << b)
    create_ashr = _binary(lambda a, b: a >> b)
    create_lshr = _binary_unsigned(np.right_shift)
    create_maxnumf = _binary(torch.fmax)
    create_minnumf = _binary(torch.fmin)
    create_maximumf = create_maxsi = _binary(torch.maximum)
    create_minimumf = create_minsi = _binary(torch.minimum)
    create_maxui = _binary_unsigned(np.maximum)
    create_minui = _binary_unsigned(np.minimum)
    create_fneg = _unary(operator.neg)
    create_exp = _unary(torch.exp)
    create_exp2 = _unary(torch.exp2)
    create_log = _unary(torch.log)
    create_log2 = _unary(torch.log2)
    create_sqrt = create_precise_sqrt = _unary(torch.sqrt)
    create_rsqrt = _unary(torch.rsqrt)
    create_sin = _unary(torch.sin)
    create_cos = _unary(torch.cos)
    create_erf = _unary(torch.erf)
    create_tanh = _unary(torch.tanh)
    create_floor = _unary(torch.floor)
    create_ceil = _unary(torch.ceil)
    create_fabs = create_iabs = _unary(torch.abs)

    for _name, _compute in (
        ("EQ", operator.eq),
        ("NE", operator.ne),
        ("GE", operator.ge),
        ("GT", operator.gt),
        ("LE", operator.le),
        ("LT", operator.lt),
    ):
        for _prefix in ("create_fcmpO", "create_fcmpU", "create_icmpS", "create_icmp"):
            locals()[_prefix + _name] = _comparison(_compute)
        locals()["create_icmpU" + _name] = _comparison(_compute, unsigned=True)
    del _name, _compute, _prefix

    def create_fma(self, x: Value, y: Value, z: Value) -> Value:
        # a product of two float32 is exact in float64
        result = x.data.double() * y.data.double() + z.data.double()
        return Value(result.to(x.type.dtype), x.type)

    def create_umulhi(self, x: Value, y: Value) -> Value:
        product = _unsigned(x.data).astype(np.uint64) * _unsigned(y.data).astype(np.uint64)
        return Value(_signed((product >> np.uint64(32)).astype(np.uint32), x.type.dtype), x.type)

    def create_clampf(self, x: Value, low: Value, high: Value, propagate_nan) -> Value:
        return Value(torch.minimum(torch.maximum(x.data, low.data), high.data), x.type)

    def create_select(self, condition: Value, yes: Value, no: Value) -> Value:
        chosen = torch.where(condition.data, bits(yes.data), bits(no.data))
        return Value(chosen.view(yes.type.dtype), yes.type)

    # ---- conversions ----

    def create_fp_to_fp(self, value: Value, type: Type, rounding=None) -> Value:
        if rounding is not None and "RTZ" in str(rounding):
            raise NotModelled(f"rounding toward zero, at {self.where()}")
        data = widened(value.data)
        if type.dtype in FLOAT8:
            # GPUs saturate, torch makes NaN of a number too large; NaN stays NaN
            largest = torch.finfo(type.dtype).max
            data = data.float().clamp(-largest, largest)
        return Value(data.to(type.dtype), type)

    create_fp_ext = create_fp_trunc = create_si_to_fp = create_fp_to_si = create_fp_to_fp

    def create_ui_to_fp(self, value: Value, type: Type) -> Value:
        return Value(
            torch.from_numpy(np.asarray(_unsigned(value.data).astype(np.float64))).to(type.dtype), type
        )

    def create_fp_to_ui(self, value: Value, type: Type) -> Value:
        return Value(widened(value.data).to(torch.int64).to(type.dtype), type)

    def create_int_cast(self, value: Value, type: Type, is_signed: bool) -> Value:
        data = value.data
        if type.dtype == torch.bool:
            return Value((data & 1).bool(), type)
        if not is_signed and data.dtype != torch.bool and data.itemsize < type.dtype.itemsize:
            data = data.to(torch.int64) & ((1 << 8 * data.itemsize) - 1)
        return Value(data.to(type.dtype), type)

    def create_bitcast(self, value: Value, type: Type) -> Value:
        return Value(value.data.contiguous().view(type.dtype), type)

    def create_ptr_to_int(self, value: Value, type: Type) -> Value:
        return Value(value.data.to(type.dtype), type)

    create_int_to_ptr = create_ptr_to_int

    def create_addptr(self, pointer: Value, offset: Value) -> Value:
        step = offset.data.to(torch.int64) * pointer.type.pointee.dtype.itemsize
        return Value(pointer.data + step, pointer.type)

    # ---- shapes and layouts ----

    def create_make_range(self, type: Type, start: int, end: int) -> Value:
        return Value(torch.arange(start, end, dtype=torch.int32), type)

    def create_splat(self, type: Type, value: Value) -> Value:
        return Value(value.data.expand(type.shape), type)

    def create_broadcast(self, value: Value, type) -> Value:
        if not isinstance(type, Type):
            type = self.get_distributed_ty(self.element_of(value.type), type, value.type.layout_attribute)
        return Value(value.data.expand(type.shape), type)

    def create_unsplat(self, value: Value) -> Value:
        return Value(value.data.reshape(()), self.element_of(value.type))

    def create_expand_dims(self, value: Value, axis: int) -> Value:
        data = value.data.unsqueeze(axis)
        type = self.inferred(
            ("expand_dims", axis),
            value.type,
            data.shape,
            lambda real: self.real.create_expand_dims(real, axis),
        )
        return Value(data, type)

    def create_trans(self, value: Value, order) -> Value:
        order = tuple(order)
        data = value.data.permute(order)
        type = self.inferred(
            ("trans", order), value.type, data.shape, lambda real: self.real.create_trans(real, list(order))
        )
        return Value(data, type)

    def create_reshape(self, value: Value, shape, can_reorder) -> Value:
        shape = tuple(shape)
        type = self.inferred(
            ("reshape", shape),
            value.type,
            shape,
            lambda real: self.real.create_reshape(real, list(shape), False),
        )
        return Value(value.data.reshape(shape), type)

    def create_join(self, left: Value, right: Value) -> Value:
        data = torch.stack([bits(left.data), bits(right.data)], -1).view(left.type.dtype)
        type = self.inferred(("join",), left.type, data.shape, lambda real: self.real.create_join(real, real))
        return Value(data, type)

    def create_split(self, value: Value) -> tuple[Value, Value]:
        data = value.data
        type = self.inferred(
            ("split",), value.type, data.shape[:-1], lambda real: self.real.create_split(real)
        )
        return Value(data[..., 0], type), Value(data[..., 1], type)

    def create_convert_layout(self, type: Type, value: Value) -> Value:
        if self.ctas > 1 and not self.can_exchange_between_ctas():
            source, target = self.cta_bases(value.type), self.cta_bases(type)
            if source != target:
                raise Refused(
                    f"convert_layout moves values between the CTAs of a cluster, at {self.where()}: "
                    f"{self.no_exchange_reason()}"
                )
        return Value(value.data, type)

    def is_convert_layout_trivial(self, type: Type, value: Value) -> bool:
        return self.real.is_convert_layout_trivial(type.real, self.real.create_poison(value.type.real))

    def can_exchange_between_ctas(self) -> bool:
        return gluon_compat.exchanges_between_ctas(self.generation)

    def no_exchange_reason(self) -> str:
        if self.generation.startswith("gfx"):
            return f"{self.generation} has no shared memory between CTAs"
        return "this release of Triton cannot"

    def create_set_auto_layout(self, attribute, value: Value) -> Value:
        type = self.get_distributed_ty(self.element_of(value.type), value.type.shape, attribute)
        return Value(value.data, type)

    def create_extract_slice(self, type: Type, value: Value, offsets) -> Value:
        window = tuple(slice(o, o + n) for o, n in zip(offsets, type.shape, strict=True))
        return Value(value.data[window], type)

    def create_gather(self, source: Value, index: Value, axis: int) -> Value:
        data = torch.gather(bits(source.data), axis, index.data.long()).view(source.type.dtype)
        type = self.get_distributed_ty(
            self.element_of(source.type), index.type.shape, index.type.layout_attribute
        )
        return Value(data, type)

    def create_cat(self, left: Value, right: Value, type: Type) -> Value:
        return Value(torch.cat([bits(left.data), bits(right.data)]).view(type.dtype), type)

    # ---- the program ----

    def create_get_program_id(self, axis: int) -> Value:
        return self.integer(self.program[axis])

    def create_get_num_programs(self, axis: int) -> Value:
        return self.integer(self.grid[axis])

    def create_assume(self, condition: Value) -> None:
        if not condition.data.all():
            raise GluonFault(f"an assumption does not hold, at {self.where()}")

    def create_assert(self, condition: Value, message: str, *mask) -> None:
        if not condition.data.all():
            raise GluonFault(f"an assertion fails: {message}, at {self.where()}")

    def create_print(self, prefix: str, is_hex, values, *signs) -> None:
        print(prefix, *(value.data for value in values))

    # scheduling hints
    def create_warp_pipeline_border(self, *arguments) -> None:
        pass

    create_amd_sched_barrier = create_warp_pipeline_border
    create_grid_dependency_wait = create_warp_pipeline_border
    create_grid_dependency_launch_dependents = create_warp_pipeline_border

    # ---- inline assembly ----

    def create_inline_asm(self, text: str, constraints: str, operands, types, is_pure, pack):
        model = _asm_models.get(text.strip())
        if model is None:
            raise NotModelled(
                f"inline assembly, at {self.where()}: say what it computes with "
                f"numa_attention.testing.gluon.register_asm({text.strip()!r}, model)"
            )
        results = model(*(operand.data for operand in operands))
        results = results if isinstance(results, tuple) else (results,)
        return _Results(
            [
                Value(torch.as_tensor(r).to(t.dtype).expand(t.shape), t)
                for r, t in zip(results, types, strict=True)
            ]
        )


class _Results:
    """An operation with several results."""

    def __init__(self, values: list[Value]) -> None:
        self._values = values

    def get_result(self, index: int) -> Value:
        return self._values[index]

"""Triton's CPU interpreter with a GPU's arithmetic, also in a process that imported Triton long before.

Triton decides once, when `triton.language` is imported, whether `tl.sum`, `tl.cdiv` and their like are
interpreted. Here a launch of one of our kernels swaps interpreted versions in and takes them out again, so
that other people's kernels in the process stay compiled.

The interpreter holds bfloat16 and float8 numbers as their bit patterns. As Triton has it, it adds,
multiplies and sums these patterns as integers, truncates where it should round to nearest even, and reads a
float8 NaN or infinity as a finite number. `enable` replaces those operations: widen to float32, compute,
round as torch does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import JITFunction

# Triton's name of a type that the interpreter stores as bits -> torch's type
_STORED_AS_BITS = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_BITS = {1: torch.uint8, 2: torch.uint16}


def enable() -> None:
    """Correct the interpreter's bfloat16 and float8 arithmetic for every interpreted kernel in this process.

    A number too large for a float8 type becomes what torch makes of it (NaN in e4m3fn), where some GPUs
    saturate: a kernel that forgets to clamp shows. Calling this twice is harmless.
    """
    # the one builder object is known to every interpreted function: give it the class that computes right
    upstream.interpreter_builder.__class__ = _Builder
    upstream.ReduceOps = _ReduceOps
    upstream.ScanOps = _ScanOps


def interpret(fn: Callable, **options) -> InterpretedKernel:
    """`fn` as an interpreted kernel or device function; `options` are those of `triton.jit`."""
    return InterpretedKernel(fn, **options)


class InterpretedKernel(upstream.InterpretedFunction):
    """A kernel whose launch brings its own interpreted `triton.language` and leaves none of it behind."""

    def run(self, *args, grid, warmup, **kwargs):
        if warmup:
            return
        with _interpreted_language():
            _Grid(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        # a call from inside a kernel, where the language is interpreted already
        return self.rewrite()(*args, **kwargs)


class _Grid(upstream.GridExecutor):
    """Triton's loop over the grid, which uses tensors on the CPU in place, however large their storage."""

    def _init_args_hst(self, args_dev, kwargs):
        if _all_on_cpu(args_dev) and _all_on_cpu(kwargs.values()):
            return list(args_dev), kwargs
        return super()._init_args_hst(args_dev, kwargs)

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        if kwargs_hst is not kwargs:
            super()._restore_args_dev(args_dev, args_hst, kwargs, kwargs_hst)


def _all_on_cpu(arguments) -> bool:
    return all(not hasattr(a, "data_ptr") or getattr(a, "is_cpu", False) for a in arguments) and not any(
        isinstance(a, (tuple, upstream.TensorDescriptor)) for a in arguments
    )


# ---- the language, while one of our kernels runs ----

_launching = threading.RLock()
# upstream patches every language module that it finds in a function's globals
_WHOLE_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


@contextmanager
def _interpreted_language() -> Iterator[None]:
    with _launching, triton.knobs.runtime.scope(), np.errstate(all="ignore"):
        triton.knobs.runtime.interpret = True
        swapped = [(owner, name, vars(owner)[name], new) for owner, name, new in _library_functions()]
        try:
            for owner, name, _, new in swapped:
                setattr(owner, name, new)
            builtins = upstream._patch_lang(_WHOLE_LANGUAGE)
            builtins.set_attr(tl.dtype, "to_ir", _to_ir(tl.dtype.to_ir))
            # numpy >= 2.4 no longer turns a one-element array into a number, as Triton 3.6 would have it
            builtins.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
            # the language is ready: the grid loop need not prepare it again, which takes milliseconds
            builtins.set_attr(upstream, "_patch_lang", lambda fn: upstream._LangPatchScope())
            try:
                yield
            finally:
                builtins.restore()
        finally:
            for owner, name, old, _ in swapped:
                setattr(owner, name, old)


def _to_ir(upstream_to_ir: Callable) -> Callable:
    # Triton 3.6 forgets the fnuz types; the interpreter's type is the type itself
    return lambda self, builder: self if self.name in _STORED_AS_BITS else upstream_to_ir(self, builder)


@cache
def _library_functions() -> list[tuple[object, str, object]]:
    """(owner, name, interpreted version) of each kernel in Triton's own library: `tl.sum`, `tl.cdiv`, ..."""
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name == "triton.language" or module_name.startswith("triton.language."):
            for name, value in list(vars(module).items()):
                if _is_library_kernel(value):
                    found.append((module, name, _interpreted_version(value)))
    for name, value in list(vars(tl.tensor).items()):
        # a method such as x.sum() is the kernel itself, or a closure over an interpreted one
        cells = getattr(value, "__closure__", None) or ()
        for candidate in (value, *(cell.cell_contents for cell in cells)):
            if _is_library_kernel(candidate):
                found.append((tl.tensor, name, _as_method(_interpreted_version(candidate))))
    return found


def _is_library_kernel(value: object) -> bool:
    return isinstance(value, (JITFunction, upstream.InterpretedFunction))


@cache
def _interpreted_version(library_kernel) -> InterpretedKernel:
    # cached because reductions compare their combine function by identity
    return InterpretedKernel(library_kernel.fn)


def _as_method(function: InterpretedKernel) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs)


# ---- numbers that are stored as bits ----


def _is_bits(dtype: tl.dtype) -> bool:
    return dtype.scalar.name in _STORED_AS_BITS


def _widen(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The float32 values of bit patterns; exact."""
    stored = torch.from_numpy(np.array(bits, order="C")).view(_STORED_AS_BITS[dtype.scalar.name])
    return stored.float().numpy()


def _round(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The bit patterns of the nearest numbers of `dtype`; ties go to even."""
    torch_dtype = _STORED_AS_BITS[dtype.scalar.name]
    rounded = torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(torch_dtype)
    return rounded.view(_BITS[torch_dtype.itemsize]).numpy()


def _values(handle: upstream.TensorHandle) -> np.ndarray:
    """The numbers that a handle holds, whatever way it stores them."""
    return _widen(handle.data, handle.dtype) if _is_bits(handle.dtype) else handle.data


def _stored(values: np.ndarray, dtype: tl.dtype) -> upstream.TensorHandle:
    """A handle of `dtype` that holds `values`, rounded."""
    scalar = dtype.scalar
    data = _round(values, scalar) if _is_bits(scalar) else values.astype(upstream._get_np_dtype(scalar))
    return upstream.TensorHandle(data, scalar)


def _float32(handle: upstream.TensorHandle) -> upstream.TensorHandle:
    return (
        upstream.TensorHandle(_widen(handle.data, handle.dtype), tl.float32)
        if _is_bits(handle.dtype)
        else handle
    )


class _Builder(upstream.InterpreterBuilder):
    """Triton's interpreter builder, right for bfloat16 and float8."""

    def get_bf16(self, value):
        return _stored(np.array([value], dtype=np.float32), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        if _is_bits(src.dtype) or _is_bits(dst_type):
            return _stored(_values(src), dst_type)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        toward_zero = rounding_mode == upstream._ir.ROUNDING_MODE.RTZ
        if toward_zero or tl.float8e4b15.name in (src.dtype.scalar.name, dst_type.scalar.name):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def unary_op(self, arg, op):
        return _stored(op(_values(arg)), arg.dtype) if _is_bits(arg.dtype) else super().unary_op(arg, op)

    def binary_op(self, lhs, rhs, op):
        if not _is_bits(lhs.dtype):
            return super().binary_op(lhs, rhs, op)
        result = op(_values(lhs), _values(rhs))
        if result.dtype == np.bool_:
            return upstream.TensorHandle(result, tl.int1)
        return _stored(result, lhs.dtype)

    def ternary_op(self, lhs, rhs, other, op):
        # choosing between two numbers needs no arithmetic
        if op is np.where or not _is_bits(other.dtype):
            return super().ternary_op(lhs, rhs, other, op)
        return _stored(op(_values(lhs), _values(rhs), _values(other)), other.dtype)

    def create_fma(self, x, y, z):
        return self._in_float32(super().create_fma, x, y, z)

    def create_erf(self, arg):
        return self._in_float32(super().create_erf, arg)

    def create_rsqrt(self, arg):
        return self._in_float32(super().create_rsqrt, arg)

    def _in_float32(self, operation, *handles):
        dtype = handles[-1].dtype
        result = operation(*map(_float32, handles))
        return _stored(result.data, dtype) if _is_bits(dtype) else result

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if not (a.dtype.is_floating() and b.dtype.is_floating()):
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(*(_values(x).astype(_accumulator(d)) for x in (a, b)))
        return _stored(product + _values(d), d.dtype)

    def create_atomic_rmw(self, rmw_op, ptr, val, mask, sem, scope):
        if not (_is_bits(val.dtype) and rmw_op == upstream._ir.ATOMIC_OP.FADD):
            return super().create_atomic_rmw(rmw_op, ptr, val, mask, sem, scope)
        # lane by lane: two lanes may add to one address
        before = np.zeros(val.data.shape, dtype=val.data.dtype)
        for lane in np.ndindex(val.data.shape):
            if mask.data[lane]:
                address = upstream.TensorHandle(np.array([ptr.data[lane]]), ptr.dtype)
                old = self.create_load(address, *_UNUSED_LOAD_ARGUMENTS)
                addend = upstream.TensorHandle(val.data[lane].reshape(1), val.dtype)
                self.create_store(address, self.create_fadd(old, addend), *_UNUSED_STORE_ARGUMENTS)
                before[lane] = old.data[0]
        return upstream.TensorHandle(before, val.dtype.scalar)


def _accumulator(d: upstream.TensorHandle) -> type:
    return np.float64 if d.data.dtype == np.float64 else np.float32


def _unused_arguments(method: Callable, used: int) -> tuple[None, ...]:
    return (None,) * (method.__code__.co_argcount - 1 - used)


# cache modifiers and the like, whose number differs between Triton releases and which the interpreter ignores
_UNUSED_LOAD_ARGUMENTS = _unused_arguments(upstream.InterpreterBuilder.create_load, used=1)
_UNUSED_STORE_ARGUMENTS = _unused_arguments(upstream.InterpreterBuilder.create_store, used=2)


def _as_float32(tensor: tl.tensor) -> tl.tensor:
    if not _is_bits(tensor.dtype):
        return tensor
    widened_type = tl.block_type(tl.float32, list(tensor.shape)) if tensor.type.is_block() else tl.float32
    return tl.tensor(_float32(tensor.handle), widened_type)


def _back_to(dtype: tl.dtype, tensor: tl.tensor) -> tl.tensor:
    if not _is_bits(dtype):
        return tensor
    narrow_type = tl.block_type(dtype, list(tensor.shape)) if tensor.type.is_block() else dtype
    return tl.tensor(_stored(tensor.handle.data, dtype), narrow_type)


class _ReduceOps(upstream.ReduceOps):
    """Sums, maxima and minima; other reductions combine element by element, through the builder."""

    def sum(self, input):
        return _back_to(input.dtype, super().sum(_as_float32(input)))

    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        input = input[0] if isinstance(input, tuple) else input
        result = super().min_max(_as_float32(input), val_reduce_op, idx_reduce_op)
        if not val_reduce_op:
            return result
        if idx_reduce_op:
            value, index = result
            return _back_to(input.dtype, value), index
        return _back_to(input.dtype, result)


class _ScanOps(upstream.ScanOps):
    def cumsum(self, input):
        return [_back_to(input.dtype, scanned) for scanned in super().cumsum(_as_float32(input))]

    def cumprod(self, input):
        return [_back_to(input.dtype, scanned) for scanned in super().cumprod(_as_float32(input))]

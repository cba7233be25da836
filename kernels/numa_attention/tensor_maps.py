"""What TMA sees of a cache on sm_90: a matrix of rows, and tensor maps that are made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLE_BYTES = 128  # the widest swizzle of shared memory


@dataclass(frozen=True)
class Matrix:
    """A cache [page, token, kv_head, dim] as a matrix: its size, and where its pages and heads begin."""

    rows: int
    columns: int
    row_stride: int
    page_rows: int
    head_rows: int
    head_columns: int


@lru_cache(maxsize=1024)
def matrix_of(size: torch.Size, stride: tuple[int, ...], itemsize: int) -> Matrix | None:
    """A cache as a matrix whose rows are tokens; None where its strides allow none to TMA."""
    pages, tokens, heads, dim = size
    page_stride, token_stride, head_stride = stride[:3]
    if token_stride == 0:
        return None
    if heads == 1:
        head_stride = 0
    by_rows = head_stride % token_stride == 0
    page_rows = page_stride // token_stride
    head_rows = head_stride // token_stride if by_rows else 0
    # up to the last row of the last page: rows behind it may lie outside of the storage
    rows = (pages - 1) * page_rows + (heads - 1) * head_rows + tokens
    inside = by_rows or head_stride * (heads - 1) + dim <= token_stride
    aligned = not (token_stride * itemsize) % 16 and not (head_stride * itemsize) % 16
    if page_stride % token_stride or not inside or not aligned or rows >= 1 << 31:
        return None
    return Matrix(
        rows=rows,
        columns=dim if by_rows else (heads - 1) * head_stride + dim,
        row_stride=token_stride,
        page_rows=page_rows,
        head_rows=head_rows,
        head_columns=0 if by_rows else head_stride,
    )


@dataclass(frozen=True)
class Address:
    """Where a tensor map begins: what a launch needs of a tensor, without keeping its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def descriptor_of(
    base: torch.Tensor | Address, size: tuple[int, ...], stride: tuple[int, ...], box: tuple[int, ...],
    shares: tuple[tuple[int, ...], ...] = (),
) -> TensorDescriptor:  # fmt: skip
    """A tensor map whose boxes lie in shared memory swizzled as widely as their rows allow.

    shares: in a cluster, the step from one workgroup's part of a box to the next one's; of zeros where each has it all.
    """
    itemsize = base.dtype.itemsize
    swizzle = min(box[-1] * itemsize, SWIZZLE_BYTES)
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle,
        element_bitwidth=8 * itemsize,
        rank=len(box),
        cga_layout=list(map(list, shares)),
    )
    return TensorDescriptor(base, list(size), list(stride), list(box), layout)


_descriptor_of = lru_cache(maxsize=4096)(descriptor_of)


def tensor_map(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], box: tuple[int, ...],
    shares: tuple[tuple[int, ...], ...] = (),
) -> TensorDescriptor:  # fmt: skip
    """The tensor map of a tensor, made once for each: every layer of every step asks for some."""
    if tensor.device.type == "cpu":  # the interpreter reads the tensor itself
        return descriptor_of(tensor, size, stride, box, shares)
    return _descriptor_of(Address(tensor.data_ptr(), tensor.dtype), size, stride, box, shares)


def map_of_rows(
    pages: torch.Tensor, matrix: Matrix, box: tuple[int, int], shares: tuple[tuple[int, ...], ...] = ()
) -> TensorDescriptor:
    """The tensor map of a cache that `matrix_of` describes."""
    return tensor_map(pages, (matrix.rows, matrix.columns), (matrix.row_stride, 1), box, shares)

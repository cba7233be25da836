"""Prefill on sm_90: which thread of a consumer holds what of its 64 rows of the packed tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper


@gluon.constexpr_function
def shares(ctas, rank=2, split=True):
    """The step that a cluster's second workgroup is from its first in a tile: half of the rows, or none for a copy."""
    return [] if ctas == 1 else [[1 if split else 0] + [0] * (rank - 1)]


@gluon.constexpr_function
def barrier_layout(ctas, shared=False):
    """An mbarrier of each workgroup of a cluster, or one that all arrive at and for which the first one alone waits."""
    return hopper.mbarrier.MBarrierLayout(shares(ctas, rank=1, split=not shared))


@gluon.constexpr_function
def product_layout(columns, depth=16, ctas=1):
    """A consumer's accumulator of so many columns; depth: of the instruction, 32 for float8."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth], shares(ctas))


@gluon.constexpr_function
def copy_layout(columns, ctas=1, split=True):
    """Rows of 16-bit elements in the registers of a consumer, 16 bytes of a row in each thread."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0], shares(ctas, split=split))


@gluon.jit
def rows_of(
    first_row, kv_head, query_start, query_len, COUNT: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr
):
    """Token, query head, and whether it exists, of COUNT rows of the packed tile."""
    o_row = first_row + gl.arange(0, COUNT, LAYOUT)
    o_query = o_row // C.group
    return (query_start + o_query).to(gl.int64), kv_head * C.group + o_row % C.group, o_query < query_len

"""Which layers the sm_90 decode kernel takes, and its launch."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.decode.hopper import decode_kernel
from numa_attention.decode.hopper_copies import descriptor_of, rows_of
from numa_attention.shapes import LayerShape, UnsupportedShape

FORMS = ("single", "two-stage", "four-stage")
HEAD_DIMS = {1: (128, 256), 2: (64, 128, 256)}  # by bytes of a cached number
MIN_ROWS = 8  # the smallest N of a wgmma
FAN_IN = 16  # parts merged at a time, as in decode/portable.py


def why_not(shape: LayerShape) -> str | None:
    """Why this kernel cannot take a layer, as a clause that follows "because"; None if it can."""
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"its queries are {shape.dtype}, not float16 or bfloat16"
    size = shape.kv_dtype.itemsize
    if size == 2 and shape.kv_dtype != shape.dtype:
        return f"its cache is {shape.kv_dtype}, its queries {shape.dtype}"
    if shape.head_dim != shape.head_dim_v or shape.head_dim not in HEAD_DIMS.get(size, ()):
        return f"keys of {shape.head_dim} and values of {shape.head_dim_v} are none of its head sizes"
    return None


def launch_of(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule,
    *,
    scale: float,
    form: str = "four-stage",
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[tuple[int], tuple, dict]:
    """(grid, arguments, constants and options) of the launch for `schedule`; see `attention.attend` for shapes.

    Raises ValueError for an unknown form, UnsupportedShape.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown: choose one of {', '.join(FORMS)}")
    shape, plan, batch = schedule.shape, schedule.decode, schedule.batch
    reason = why_not(shape)
    k_rows, v_rows = rows_of(k_pages), rows_of(v_pages)
    if reason is None and (k_rows is None or v_rows is None):
        reason = f"strides {k_pages.stride()} and {v_pages.stride()} are no rows that TMA can copy"
    if reason is not None:
        raise UnsupportedShape(f"the sm_90 decode kernel does not take this layer, because {reason}")
    variant = plan.variant
    rows, block_n = variant.block_m, variant.block_n
    chunk = min(shape.page_size & -shape.page_size, block_n)
    float8 = shape.kv_dtype.itemsize == 1
    width = min(shape.head_dim, 128 // shape.kv_dtype.itemsize)
    has_lse = lse is not None
    lse = lse if has_lse else out
    arguments = (
        *(descriptor_of(k_pages, k_rows, chunk), descriptor_of(v_pages, v_rows, chunk), q, out, lse),
        *(plan.ranges, plan.items, plan.arrivals, plan.partial_acc, plan.partial_ml),
        *(batch.block_table, batch.query_start_loc, batch.seq_lens),
        *(q if optional is None else optional for optional in (sinks, alibi_slopes, k_scale, v_scale)),
        *(float(scale), float(soft_cap)),
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), lse.stride(0), lse.stride(1)),
        batch.block_table.stride(0),
        *(k_rows.page_rows, k_rows.head_rows, k_rows.head_columns),
        *(v_rows.page_rows, v_rows.head_rows, v_rows.head_columns),
    )
    constants = dict(
        GROUP=shape.group,
        BLOCK_M=rows,
        BLOCK_N=block_n,
        PAGE_SIZE=shape.page_size,
        CHUNK=chunk,
        COLUMNS=shape.head_dim // width,
        WIDTH=width,
        PARTS=shape.head_dim // 64,
        STAGES=1 if form == "single" else variant.num_stages,
        FORM=form,
        FLOAT8=float8,
        E5M2=shape.kv_dtype == torch.float8_e5m2,
        WINDOW=shape.window,
        CAUSAL=batch.causal,
        HAS_CAP=soft_cap > 0.0,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_SINK=sinks is not None,
        HAS_LSE=has_lse,
        HAS_SCALES=k_scale is not None,
        DOMAINS=variant.domains if variant.mapping.startswith("swizzled") else 1,
        FAN_IN=FAN_IN,
        IN_FLIGHT=max(1, min(4, 64 // (shape.head_dim * rows // 128))),
        PRODUCER_REGISTERS=40,
        ACC_S=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16]),
        ACC_O=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16]),
        QUERY=gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]),
        COPY=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        SHARED=gl.NVMMASharedLayout(128, 16, 2),
        BARRIER=hopper.mbarrier.MBarrierLayout(),
        num_warps=4,
        maxnreg=128,
    )
    return (variant.workgroups,), arguments, constants


def decode(*arguments, **options) -> None:
    """Attention of the decoding requests of a schedule on the GPU; arguments as for `launch_of`."""
    grid, values, constants = launch_of(*arguments, **options)
    decode_kernel[grid](*values, **constants)

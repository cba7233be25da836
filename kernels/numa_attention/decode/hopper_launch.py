"""The launch of the sm_90 decode kernel; `hopper_variant.py` says for which layers."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.decode import portable
from numa_attention.decode.hopper import decode_kernel
from numa_attention.decode.hopper_variant import PART, key_stages_of, registers_of
from numa_attention.direct_launch import Launched
from numa_attention.jit import Launcher, gluon_entry, pointer_traits
from numa_attention.shapes import LayerShape, chunk_of
from numa_attention.tensor_maps import SWIZZLE_BYTES, map_of_rows, matrix_of
from numa_attention.variants import Variant

FAN_IN = 16  # parts merged at a time, as in decode/portable.py
PRODUCER_REGISTERS = {
    True: 24,
    False: 40,
}  # whether a tile lies in one page: others need addresses of several
MERGE_REGISTERS = (
    96  # of a thread, for accumulators and for parts of others that are on their way, in a merge
)
THREADS = 128  # that compute
# float8 numbers whose sum is a query's number: float8_e4m3 has 4 bits of significand, bfloat16 8 and float16 11
TERMS = {torch.bfloat16: 2, torch.float16: 3}


@lru_cache(maxsize=256)
def constants_of(
    shape: LayerShape, variant: Variant, causal: bool, has_cap: bool, has_alibi: bool, has_sink: bool, has_lse: bool,
    has_scales: bool,
) -> dict:  # fmt: skip
    """The kernel's compile-time constants, in its order."""
    rows, block_n = variant.block_m, variant.block_n
    width = min(shape.head_dim, SWIZZLE_BYTES // shape.kv_dtype.itemsize)
    float8 = shape.kv_dtype.itemsize == 1
    rows_first = rows >= PART
    accumulator = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    scores = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, block_n if rows_first else rows, 32 if float8 else 16]
    )
    return dict(
        GROUP=shape.group,
        BLOCK_M=rows,
        BLOCK_N=block_n,
        PAGE_SIZE=shape.page_size,
        CHUNK=chunk_of(shape.page_size, block_n),
        COLUMNS=shape.head_dim // width,
        WIDTH=width,
        PARTS=shape.head_dim // PART,
        KEY_STAGES=key_stages_of(shape, rows, variant.num_stages, block_n),
        STAGES=variant.num_stages,
        FORM=variant.form,
        FLOAT8=float8,
        E5M2=shape.kv_dtype == torch.float8_e5m2,
        WINDOW=shape.window,
        CAUSAL=causal,
        HAS_CAP=has_cap,
        HAS_ALIBI=has_alibi,
        HAS_SINK=has_sink,
        HAS_LSE=has_lse,
        HAS_SCALES=has_scales,
        DOMAINS=variant.domains if variant.mapping.startswith("swizzled") else 1,
        FAN_IN=FAN_IN,
        IN_FLIGHT=parts_in_flight(shape.head_dim, rows),
        TERMS=TERMS[shape.dtype] if float8 else 1,
        ROWS_FIRST=rows_first,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS[chunk_of(shape.page_size, block_n) == block_n],
        ACC_S=scores,
        ACC_O=accumulator,
        QUERY=gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0]),
        COPY=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        WORDS=half_operand(block_n) if float8 and width == PART else gl.DotOperandLayout(0, accumulator, 2),
        SHARED_Q=gl.NVMMASharedLayout(*((width, 8) if float8 else (2 * width, 16)), 2),
        SHARED_P=gl.NVMMASharedLayout(128, 16, 2),
        BARRIER=hopper.mbarrier.MBarrierLayout(),
    )


def parts_in_flight(head_dim: int, rows: int) -> int:
    """Parts of accumulators, of 64 dimensions each, that a merge loads ahead: as many as there are registers for.

    A power of two, so that they are those of a number of splits that divides FAN_IN, or of one.
    """
    registers = PART * rows // THREADS
    parts = head_dim // PART
    most = min(max(MERGE_REGISTERS // registers - parts, 1), FAN_IN // 2 * parts)
    return 1 << most.bit_length() - 1


def half_operand(block_n: int) -> gl.DistributedLinearLayout:
    """A left operand of wgmma [64, block_n] without every second eight of its rows: [32, block_n]."""
    steps = [[0, 16 << bit] for bit in range((block_n // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], *steps],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, block_n],
    )


@cache
def _warn(k_stride: tuple[int, ...], v_stride: tuple[int, ...]) -> None:
    logging.getLogger(__name__).warning(
        "portable-decode instead of hopper-decode: TMA cannot copy pages with strides %s and %s",
        k_stride,
        v_stride,
    )


_launch = Launcher(gluon_entry(decode_kernel, "sm_90"))


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Launched:
    """Attention of the decoding requests of a schedule; see `runner.attend` for shapes.

    A cache that TMA cannot copy, of which the schedule knew nothing, goes to the portable kernel: logged once.
    """
    shape, plan, batch = schedule.shape, schedule.decode, schedule.batch
    variant = plan.variant
    k_rows, v_rows = (matrix_of(x.shape, x.stride(), x.itemsize) for x in (k_pages, v_pages))
    if k_rows is None or v_rows is None or (k_pages.data_ptr() | v_pages.data_ptr()) % 16:
        _warn(k_pages.stride(), v_pages.stride())
        other = replace(variant, name="portable-decode", form="", num_stages=2)
        return portable.decode(
            q, k_pages, v_pages, out, replace(schedule, decode=replace(plan, variant=other)), scale=scale,
            soft_cap=soft_cap, sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale, lse=lse,
        )  # fmt: skip
    p_lse = out if lse is None else lse
    constants = constants_of(
        shape, variant, batch.causal, soft_cap > 0.0, alibi_slopes is not None, sinks is not None, lse is not None,
        k_scale is not None,
    )  # fmt: skip
    box = constants["CHUNK"], constants["WIDTH"]
    integers = (
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), p_lse.stride(0), p_lse.stride(1),
        batch.block_table.stride(0), k_rows.page_rows, k_rows.head_rows, k_rows.head_columns,
        v_rows.page_rows, v_rows.head_rows, v_rows.head_columns,
    )  # fmt: skip
    arguments = (
        map_of_rows(k_pages, k_rows, box), map_of_rows(v_pages, v_rows, box), q, out, p_lse,
        plan.ranges, plan.items, plan.arrivals, plan.partial_acc, plan.partial_ml,
        batch.block_table,
        q if sinks is None else sinks, q if alibi_slopes is None else alibi_slopes,
        q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        float(scale), float(soft_cap), *integers,
    )  # fmt: skip
    key = (
        q.get_device(), shape, variant, integers, pointer_traits(q, out, p_lse, batch.block_table), out.dtype,
        batch.causal, soft_cap > 0.0, lse is None, k_scale is None, None if sinks is None else sinks.dtype,
        None if alibi_slopes is None else alibi_slopes.dtype,
    )  # fmt: skip
    options = dict(
        num_warps=4, maxnreg=registers_of(shape, variant.block_m, variant.num_stages, variant.block_n)
    )
    grid = variant.workgroups, 1, 1
    direct = _launch(key, grid, arguments, constants, options)
    maps = {
        "k_tiles": ("k_pages", lambda pages: map_of_rows(pages, k_rows, box)),
        "v_tiles": ("v_pages", lambda pages: map_of_rows(pages, v_rows, box)),
    }
    return Launched(variant.name, direct, grid, (*arguments, *constants.values()), maps)

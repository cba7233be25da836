"""The launch of the sm_90 prefill kernel; `hopper_variant.py` says for which layers."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, lru_cache

import torch

from numa_attention.direct_launch import Launched
from numa_attention.jit import Launcher, gluon_entry, pointer_traits, triton_release
from numa_attention.prefill import portable
from numa_attention.prefill.hopper import prefill_kernel
from numa_attention.prefill.hopper_variant import (
    FLOAT8_VALUE_STAGES,
    NAME,
    ROWS,
    check_cluster,
    ctas_of,
    keep_together,
    partitions_of,
    parts_of,
    queues_of,
    splits_of,
    takes_float8,
)
from numa_attention.prefill.hopper_work import Constants
from numa_attention.schedule import StepBatch
from numa_attention.shapes import LayerShape, chunk_of
from numa_attention.tensor_maps import map_of_rows, matrix_of, tensor_map
from numa_attention.topology import pretend
from numa_attention.variants import Variant, portable_prefill


@lru_cache(maxsize=1024)
def constants_of(
    shape: LayerShape, variant: Variant, causal: bool, has_cap: bool, has_alibi: bool, has_sink: bool, has_lse: bool,
    has_scales: bool,
) -> Constants:  # fmt: skip
    """What one compiled kernel is made for. Raises ValueError for a form that cannot run here."""
    check_cluster(variant.form, variant.queues, triton_release())
    words = variant.form.split()
    ctas = ctas_of(variant.form)
    consumers = variant.block_m // (ROWS * ctas)
    float8 = takes_float8(shape)
    warps, registers = partitions_of(consumers, variant.form, float8)
    dim, second = columns_of(shape.head_dim)
    return Constants(
        group=shape.group,
        dim=dim,
        second=second,
        dim_v=shape.head_dim_v,
        block_n=variant.block_n,
        page_size=shape.page_size,
        chunk=chunk_of(shape.page_size, variant.block_n),
        window=shape.window,
        causal=causal,
        has_cap=has_cap,
        has_alibi=has_alibi,
        has_sink=has_sink,
        has_lse=has_lse,
        has_scales=has_scales,
        consumers=consumers,
        ctas=ctas,
        stages=variant.num_stages,
        value_stages=min(variant.num_stages, FLOAT8_VALUE_STAGES) if float8 else variant.num_stages,
        # hyperbolic tangents under way need too many registers
        ahead="ahead" in words and not has_cap,
        turns="turns" in words and consumers > 1,
        query_copies="copied" in words and ROWS % shape.group == 0,
        staged="staged" in words,
        splits=splits_of(shape, variant.form),
        queues=queues_of(variant.form, variant.queues),
        float8=float8,
        cache_bytes=shape.kv_dtype.itemsize,
        query_parts=parts_of(variant.form) if float8 else 1,
        depth=32 // shape.kv_dtype.itemsize,
        worker_warps=warps,
        worker_registers=registers,
    )


def columns_of(head_dim: int) -> tuple[int, int]:
    """head_dim as powers of two, the second one 0 where one is enough."""
    first = 1 << head_dim.bit_length() - 1
    return first, head_dim - first


@cache
def size_of(device: torch.device) -> tuple[int, int]:
    """(SMs, bytes of L2) of the GPU that runs the kernel."""
    if device.type != "cuda":
        topology = pretend("sm_90")
        return topology.compute_units, topology.l2_bytes
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def workgroups_of(
    shape: LayerShape, variant: Variant, batch: StepBatch, tiles: int, device: torch.device
) -> int:
    """Workgroups or clusters of a launch: one a tile, or as many as run at once where the form says so."""
    if "persistent" not in variant.form.split():
        return tiles
    units, l2_bytes = size_of(device)
    ctas = ctas_of(variant.form)
    if ctas > 1:
        # clusters take tiles in turn, and not as they get done
        blocks = batch.max_query_len * shape.group // variant.block_m
        head_bytes = batch.max_seq_len * (shape.head_dim + shape.head_dim_v) * shape.kv_dtype.itemsize
        if not keep_together(blocks, head_bytes, units // ctas, l2_bytes):
            return tiles
    return min(tiles, max(units // ctas, 1))


# ---- the launch ----


def why_not_call(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, scale: float, window: int, causal: bool
) -> str | None:
    """What keeps a call from this kernel, of which the schedule knew nothing; None if nothing."""
    for pages in (k_pages, v_pages):
        if matrix_of(pages.shape, pages.stride(), pages.itemsize) is None:
            return f"takes no cache with strides {pages.stride()}: TMA cannot copy its pages"
    addresses = q.data_ptr() | k_pages.data_ptr() | v_pages.data_ptr()
    if (q.stride(0) | q.stride(1)) % 8 or addresses % 16:
        return "takes queries, keys and values whose rows begin at multiples of 16 bytes"
    if not scale > 0.0:
        return f"takes positive scales, not {scale}"
    if not causal and window >= 0:
        return "takes no window that is not causal"
    return None


@cache
def _warn(reason: str) -> None:
    logging.getLogger(__name__).warning("portable-prefill instead of %s, which %s", NAME, reason)


_launch = Launcher(gluon_entry(prefill_kernel, "sm_90"))


def prefill(
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
    """Attention of the prefilling requests of a schedule; see `runner.attend` for shapes.

    What this kernel does not take, of which the schedule knew nothing, goes to the portable kernel: logged once.
    """
    shape, plan, batch = schedule.shape, schedule.prefill, schedule.batch
    variant = plan.variant
    reason = why_not_call(q, k_pages, v_pages, scale, shape.window, batch.causal)
    if reason is not None:
        _warn(reason)
        other = portable_prefill(shape, variant)
        return portable.prefill(
            q, k_pages, v_pages, out, replace(schedule, prefill=replace(plan, variant=other)), scale=scale,
            soft_cap=soft_cap, sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale, lse=lse,
        )  # fmt: skip
    constants = constants_of(
        shape, variant, batch.causal, soft_cap > 0.0, alibi_slopes is not None, sinks is not None, lse is not None,
        k_scale is not None,
    )  # fmt: skip
    dim, second = columns_of(shape.head_dim)
    k_matrix = matrix_of(k_pages.shape, k_pages.stride(), k_pages.itemsize)
    v_matrix = matrix_of(v_pages.shape, v_pages.stride(), v_pages.itemsize)
    chunk = chunk_of(shape.page_size, variant.block_n)
    # where the kernel copies no queries, their tensor map is not used
    ctas = ctas_of(variant.form)
    rows = ROWS * ctas
    tokens, heads = (rows // shape.group, shape.group) if ROWS % shape.group == 0 else (rows, 1)
    divided, copied = (((1, 0, 0),), ((0, 0),)) if ctas > 1 else ((), ())
    size, stride = q.shape, q.stride()
    maps = {
        "queries": ("q", lambda q: tensor_map(q, size, stride, (tokens, heads, dim), divided)),
        "queries_second": (
            "q",
            lambda q: tensor_map(q, size, stride, (tokens, heads, second or dim), divided),
        ),
        "keys": ("k_pages", lambda pages: map_of_rows(pages, k_matrix, (chunk, dim), copied)),
        "keys_second": (
            "k_pages",
            lambda pages: map_of_rows(pages, k_matrix, (chunk, second or dim), copied),
        ),
        "values": ("v_pages", lambda pages: map_of_rows(pages, v_matrix, (chunk, shape.head_dim_v), copied)),
    }
    described = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    p_lse = out if lse is None else lse
    splits = plan.splits
    if splits is None:
        rows, parts = plan.tiles, (plan.tiles, plan.tiles)
    else:
        rows, parts = splits.rows, (splits.table, splits.partial)
    integers = (
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), p_lse.stride(0), p_lse.stride(1),
        k_matrix.page_rows, k_matrix.head_rows, k_matrix.head_columns,
        v_matrix.page_rows, v_matrix.head_rows, v_matrix.head_columns, batch.block_table.stride(0),
    )  # fmt: skip
    arguments = (
        rows, len(plan.tiles), batch.num_decodes, plan.queues, *parts,
        *(make(described[tensor]) for tensor, make in maps.values()), q, out, p_lse,
        batch.block_table, batch.query_start_loc, batch.seq_lens,
        q if sinks is None else sinks, q if alibi_slopes is None else alibi_slopes,
        q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        float(scale), float(soft_cap), *integers,
    )  # fmt: skip
    key = (
        q.get_device(), constants, integers, pointer_traits(q, out, p_lse), out.dtype,
        None if sinks is None else sinks.dtype, None if alibi_slopes is None else alibi_slopes.dtype,
    )  # fmt: skip
    workgroups = workgroups_of(shape, variant, batch, len(plan.tiles), q.device)
    grid = workgroups, 1, 1
    direct = _launch(key, grid, arguments, dict(C=constants), dict(num_warps=4, num_ctas=ctas))
    return Launched(variant.name, direct, grid, (*arguments, constants), maps)

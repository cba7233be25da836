"""Prefill over a paged cache for sm_90 (H100, H200), in Gluon: TMA, wgmma, and warps with different work.

It takes the tile list of `prefill/portable.py`, whose tiles workgroups take as `hopper_tiles.py` says. One warp of a
workgroup, the producer, copies queries, and keys and values straight from their pages, into rings of buffers in
shared memory. Each consumer, a warpgroup of four warps, keeps 64 rows of the packed tile, multiplies and exponentiates.
mbarriers say when a buffer is full and when all consumers are done with it.

KV tiles are walked from the last one seen to the first: the diagonal and the end of the sequence (masked), the interior
(no mask at all), the left edge of the window (masked). Probabilities stay in registers: they are the left operand of
the second product. The words of a variant's form say what overlaps; see `hopper_variant.WORDS`.

A cache is a matrix to TMA: its rows are the tokens of all pages, so that pages need no dimension of their own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.gluon_compat import cluster_barrier
from numa_attention.portable_launch import ANY_ALIGNMENT
from numa_attention.prefill.hopper_consumer import consume
from numa_attention.prefill.hopper_float8 import allocate_queries, convert, shared_layout
from numa_attention.prefill.hopper_producer import produce
from numa_attention.prefill.hopper_rows import barrier_layout
from numa_attention.prefill.hopper_tiles import allocate_records


@gluon.jit(
    do_not_specialize=["first_request", "count"],
    do_not_specialize_on_alignment=["tiles", "queues", "splits", *ANY_ALIGNMENT],
)
def prefill_kernel(
    tiles,  # int32 [count, 4]: request, KV head, query block
    count,
    first_request,
    queues,  # int32 [C.queues + 1], and the domains of SM ids with hardware placement; see hopper_tiles.next_tile
    splits,  # int32 [1 + requests, 2] with C.splits; see tile_splits.py
    partial,  # and the workspace of parts; see hopper_parts.py
    queries,  # descriptor of q for boxes [tokens, group, dim], and the one for its second part
    queries_second,
    keys,  # descriptor of the keys, a matrix, for boxes [chunk, dim], and the one for its second part
    keys_second,
    values,  # descriptor of the values, a matrix, for boxes [chunk, dim_v]
    q,  # [tokens, q_heads, head_dim]
    out,  # [tokens, q_heads, head_dim_v]
    lse,  # float32 [tokens, q_heads]
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    alibi_slopes,
    k_scale,
    v_scale,
    scale,
    soft_cap,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    k_page_rows,  # where a page and a head begin in the matrix of the keys, and in that of the values
    k_head_rows,
    k_head_columns,
    v_page_rows,
    v_head_rows,
    v_head_columns,
    block_table_stride,
    C: gl.constexpr,
):
    QUERY_BUFFERS: gl.constexpr = C.consumers * C.query_parts
    BAR: gl.constexpr = barrier_layout(C.ctas)
    # of tiles that all workgroups of a cluster must have left before they are copied over
    COMMON: gl.constexpr = barrier_layout(C.ctas, shared=True)
    buffer_q = gl.allocate_shared_memory(
        keys.dtype,
        [QUERY_BUFFERS, C.rows, C.dim],
        shared_layout(C.dim, 8 * C.cache_bytes, C.ctas, split=True),
    )
    buffer_k = gl.allocate_shared_memory(keys.dtype, [C.stages, C.block_n, C.dim], keys.layout)
    buffer_v = gl.allocate_shared_memory(keys.dtype, [C.stages, C.block_n, C.dim_v], keys.layout)
    buffer_q2 = buffer_q
    buffer_k2 = buffer_k
    if C.second > 0:
        buffer_q2 = gl.allocate_shared_memory(
            keys.dtype,
            [QUERY_BUFFERS, C.rows, C.second],
            shared_layout(C.second, 8 * C.cache_bytes, C.ctas, split=True),
        )
        buffer_k2 = gl.allocate_shared_memory(keys.dtype, [C.stages, C.block_n, C.second], keys_second.layout)
    full_q = gl.allocate_shared_memory(gl.int64, [C.consumers, C.ctas], BAR)
    empty_q = gl.allocate_shared_memory(gl.int64, [C.consumers, C.ctas], BAR)
    turn = gl.allocate_shared_memory(gl.int64, [C.consumers, C.ctas], BAR)
    cleared = gl.allocate_shared_memory(gl.int64, [1, C.ctas], BAR)
    full_k = gl.allocate_shared_memory(gl.int64, [C.stages, C.ctas], BAR)
    empty_k = gl.allocate_shared_memory(gl.int64, [C.stages, 1], COMMON)
    full_v = gl.allocate_shared_memory(gl.int64, [C.value_stages, C.ctas], BAR)
    # the values of a float8 cache come from a workgroup's own converter
    empty_v = (
        gl.allocate_shared_memory(gl.int64, [C.value_stages, C.ctas], BAR)
        if C.float8
        else gl.allocate_shared_memory(gl.int64, [C.value_stages, 1], COMMON)
    )
    for i in gl.static_range(C.consumers):
        hopper.mbarrier.init(full_q.index(i), count=1)
        hopper.mbarrier.init(empty_q.index(i), count=1)
        hopper.mbarrier.init(turn.index(i), count=1)
    hopper.mbarrier.init(cleared.index(0), count=C.consumers)
    for i in gl.static_range(C.stages):
        hopper.mbarrier.init(full_k.index(i), count=1)
        hopper.mbarrier.init(empty_k.index(i), count=C.consumers)
    for i in gl.static_range(C.value_stages):
        hopper.mbarrier.init(full_v.index(i), count=1)
        hopper.mbarrier.init(empty_v.index(i), count=C.consumers)
    # what the producer fills: of a float8 cache other buffers, as queries become float8 and values
    # float16
    raw_queries = (buffer_q, buffer_q2)
    raw_v = buffer_v
    full_raw = full_v
    empty_raw = empty_v
    if C.float8:
        if C.query_copies:
            raw_queries = allocate_queries(queries.dtype, C)
        buffer_v = gl.allocate_shared_memory(
            gl.float16, [C.value_stages, C.block_n, C.dim_v], shared_layout(C.dim_v, 16, C.ctas)
        )
        full_raw = gl.allocate_shared_memory(gl.int64, [C.stages, C.ctas], BAR)
        empty_raw = gl.allocate_shared_memory(gl.int64, [C.stages, 1], COMMON)
        for i in gl.static_range(C.stages):
            hopper.mbarrier.init(full_raw.index(i), count=1)
            hopper.mbarrier.init(empty_raw.index(i), count=1)
    buffers = (buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v)
    barriers = (full_q, empty_q, full_k, empty_k, full_v, empty_v, turn, cleared)
    raw_buffers = raw_queries + (buffer_k, buffer_k2, raw_v)
    raw_barriers = (full_q, empty_q, full_k, empty_k, full_raw, empty_raw)
    ring = allocate_records(C)
    step = (
        tiles,
        count,
        first_request,
        query_start_loc,
        seq_lens,
        block_table,
        block_table_stride,
        queues,
        splits,
    )
    descriptors = (queries, queries_second, keys, keys_second, values)
    places = (k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows, v_head_columns)
    arguments = (q, out, lse, sinks, alibi_slopes, k_scale, v_scale, scale, soft_cap)
    strides = (
        q_token_stride,
        q_head_stride,
        out_token_stride,
        out_head_stride,
        lse_token_stride,
        lse_head_stride,
    )
    # written out, as no variable can hold functions
    if C.float8 and C.consumers == 1:
        gl.warp_specialize(
            [
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 0, C)),
                (convert, (raw_v, buffer_v, full_raw, empty_raw, full_v, empty_v, ring, C)),
                (produce, (descriptors, raw_buffers, raw_barriers, ring, step, places, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.float8 and C.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 0, C)),
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 1, C)),
                (convert, (raw_v, buffer_v, full_raw, empty_raw, full_v, empty_v, ring, C)),
                (produce, (descriptors, raw_buffers, raw_barriers, ring, step, places, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 1:
        gl.warp_specialize(
            [
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 0, C)),
                (produce, (descriptors, raw_buffers, raw_barriers, ring, step, places, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 0, C)),
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 1, C)),
                (produce, (descriptors, raw_buffers, raw_barriers, ring, step, places, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    else:
        gl.warp_specialize(
            [
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 0, C)),
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 1, C)),
                (consume, (arguments, strides, partial, buffers, raw_queries, barriers, ring, 2, C)),
                (produce, (descriptors, raw_buffers, raw_barriers, ring, step, places, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    if C.ctas > 1:
        # the others have arrived at barriers of the first workgroup, which must still be there
        cluster_barrier()

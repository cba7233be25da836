"""Prefill on sm_90: the warp that asks TMA for queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.gluon_compat import reinterpret, tma_load, tma_load_shared
from numa_attention.prefill import hopper_variant
from numa_attention.prefill.hopper_tiles import (
    INDEX,
    STEPS,
    field,
    leave,
    next_tile,
    own_domain,
    read_record,
    write_record,
)
from numa_attention.prefill.hopper_work import QUERY_BYTES, ROWS

PLACES = gl.constexpr(hopper_variant.PLACES)


@gluon.jit
def pages_of(p_table, tile, seq_len, C: gl.constexpr):
    """The pages of a tile's copies, a tuple; for copies outside of the sequence some page."""
    last = gl.maximum(seq_len - 1, 0) // C.page_size
    pages = ()
    for chunk in gl.static_range(C.block_n // C.chunk):
        entry = gl.maximum(tile * C.block_n + chunk * C.chunk, 0) // C.page_size
        pages = pages + (gl.load(p_table + gl.minimum(entry, last)),)
    return pages


@gluon.jit
def copy_tile(
    cache, second, buffer, second_buffer, full, empty, count, pages, tile, page_rows, row, column,
    DIM: gl.constexpr, SECOND: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Request a tile [block_n, DIM], and the SECOND columns after it, once its buffer is free.

    count: tiles requested before it. row, column: where the head begins in the matrix of the cache.
    """
    slot = count % C.stages
    phase = ((count // C.stages) & 1) ^ 1
    hopper.mbarrier.wait(empty.index(slot), phase)
    if C.ctas > 1:
        # the first workgroup alone has waited: what another one expects must not count for the copy before
        hopper.mbarrier.wait(full.index(slot), phase)
    hopper.mbarrier.expect(full.index(slot), C.block_n * (DIM + SECOND) * C.cache_bytes)
    for chunk in gl.static_range(C.block_n // C.chunk):
        first = pages[chunk] * page_rows + row
        if C.page_size > C.chunk:
            first += (tile * C.block_n + chunk * C.chunk) % C.page_size
        to = buffer.index(slot).slice(chunk * C.chunk, C.chunk, dim=0)
        tma_load_shared(cache, [first, column], full.index(slot), to, C.ctas)
        if SECOND > 0:
            to = second_buffer.index(slot).slice(chunk * C.chunk, C.chunk, dim=0)
            tma_load_shared(second, [first, column + DIM], full.index(slot), to, C.ctas)


@gluon.jit
def copy_queries(
    queries, second, buffers, full, empty, phase, token, head, CONSUMER: gl.constexpr, C: gl.constexpr
):
    """Request a consumer's rows of the packed tile, which begin at (token, head), once their buffer is free."""
    TOKENS: gl.constexpr = C.rows // C.group
    buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v = buffers
    bar = full.index(CONSUMER)
    hopper.mbarrier.wait(empty.index(CONSUMER), phase ^ 1)
    hopper.mbarrier.expect(bar, ROWS * (C.dim + C.second) * QUERY_BYTES)
    # not reshaped: where workgroups divide the rows, that gives a layout that TMA does not take
    LAYOUT: gl.constexpr = queries.layout
    to = reinterpret(buffer_q.index(CONSUMER), queries.dtype, [TOKENS, C.group, C.dim], LAYOUT)
    tma_load(queries, [token, head, 0], bar, to)
    if C.second > 0:
        LAYOUT2: gl.constexpr = second.layout
        to = reinterpret(buffer_q2.index(CONSUMER), second.dtype, [TOKENS, C.group, C.second], LAYOUT2)
        tma_load(second, [token, head, C.dim], bar, to)


@gluon.jit
def produce(descriptors, buffers, barriers, ring, step, places, C: gl.constexpr):
    """What the producer does: take this workgroup's tiles, and copy their queries, keys and values."""
    queries, queries_second, keys, keys_second, values = descriptors
    buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v = buffers
    full_q, empty_q, full_k, empty_k, full_v, empty_v = barriers
    (
        tiles,
        count,
        first_request,
        query_start_loc,
        seq_lens,
        block_table,
        block_table_stride,
        queues,
        splits,
    ) = step
    if C.splits:
        # rows of further parts stand before the others, as many as there are
        further = gl.load(splits)
        tiles += (PLACES - further) * 4
        count += further
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
    k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows, v_head_columns = places
    records = ring[0]
    own = own_domain(queues, C)
    walked = 0
    number = 0  # of the tile among those of this workgroup
    write_record(ring, 0, next_tile(queues, own, -1, count, C), step, C)
    while field(records, number, STEPS, 1, C) > 0:
        (
            request,
            kv_head,
            block,
            query_start,
            query_len,
            seq_len,
            key_low,
            tile_high,
            steps,
            diagonal,
            interior,
        ) = read_record(records, number, 1, C)
        p_table = block_table + request.to(gl.int64) * block_table_stride
        pages = pages_of(p_table, tile_high - 1, seq_len, C)
        k_row, k_column = kv_head * k_head_rows, kv_head * k_head_columns
        v_row, v_column = kv_head * v_head_rows, kv_head * v_head_columns
        # keys go one tile ahead of values: so they are needed. The first ones go ahead of the queries too, whose
        # buffer is in use for longer
        copy_tile(
            keys, keys_second, buffer_k, buffer_k2, full_k, empty_k, walked, pages, tile_high - 1,
            k_page_rows, k_row, k_column, C.dim, C.second, C,
        )  # fmt: skip
        if C.query_copies:
            for consumer in gl.static_range(C.consumers):
                token = query_start + (block * C.block_m + consumer * C.rows) // C.group
                copy_queries(
                    queries, queries_second, buffers, full_q, empty_q, number & 1, token, kv_head * C.group, consumer,
                    C,
                )  # fmt: skip
        pages_next = pages_of(p_table, tile_high - 2, seq_len, C)
        for done in range(1, steps):
            # the block table is read a tile before its pages are asked for
            pages_after = pages_of(p_table, tile_high - 2 - done, seq_len, C)
            copy_tile(
                keys, keys_second, buffer_k, buffer_k2, full_k, empty_k, walked + done, pages_next,
                tile_high - 1 - done, k_page_rows, k_row, k_column, C.dim, C.second, C,
            )  # fmt: skip
            copy_tile(
                values, values, buffer_v, buffer_v, full_v, empty_v, walked + done - 1, pages,
                tile_high - done, v_page_rows, v_row, v_column, C.dim_v, 0, C,
            )  # fmt: skip
            pages = pages_next
            pages_next = pages_after
        copy_tile(
            values, values, buffer_v, buffer_v, full_v, empty_v, walked + steps - 1, pages,
            tile_high - steps, v_page_rows, v_row, v_column, C.dim_v, 0, C,
        )  # fmt: skip
        walked += steps
        # late, so that a workgroup holds no tile that an idle one could compute, and yet before the others are done
        index = next_tile(queues, own, field(records, number, INDEX, 1, C), count, C)
        number += 1
        write_record(ring, number, index, step, C)
    leave(queues, C)

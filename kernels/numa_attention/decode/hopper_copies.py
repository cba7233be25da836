"""Decode on sm_90: the warp that asks TMA for the tiles of keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.gluon_compat import tma_load


@gluon.jit
def pages_of(p_table, tile, last, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr):
    """The pages of a tile's BLOCK_N / CHUNK copies, a tuple; past entry `last` of the block table it is that one's."""
    pages = ()
    for chunk in gl.static_range(BLOCK_N // CHUNK):
        pages = pages + (gl.load(p_table + gl.minimum((tile * BLOCK_N + chunk * CHUNK) // PAGE_SIZE, last)),)
    return pages


@gluon.jit
def copy_tile(
    tiles, pages, tile, head_row, column, page_rows, full, buffers, first_buffer,
    BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Ask for one tile [BLOCK_N, COLUMNS * WIDTH], whose arrival `full` counts in bytes."""
    hopper.mbarrier.expect(full, BLOCK_N * COLUMNS * WIDTH * (tiles.dtype.primitive_bitwidth // 8))
    for chunk in gl.static_range(BLOCK_N // CHUNK):
        row = pages[chunk] * page_rows + head_row
        if PAGE_SIZE > CHUNK:
            row += (tile * BLOCK_N + chunk * CHUNK) % PAGE_SIZE
        for part in gl.static_range(COLUMNS):
            buffer = buffers.index(first_buffer + part).slice(chunk * CHUNK, CHUNK, dim=0)
            tma_load(tiles, [row, column + part * WIDTH], full, buffer)


@gluon.jit
def produce(
    k_tiles, v_tiles, ranges, items, workgroup, block_table,
    full_k, full_v, empty_k, empty_v, buffers_k, buffers_v,
    k_page_rows, k_head_rows, k_head_columns, v_page_rows, v_head_rows, v_head_columns, block_table_stride,
    BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr,
    KEY_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy all tiles of a workgroup's items, one after the other, into the rings of buffers."""
    p_range = ranges + workgroup * 16
    first = gl.load(p_range)
    count = gl.load(p_range + 1)
    p_item = p_range + 2  # which holds what the first item does
    step = 0
    for index in range(first, first + count):
        request = gl.load(p_item).to(gl.int64)
        kv_head = gl.load(p_item + 1)
        tile_begin = gl.load(p_item + 3)
        tile_end = gl.load(p_item + 4)
        last = gl.maximum(gl.load(p_item + 10) - 1, 0) // PAGE_SIZE
        p_table = block_table + request * block_table_stride
        pages = pages_of(p_table, tile_begin, last, BLOCK_N, PAGE_SIZE, CHUNK)
        for tile in range(tile_begin, tile_end):
            # the block table is read a tile ahead: the copies need not wait for it
            pages_next = pages_of(p_table, tile + 1, last, BLOCK_N, PAGE_SIZE, CHUNK)
            slot = step % KEY_STAGES
            hopper.mbarrier.wait(empty_k.index(slot), ((step // KEY_STAGES) & 1) ^ 1)
            copy_tile(
                k_tiles, pages, tile, kv_head * k_head_rows, kv_head * k_head_columns, k_page_rows,
                full_k.index(slot), buffers_k, slot * COLUMNS, BLOCK_N, PAGE_SIZE, CHUNK, COLUMNS, WIDTH,
            )  # fmt: skip
            slot = step % STAGES
            hopper.mbarrier.wait(empty_v.index(slot), ((step // STAGES) & 1) ^ 1)
            copy_tile(
                v_tiles, pages, tile, kv_head * v_head_rows, kv_head * v_head_columns, v_page_rows,
                full_v.index(slot), buffers_v, slot * COLUMNS, BLOCK_N, PAGE_SIZE, CHUNK, COLUMNS, WIDTH,
            )  # fmt: skip
            pages = pages_next
            step += 1
        p_item = items + (index + 1) * 16

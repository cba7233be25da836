"""Prefill on sm_90 over a float8 cache: keys are multiplied as they are, values in float16.

Products with float8 values would be twice as fast, but wgmma keeps about 14 bits of their sums: 16,384 values of one
sign came out 23 % too small. Float16 holds every e4m3 number, and its products are summed in float32. So four warps,
the converter, take each tile of values from the ring that TMA fills, and write it in float16 to another one, from which
consumers multiply as over a 16-bit cache. It zeroes values outside of the sequence too, so that consumers need not.

A query of 8 significant bits is the sum of two e4m3 numbers of 4. Two products with keys into one accumulator cost what
one 16-bit product costs; where rounding queries to e4m3 will do, one is enough. Their sums are short.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention import scores
from numa_attention.prefill.hopper_rows import copy_layout, rows_of, shares
from numa_attention.prefill.hopper_tiles import RECORDS, is_tile, read_record

power_of_two_below = gluon.jit(scores.power_of_two_below.fn)

QUERY_SCALE = gl.constexpr(
    128.0
)  # the largest number of a query row is scaled to between this and its double
CONVERTED_ROWS = gl.constexpr(16)  # of values at a time
PROBABILITY_SCALE = gl.constexpr(256.0)
PROBABILITY_BITS = gl.constexpr(8.0)  # its logarithm

# four numbers -> four e4m3 numbers, and four more of what is left. The first are rounded to four bits in float16, which
# e4m3 then holds, and not read back: where a pair of e4m3 numbers is both read back and packed with another pair, ptxas
# 12.8 and 12.9 can read a register that nothing has written
SPLIT = gl.constexpr("""{
.reg .b16 a, b, c, d;
.reg .b32 x, y, s, t;
cvt.rn.f16x2.f32 x, $3, $2;
cvt.rn.f16x2.f32 y, $5, $4;
add.u32 s, x, 0x00400040;
add.u32 t, y, 0x00400040;
and.b32 s, s, 0xff80ff80;
and.b32 t, t, 0xff80ff80;
sub.rn.f16x2 x, x, s;
sub.rn.f16x2 y, y, t;
cvt.rn.satfinite.e4m3x2.f16x2 a, s;
cvt.rn.satfinite.e4m3x2.f16x2 b, t;
cvt.rn.satfinite.e4m3x2.f16x2 c, x;
cvt.rn.satfinite.e4m3x2.f16x2 d, y;
mov.b32 $0, {a, b};
mov.b32 $1, {c, d};
}""")


@gluon.constexpr_function
def bytes_layout(columns, ctas=1):
    """Rows of e4m3 numbers in the registers of the converter, 16 of them in each thread."""
    lanes = columns // 16
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], [4, 1], [1, 0], shares(ctas, split=False))


@gluon.constexpr_function
def shared_layout(columns, bits, ctas=1, split=False):
    """Rows of so many elements of so many bits in shared memory, as wgmma and TMA want them."""
    return gl.NVMMASharedLayout(min(columns * bits // 8, 128), bits, 2, cga_layout=shares(ctas, split=split))


@gluon.jit
def split(b_x):
    """Numbers up to 256 -> (e4m3, e4m3 of what is left)."""
    return gl.inline_asm_elementwise(
        SPLIT, "=r,=r,r,r,r,r", [b_x], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )


# ---- values ----


@gluon.jit
def convert_tile(source, target, key_low, seq_len, tile, C: gl.constexpr):
    """Values [block_n, dim_v] in float16.

    Tokens outside of [key_low, seq_len) become zero: they may be anything, NaN included.
    """
    LAYOUT: gl.constexpr = bytes_layout(C.dim_v, C.ctas)
    at_edge = (tile * C.block_n < key_low) | ((tile + 1) * C.block_n > seq_len)
    for part in gl.static_range(C.block_n // CONVERTED_ROWS):
        b_v = source.slice(part * CONVERTED_ROWS, CONVERTED_ROWS, dim=0).load(LAYOUT).to(gl.float16)
        if at_edge:
            o_key = tile * C.block_n + part * CONVERTED_ROWS
            o_key += gl.arange(0, CONVERTED_ROWS, gl.SliceLayout(1, LAYOUT))
            b_v = gl.where(((o_key >= key_low) & (o_key < seq_len))[:, None], b_v, 0.0)
        target.slice(part * CONVERTED_ROWS, CONVERTED_ROWS, dim=0).store(b_v)


@gluon.jit
def convert(raw_v, buffer_v, full_raw, empty_raw, full_v, empty_v, ring, C: gl.constexpr):
    """What the converter does: the values of all tiles of this workgroup, from one ring of buffers to another."""
    records, full_records, empty_records = ring
    walked = 0
    number = 0  # of the tile among those of this workgroup
    while is_tile(ring, number, 4, C):
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
        ) = read_record(records, number, 4, C)
        hopper.mbarrier.arrive(empty_records.index(number % RECORDS), count=1)
        for done in range(steps):
            v_count = walked + done
            slot, to = v_count % C.stages, v_count % C.value_stages
            source, target, tile = raw_v.index(slot), buffer_v.index(to), tile_high - 1 - done
            hopper.mbarrier.wait(full_raw.index(slot), (v_count // C.stages) & 1)
            hopper.mbarrier.wait(empty_v.index(to), ((v_count // C.value_stages) & 1) ^ 1)
            convert_tile(source, target, key_low, seq_len, tile, C)
            hopper.fence_async_shared()
            hopper.mbarrier.arrive(full_v.index(to), count=1)
            hopper.mbarrier.arrive(empty_raw.index(slot), count=1)
        walked += steps
        number += 1


# ---- queries ----


@gluon.jit
def allocate_queries(DTYPE: gl.constexpr, C: gl.constexpr):
    """Buffers for the rows of the packed tile as they come, and for their second part."""
    first = gl.allocate_shared_memory(
        DTYPE, [C.consumers, C.rows, C.dim], shared_layout(C.dim, 16, C.ctas, True)
    )
    second = first
    if C.second > 0:
        second = gl.allocate_shared_memory(
            DTYPE, [C.consumers, C.rows, C.second], shared_layout(C.second, 16, C.ctas, True)
        )
    return first, second


@gluon.jit
def load_rows(
    q, first_row, first_column, kv_head, query_start, query_len, token_stride, head_stride,
    DIM: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of the packed tile, DIM columns from `first_column`."""
    COPY: gl.constexpr = copy_layout(DIM, C.ctas)
    o_token, o_head, m_row = rows_of(
        first_row, kv_head, query_start, query_len, C.rows, gl.SliceLayout(1, COPY), C
    )
    o_column = first_column + gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    p_q = q + o_token[:, None] * token_stride + o_head[:, None] * head_stride + o_column[None, :]
    return gl.load(p_q, mask=m_row[:, None], other=0.0)


@gluon.jit
def store_queries(b_q, b_factor, buffer_q, CONSUMER: gl.constexpr, DIM: gl.constexpr, C: gl.constexpr):
    """Put rows [M, DIM] into shared memory in float8, divided by b_factor."""
    b_factor = gl.convert_layout(b_factor, gl.SliceLayout(1, copy_layout(DIM, C.ctas)))
    b_high, b_low = split(b_q.to(gl.float32) / b_factor[:, None])
    buffer_q.index(CONSUMER * C.query_parts).store(b_high)
    if C.query_parts == 2:
        buffer_q.index(CONSUMER * C.query_parts + 1).store(b_low)


@gluon.jit
def quantise_queries(b_q, b_q2, buffers, CONSUMER: gl.constexpr, ROW: gl.constexpr, C: gl.constexpr):
    """Put rows [M, dim], [M, second] into shared memory in float8; the factors [M] by which they are too small there.

    A row is scaled into the range of e4m3 by a power of two. In two parts it loses what is 2^-16 of its largest number.
    """
    buffer_q, buffer_q2, buffer_k, buffer_k2, buffer_v = buffers
    b_max = gl.max(gl.abs(b_q.to(gl.float32)), 1)
    if C.second > 0:
        b_max2 = gl.max(gl.abs(b_q2.to(gl.float32)), 1)
        b_max = gl.maximum(b_max, gl.convert_layout(b_max2, gl.SliceLayout(1, copy_layout(C.dim, C.ctas))))
    b_factor = power_of_two_below(b_max) * (1.0 / QUERY_SCALE)
    store_queries(b_q, b_factor, buffer_q, CONSUMER, C.dim, C)
    if C.second > 0:
        store_queries(b_q2, b_factor, buffer_q2, CONSUMER, C.second, C)
    hopper.fence_async_shared()
    return gl.convert_layout(b_factor, ROW)

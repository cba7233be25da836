"""Prefill on sm_90 over a float8 cache: both products in float8, and the warps that transpose values for them.

A float8 wgmma wants the numbers of both operands along the summed dimension. Keys lie so. Values do not: four warps,
the transposer, read each tile of them transposed in 16-bit words of two neighbouring dimensions, take the words apart
and write the tile again, [dimension, token]. A thread holds four tokens of a word that are not neighbours, and a thread
of a consumer holds the probabilities of the same four: so tokens are written in the order in which they are held, and
no value changes its thread. Dimensions are in another order too, eight even ones before eight odd ones, which spreads
the writes over the banks; `in_order` puts the accumulator's columns right, again without moving any.

A query or a probability of 8 significant bits is the sum of two e4m3 numbers of 4. Two products into one accumulator
cost what one 16-bit product costs; where rounding to e4m3 will do, one is enough.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention import scores
from numa_attention.gluon_compat import reinterpret
from numa_attention.prefill import hopper_variant
from numa_attention.prefill.hopper_rows import copy_layout, product_layout, rows_of, shares
from numa_attention.prefill.hopper_tiles import RECORDS, is_tile, read_record

power_of_two_below = gluon.jit(scores.power_of_two_below.fn)

QUERY_SCALE = gl.constexpr(
    128.0
)  # the largest number of a query row is scaled to between this and its double
CONVERTED_ROWS = gl.constexpr(8)  # of values at a time
CONVERTER_WARPS = gl.constexpr(hopper_variant.CONVERTER_WARPS)
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
# four 16-bit words -> their lower bytes, and their upper ones
BYTES = gl.constexpr("""{
prmt.b32 $0, $2, $3, 0x6420;
prmt.b32 $1, $2, $3, 0x7531;
}""")


@gluon.constexpr_function
def word_layout(words, tokens, ctas=1):
    """A tile of values [words, tokens] as `ldmatrix` transposes it, a quarter of the tokens to a warp.

    A thread's first four registers are tokens 0, 1, 8 and 9 of sixteen, then 2, 3, 10 and 11 are its neighbour's.
    """
    registers = [[0, 1], [0, 8]]
    registers += [[0, 16 << bit] for bit in range((tokens // 64).bit_length() - 1)]
    registers += [[8 << bit, 0] for bit in range((words // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers,
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, tokens // 4], [0, tokens // 2]],
        shares(ctas, split=False),
        [words, tokens],
    )


@gluon.constexpr_function
def bytes_layout(columns, ctas=1):
    """Rows of e4m3 numbers in the registers of the converter, 16 of them in each thread."""
    lanes = columns // 16
    warps = [hopper_variant.CONVERTER_WARPS, 1]
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], warps, [1, 0], shares(ctas, split=False))


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
def transpose_tile(source, target, key_low, seq_len, tile, C: gl.constexpr):
    """Values [block_n, dim_v] -> [dim_v, block_n], in the orders that the module's docstring tells.

    Tokens outside of [key_low, seq_len) become zero: they may be anything, NaN included.
    """
    WORDS: gl.constexpr = C.dim_v // 2
    LAYOUT: gl.constexpr = word_layout(WORDS, C.block_n, C.ctas)
    pairs = reinterpret(source, gl.int16, [C.block_n, WORDS], shared_layout(WORDS, 16, C.ctas))
    b_pairs = pairs.permute((1, 0)).load(LAYOUT)
    if (tile * C.block_n < key_low) | ((tile + 1) * C.block_n > seq_len):
        o_key = tile * C.block_n + gl.arange(0, C.block_n, gl.SliceLayout(0, LAYOUT))
        b_pairs = gl.where(((o_key >= key_low) & (o_key < seq_len))[None, :], b_pairs, 0)
    b_even, b_odd = gl.inline_asm_elementwise(
        BYTES, "=r,=r,r,r", [b_pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    b_v = gl.join(b_even, b_odd).reshape([WORDS // 8, 8, C.block_n // 16, 2, 4, 2, 2])
    b_v = b_v.permute([0, 6, 1, 2, 4, 3, 5]).reshape([C.dim_v, C.block_n])
    target.store(b_v.to(target.dtype, bitcast=True))


@gluon.jit
def convert_tile(source, target, key_low, seq_len, tile, C: gl.constexpr):
    """Values [block_n, dim_v] in float16, which holds every e4m3 number; tokens as in `transpose_tile`."""
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
def prepare_values(raw_v, buffer_v, full_raw, empty_raw, full_v, empty_v, ring, C: gl.constexpr):
    """What transposer or converter does: the values of all tiles of this workgroup, from one ring to another."""
    records, full_records, empty_records = ring
    walked = 0
    number = 0  # of the tile among those of this workgroup
    WARPS: gl.constexpr = 4 if C.float8_values else CONVERTER_WARPS
    while is_tile(ring, number, WARPS, C):
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
        ) = read_record(records, number, WARPS, C)
        hopper.mbarrier.arrive(empty_records.index(number % RECORDS), count=1)
        for done in range(steps):
            v_count = walked + done
            slot, to = v_count % C.stages, v_count % C.value_stages
            source, target, tile = raw_v.index(slot), buffer_v.index(to), tile_high - 1 - done
            hopper.mbarrier.wait(full_raw.index(slot), (v_count // C.stages) & 1)
            hopper.mbarrier.wait(empty_v.index(to), ((v_count // C.value_stages) & 1) ^ 1)
            if C.float8_values:
                transpose_tile(source, target, key_low, seq_len, tile, C)
            else:
                convert_tile(source, target, key_low, seq_len, tile, C)
            hopper.fence_async_shared()
            hopper.mbarrier.arrive(full_v.index(to), count=1)
            hopper.mbarrier.arrive(empty_raw.index(slot), count=1)
        walked += steps
        number += 1


@gluon.jit
def in_order(b_acc, C: gl.constexpr):
    """The accumulator [M, dim_v] with its columns in the order of the dimensions."""
    b_acc = b_acc.reshape([C.rows, C.dim_v // 16, 2, 4, 2]).permute([0, 1, 3, 4, 2])
    return b_acc.reshape([C.rows, C.dim_v])


# ---- queries and probabilities ----


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


@gluon.jit
def left_operand(b_p, C: gl.constexpr):
    """float8 probabilities [M, N] as a left operand, tokens in the order of `transpose_tile`."""
    b_p = b_p.reshape([C.rows, C.block_n // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    b_p = b_p.reshape([C.rows, C.block_n])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(C.dim_v, 32, C.ctas), 4)
    return gl.convert_layout(b_p, OPERAND, assert_trivial=True)


@gluon.jit
def as_float8_operands(b_p, C: gl.constexpr):
    """Probabilities [M, N], times PROBABILITY_SCALE, as the left operands of products with values.

    The second of them, of what is left of the first, counts where `C.probability_parts` is two.
    """
    if C.probability_parts == 2:
        b_high, b_low = split(b_p)
        return left_operand(b_high, C), left_operand(b_low, C)
    else:
        b_high = left_operand(b_p.to(gl.float8e4nv), C)
        return b_high, b_high

"""Decode on sm_90: the two matrix products of a tile, both transposed, so that keys fill the 64 rows of a wgmma.

S^T = K Q^T and O^T = V^T P^T. The few rows of the packed query tile are the N of the instruction, of which 8 suffice.

16-bit caches are read by wgmma where TMA put them. A product with a float8 cache needs 16-bit operands: pairs of
neighbouring dimensions are loaded as 16-bit words into the registers where wgmma wants its left operand, and are
unpacked there into a tile of even and a tile of odd dimensions. So a *part* of the accumulator is 64 dimensions:
neighbours for a 16-bit cache, every second one for float8. Values of head_dim 64 in float8 are 32 words, half a wgmma:
their even and odd dimensions are *stacked*, those of eight words in turn. float16 holds every float8 value.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from numa_attention.gluon_compat import reinterpret, thread_barrier

PART = gl.constexpr(64)  # dimensions of one part of the accumulator: the rows of a wgmma

# one 32-bit register holds two words, each of an even and an odd dimension
UNPACK_E4M3 = gl.constexpr("""{
.reg .b32 t;
.reg .b16 even, odd;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {even, odd}, t;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# the upper byte of a float16 is an e5m2
UNPACK_E5M2 = gl.constexpr("""{
prmt.b32 $0, $2, 0, 0x2404;
and.b32 $1, $2, 0xff00ff00;
}""")


@gluon.jit
def unpack(b_pairs, E5M2: gl.constexpr):
    """int16 [A, B] of two float8 numbers each -> float16 [A, B] of the lower bytes, and of the upper ones."""
    if E5M2:
        asm: gl.constexpr = UNPACK_E5M2
    else:
        asm: gl.constexpr = UNPACK_E4M3
    return gl.inline_asm_elementwise(
        asm, "=r,=r,r", [b_pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def part_dim(part, b_row, FLOAT8: gl.constexpr, WIDTH: gl.constexpr):
    """The dimension of row b_row (0 to 63) of an accumulator's part. WIDTH: numbers in a row of a tile's buffer."""
    if FLOAT8:
        if WIDTH == PART:  # stacked
            return 2 * (b_row // 16 * 8 + b_row % 8) + b_row // 8 % 2
        else:
            return (part // 2) * WIDTH + 2 * b_row + part % 2
    else:
        return part * WIDTH + b_row


@gluon.jit
def pairs_of(buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A float8 tile [ROWS, WIDTH] in shared memory as 16-bit words [ROWS, WIDTH / 2]."""
    return reinterpret(buffer, gl.int16, [ROWS, WIDTH // 2], gl.NVMMASharedLayout(WIDTH, 16, 2))


@gluon.jit
def stack(b_even, b_odd, BLOCK_N: gl.constexpr, LEFT: gl.constexpr):
    """Even and odd dimensions [32, N] of one tile of values as one left operand [64, N], without moving any."""
    b_both = gl.join(b_even, b_odd).reshape([4, 8, BLOCK_N, 2]).permute([0, 3, 1, 2])
    return gl.convert_layout(b_both.reshape([PART, BLOCK_N]), LEFT, assert_trivial=True)


@gluon.jit
def multiply_keys(
    buffers_k, first_buffer, shared_q,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, TERMS: gl.constexpr,
    ROWS_FIRST: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Begin the raw scores of one tile, S^T [N, M], or S [M, N] with ROWS_FIRST; the result is there after a wait.

    TERMS: the numbers whose sum is an element of a query.
    """
    if ROWS_FIRST:
        b_s = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC)
    else:
        b_s = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, ACC)
    for column in gl.static_range(COLUMNS):
        keys = buffers_k.index(first_buffer + column)
        for term in gl.static_range(TERMS):
            queries = shared_q.index(column * TERMS + term)
            if ROWS_FIRST:
                b_s = hopper.warpgroup_mma(
                    queries, keys.permute((1, 0)), b_s, use_acc=column + term > 0, is_async=True
                )
            else:
                b_s = hopper.warpgroup_mma(
                    keys, queries.permute((1, 0)), b_s, use_acc=column + term > 0, is_async=True
                )
    return b_s


@gluon.jit
def multiply_values(
    buffers_v, first_buffer, shared_p, b_accs, tile, key_low, key_high, edge,
    BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, FLOAT8: gl.constexpr, E5M2: gl.constexpr,
    ACC: gl.constexpr, COPY: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Begin O^T += V^T P^T for all parts [64, M] of the accumulator; the results are there after a wait.

    edge: keys outside [key_low, key_high) lie in this tile; whatever their pages hold, NaN included, becomes zero.
    WORDS: the layout in which float8 values are loaded, transposed: that of a left operand, or of half of one.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    weights = shared_p.permute((1, 0))
    results = ()
    if edge:
        o_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
        m_key = (o_key >= key_low) & (o_key < key_high)
        for column in gl.static_range(COLUMNS):
            buffer = buffers_v.index(first_buffer + column)
            if FLOAT8:
                buffer = pairs_of(buffer, BLOCK_N, WIDTH)
            b_v = buffer.load(COPY)
            buffer.store(gl.where(m_key[:, None], b_v, gl.zeros_like(b_v)))
        if FLOAT8:
            thread_barrier()  # other threads read what these wrote
        else:
            hopper.fence_async_shared()
    if FLOAT8:
        for column in gl.static_range(COLUMNS):
            buffer = buffers_v.index(first_buffer + column)
            b_pairs = pairs_of(buffer, BLOCK_N, WIDTH).permute((1, 0)).load(WORDS)
            b_even, b_odd = unpack(b_pairs, E5M2)
            if WIDTH == PART:
                b_left = stack(b_even, b_odd, BLOCK_N, LEFT)
                results = results + (hopper.warpgroup_mma(b_left, weights, b_accs[column], is_async=True),)
            else:
                results = results + (
                    hopper.warpgroup_mma(b_even, weights, b_accs[2 * column], is_async=True),
                )
                results = results + (
                    hopper.warpgroup_mma(b_odd, weights, b_accs[2 * column + 1], is_async=True),
                )
    else:
        for column in gl.static_range(COLUMNS):
            buffer = buffers_v.index(first_buffer + column)
            results = results + (
                hopper.warpgroup_mma(buffer.permute((1, 0)), weights, b_accs[column], is_async=True),
            )
    return results

"""Small kernels, one feature of the language each."""

# ruff: noqa: SIM108, SIM113 - the language has no enumerate, and a choice at compile time is an if

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import amd
from triton.experimental.gluon.language.nvidia import ampere

from numa_attention.gluon_compat import cdna5, reinterpret

N = gl.constexpr(128)


@gluon.jit
def scaled(x, flag):
    if flag > 0:
        return x * 2.0
    return x - 1.0


@gluon.jit
def sum_and_difference(a, b):
    return a + b, (a - b, 3)


@gluon.jit
def control_flow(out, n, factor, REG: gl.constexpr, FLAG: gl.constexpr = None):
    """Loops of all kinds, early returns, nested tuples, run-time and compile-time branches."""
    x = gl.arange(0, N, REG).to(gl.float32)
    i = 0
    total = 0.0
    while i < n:
        x += 1.0
        i += 1
    for j in range(n, 0, -1):
        total += j
    for j in gl.static_range(3):
        x = x + j
    y = x * 2.0 if n > 3 else x
    if FLAG is None and n > 2:
        y = y + total
    a, b = sum_and_difference(y, 1.0)
    _, three = b
    z = scaled(a, n) + three
    if n > 100:
        z = z * 0.0
    elif n == 5:
        z = z + 10.0
    gl.static_assert(N == 128)
    gl.store(out + gl.arange(0, N, REG), z * factor)


@gluon.jit
def bound_in_one_branch(out, n, REG: gl.constexpr):
    if n > 3:
        value = 1.0
    gl.store(out + gl.arange(0, N, REG), gl.full((N,), value, gl.float32, REG))


@gluon.jit
def changes_type_in_a_loop(out, n, REG: gl.constexpr):
    value = 0
    for _ in range(0, n):
        value = value + 0.5
    gl.store(out + gl.arange(0, N, REG), gl.full((N,), value, gl.float32, REG))


@gluon.jit
def layouts_differ(out, FROM: gl.constexpr, TO: gl.constexpr):
    gl.store(out + gl.arange(0, N, TO), gl.zeros((N,), gl.float32, FROM))


@gluon.jit
def later_of_larger(value_a, index_a, value_b, index_b):
    first = (value_a > value_b) | ((value_a == value_b) & (index_a < index_b))
    return gl.where(first, value_a, value_b), gl.where(first, index_a, index_b)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def reductions(a, out, index, scan, REG: gl.constexpr):
    """Per row of a [32, 64]: max + sum + total; the index of the maximum; running sums."""
    rows = gl.arange(0, 32, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    at = rows[:, None] * 64 + columns[None, :]
    x = gl.load(a + at)
    largest, where = gl.reduce((x, columns[None, :] + gl.zeros((32, 64), gl.int32, REG)), 1, later_of_larger)
    gl.store(out + rows, largest + gl.sum(x, 1) + gl.sum(gl.sum(x, 0), 0))
    gl.store(index + rows, where)
    gl.store(scan + at, gl.associative_scan(x, 1, add))


@gluon.jit
def shapes(a, out, REG: gl.constexpr):
    i = gl.arange(0, N, REG)
    x = gl.load(a + i)
    both = gl.join(x, x * 2)
    first, second = gl.split(both)
    flat = gl.reshape(gl.permute(both, (1, 0)), (2 * N,))
    gl.store(out + i, gl.convert_layout(first + second, REG) + gl.sum(flat, 0))


@gluon.jit
def views(a, out, SHARED: gl.constexpr, REG: gl.constexpr):
    """Slices, transposes and reshapes of a [32, 64] in shared memory."""
    rows = gl.arange(0, 32, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    half = gl.arange(0, 32, gl.SliceLayout(0, REG))
    shared = gl.allocate_shared_memory(gl.float32, [32, 64], SHARED)
    shared.store(gl.load(a + rows[:, None] * 64 + columns[None, :]))
    right = shared.slice(32, 32, dim=1).load(REG)
    left_transposed = shared.permute([1, 0]).slice(0, 32).load(REG)
    right_transposed = shared.slice(32, 32, dim=1).permute([1, 0]).load(REG)
    folded = shared.reshape([64, 32]).slice(0, 32).load(REG)
    gl.store(
        out + rows[:, None] * 32 + half[None, :], right + left_transposed + 2 * right_transposed + folded
    )


@gluon.jit
def part_as_another_type(SHARED: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.float32, [32, 64], SHARED)
    reinterpret(shared.slice(32, 32, dim=1), gl.int32, [32, 32], SHARED)


@gluon.jit
def partly_written(a, out, SHARED: gl.constexpr, REG: gl.constexpr):
    """Reads rows that nobody wrote."""
    shared = gl.allocate_shared_memory(gl.float32, [2, N], SHARED)
    i = gl.arange(0, N, REG)
    shared.index(0).store(gl.load(a + i))
    gl.store(out + i, shared.index(1).load(REG))


@gluon.jit
def atomics(out, tickets, REG: gl.constexpr):
    gl.atomic_add(out + gl.arange(0, N, REG) % 4, gl.full((N,), 1.0, gl.float32, REG))
    gl.store(tickets + gl.program_id(0), gl.atomic_add(tickets + 3, 1))


@gluon.jit
def far_row(a, out, row, REG: gl.constexpr):
    i = gl.arange(0, N, REG)
    gl.store(out + i, gl.load(a + row * 70000 + i))


@gluon.jit
def rescale(a, scale, out, REG: gl.constexpr):
    i = gl.arange(0, N, REG)
    x = gl.load(a + i).to(gl.float32) * gl.load(scale)
    gl.store(out + i, x.to(out.dtype.element_ty))


@gluon.jit
def unsigned(a, b, out, REG: gl.constexpr):
    i = gl.arange(0, N, REG)
    x = gl.load(a + i).to(gl.uint32, bitcast=True)
    y = gl.load(b + i).to(gl.uint32, bitcast=True)
    larger = gl.where(x > y, x, y)
    gl.store(out + i, (larger // 7 + (x >> 3) + x % 5).to(gl.int32, bitcast=True))


@gluon.jit
def assembly(a, out, REG: gl.constexpr):
    i = gl.arange(0, N, REG)
    x = gl.inline_asm_elementwise("v_exp_f32 $0, $1", "=v,v", [gl.load(a + i)], gl.float32, True, 1)
    gl.store(out + i, x)


@gluon.jit
def tile_at_the_edge(a, out, M, K, SHARED: gl.constexpr, REG: gl.constexpr):
    """A [32, 64] tile of a tensor [M, K] that is smaller."""
    tiles = cdna5.tdm.make_tensor_descriptor(a, (M, K), (K, 1), (32, 64), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [32, 64], SHARED)
    cdna5.tdm.async_load(tiles, [0, 0], buffer)
    cdna5.tdm.async_wait(0)
    rows = gl.arange(0, 32, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    gl.store(out + rows[:, None] * 64 + columns[None, :], buffer.load(REG))


@gluon.jit
def tdm_through(a, out, M, K, SHARED: gl.constexpr):
    """out [M, K] = a [M, K] by tiles [32, 64], TDM in and TDM out."""
    source = cdna5.tdm.make_tensor_descriptor(a, (M, K), (K, 1), (32, 64), SHARED)
    target = cdna5.tdm.make_tensor_descriptor(out, (M, K), (K, 1), (32, 64), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [32, 64], SHARED)
    row = gl.program_id(0) * 32
    column = gl.program_id(1) * 64
    cdna5.tdm.async_load(source, [row, column], buffer)
    cdna5.tdm.async_wait(0)
    cdna5.tdm.async_store(target, [row, column], buffer)
    cdna5.tdm.async_wait(0)


@gluon.jit
def tdm_gather(a, rows_from, out, M, K, SHARED: gl.constexpr, ROWS: gl.constexpr, REG: gl.constexpr):
    """out [8, 64] = the rows of a [M, K] that rows_from [8] names. For Triton 3.8 and later."""
    tiles = cdna5.tdm.make_tensor_descriptor(a, (M, K), (K, 1), (8, 64), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [8, 64], SHARED)
    cdna5.tdm.async_gather(tiles, gl.load(rows_from + gl.arange(0, 8, ROWS)), buffer)
    cdna5.tdm.async_wait(0)
    rows = gl.arange(0, 8, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    gl.store(out + rows[:, None] * 64 + columns[None, :], buffer.load(REG))


@gluon.jit
def tdm_scatter(a, rows_to, out, M, K, SHARED: gl.constexpr, ROWS: gl.constexpr, REG: gl.constexpr):
    """The rows of out [M, K] that rows_to [8] names = a [8, 64]. For Triton 3.8 and later."""
    tiles = cdna5.tdm.make_tensor_descriptor(out, (M, K), (K, 1), (8, 64), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [8, 64], SHARED)
    rows = gl.arange(0, 8, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    buffer.store(gl.load(a + rows[:, None] * 64 + columns[None, :]))
    cdna5.tdm.async_scatter(tiles, gl.load(rows_to + gl.arange(0, 8, ROWS)), buffer)
    cdna5.tdm.async_wait(0)


@gluon.jit
def tdm_on_a_barrier(
    a,
    out,
    K,
    SHARED: gl.constexpr,
    REG: gl.constexpr,
    BAR: gl.constexpr,
    WARPS: gl.constexpr,
    FAULT: gl.constexpr,
):
    """out [32, 64] = the sum of a [32, K] over blocks of 64 columns; copies signal an mbarrier, one arrival a warp."""
    tiles = cdna5.tdm.make_tensor_descriptor(a, (32, K), (K, 1), (32, 64), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [32, 64], SHARED)
    bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    cdna5.mbarrier.init(bar, count=WARPS)
    rows = gl.arange(0, 32, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    total = gl.zeros((32, 64), gl.float32, REG)
    for step in range(0, K // 64):
        cdna5.tdm.async_load(tiles, [0, step * 64], buffer, mbarrier=bar)
        if FAULT != "missing wait":
            cdna5.mbarrier.wait(bar, step & 1)
        total += buffer.load(REG)
    gl.store(out + rows[:, None] * 64 + columns[None, :], total)


@gluon.jit
def tdm_step_by_step(a, out, K, SHARED: gl.constexpr, REG: gl.constexpr):
    """The same sum with a descriptor that is moved, and prefetches. For Triton 3.8 and later."""
    tiles = cdna5.tdm.make_tensor_descriptor(a, (32, K), (K, 1), (32, 64), SHARED)
    buffer = gl.allocate_shared_memory(a.dtype.element_ty, [32, 64], SHARED)
    rows = gl.arange(0, 32, gl.SliceLayout(1, REG))
    columns = gl.arange(0, 64, gl.SliceLayout(0, REG))
    total = gl.zeros((32, 64), gl.float32, REG)
    for _ in range(0, K // 64):
        cdna5.tdm.prefetch(tiles, [0, 64])
        cdna5.tdm.async_load(tiles, dest=buffer)
        cdna5.tdm.async_wait(0)
        total += buffer.load(REG)
        tiles = cdna5.tdm.update_tensor_descriptor(tiles, add_offsets=[0, 64], clamp_bounds=True)
    gl.store(out + rows[:, None] * 64 + columns[None, :], total)


@gluon.jit
def wmma_tile(a, b, c, K: gl.constexpr, WIDTH: gl.constexpr, ACC: gl.constexpr, SCALED: gl.constexpr):
    """c [32, 32] = a [32, K] @ b [K, 32] from registers, scaled by 2 along K if SCALED."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, WIDTH)
    m = gl.arange(0, 32, gl.SliceLayout(1, LEFT))
    k = gl.arange(0, K, gl.SliceLayout(0, LEFT))
    left = gl.load(a + m[:, None] * K + k[None, :])
    k = gl.arange(0, K, gl.SliceLayout(1, RIGHT))
    n = gl.arange(0, 32, gl.SliceLayout(0, RIGHT))
    right = gl.load(b + k[:, None] * 32 + n[None, :])
    acc = gl.zeros((32, 32), gl.float32, ACC)
    if SCALED:
        # 128 is the code of 2
        acc = cdna5.wmma_scaled(left, 128, "e4m3", right, 127, "e4m3", acc)
    else:
        acc = cdna5.wmma(left, right, acc)
    m = gl.arange(0, 32, gl.SliceLayout(1, ACC))
    n = gl.arange(0, 32, gl.SliceLayout(0, ACC))
    gl.store(c + m[:, None] * 32 + n[None, :], acc)


@gluon.jit
def cdna4_gemm(
    a, b, c, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, ACC: gl.constexpr, COPY: gl.constexpr,
    SHARED: gl.constexpr, FAULT: gl.constexpr,
):  # fmt: skip
    """c [BM, BN] = a [BM, K] @ b [K, BN] on gfx950 through two buffers, straight from global to shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    buffers_a = gl.allocate_shared_memory(a.dtype.element_ty, [2, BM, BK], SHARED)
    buffers_b = gl.allocate_shared_memory(b.dtype.element_ty, [2, BK, BN], SHARED)
    rows = gl.arange(0, BM, gl.SliceLayout(1, COPY))
    columns = gl.arange(0, BK, gl.SliceLayout(0, COPY))
    at_a = rows[:, None] * K + columns[None, :]
    at_b = rows[:, None] * BN + columns[None, :]
    amd.cdna4.async_copy.buffer_load_to_shared(buffers_a.index(0), a, at_a)
    amd.cdna4.async_copy.buffer_load_to_shared(buffers_b.index(0), b, at_b)
    amd.cdna4.async_copy.commit_group()
    acc = gl.zeros((BM, BN), gl.float32, ACC)
    for step in range(0, K // BK):
        if step + 1 < K // BK:
            slot = (step + 1) % 2
            amd.cdna4.async_copy.buffer_load_to_shared(buffers_a.index(slot), a, at_a + (step + 1) * BK)
            amd.cdna4.async_copy.buffer_load_to_shared(buffers_b.index(slot), b, at_b + (step + 1) * BK * BN)
            amd.cdna4.async_copy.commit_group()
            if FAULT == "wait too shallow":
                amd.cdna4.async_copy.wait_group(2)
            else:
                amd.cdna4.async_copy.wait_group(1)
        else:
            amd.cdna4.async_copy.wait_group(0)
        left = buffers_a.index(step % 2).load(LEFT)
        acc = amd.cdna4.mfma(left, buffers_b.index(step % 2).load(RIGHT), acc)
    m = gl.arange(0, BM, gl.SliceLayout(1, ACC))
    n = gl.arange(0, BN, gl.SliceLayout(0, ACC))
    amd.cdna4.buffer_store(acc, c, m[:, None] * BN + n[None, :])


if hasattr(ampere.async_copy, "async_load"):
    copy_elements = ampere.async_copy.async_load
else:
    copy_elements = ampere.async_copy.async_copy_global_to_shared


@gluon.jit
def commit_groups(a, out, SHARED: gl.constexpr, REG: gl.constexpr, FAULT: gl.constexpr):
    buffers = gl.allocate_shared_memory(gl.float32, [2, N], SHARED)
    i = gl.arange(0, N, REG)
    copy_elements(buffers.index(0), a + i)
    ampere.async_copy.commit_group()
    copy_elements(buffers.index(1), a + N + i)
    if FAULT != "missing commit":
        ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(0)
    gl.store(out + i, buffers.index(0).load(REG) + buffers.index(1).load(REG))

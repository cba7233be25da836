"""The language, feature by feature, against torch."""

import language_kernels as kernels
import pytest
import torch
from gluon_cases import error, padded, poisoned
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import amd

from numa_attention import gluon_compat
from numa_attention.testing import interpret
from numa_attention.testing.gluon import GluonFault, NotModelled, OutOfBounds, Race, Refused, register_asm

LINE = gl.BlockedLayout([1], [32], [4], [0])
TILE = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
PLAIN = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
FLOAT8 = torch.float8_e4m3fn


def test_control_flow():
    out = poisoned(128)
    interpret(kernels.control_flow)[(1,)](out, 5, 0.5, LINE)
    x = (torch.arange(128.0) + 5 + 3) * 2 + 15
    assert torch.equal(out, ((x + 1) * 2 + 3 + 10) * 0.5)


@pytest.mark.parametrize("kernel", [kernels.bound_in_one_branch, kernels.changes_type_in_a_loop])
def test_what_only_looks_like_python_is_refused(kernel):
    with pytest.raises(Refused, match=r"language_kernels\.py:\d+"):
        interpret(kernel)[(1,)](poisoned(128), 5, LINE)


def test_layouts_are_checked_as_by_the_compiler():
    with pytest.raises(Refused, match="[Ll]ayout"):
        interpret(kernels.layouts_differ)[(1,)](poisoned(128), LINE, gl.BlockedLayout([4], [32], [4], [0]))


def test_reductions_and_scan():
    a, out, scan = torch.randn(32, 64), poisoned(32), poisoned(32, 64)
    index = torch.full((32,), -1, dtype=torch.int32)
    interpret(kernels.reductions)[(1,)](a, out, index, scan, TILE)
    assert torch.equal(index.long(), a.argmax(1))
    assert error(out, a.amax(1) + a.sum(1) + a.sum()) < 1e-5
    assert error(scan, a.cumsum(1)) < 1e-6


def test_join_split_permute_reshape():
    a, out = torch.randn(128), poisoned(128)
    interpret(kernels.shapes)[(1,)](a, out, LINE)
    assert error(out, a * 3 + a.sum() * 3) < 1e-5


def test_views_of_shared_memory():
    a, out = torch.randn(32, 64), poisoned(32, 32)
    interpret(kernels.views)[(1,)](a, out, PLAIN, TILE)
    assert error(out, a[:, 32:] + a[:, :32].T + 2 * a[:, 32:].T + a.view(64, 32)[:32]) < 1e-6


def test_a_part_of_a_buffer_as_another_type():
    with pytest.raises(NotModelled, match=r"a part of a buffer.*language_kernels\.py:\d+"):
        interpret(kernels.part_as_another_type)[(1,)](PLAIN)


def test_a_read_of_what_nobody_wrote():
    shared = gl.SwizzledSharedLayout(1, 1, 1, [0])
    with pytest.raises(Race, match="never written"):
        interpret(kernels.partly_written)[(1,)](torch.randn(128), poisoned(128), shared, LINE)


def test_atomics():
    out, tickets = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    interpret(kernels.atomics)[(3,)](out, tickets, LINE)
    assert torch.equal(out, torch.full((4,), 96.0))
    assert sorted(tickets[:3].tolist()) == [0, 1, 2] and tickets[3] == 3


def test_out_of_bounds_and_overflow():
    a, out = torch.zeros(3, 70000, dtype=torch.int8), torch.zeros(128, dtype=torch.int8)
    a[2, :128] = torch.arange(128) % 50
    interpret(kernels.far_row)[(1,)](a, out, 2, LINE)
    assert torch.equal(out, a[2, :128])
    with pytest.raises(OutOfBounds, match=r"past the end of its tensor.*language_kernels\.py:\d+"):
        interpret(kernels.far_row)[(1,)](a, out, 3, LINE)
    with pytest.raises(GluonFault, match="overflow"):
        interpret(kernels.far_row)[(1,)](a, out, 40000, LINE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8, torch.float8_e5m2], ids=str)
def test_conversions_round_as_torch_does(dtype):
    a, scale = torch.randn(128).to(dtype), torch.tensor([0.3])
    out = torch.zeros(128).to(dtype)
    interpret(kernels.rescale)[(1,)](a, scale, out, LINE)
    assert torch.equal(out.float(), (a.float() * 0.3).to(dtype).float())


def test_float8_saturates_as_on_a_gpu():
    a, out = torch.full((128,), 448.0).to(FLOAT8), torch.zeros(128).to(FLOAT8)
    interpret(kernels.rescale)[(1,)](a, torch.tensor([4.0]), out, LINE)
    assert torch.equal(out.float(), torch.full((128,), 448.0))


def test_unsigned_arithmetic():
    a, b = (torch.randint(-(1 << 31), (1 << 31) - 1, (128,), dtype=torch.int32) for _ in range(2))
    out = torch.zeros(128, dtype=torch.int32)
    interpret(kernels.unsigned)[(1,)](a, b, out, LINE, debug=False)
    x, y = (t.long() & 0xFFFFFFFF for t in (a, b))
    assert torch.equal(out.long() & 0xFFFFFFFF, torch.maximum(x, y) // 7 + (x >> 3) + x % 5)


def test_inline_assembly_needs_a_model():
    a, out = torch.randn(128), poisoned(128)
    with pytest.raises(NotModelled, match="register_asm"):
        interpret(kernels.assembly)[(1,)](a, out, LINE)
    register_asm("v_exp_f32 $0, $1", torch.exp2)
    interpret(kernels.assembly)[(1,)](a, out, LINE)
    assert torch.equal(out, torch.exp2(a))


def test_tdm_pads_with_zeros():
    a, out = torch.randn(20, 48), poisoned(32, 64)
    interpret(kernels.tile_at_the_edge)[(1,)](a, out, 20, 48, padded([32, 64]), TILE)
    assert torch.equal(out, torch.nn.functional.pad(a, (0, 16, 0, 12)))


def test_tdm_store_stays_inside_the_tensor():
    a, out = torch.randn(40, 80), poisoned(50, 80)
    interpret(kernels.tdm_through)[(2, 2)](a, out, 40, 80, PLAIN)
    assert torch.equal(out[:40], a)
    assert out[40:].isnan().all()


@pytest.mark.skipif(gluon_compat.STORES_PADDED_TILES, reason="this Triton can store them")
def test_tdm_store_of_a_padded_tile():
    with pytest.raises(Refused, match="from a padded layout"):
        interpret(kernels.tdm_through)[(1, 1)](
            torch.randn(32, 64), poisoned(32, 64), 32, 64, padded([32, 64])
        )


needs_moving_descriptors = pytest.mark.skipif(
    gluon_compat.VERSION < (3, 8), reason="the descriptor carries the offsets since Triton 3.8"
)
EIGHT_ROWS = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
EIGHT = gl.SliceLayout(1, gl.BlockedLayout([8, 1], [1, 32], [1, 4], [1, 0]))


@needs_moving_descriptors
def test_tdm_gather():
    a, out = torch.randn(100, 64), poisoned(8, 64)
    rows = torch.randperm(100, dtype=torch.int32)[:8].contiguous()
    interpret(kernels.tdm_gather)[(1,)](a, rows, out, 100, 64, padded([8, 64]), EIGHT, EIGHT_ROWS)
    assert torch.equal(out, a[rows.long()])


@needs_moving_descriptors
def test_tdm_scatter():
    a, out = torch.randn(8, 64), poisoned(100, 64)
    rows = torch.randperm(100, dtype=torch.int32)[:8].contiguous()
    interpret(kernels.tdm_scatter)[(1,)](a, rows, out, 100, 64, padded([8, 64]), EIGHT, EIGHT_ROWS)
    assert torch.equal(out[rows.long()], a)
    assert out.isnan().all(1).sum() == 92


@needs_moving_descriptors
def test_tdm_with_a_moving_descriptor():
    a, out = torch.randn(32, 256), poisoned(32, 64)
    interpret(kernels.tdm_step_by_step)[(1,)](a, out, 256, padded([32, 64]), TILE)
    assert error(out, a.view(32, 4, 64).sum(1)) < 1e-6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", ["", "missing wait"])
def test_tdm_that_signals_a_barrier(fault, seed):
    a, out = torch.randn(32, 256), poisoned(32, 64)
    launch = interpret(kernels.tdm_on_a_barrier)[(1,)]
    arguments = (a, out, 256, padded([32, 64]), TILE, gluon_compat.cdna5.mbarrier.MBarrierLayout(), 4, fault)
    if fault:
        with pytest.raises(Race, match="is not ordered after a TDM load"):
            launch(*arguments, seed=seed)
    else:
        launch(*arguments, seed=seed)
        assert error(out, a.view(32, 4, 64).sum(1)) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "k", "scaled"), [(torch.float16, 32, False), (FLOAT8, 128, False), (FLOAT8, 128, True)], ids=str
)
def test_wmma(dtype, k, scaled):
    a, b, c = torch.randn(32, k).to(dtype), torch.randn(k, 32).to(dtype), poisoned(32, 32)
    acc = gluon_compat.wmma_layout(2, 2, (16, 16, k))
    interpret(kernels.wmma_tile)[(1,)](a, b, c, K=k, WIDTH=8 if k == 32 else 16, ACC=acc, SCALED=scaled)
    assert error(c, a.float() @ b.float() * (2 if scaled else 1)) < 1e-6


@pytest.mark.parametrize("fault", ["", "wait too shallow"])
def test_gfx950_gemm(fault):
    a, b, c = torch.randn(64, 128).half(), torch.randn(128, 64).half(), poisoned(64, 64)
    acc = amd.AMDMFMALayout(version=4, instr_shape=[32, 32, 16], transposed=True, warps_per_cta=[2, 2])
    launch = interpret(kernels.cdna4_gemm, target="gfx950")[(1,)]
    arguments = dict(
        BM=64,
        BN=64,
        BK=64,
        ACC=acc,
        COPY=gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0]),
        SHARED=PLAIN,
        FAULT=fault,
    )
    if fault:
        with pytest.raises(Race, match="buffer load to shared memory"):
            launch(a, b, c, 128, **arguments)
    else:
        launch(a, b, c, 128, **arguments)
        assert error(c, a.float() @ b.float()) < 1e-6


@pytest.mark.parametrize("fault", ["", "missing commit"])
def test_commit_groups(fault):
    a, out = torch.randn(256), poisoned(128)
    launch = interpret(kernels.commit_groups, target="sm_90")[(1,)]
    if fault:
        with pytest.raises(Race, match="is not ordered after an async copy"):
            launch(a, out, gl.SwizzledSharedLayout(1, 1, 1, [0]), LINE, fault)
    else:
        launch(a, out, gl.SwizzledSharedLayout(1, 1, 1, [0]), LINE, fault)
        assert torch.equal(out, a[:128] + a[128:])


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="choose one of gfx1250"):
        interpret(kernels.atomics, target="gfx1100")
    with pytest.raises(TypeError, match="no @gluon.jit kernel"):
        interpret(lambda: None)

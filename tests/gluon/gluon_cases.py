"""Launches of the kernels beside this file: each returns the relative error against torch in float32."""

import cluster_kernels
import tdm_kernels
import tma_kernels
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from numa_attention.gluon_compat import READS_PARTS_OF_COPIES, wmma_layout
from numa_attention.testing import interpret

# by which axis the two workgroups of a cluster divide a tile, as a layout's basis; none: both have all of it
SPLIT = (1, 0) if READS_PARTS_OF_COPIES else (0, 0)
LOG2_E = 1.4426950408889634


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def padded(shape: list[int]):
    return gl.PaddedSharedLayout.with_identity_for([[shape[1], 8]], shape, [1, 0])


def tdm_gemm(fault="", seed=0, buffers=3, dtype=torch.bfloat16, size=(128, 64, 250)) -> float:
    m, n, k = size
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), poisoned(m, n)
    interpret(tdm_kernels.gemm)[(m // 64, n // 64)](
        a, b, c, m, n, k,
        BLOCK=64, BUFFERS=buffers, ACC=wmma_layout(2, 2, (16, 16, 32)), SHARED=padded([64, 64]), FAULT=fault, seed=seed,
    )  # fmt: skip
    return error(c, a.float() @ b.float())


def tdm_attention(causal: bool, dtype=torch.bfloat16, n=128, d=64, heads=2) -> float:
    bm, bn = 64, 32
    q, k, v = (torch.randn(heads, n, d).to(dtype) for _ in range(3))
    o = poisoned(heads, n, d, dtype=dtype)
    interpret(tdm_kernels.attention)[(n // bm, heads)](
        q, k, v, o, n, d**-0.5 * LOG2_E,
        D=d, BM=bm, BN=bn, ACC=wmma_layout(4, 1, (16, 16, 32)), SHARED_Q=padded([bm, d]), SHARED_K=padded([bn, d]),
        CAUSAL=causal,
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal
    )
    return error(o, expected)


def tma_layout(shape, cga_layout=None):
    return gl.NVMMASharedLayout.get_default_for(
        shape, gl.float16, **({"cga_layout": cga_layout} if cga_layout else {})
    )


def descriptor(tensor: torch.Tensor, block: list[int], cga_layout=None) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, tma_layout(block, cga_layout))


def mma_layout(n: int):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


def tma_gemm(fault="", seed=0) -> float:
    m, n, k = 128, 128, 256
    a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), poisoned(m, n, dtype=torch.float16)
    interpret(tma_kernels.gemm, target="sm_90")[(m // 64, n // 128)](
        descriptor(a, [64, 64]), descriptor(b, [64, 128]), descriptor(c, [64, 128]), k,
        BM=64, BN=128, BK=64, ACC=mma_layout(128), BAR=hopper.mbarrier.MBarrierLayout(), FAULT=fault, seed=seed,
    )  # fmt: skip
    return error(c, a.float() @ b.float())


def specialised_sum(fault="", seed=0, slots=2, steps=6) -> float:
    a, out = torch.randn(64, 64 * steps).half(), poisoned(64, 64)
    interpret(tma_kernels.specialised_sum, target="sm_90")[(1,)](
        descriptor(a, [64, 64]), out, 64 * steps,
        BM=64, BK=64, SLOTS=slots, REG=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        BAR=hopper.mbarrier.MBarrierLayout(), FAULT=fault, seed=seed,
    )  # fmt: skip
    return error(out, a.float().view(64, steps, 64).sum(1))


def tma_attention(n=128, d=64) -> float:
    bm, bn = 64, 64
    q, k, v = (torch.randn(n, d).half() for _ in range(3))
    o = poisoned(n, d, dtype=torch.float16)
    interpret(tma_kernels.attention, target="sm_90")[(n // bm,)](
        descriptor(q, [bm, d]), descriptor(k, [bn, d]), descriptor(v, [bn, d]), o, n, d**-0.5 * LOG2_E,
        D=d, BM=bm, BN=bn, QK=mma_layout(bn), PV=mma_layout(d), BAR=hopper.mbarrier.MBarrierLayout(),
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.float()[None] for x in (q, k, v)))
    return error(o, expected[0])


def rows_over_ctas(basis):
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[list(basis)])


def tdm_multicast(fault="", seed=0, split=SPLIT) -> float:
    a, out = torch.randn(64, 192).half(), poisoned(64)
    shared = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[0, 0]])
    interpret(cluster_kernels.tdm_multicast_sum)[(1,)](
        a,
        out,
        192,
        BM=64,
        BK=64,
        SHARED=shared,
        REG=rows_over_ctas(split),
        FAULT=fault,
        num_ctas=2,
        seed=seed,
    )
    return error(out, a.float().sum(1))


def convert_between_ctas(target: str) -> float:
    out = torch.full((128,), -1, dtype=torch.int32)
    layouts = [gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[step]]) for step in (1, 0)]
    interpret(cluster_kernels.convert_between_ctas, target=target)[(1,)](
        out, FROM=layouts[0], TO=layouts[1], num_ctas=2
    )
    return error(out, torch.arange(128))


def tma_multicast(fault="", seed=0, split=SPLIT, kernel=cluster_kernels.tma_multicast_sum) -> float:
    a, out = torch.randn(64, 192).half(), poisoned(64)
    interpret(kernel, target="sm_90")[(1,)](
        descriptor(a, [64, 64], [[0, 0]]), out, 192,
        BM=64, BK=64, REG=rows_over_ctas(split), FAULT=fault, num_ctas=2, seed=seed,
    )  # fmt: skip
    return error(out, a.float().sum(1))


def tma_shared_barrier(fault="", seed=0) -> float:
    return tma_multicast(fault, seed, kernel=cluster_kernels.tma_shared_barrier_sum)


def tma_expects_early(seed=0) -> None:
    interpret(cluster_kernels.tma_expects_early, target="sm_90")[(1,)](
        descriptor(torch.randn(64, 128).half(), [64, 64]), poisoned(64),
        BM=64, BK=64, REG=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), seed=seed,
    )  # fmt: skip

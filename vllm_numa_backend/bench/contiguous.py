"""`numa_attention.attention` on contiguous tensors beside torch's scaled_dot_product_attention through cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from numa_attention import attention, runner
from vllm_numa_backend.bench.rows import WrongResult
from vllm_numa_backend.bench.timing import time_few

AGREEMENT = 1e-2  # ||ours - cuDNN's|| / ||cuDNN's||, both in bfloat16
HEADS = ((128, 128), (64, 8))
LENGTHS = (8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class ContiguousCase:
    """q [batch, q_heads, length, 128], k and v [batch, kv_heads, length, 128], bfloat16."""

    batch: int
    length: int
    q_heads: int
    kv_heads: int
    causal: bool = False
    head_dim: int = 128

    @property
    def name(self) -> str:
        return (
            f"{self.batch}, {self.length}, {self.q_heads}/{self.kv_heads}{', causal' if self.causal else ''}"
        )

    @property
    def flops(self) -> float:
        """Floating-point operations of both products; of the pairs that a causal mask leaves."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.head_dim * pairs * self.q_heads * self.batch


@dataclass(frozen=True)
class ContiguousRow:
    """Seconds a call. variant: what ran of ours."""

    case: ContiguousCase
    variant: str
    ours: float
    cudnn: float

    def rate(self, seconds: float) -> float:
        """TFLOP/s."""
        return self.case.flops / seconds / 1e12


def contiguous_cases(causal: bool) -> list[ContiguousCase]:
    return [ContiguousCase(1, length, *heads, causal) for heads in HEADS for length in LENGTHS]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's operation by cuDNN and nothing else. Raises RuntimeError where cuDNN does not take it."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def measure_contiguous(
    case: ContiguousCase,
    kernel: str | None = None,
    *,
    device: torch.device | str = "cuda",
    peer: Callable[..., torch.Tensor] = cudnn,
    timer: Callable[[Sequence[Callable[[], object]]], list[float]] = time_few,
) -> ContiguousRow:
    """Time one case after comparing the results.

    Raises WrongResult where they differ, RuntimeError where the peer does not take the case, UnsupportedShape where
    `kernel` does not.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(
            case.batch, heads, case.length, case.head_dim, device=device, dtype=torch.bfloat16, generator=generator
        )
        for heads in (case.q_heads, case.kv_heads, case.kv_heads)
    )  # fmt: skip

    def ours() -> torch.Tensor:
        return attention(q, k, v, causal=case.causal, kernel=kernel)

    runner.ran.clear()
    found, right = ours(), peer(q, k, v, case.causal)
    ((variant, _),) = runner.ran.items()
    error = float((found.float() - right.float()).norm() / right.float().norm())
    if not error <= AGREEMENT:
        raise WrongResult(f"{case.name}: our output is {error:.1e} away from cuDNN's")
    del found, right
    return ContiguousRow(case, variant, *timer([ours, lambda: peer(q, k, v, case.causal)]))

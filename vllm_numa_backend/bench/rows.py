"""One row of a kernel benchmark: correctness first, then the times of all contestants."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from numa_attention import runner
from numa_attention.topology import detect
from numa_attention.variants import Variant, choose_decode, choose_prefill
from vllm_numa_backend.bench.cases import MAX_DECODE_QUERY, Case, make_tensors
from vllm_numa_backend.bench.contestants import flash_attention_3, is_fp8, ours, triton_attn
from vllm_numa_backend.bench.mixed import MixedCase, make_mixed_tensors
from vllm_numa_backend.bench.timing import time_in_turns

# ||ours - FA3|| / ||FA3||; FA3 quantises queries and probabilities where the cache is float8, we do not
AGREEMENT = {False: 1e-2, True: 6e-2}


class WrongResult(RuntimeError):
    """The kernels disagree: there is nothing to time."""


@dataclass
class Row:
    """Seconds a call. variant: what the schedule chose and what the launch counters saw."""

    case: Case
    variant: str
    ours: float
    flash_attention_3: float
    triton_attn: float | None

    def rate(self, seconds: float) -> float:
        """TB/s of KV read for decode, TFLOP/s for prefill."""
        return (
            (self.case.kv_bytes if self.case.query_len <= MAX_DECODE_QUERY else self.case.flops)
            / seconds
            / 1e12
        )


def asked_for(case: Case, kernel: str | None) -> dict[str, Variant]:
    """The planner's options that make it take one kernel. Raises ValueError where that cannot run the case."""
    if kernel is None:
        return {}
    topology = detect("cuda")
    if case.query_len <= MAX_DECODE_QUERY:
        return {
            "decode_variant": choose_decode(case.shape, topology, "triton", case.query_len, kernel=kernel)
        }
    return {"prefill_variant": choose_prefill(case.shape, topology, "triton", kernel=kernel)}


def measure(case: Case, with_triton: bool = True, kernel: str | None = None) -> Row:
    """Time one case, with one kernel instead of the dispatcher's choice.

    Raises WrongResult when our output and FlashAttention-3's differ or another kernel ran, ValueError where the kernel
    asked for cannot run the case.
    """
    tensors = make_mixed_tensors(case) if isinstance(case, MixedCase) else make_tensors(case)
    copies = len(tensors.kv)
    peer = flash_attention_3(tensors)
    tensors.out.fill_(math.nan)
    peer(0)
    expected = tensors.out.float()
    call, schedule = ours(tensors, **asked_for(case, kernel))
    plans = (schedule.decode, schedule.prefill, schedule.extend)
    variants = [plan.variant.name for plan in plans if plan is not None]
    tensors.out.fill_(math.nan)
    runner.ran.clear()
    call(0)
    error = float((tensors.out.float() - expected).norm() / expected.norm())
    if not error <= AGREEMENT[is_fp8(case)]:
        raise WrongResult(f"{case.name}: our output is {error:.1e} away from FlashAttention-3's")
    if dict(runner.ran) != dict.fromkeys(variants, 1):
        raise WrongResult(f"{case.name}: the schedule names {variants}, but {dict(runner.ran)} ran")
    others = list(triton_attn(tensors).values()) if with_triton else []
    seconds, peer_seconds, *of_triton = time_in_turns([call, peer, *others], copies)
    del tensors
    torch.cuda.empty_cache()
    return Row(case, ", ".join(variants), seconds, peer_seconds, min(of_triton, default=None))

"""Who runs in a benchmark: our kernels, FlashAttention-3 and TRITON_ATTN as vLLM calls them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numa_attention import runner
from numa_attention.schedule import Planner, Schedule
from vllm_numa_backend.bench.cases import MAX_DECODE_QUERY, Case, Tensors

Call = Callable[[int], None]


def is_fp8(case: Case) -> bool:
    """Whether the case's cache is held in an 8-bit float type."""
    return case.kv_dtype.itemsize == 1


def ours(tensors: Tensors, **planner_options) -> tuple[Call, Schedule]:
    """Our backend's kernels; the step is planned once, as it is for all layers of a model."""
    case = tensors.case
    planner = Planner(
        case.shape,
        tensors.out.device,
        max_requests=max(case.batch, 8),
        max_tokens=tensors.out.shape[0],
        max_decode_query=case.query_len if case.query_len <= MAX_DECODE_QUERY else 1,
        **planner_options,
    )
    schedule = planner.plan(tensors.step)
    scales = tensors.scales if is_fp8(case) else None

    def call(copy: int) -> None:
        kv = tensors.kv[copy]
        runner.attend(
            tensors.q[copy],
            kv[:, 0],
            kv[:, 1],
            tensors.out,
            schedule,
            scale=case.head_dim**-0.5,
            k_scale=scales,
            v_scale=scales,
        )

    return call, schedule


def flash_attention_3(tensors: Tensors) -> Call:
    """vLLM's FlashAttention-3 with the scheduler metadata that vLLM computes once a step."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case, step = tensors.case, tensors.step
    window = (case.window, 0) if case.window >= 0 else (-1, -1)
    fp8 = is_fp8(case)
    metadata = get_scheduler_metadata(
        batch_size=case.batch,
        max_seqlen_q=case.query_len,
        max_seqlen_k=case.length,
        num_heads_q=case.q_heads,
        num_heads_kv=case.kv_heads,
        headdim=case.head_dim,
        cache_seqlens=step.seq_lens,
        qkv_dtype=case.kv_dtype,
        cu_seqlens_q=step.query_start_loc,
        page_size=case.page_size,
        causal=True,
        window_size=window,
    )
    descale = tensors.scales.expand(case.batch, case.kv_heads) if fp8 else None
    queries = [q.to(case.kv_dtype) for q in tensors.q] if fp8 else tensors.q

    def call(copy: int) -> None:
        kv = tensors.kv[copy]
        flash_attn_varlen_func(
            q=queries[copy],
            k=kv[:, 0],
            v=kv[:, 1],
            out=tensors.out,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=case.query_len,
            seqused_k=step.seq_lens,
            max_seqlen_k=case.length,
            softmax_scale=case.head_dim**-0.5,
            causal=True,
            window_size=list(window),
            block_table=step.block_table,
            scheduler_metadata=metadata,
            fa_version=3,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
        )

    return call


def triton_attn(tensors: Tensors) -> dict[str, Call]:
    """vLLM's TRITON_ATTN: its one-pass kernel, and for decode its split kernel with 16 segments."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    case, step = tensors.case, tensors.step
    segments = 16
    device = tensors.out.device
    workspace = (
        torch.empty(case.batch, case.q_heads, segments, case.head_dim, device=device),
        torch.empty(case.batch, case.q_heads, segments, device=device),
        torch.empty(case.batch, case.q_heads, segments, device=device),
    )
    descale = tensors.scales.expand(case.batch, case.kv_heads) if is_fp8(case) else None

    def make(split: bool) -> Call:
        def call(copy: int) -> None:
            kv = tensors.kv[copy]
            unified_attention(
                q=tensors.q[copy],
                k=kv[:, 0],
                v=kv[:, 1],
                out=tensors.out,
                cu_seqlens_q=step.query_start_loc,
                max_seqlen_q=case.query_len,
                seqused_k=step.seq_lens,
                max_seqlen_k=case.length,
                softmax_scale=case.head_dim**-0.5,
                causal=True,
                window_size=(case.window, 0) if case.window >= 0 else (-1, -1),
                block_table=step.block_table,
                softcap=0.0,
                q_descale=None,
                k_descale=descale,
                v_descale=descale,
                seq_threshold_3D=case.batch if split else 0,
                num_par_softmax_segments=segments if split else None,
                softmax_segm_output=workspace[0] if split else None,
                softmax_segm_max=workspace[1] if split else None,
                softmax_segm_expsum=workspace[2] if split else None,
            )

        return call

    calls = {"one pass": make(False)}
    if case.query_len == 1:
        calls["split"] = make(True)
    return calls


def aiter(tensors: Tensors) -> Call:
    """AMD's paged decode or variable-length prefill, through our adapter, whatever the dispatcher would take."""
    from numa_attention import aiter_adapter
    from numa_attention.topology import detect

    case = tensors.case
    phase = "decode" if tensors.step.num_decodes else "prefill"
    reason = aiter_adapter.why_not(
        phase, case.shape, detect(tensors.out.device), frozenset(), max_decode_query=case.query_len
    )
    if reason is not None:
        raise NotImplementedError(reason)
    return ours(tensors, kernels="triton", aiter="always")[0]


def aiter_unified(tensors: Tensors) -> Call:
    """AMD's Triton kernel for both phases, which vLLM calls ROCM_AITER_UNIFIED_ATTN."""
    from aiter.ops.triton.unified_attention import unified_attention

    case, step = tensors.case, tensors.step
    descale = tensors.scales.expand(case.batch, case.kv_heads) if is_fp8(case) else None

    def call(copy: int) -> None:
        kv = tensors.kv[copy]
        unified_attention(
            q=tensors.q[copy],
            k=kv[:, 0],
            v=kv[:, 1],
            out=tensors.out,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=case.query_len,
            seqused_k=step.seq_lens,
            max_seqlen_k=case.length,
            softmax_scale=case.head_dim**-0.5,
            causal=True,
            window_size=(case.window, 0) if case.window >= 0 else (-1, -1),
            block_table=step.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=descale,
            v_descale=descale,
        )

    return call

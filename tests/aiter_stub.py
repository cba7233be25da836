"""Two functions of amd-aiter 0.1.7.post2.dev18, with its signatures, computed by the float64 reference."""

from __future__ import annotations

from typing import Optional

import torch

from numa_attention import reference

calls: list[str] = []


def paged_attention_v1(
    out: torch.Tensor,
    workspace_buffer: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    cu_query_lens: Optional[torch.Tensor],  # noqa: UP045
    context_lens: torch.Tensor,
    max_context_len: int,
    alibi_slopes: Optional[torch.Tensor],  # noqa: UP045
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    fp8_out_scale: Optional[torch.Tensor] = None,  # noqa: UP045
    partition_size: int = 256,
    mtp: int = 1,
    sliding_window: int = 0,
) -> torch.Tensor:
    """key_cache, value_cache [page, token, KV head, head_dim] in "NHD"; uint8 where kv_cache_dtype is "fp8"."""
    calls.append("paged_attention_v1")
    requests, heads, head_dim = query.shape
    assert kv_cache_layout == "NHD" and (mtp, sliding_window, fp8_out_scale) == (1, 0, None)
    assert key_cache.stride() == value_cache.stride(), "it has one set of strides"
    assert context_lens.dtype == block_tables.dtype == torch.int32 and block_tables.stride(1) == 1
    assert k_scale.dtype == v_scale.dtype == torch.float32
    assert block_tables.shape[0] == context_lens.shape[0] == requests and cu_query_lens is None
    assert int(context_lens.max()) <= max_context_len <= block_tables.shape[1] * key_cache.shape[1]
    # exp_sums, max_logits and the parts of the output lie in the workspace
    parts = -(-max_context_len // partition_size)
    needed = requests * heads * parts * (head_dim * out.element_size() + 2 * 4)
    assert workspace_buffer.numel() * workspace_buffer.element_size() >= needed
    if kv_cache_dtype == "fp8":
        assert key_cache.dtype == value_cache.dtype == torch.uint8
        key_cache, value_cache = key_cache.view(FP8), value_cache.view(FP8)
    else:
        assert kv_cache_dtype == "auto" and key_cache.dtype == query.dtype
    result, _ = reference.attention(
        query, key_cache, value_cache, torch.arange(requests + 1), context_lens, block_tables,
        scale=scale, soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes,
        k_scale=float(k_scale), v_scale=float(v_scale),
    )  # fmt: skip
    out.copy_(result)
    return out


FP8 = torch.float8_e4m3fnuz


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    min_seqlen_q=0,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    how_v3_bf16_cvt=1,
    block_table=None,
    out=None,
    cu_seqlens_q_padded: Optional[torch.Tensor] = None,  # noqa: UP045
    cu_seqlens_k_padded: Optional[torch.Tensor] = None,  # noqa: UP045
):
    """k, v [page, token, KV head, head_dim] with a block table; the mask is aligned to the last query and key."""
    calls.append("flash_attn_varlen_func")
    requests = len(cu_seqlens_q) - 1
    assert k.shape[1] % 128 == 0, "Paged KV cache block size must be divisible by 128"
    assert (
        block_table.dtype == torch.int32 and block_table.shape[0] == requests and block_table.stride(1) == 1
    )
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[0] == 0
        assert len(starts) == requests + 1
    assert cu_seqlens_q[-1] == len(q) == len(out)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    assert not return_lse and window_size[1] == (0 if window_size[0] >= 0 else -1)
    result, _ = reference.attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table,
        scale=softmax_scale, causal=causal, window=window_size[0], soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    out.copy_(result)
    return out

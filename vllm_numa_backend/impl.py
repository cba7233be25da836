"""A layer's call: write the new keys and values into their pages, then attend over the pages.

An encoder's layer has no cache: it attends over the keys and values of the call itself.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from numa_attention.kv_cache import write_pages
from numa_attention.runner import attend
from vllm_numa_backend import NAME, settings
from vllm_numa_backend.compat import split_kv_cache
from vllm_numa_backend.context_parallel import (
    VllmRanks,
    attend_over_ranks,
    exchange,
    fault_of_layer,
    rehearse,
)
from vllm_numa_backend.metadata import NumaSwizzleMetadata
from vllm_numa_backend.remedy import another_backend

_FP8_DTYPES = {
    "fp8": current_platform.fp8_dtype,
    "fp8_e4m3": current_platform.fp8_dtype,
    "fp8_e5m2": lambda: torch.float8_e5m2,
}
# values by which vLLM says that a layer option is off
_OFF = (None, False, -1)


_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class NumaSwizzleImpl(AttentionImpl[NumaSwizzleMetadata]):
    # queries in the model's type are as fast, since products run in 16 bits, and more exact; those that come in
    # float8 all the same are taken with their scale
    supports_quant_query_input = False
    # of decode context parallelism, see context_parallel.py; with any interleave, since masks are of positions
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool | None = False,
        **options: Any,
    ) -> None:
        """Raises NotImplementedError for a layer option that changes the result and is not supported."""
        self.is_encoder = attn_type in _ENCODERS
        if self.is_encoder and alibi_slopes is not None:
            raise NotImplementedError(
                f"{NAME} does not support ALiBi in an encoder, where what it says of later keys is not settled: "
                f"{another_backend()}."
            )
        for name, value in options.items():
            if not any(value is off or (isinstance(value, int) and value == off) for off in _OFF):
                raise NotImplementedError(
                    f"{NAME} does not support the layer option {name}={value!r}: {another_backend()}."
                )
        if self.pcp_world_size > 1:
            raise NotImplementedError(
                f"{NAME} does not support prefill context parallelism: give --prefill-context-parallel-size 1."
            )
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"{NAME} needs one sink per query head, {num_heads}, and got {sinks.shape[0]}.")

        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.use_alibi_sqrt = bool(use_alibi_sqrt)
        # vLLM counts the query's own position, the kernels count the positions to its left
        self.window = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype = kv_cache_dtype
        is_fp8 = kv_cache_dtype in _FP8_DTYPES and not self.is_encoder  # which caches nothing
        self.fp8_dtype = _FP8_DTYPES[kv_cache_dtype]() if is_fp8 else None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.kernels = settings.current().kernels
        self.ranks = self._join_ranks(attn_type)
        # what tells this layer's schedule from those of the other layers in its KV cache group
        self.schedule_key = (num_heads, self.window)

    def _join_ranks(self, attn_type: str) -> VllmRanks | None:
        """The ranks that share this layer's cache, None where this one has it all."""
        if self.dcp_world_size == 1 or self.is_encoder:
            return None
        fault = fault_of_layer(self, attn_type == AttentionType.ENCODER_DECODER)
        if fault is not None:
            raise NotImplementedError(fault)
        self.exchange = exchange()
        ranks = VllmRanks()
        if self.alibi_slopes is not None:
            self.alibi_slopes = ranks.all_gather(self.alibi_slopes).flatten()
        return ranks

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether `forward` can quantise its output as `quant_key` says: to float8, by one scale known beforehand."""
        return quant_key == kFp8StaticTensorSym

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # views are made at every call: kept ones would hold on to a cache that vLLM has dropped
        k_pages, v_pages = split_kv_cache(kv_cache, self.head_size)
        if self.fp8_dtype is None:
            return k_pages, v_pages
        return k_pages.view(self.fp8_dtype), v_pages.view(self.fp8_dtype)

    def _scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if self.fp8_dtype is None else (layer._k_scale, layer._v_scale)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key, value [tokens, KV heads, head_dim] at `slot_mapping` int64 [n]; slot -1 is skipped."""
        if self.kv_sharing_target_layer_name is not None or self.is_encoder:
            return
        k_pages, v_pages = self._pages(kv_cache)
        write_pages(key, value, k_pages, v_pages, slot_mapping, *self._scales(layer), kernels=self.kernels)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: NumaSwizzleMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [tokens, heads, head_dim] over the pages, into output likewise (head_dim_v).

        `key` and `value` are in the pages already; an encoder's are read where they are. output_scale float32 [1]: of
        a float8 output. Rows past the step's tokens are left as they are.
        """
        if output_block_scale is not None:
            raise NotImplementedError(
                f"{NAME} does not support output quantised in blocks: {another_backend()}."
            )
        if attn_metadata is None:
            # vLLM measures memory with no step to run
            if self.ranks is not None:
                rehearse(query, output, self.ranks, exchange=self.exchange)
            return output.zero_()
        # outside graphs this runs for every layer of every step: as few torch calls as can be
        tokens = attn_metadata.num_actual_tokens
        if self.is_encoder:
            k_pages, v_pages = key, value
        else:
            k_pages, v_pages = self._pages(kv_cache)
        k_scale, v_scale = self._scales(layer)
        spans = attn_metadata.mm_prefix_range_tensor
        schedule = attn_metadata.schedules[self.schedule_key]
        run, over_ranks = attend, {}
        if not schedule.shape.shard.is_whole:
            run, over_ranks = attend_over_ranks, {"ranks": self.ranks, "exchange": self.exchange}
        run(
            query[:tokens],
            k_pages,
            v_pages,
            output[:tokens],
            schedule,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            alibi_sqrt=self.use_alibi_sqrt,
            spans=spans,
            clamp_spans=spans is not None and getattr(layer, "mm_prefix_clamp_sliding_window", False),
            q_scale=layer._q_scale if query.dtype.itemsize == 1 else None,
            k_scale=k_scale,
            v_scale=v_scale,
            out_scale=output_scale,
            **over_ranks,
        )
        return output

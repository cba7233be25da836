"""One schedule per step and layer shape, computed once and shared by every layer of that shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from numa_attention.schedule import Planner, Schedule, StepBatch
from numa_attention.shapes import LayerShape
from vllm_numa_backend import NAME, settings
from vllm_numa_backend.compat import backend_names_kv_shape

logger = init_logger("vllm.numa_swizzle")
_announced: set[tuple[str, LayerShape]] = set()


@dataclass
class NumaSwizzleMetadata(AttentionMetadata):
    """One step of one KV cache group.

        |---- cached earlier ----|-- query (new tokens) --|
        |------------------- sequence --------------------|

    Decodes come first. `schedules` has one entry per kind of layer, keyed by the layer's `schedule_key`.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    schedules: dict[tuple[int, int], Schedule]


class NumaSwizzleMetadataBuilder(AttentionMetadataBuilder[NumaSwizzleMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise NotImplementedError(f"{NAME} does not support reference sliding window attention (R-SWA).")
        # a speculative step, a few tokens a request, is decode
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.planners = self._make_planners()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Only the compiled Triton kernels can be captured."""
        if settings.current().kernels in ("torch", "interpret"):
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def _make_planners(self) -> dict[tuple[int, int], Planner]:
        """One planner per distinct layer shape of the group: layers may differ in window and query heads."""
        layers = self.vllm_config.compilation_config.static_forward_context
        chosen = settings.current()
        max_requests, max_tokens = self._largest_batch()
        planners: dict[tuple[int, int], Planner] = {}
        features = features_of(layers[name].impl for name in self.layer_names)
        for layer in (layers[name] for name in self.layer_names):
            if layer.impl.schedule_key in planners:
                continue
            shape = layer_shape(layer, self.kv_cache_spec, self.vllm_config.model_config.dtype)
            shape.check()
            planners[layer.impl.schedule_key] = Planner(
                shape,
                self.device,
                max_requests=max_requests,
                max_tokens=max_tokens,
                max_decode_query=self.reorder_batch_threshold,
                kernels=chosen.kernels,
                mapping=chosen.mapping,
                aiter=chosen.aiter,
                features=features,
            )
        return planners

    def _largest_batch(self) -> tuple[int, int]:
        """The most requests and query tokens in one step, padding for graphs and drafts included."""
        scheduler = self.vllm_config.scheduler_config
        largest_graph = max(self.vllm_config.compilation_config.cudagraph_capture_sizes or [0])
        max_requests = max(scheduler.max_num_seqs, largest_graph)
        # parallel drafting appends up to one token fewer than a decode query to each request
        drafts = max_requests * (self.reorder_batch_threshold - 1)
        return max_requests, max(scheduler.max_num_batched_tokens, largest_graph) + drafts

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> NumaSwizzleMetadata:
        """The step's metadata; reads no device tensor. A common prefix is read through the block table."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                f"{NAME} does not support non-causal attention, which this step asks for."
            )
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        batch = StepBatch(
            query_start_loc=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )
        schedules = {key: planner.plan(batch) for key, planner in self.planners.items()}
        for schedule in schedules.values():
            _announce(schedule)
        return NumaSwizzleMetadata(common.num_actual_tokens, num_decodes, num_decode_tokens, schedules)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> NumaSwizzleMetadata:
        """Capture on the shortest sequences, the new tokens alone: the graph holds for any length."""
        common_attn_metadata.seq_lens.fill_(common_attn_metadata.max_query_len)
        return self.build(0, common_attn_metadata)


def features_of(impls: Iterable[Any]) -> frozenset[str]:
    """What the calls of any of these layers have, as `aiter_adapter.why_not` names it."""
    found = set()
    for impl in impls:
        found |= {
            name
            for name, used in (
                ("sinks", impl.sinks is not None),
                ("alibi", impl.alibi_slopes is not None),
                ("soft_cap", impl.soft_cap > 0.0),
            )
            if used
        }
    return frozenset(found)


def layer_shape(layer: Any, kv_cache_spec: Any, default_dtype: torch.dtype) -> LayerShape:
    """What the kernels need to know of an attention layer whose cache has this spec."""
    impl = layer.impl
    head_dim_v = getattr(layer, "head_size_v", kv_cache_spec.head_size)
    if head_dim_v != kv_cache_spec.head_size and backend_names_kv_shape():
        raise NotImplementedError(
            f"{NAME} supports values of another head size ({head_dim_v}) than keys ({kv_cache_spec.head_size}) "
            "on vLLM 0.32 and later only."
        )
    return LayerShape(
        q_heads=impl.num_heads,
        kv_heads=kv_cache_spec.num_kv_heads,
        head_dim=kv_cache_spec.head_size,
        head_dim_v=head_dim_v,
        dtype=getattr(layer, "dtype", default_dtype),
        kv_dtype=impl.fp8_dtype or kv_cache_spec.dtype,
        page_size=kv_cache_spec.block_size,
        window=impl.window,
    )


def _announce(schedule: Schedule) -> None:
    """Log once per process what runs for a phase and a layer shape."""
    shape = schedule.shape
    for phase, part in (("decode", schedule.decode), ("prefill", schedule.prefill)):
        if part is not None and (phase, shape) not in _announced:
            _announced.add((phase, shape))
            heads = f"{shape.q_heads}/{shape.kv_heads} heads of {shape.head_dim}"
            window = "" if shape.window < 0 else f", window {shape.window}"
            logger.info("%s %s of %s%s: %s", NAME, phase, heads, window, part.variant.describe())

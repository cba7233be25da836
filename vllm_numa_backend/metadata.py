"""One schedule per step and layer shape, computed once and shared by every layer of that shape."""

from __future__ import annotations

import dataclasses
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
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from numa_attention.schedule import Planner, Schedule, StepBatch
from numa_attention.shapes import CONTIGUOUS, LayerShape
from vllm_numa_backend import NAME, peers, settings
from vllm_numa_backend.compat import backend_names_kv_shape
from vllm_numa_backend.context_parallel import shard_of
from vllm_numa_backend.remedy import another_backend

logger = init_logger("vllm.numa_swizzle")
_announced: set[tuple[str, LayerShape, str]] = set()


@dataclass
class NumaSwizzleMetadata(AttentionMetadata):
    """One step of one KV cache group.

        |---- cached earlier ----|-- query (new tokens) --|
        |------------------- sequence --------------------|

    Decodes come first. `schedules` has one entry per kind of layer, keyed by the layer's `schedule_key`.
    mm_prefix_range_tensor int32 [requests, n, 2]: first and last token of the images whose tokens see all of their
    image; models clear it, by this name, for layers that see images causally. slot_mapping: where a cross-attention
    layer writes; vLLM fills it in.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    schedules: dict[tuple[int, int], Schedule]
    mm_prefix_range_tensor: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None


class NumaSwizzleMetadataBuilder(AttentionMetadataBuilder[NumaSwizzleMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise NotImplementedError(
                f"{NAME} does not support reference sliding window attention (R-SWA): {another_backend()}."
            )
        # a speculative step, a few tokens a request, is decode
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        self.planners = self._make_planners()
        # for steps that only the general kernels take, once there is one
        self._general_planners: dict[tuple[int, int], Planner] | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Only the compiled Triton kernels can be captured, and only decode has a grid that stays."""
        if settings.current().kernels in ("torch", "interpret") or isinstance(
            kv_cache_spec, EncoderOnlyAttentionSpec
        ):
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def _make_planners(self, general: bool = False) -> dict[tuple[int, int], Planner]:
        """One planner per distinct layer shape of the group: layers may differ in window and query heads."""
        layers = self.vllm_config.compilation_config.static_forward_context
        chosen = settings.current()
        max_requests, max_tokens = self._largest_batch()
        planners: dict[tuple[int, int], Planner] = {}
        features = features_of(layers[name].impl for name in self.layer_names)
        for layer in (layers[name] for name in self.layer_names):
            if layer.impl.schedule_key in planners:
                continue
            shape = layer_shape(layer, self.kv_cache_spec, self.vllm_config)
            if general:
                shape = dataclasses.replace(shape, general=True)
            shape.check()
            if not shape.shard.is_whole:
                peers.join(layer.impl.ranks, shape, self.device, max_tokens)
            planners[layer.impl.schedule_key] = Planner(
                shape,
                self.device,
                max_requests=max_requests,
                max_tokens=max_tokens,
                max_decode_query=self.reorder_batch_threshold,
                kernels=chosen.kernels,
                mapping=chosen.mapping,
                aiter=chosen.aiter,
                placement=chosen.placement,
                clusters=chosen.clusters and shape.page_size != CONTIGUOUS,
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
        """The step's metadata; reads no device tensor. A common prefix is read through the block table.

        Raises LostRank where another rank was missed in an earlier step.
        """
        peers.check()
        common = common_attn_metadata
        spans = image_spans(common)
        planners = self.planners
        if spans is not None or not isinstance(common.causal, bool):
            self._general_planners = self._general_planners or self._make_planners(general=True)
            planners = self._general_planners
        if all(planner.shape.page_size == CONTIGUOUS for planner in planners.values()):
            batch = _encoder_batch(common)
        else:
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
                causal=common.causal,
                has_spans=spans is not None,
            )
        schedules = {key: planner.plan(batch) for key, planner in planners.items()}
        for schedule in schedules.values():
            _announce(schedule)
        return NumaSwizzleMetadata(
            common.num_actual_tokens, batch.num_decodes, batch.num_decode_tokens, schedules, spans
        )

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


def _encoder_batch(common: CommonAttentionMetadata) -> StepBatch:
    """A step of whole sequences, each of which has the keys of its own query tokens and sees them all."""
    starts = common.query_start_loc
    return StepBatch(
        query_start_loc=starts,
        query_start_loc_cpu=common.query_start_loc_cpu,
        seq_lens=starts[1:] - starts[:-1],
        block_table=starts[:-1, None],
        num_decodes=0,
        num_decode_tokens=0,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_query_len,
        causal=False,
    )


def image_spans(common: CommonAttentionMetadata) -> torch.Tensor | None:
    """int32 [requests, n, 2]: first and last token of the images that some query of its request lies in, or None.

    Decoding queries lie right of every image, so that a step of decodes alone has none. The lengths that vLLM has on
    the host are exact for prefills and upper bounds for decodes, which only moves those further right.
    """
    images = common.mm_req_doc_ranges
    if not images or not any(images.values()):
        return None
    starts = common.query_start_loc_cpu.tolist()
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    kept: list[list[tuple[int, int]]] = [[] for _ in range(common.num_reqs)]
    for request, ranges in images.items():
        if starts[request + 1] == starts[request]:
            continue
        low, high = 0, common.max_seq_len
        if lengths is not None:
            high = int(lengths[request])
            low = high - (starts[request + 1] - starts[request])
        kept[request] = [
            (first, last) for first, last in ranges if first < last and first < high and last >= low
        ]
    most = max(map(len, kept))
    if most == 0:
        return None
    # a span of one token says nothing
    padded = [row + [(0, 0)] * (most - len(row)) for row in kept]
    return torch.tensor(padded, dtype=torch.int32).to(common.query_start_loc.device, non_blocking=True)


def layer_shape(layer: Any, kv_cache_spec: Any, vllm_config: Any) -> LayerShape:
    """What the kernels need to know of an attention layer whose cache has this spec."""
    impl = layer.impl
    dtype = getattr(layer, "dtype", vllm_config.model_config.dtype)
    shard = shard_of(impl, kv_cache_spec, vllm_config)
    head_dim_v = getattr(layer, "head_size_v", kv_cache_spec.head_size)
    if head_dim_v != kv_cache_spec.head_size and backend_names_kv_shape():
        raise NotImplementedError(
            f"{NAME} supports values of another head size ({head_dim_v}) than keys ({kv_cache_spec.head_size}) "
            f"on vLLM 0.32 and later only: {another_backend()}."
        )
    return LayerShape(
        # the ranks that share a cache attend with the queries of all of them
        q_heads=impl.num_heads * shard.ranks,
        kv_heads=kv_cache_spec.num_kv_heads,
        head_dim=kv_cache_spec.head_size,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kv_dtype=dtype if impl.is_encoder else impl.fp8_dtype or kv_cache_spec.dtype,
        page_size=CONTIGUOUS if impl.is_encoder else kv_cache_spec.block_size,
        window=impl.window,
        general=impl.use_alibi_sqrt or impl.supports_quant_query_input,
        shard=shard,
    )


def _announce(schedule: Schedule) -> None:
    """Log once per process which kernel runs for a phase and a layer shape."""
    shape = schedule.shape
    for phase, part in (
        ("decode", schedule.decode),
        ("prefill", schedule.prefill),
        ("extend", schedule.extend),
    ):
        if part is not None and (key := (phase, shape, part.variant.name)) not in _announced:
            _announced.add(key)
            heads = f"{shape.q_heads}/{shape.kv_heads} heads of {shape.head_dim}"
            window = "" if shape.window < 0 else f", window {shape.window}"
            held = "" if shape.shard.is_whole else f", {shape.shard}"
            logger.info("%s %s of %s%s%s: %s", NAME, phase, heads, window, held, part.variant.describe())

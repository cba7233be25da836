"""Decode context parallelism (DCP): the KV cache of a layer is sharded over ranks along the sequence.

Tensor parallelism over more ranks than KV heads gives several ranks the same KV head, each with query heads of its own.
Under DCP those ranks keep a part of the head's cache each. `attend_over_ranks` then gathers their queries, attends with
all of them over the rank's own part, the step's new tokens included, and merges what the ranks found.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec

from numa_attention import across_devices
from numa_attention.merge import EXCHANGES, fold_sinks, merge_across_ranks
from numa_attention.ranks import Ranks
from numa_attention.runner import attend
from numa_attention.schedule import Schedule
from numa_attention.sharding import WHOLE, Shard
from vllm_numa_backend import NAME, peers, settings

WITHOUT = "give --decode-context-parallel-size 1"


class VllmRanks(Ranks):
    """The ranks of vLLM's DCP group, with the collectives of vLLM's communicator, which graphs can capture."""

    def __init__(self) -> None:
        self._coordinator = get_dcp_group()
        super().__init__(self._coordinator.device_group)

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._coordinator.all_gather(x[None], dim=0)

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._coordinator.reduce_scatter(x, dim=0)[0]


def exchange() -> str:
    """The collectives that merge what ranks found: of NUMA_SWIZZLE_EXCHANGE, or of vLLM's --dcp-comm-backend."""
    chosen = settings.current().exchange
    if chosen in EXCHANGES:
        return chosen
    config = get_current_vllm_config_or_none()
    return (config and config.parallel_config.dcp_comm_backend) or "ag_rs"


def shard_of(impl: Any, kv_cache_spec: Any, vllm_config: Any) -> Shard:
    """The part of every sequence that this rank's cache of a layer holds.

    Raises NotImplementedError for a sharded cache of another kind than plain full attention.
    """
    # caches of draft models may be kept whole on every rank
    if impl.ranks is None or not getattr(kv_cache_spec, "dcp_sharded", True):
        return WHOLE
    chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
    if type(kv_cache_spec) is not FullAttentionSpec or chunk is not None:
        kind = f"attention in chunks of {chunk} tokens" if chunk else f"a {type(kv_cache_spec).__name__}"
        raise NotImplementedError(f"{NAME} does not shard the cache of {kind} over ranks: {WITHOUT}.")
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    return Shard(impl.dcp_world_size, impl.dcp_rank, interleave)


def fault_of_layer(impl: Any, is_cross_attention: bool) -> str | None:
    """Why a layer cannot have its cache sharded over the ranks of the DCP group, with what to do, or None."""
    if is_cross_attention:
        return f"{NAME} does not shard the cache of cross-attention over ranks: {WITHOUT}."
    if impl.num_kv_heads > 1:
        return (
            f"{NAME} shards the cache of one KV head a rank, and this layer has {impl.num_kv_heads}: give a "
            f"--tensor-parallel-size above the number of KV heads, or {WITHOUT}."
        )
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return None
    ranks, heads = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    copies = max(ranks // heads, 1)
    if copies % impl.dcp_world_size:
        sizes = ", ".join(str(size) for size in range(1, copies + 1) if copies % size == 0)
        return (
            f"{ranks} ranks hold {copies} copies of each of {heads} KV heads, and groups of {impl.dcp_world_size} of "
            f"them would mix different heads: give one of {sizes} as --decode-context-parallel-size."
        )
    if impl.window >= 0 and not config.scheduler_config.disable_hybrid_kv_cache_manager:
        return (
            "vLLM shards the cache of sliding-window layers over ranks only where it keeps whole sequences: give "
            f"--disable-hybrid-kv-cache-manager, or {WITHOUT}."
        )
    return None


def attend_over_ranks(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    output: torch.Tensor,
    schedule: Schedule,
    ranks: Ranks,
    *,
    exchange: str,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Attention of this rank's query heads over whole sequences, of which k_pages, v_pages hold this rank's part.

    query [tokens, heads of this rank, head_dim], output likewise (head_dim_v); sinks of these heads. schedule: of a
    shape with the query heads of all ranks. exchange: of `merge.EXCHANGES`, where no kernel merges (see
    `peers`). options: the others of `runner.attend`, alibi_slopes for the heads of all ranks. Rows past the schedule's
    tokens become 0. Every rank makes the same call.

    Raises LostRank where another rank does not.
    """
    shape = schedule.shape
    if q_scale is not None:
        # each rank may have a scale of its own
        query = (query.float() * q_scale).to(shape.dtype)
    peer = peers.workspaces_for(shape, len(query))
    if peer is None:
        gathered = ranks.all_gather(query).transpose(0, 1).flatten(1, 2)
    else:
        gathered = query.new_empty(len(query), shape.q_heads, shape.head_dim)
        across_devices.gather(query, peer.queries, gathered)
    part = query.new_empty(*gathered.shape[:2], shape.head_dim_v, dtype=torch.float32)
    # rows that no request owns are written by nobody, and weigh nothing
    lse = query.new_full(gathered.shape[:2], -torch.inf, dtype=torch.float32)
    attend(gathered, k_pages, v_pages, part, schedule, lse=lse, **options)
    if peer is None:
        merged, lse = merge_across_ranks(part, lse, ranks, exchange)
    elif sinks is None and out_scale is None:
        across_devices.merge(part, lse, peer.partials, output)
        return
    else:
        merged = torch.empty_like(output, dtype=torch.float32)
        merged_lse = lse.new_empty(merged.shape[:2])
        across_devices.merge(part, lse, peer.partials, merged, merged_lse)
        lse = merged_lse
    if sinks is not None:
        merged, _ = fold_sinks(merged, lse, sinks)
    if out_scale is not None:
        largest = torch.finfo(output.dtype).max
        merged = (merged / out_scale).clamp(-largest, largest)
    output.copy_(merged)


def rehearse(query: torch.Tensor, output: torch.Tensor, ranks: Ranks, *, exchange: str) -> None:
    """Take the memory that `attend_over_ranks` takes beside the cache, as vLLM leaves the rest of the GPU to the cache.

    query, output: see there; they are left as they are. Every rank makes the same call. Raises LostRank.
    """
    if query.dtype.itemsize == 1:
        query = query.bfloat16()  # float8 queries do not travel as they are
    gathered = ranks.all_gather(query).transpose(0, 1).flatten(1, 2)
    part = query.new_zeros(*gathered.shape[:2], output.shape[-1], dtype=torch.float32)
    merge_across_ranks(part, part[..., 0].contiguous(), ranks, exchange)

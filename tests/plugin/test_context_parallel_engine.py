"""A whole engine whose two ranks share every sequence gives the tokens of an engine with one rank.

vLLM's CPU build computes no slots of a sharded cache ("Context Parallelism is not supported on CPU"), so the test puts
that one function in its place; all else is vLLM's own.
"""

from __future__ import annotations

import pytest

from plugin.engine_runs import BY_OPTION, ONE, UNBOUND, make_generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# at the top of the engine's script, which each of its processes imports
SLOTS = """
import torch
from vllm.v1.worker.block_table import BlockTable

def compute_slot_mapping(self, num_reqs, query_start_loc, positions):
    from numa_attention.sharding import Shard
    shard = Shard(self.dcp_world_size, self.dcp_rank, self.cp_kv_cache_interleave_size)
    starts = query_start_loc[: num_reqs + 1].long()
    position = positions[: starts[-1]].long()
    request = torch.repeat_interleave(torch.arange(num_reqs), starts.diff())
    local = shard.count(position)
    page = self.block_table.gpu[request, position // (self.block_size * shard.ranks)].long()
    slot = page * self.block_size + local % self.block_size
    self.slot_mapping.gpu.fill_(-1)
    self.slot_mapping.gpu[: starts[-1]] = torch.where(shard.position(local) == position, slot, -1)

BlockTable.compute_slot_mapping = compute_slot_mapping
"""
MODEL = dict(num_key_value_heads=1, num_attention_heads=8, hidden_size=256)
PARALLEL = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 32}


def test_two_ranks_give_the_tokens_of_one(tmp_path):
    """Chunked prefill, prefix caching and several tokens a decode step, in runs of 16 tokens."""
    generate = make_generate(tmp_path, SLOTS, **MODEL)
    expected, _ = generate(ONE, attention_backend="CPU_ATTN")
    assert expected[-1] != expected[-2], "these weights cannot tell right from wrong"
    tokens, log = generate(
        UNBOUND,
        cp_kv_cache_interleave_size=16,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
        **PARALLEL,
        **BY_OPTION,
    )
    for phase in ("prefill", "decode"):
        for rank in (0, 1):
            assert f"NUMA_SWIZZLE {phase} of 8/1 heads of 32, rank {rank} of 2, runs of 16" in log
    assert tokens == expected

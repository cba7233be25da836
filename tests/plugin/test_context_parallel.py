"""Decode context parallelism: two ranks in vLLM's own groups give attention over whole sequences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config

from numa_attention.sharding import WHOLE, Shard
from plugin.harness import engine_args, write_model
from vllm_numa_backend import settings
from vllm_numa_backend.context_parallel import exchange, fault_of_layer, shard_of


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two ranks found, by configuration; their processes start once."""
    folder = tmp_path_factory.mktemp("ranks")
    model = write_model(folder / "tiny", num_key_value_heads=1)
    (folder / "store").mkdir()
    answer = folder / "found.json"
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "plugin.rank_steps", model, folder / "store", answer],
        env=os.environ
        | {
            "NUMA_SWIZZLE_KERNELS": "torch",
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(answer.read_text())
    for result in found:
        assert isinstance(result, dict), result
    return found


@pytest.mark.parametrize(
    "name",
    [
        "interleave 1", "interleave 16", "a2a", "soft cap", "sinks", "alibi", "float8 cache", "speculation",
        "images and causality by request", "peers", "peers and sinks",
        "peers out of reach",
    ],
)  # fmt: skip
def test_ranks_give_attention_over_whole_sequences(results, name):
    for rank, found in enumerate(results):
        assert len(found[name]) >= 4
        assert max(found[name]) < 1e-5, (rank, found[name])


def test_a_rank_that_was_missed_ends_the_next_step(results):
    for rank, found in enumerate(results):
        assert f"rank {1 - rank} did not deliver launch 7 within 60 s" in found["lost rank"]


def test_the_memory_of_a_step_is_measured(results):
    """vLLM measures with no step: queries, LSEs and outputs of 5 tokens travel all the same."""
    for found in results:
        assert found["profiling run"] == [5 * 3 * 32, 5 * 6, 5 * 6 * 32]


def test_output_in_float8_and_rows_of_padding(results):
    for found in results:
        assert found["output in float8"] == [0.0]  # of the row that no request owns


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cross-attention", "not shard the cache of cross-attention over ranks: give --decode-context-parallel"),
        ("several KV heads", "this layer has 3: give a --tensor-parallel-size above the number of KV heads"),
        ("windows with caches of their own", "give --disable-hybrid-kv-cache-manager, or give --decode-context"),
    ],
)  # fmt: skip
def test_layers_that_are_refused(results, name, message):
    for found in results:
        assert message in found[name]


def test_groups_that_would_mix_kv_heads_are_refused(tmp_path):
    """vLLM takes 6 ranks, 2 KV heads and groups of 2: the second group would have a rank of either head."""
    model = write_model(tmp_path, num_key_value_heads=2, num_attention_heads=12, hidden_size=384)
    config = engine_args(model, tensor_parallel_size=6, decode_context_parallel_size=2).create_engine_config()
    with set_current_vllm_config(config):
        fault = fault_of_layer(SimpleNamespace(num_kv_heads=1, dcp_world_size=2, window=-1), False)
        assert (
            fault is not None
            and "6 ranks hold 3 copies of each of 2 KV heads, and groups of 2 of them would mix" in fault
        )
        assert "give one of 1, 3 as --decode-context-parallel-size" in fault
        assert fault_of_layer(SimpleNamespace(num_kv_heads=1, dcp_world_size=3, window=-1), False) is None


def test_caches_that_are_not_sharded():
    """Caches of other kinds are refused; one that vLLM keeps whole on every rank is whole."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    sizes = dict(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    impl = SimpleNamespace(ranks=object(), dcp_world_size=2, dcp_rank=1)
    config = SimpleNamespace(parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=4))
    assert shard_of(impl, FullAttentionSpec(**sizes), config) == Shard(2, 1, 4)
    assert shard_of(SimpleNamespace(ranks=None), FullAttentionSpec(**sizes), config) is WHOLE
    with pytest.raises(
        NotImplementedError, match="attention in chunks of 64 tokens over ranks: give --decode"
    ):
        shard_of(impl, ChunkedLocalAttentionSpec(attention_chunk_size=64, **sizes), config)
    with pytest.raises(NotImplementedError, match="a SlidingWindowSpec over ranks"):
        shard_of(impl, SlidingWindowSpec(sliding_window=8, **sizes), config)
    whole = FullAttentionSpec(**sizes)
    if hasattr(whole, "dcp_sharded"):
        assert shard_of(impl, FullAttentionSpec(dcp_sharded=False, **sizes), config) is WHOLE


def test_the_setting_wins_over_the_option(monkeypatch, tmp_path):
    options = dict(tensor_parallel_size=2, decode_context_parallel_size=2, dcp_comm_backend="a2a")
    config = engine_args(write_model(tmp_path, num_key_value_heads=1), **options).create_engine_config()
    with set_current_vllm_config(config):
        assert exchange() == "a2a"
        monkeypatch.setenv("NUMA_SWIZZLE_EXCHANGE", "ag_rs")
        settings.current.cache_clear()
        assert exchange() == "ag_rs"

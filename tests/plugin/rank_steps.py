"""What the two ranks of a context-parallel engine do: real layers, real metadata, vLLM's own groups over gloo.

`python -m plugin.rank_steps MODEL FOLDER ANSWER` runs both ranks and writes what they found to ANSWER as JSON: one
process imports vLLM for both of them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from numa_attention.ranks import Ranks
from numa_attention.sharding import Shard
from plugin.harness import Rig, engine_args, error, rig
from tests.rank_processes import run_ranks

HEADS_A_RANK = 3


@contextmanager
def vllm_groups(ranks: Ranks, config) -> Iterator[None]:
    """vLLM's process groups for tensor parallelism and context parallelism of all these ranks."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    os.environ["VLLM_DIST_IDENT"] = f"ranks-{os.getppid()}"
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            ranks.size, ranks.rank, "env://", ranks.rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks.size, decode_context_model_parallel_size=ranks.size
        )
    yield


@contextmanager
def rank_rig(model: Path, ranks: Ranks, interleave: int, **options) -> Iterator[Rig]:
    """The rig of one rank: its heads, and its part of the cache."""
    parallel = dict(
        tensor_parallel_size=ranks.size,
        decode_context_parallel_size=ranks.size,
        cp_kv_cache_interleave_size=interleave,
        disable_hybrid_kv_cache_manager=True,
    )
    shard = Shard(ranks.size, ranks.rank, interleave)
    with rig(model, heads=HEADS_A_RANK, kv_heads=1, shard=shard, **parallel, **options) as r:
        assert all(planner.shape.shard == shard for planner in r.builder.planners.values())
        assert all(
            planner.shape.q_heads == HEADS_A_RANK * ranks.size for planner in r.builder.planners.values()
        )
        yield r


def steps(r: Rig) -> list[float]:
    """Errors of every layer over prompts, decodes, chunks over prefixes, prefix-cached pages and padding."""
    a, b, c = r.new_request(), r.new_request(), r.new_request()
    errors = []
    for requests, query_lens, padding in (
        ([a, b], [17, 63], 0),
        ([a, b], [1, 1], 2),
        ([a, b, c], [1, 30, 1], 0),  # a whole prompt of one token: most ranks hold none of it
        ([c, b, a], [1, 1, 1], 0),
        ([a, c], [2, 70], 0),
    ):
        errors += [error(out, expected) for out, expected in r.step(requests, query_lens, padding)]
    return errors


def all_steps(ranks: Ranks, model: Path, pieces: list[list[torch.Tensor]]) -> dict[str, list[float] | str]:
    """Errors by name of the configuration; what it says where a configuration is refused."""
    options = dict(tensor_parallel_size=ranks.size, decode_context_parallel_size=ranks.size)
    config = engine_args(model, **options).create_engine_config()
    cases: dict[str, tuple[int, dict]] = {
        "interleave 1": (1, {}),
        "interleave 16": (16, {}),
        "a2a": (1, {"dcp_comm_backend": "a2a"}),
        "soft cap": (4, {"layer_options": {"logits_soft_cap": 5.0}}),
        "sinks": (1, {"layer_options": {"sinks": torch.tensor([-1.0, 0.5, 2.0]) + ranks.rank}}),
        "alibi": (2, {"layer_options": {"alibi_slopes": [2.0 ** -(i + 3 * ranks.rank) for i in range(3)]}}),
        "float8 cache": (1, {"kv_cache_dtype": "fp8_e5m2"}),
        "speculation": (
            4,
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
        ),
    }
    found: dict[str, list[float] | str] = {}
    with vllm_groups(ranks, config):
        for name, (interleave, case) in cases.items():
            with rank_rig(model, ranks, interleave, **case) as r:
                assert not name.startswith("speculation") or r.builder.reorder_batch_threshold == 4
                assert r.layers[0].impl.exchange == case.get("dcp_comm_backend", "ag_rs")
                found[name] = steps(r)
        found["peers"], found["lost rank"] = _merged_in_a_kernel(ranks, model, pieces[:2])
        sinks = {"layer_options": {"sinks": torch.tensor([-1.0, 0.5, 2.0]) + ranks.rank}}
        found["peers and sinks"], _ = _merged_in_a_kernel(ranks, model, pieces[2:], **sinks)
        found["peers out of reach"] = _peers_out_of_reach(ranks, model)
        found["images and causality by request"] = _spans_and_causality(ranks, model)
        found["output in float8"] = _float8_output(ranks, model)
        found["profiling run"] = _profiling_run(ranks, model)
        found |= _refusals(ranks, model)
    return found


@contextmanager
def _peers_asked_for() -> Iterator[None]:
    from vllm_numa_backend import peers, settings

    with (
        mock.patch.dict(os.environ, NUMA_SWIZZLE_EXCHANGE="peers"),
        mock.patch.dict(peers._workspaces, clear=True),
    ):
        settings.current.cache_clear()
        yield
    settings.current.cache_clear()


def _merged_in_a_kernel(
    ranks: Ranks, model: Path, pieces: list[list[torch.Tensor]], **options
) -> tuple[list[float], str]:
    """Errors where small steps are merged in a kernel, over memory of the host that stands for the GPUs'; and what the
    next step says when a rank was missed."""
    from numa_attention import across_devices, peer_memory
    from numa_attention.ranks import LostRank
    from vllm_numa_backend import peers

    shared = [
        peer_memory.PeerMemory(own[ranks.rank], tuple(piece.data_ptr() for piece in own), ranks.rank)
        for own in pieces
    ]
    with (
        _peers_asked_for(),
        mock.patch.object(peers, "MOST_TOKENS", 4),
        mock.patch.object(peer_memory, "allocate", side_effect=shared),
        rank_rig(model, ranks, 1, **options) as r,
    ):
        errors = steps(r)
        (both,) = peers._workspaces.values()
        tried = ranks.size + across_devices.BUFFERS
        # two of the steps are small, in both layers
        launches = [int(workspace.state[across_devices.STATE_EPOCHS]) for workspace in both]
        assert launches == [tried + 4] * 2, launches
        with mock.patch.object(
            across_devices, "merge", side_effect=AssertionError("a large step in the kernel")
        ):
            r.step([r.new_request()], [70])
        both.partials._missing[1 - ranks.rank] = 7
        try:
            r.step([r.new_request()], [1])
        except LostRank as error:
            return errors, str(error)
        raise AssertionError("a lost rank was not noticed")


def _peers_out_of_reach(ranks: Ranks, model: Path) -> list[float]:
    from vllm_numa_backend import peers

    with _peers_asked_for(), rank_rig(model, ranks, 1) as r:
        assert list(peers._workspaces.values()) == [None] and r.layers[0].impl.exchange == "ag_rs"
        return steps(r)


def _spans_and_causality(ranks: Ranks, model: Path) -> list[float]:
    with rank_rig(model, ranks, 2) as r:
        a, b = r.new_request(), r.new_request()
        r.images = {0: [(3, 12)], 1: [(30, 45)]}
        errors = [error(*result) for result in r.step([a, b], [20, 63])]
        r.images, r.causal = None, torch.tensor([True, False])
        return errors + [error(*result) for result in r.step([a, b], [9, 5])]


def _float8_output(ranks: Ranks, model: Path) -> list[float]:
    """A float8 output is the float32 one over its scale, rounded; rows past the step are 0."""
    with rank_rig(model, ranks, 1, windows=(None,)) as r:
        (layer,) = r.layers
        request = r.new_request()
        r.step([request], [40])
        common = r.common([request], [1], padding=1)
        metadata = r.builder.build(0, common)
        query, key = r.random(2, HEADS_A_RANK, layer.head_size), r.random(2, 1, layer.head_size)
        layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, common.slot_mapping)
        plain = torch.full_like(query, math.nan)
        layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, plain)
        out = torch.empty_like(query, dtype=torch.float8_e4m3fn)
        layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, out, torch.tensor([0.01]))
        assert torch.equal(out.float(), (plain / 0.01).clamp(-448, 448).to(out.dtype).float())
        return [float(plain[1:].abs().max())]


def _profiling_run(ranks: Ranks, model: Path) -> list[int]:
    """Without a step the output is 0, and the memory of one has been taken: the sizes that were gathered and merged."""
    with rank_rig(model, ranks, 1, windows=(None,)) as r:
        (layer,) = r.layers
        taken: list[int] = []
        for name in ("all_gather", "reduce_scatter"):
            collective = getattr(layer.impl.ranks, name)
            setattr(layer.impl.ranks, name, lambda x, run=collective: taken.append(x.numel()) or run(x))
        query = r.random(5, HEADS_A_RANK, layer.head_size)
        out = torch.full_like(query, math.nan)
        layer.impl.forward(layer, query, None, None, layer.kv_cache, None, out)
        assert torch.equal(out, torch.zeros_like(out))
        return taken


def _refusals(ranks: Ranks, model: Path) -> dict[str, str]:
    from vllm.v1.attention.backend import AttentionType

    said = {}
    for name, options in {
        "cross-attention": {"layer_options": {"attn_type": AttentionType.ENCODER_DECODER}},
        "several KV heads": {"kv_heads": 3},
        "windows with caches of their own": {"windows": (None, 20)},
    }.items():
        try:
            with rig(
                model,
                **dict(
                    windows=(None,), heads=HEADS_A_RANK, kv_heads=1, shard=Shard(ranks.size, ranks.rank),
                    tensor_parallel_size=ranks.size, decode_context_parallel_size=ranks.size,
                ) | options,
            ):  # fmt: skip
                said[name] = "taken"
        except NotImplementedError as refusal:
            said[name] = str(refusal)
    return said


def main() -> None:
    model, folder, answer = map(Path, sys.argv[1:])
    # one rank's rig imports what both need
    with rig(model, windows=(None,), tensor_parallel_size=2):
        pass
    # of two workspaces in each of two configurations, for each rank
    pieces = [[torch.zeros(1 << 20, dtype=torch.uint8).share_memory_() for _ in range(2)] for _ in range(4)]
    found = run_ranks(all_steps, 2, folder, model, pieces, fork=True)
    answer.write_text(json.dumps([each if isinstance(each, dict) else repr(each) for each in found]))


if __name__ == "__main__":
    main()

"""Planning tensor and context parallelism from a config.json, and choosing for a layer."""

import json
import time
from pathlib import Path

import pytest

from numa_attention.machine import ModelError
from numa_attention.machine.machines import H200, MI300X, machine
from numa_attention.machine.plan import make_plan, read_config, tokens

ROOT = Path(__file__).resolve().parents[2]
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.fixture
def config(tmp_path):
    def write(base=LLAMA_70B, **changes):
        values = {key: value for key, value in (base | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path / "config.json"

    return write


def test_llama_70b(config):
    shape = read_config(config())
    assert shape.weights_bytes == pytest.approx(141e9, rel=0.01)
    plan = make_plan(shape, MI300X, 8, tokens("1M"))
    assert plan.fits and plan.flags == "--tensor-parallel-size 8"
    assert plan.best.kv_bytes == 40 * 2**30
    assert any("no copies of KV" in reason for reason in plan.reasons)
    # what it calls the longest context fits, one token more does not
    longest = plan.best.longest_context
    assert make_plan(shape, MI300X, 8, longest).fits
    assert not make_plan(shape, MI300X, 8, longest + 1).fits


def test_the_placement_that_wins(config):
    plan = make_plan(read_config(config()), MI300X, 8, tokens("1M"))
    # sharded on both axes: a domain holds a 64th, and only softmax states move
    assert plan.placement == 6
    assert plan.placements_fit == [False, False, False, True, True, True]
    assert make_plan(read_config(config()), MI300X, 8, tokens("100M")).placement is None


def test_context_parallelism_where_kv_heads_would_be_copied(config):
    shape = read_config(config(num_key_value_heads=2))
    plan = make_plan(shape, H200, 8, tokens("4M"))
    sharded = next(each for each in plan.options if each.context_parallel == 4)
    assert sharded.fits and sharded.kv_copies == 1
    assert plan.options[0].kv_copies == 4
    assert sharded.kv_bytes * 4 == plan.options[0].kv_bytes
    assert plan.fits and not plan.best.obstacle and plan.best.context_parallel == 4
    assert plan.flags == "--tensor-parallel-size 8 --decode-context-parallel-size 4"
    assert any("context parallelism 4 would hold 1" in reason for reason in plan.reasons)
    # where everything fits easily, sharding the context is not worth its merges
    assert any("memory that is not needed" in reason for reason in make_plan(shape, H200, 8, 1024).reasons)


def test_only_what_vllm_takes(config):
    # 12 query heads a KV head do not divide over 8 GPUs; 16 GPUs for 8 KV heads take context parallelism 2, no more
    few = make_plan(
        read_config(config(num_attention_heads=24, num_key_value_heads=2, head_dim=128)),
        H200,
        24,
        tokens("4M"),
    )
    assert [each.context_parallel for each in few.options if each.possible] == [1, 2, 3, 4, 6, 12]
    many = make_plan(read_config(config()), H200, 16, tokens("8M"))
    assert [each.context_parallel for each in many.options if each.possible] == [1, 2]
    refused = [each.obstacle for each in many.options if not each.possible]
    assert refused == ["vLLM refuses it: 16 GPUs for 8 KV heads take at most context parallelism 2"] * 3
    filled = make_plan(read_config(config()), H200, 8, tokens("8M"))
    assert all("more GPUs than the 8 KV heads" in each.obstacle for each in filled.options[1:])
    with pytest.raises(ModelError, match="6 KV heads and 4 GPUs do not divide one another"):
        make_plan(
            read_config(config(num_attention_heads=24, num_key_value_heads=6, head_dim=128)), H200, 4, 1024
        )


def test_splits_that_only_the_backend_refuses(config):
    """Groups of two of three copies would have a GPU of either KV head: vLLM does not look."""
    shape = read_config(config(num_attention_heads=24, num_key_value_heads=2, head_dim=128))
    plan = make_plan(shape, H200, 6, tokens("1M"))
    by_size = {each.context_parallel: each for each in plan.options}
    assert by_size[2].possible and "different KV heads" in by_size[2].obstacle
    assert not by_size[3].obstacle and plan.best.context_parallel != 2


def test_windows_are_kept_whole_where_the_context_is_sharded(config):
    kinds = ["sliding_attention", "full_attention"] * 40
    changes = dict(layer_types=kinds, sliding_window=4096, num_key_value_heads=2)
    plan = make_plan(read_config(config(**changes)), H200, 8, tokens("8M"))
    by_size = {each.context_parallel: each for each in plan.options}
    token = 2 * 128 * 2
    assert by_size[1].kv_bytes == token * 40 * (2**23 + 4096)
    assert by_size[4].kv_bytes == token * 80 * 2**23 / 4
    assert plan.best.context_parallel == 4
    assert plan.flags.endswith("--decode-context-parallel-size 4 --disable-hybrid-kv-cache-manager")
    alone = make_plan(read_config(config(sliding_window=4096, num_key_value_heads=2)), H200, 8, 8192)
    assert all("sliding windows alone" in each.obstacle for each in alone.options[1:3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 320}, "head_dim 320 is above 256"),
        ({"head_dim": 36}, "head_dim 36 is not"),
        (DEEPSEEK_V3, "MLA"),
    ],
    ids=["too-large", "odd", "latent"],
)
def test_models_that_the_backend_does_not_serve(config, changes, words):
    plan = make_plan(read_config(config(**changes)), H200, 8, 4096)
    assert plan.fits and words in plan.best.obstacle
    assert words in plan.reasons[0] and "vLLM takes another" in plan.reasons[0]


def test_weights_that_do_not_fit(config):
    plan = make_plan(read_config(config()), H200, 1, 4096)
    assert any("16.2 GB too many" in reason for reason in plan.reasons), plan.reasons


def test_latent_attention(config):
    shape = read_config(config(DEEPSEEK_V3))
    assert shape.weights_bytes == pytest.approx(671e9, rel=0.02)
    assert shape.kv_elements == 576
    plan = make_plan(shape, H200, 8, tokens("128k"))
    assert plan.best.kv_bytes == 576 * 2 * 61 * 2**17 / plan.best.context_parallel


def test_windows_stop_growing(config):
    kinds = ["sliding_attention", "full_attention"] * 40
    shape = read_config(config(layer_types=kinds, sliding_window=4096))
    token = 2 * 8 * 128 * 2 / 8
    plan = make_plan(shape, MI300X, 8, tokens("1M"))
    assert plan.best.kv_bytes == token * 40 * (2**20 + 4096)


def test_fp8_cache_halves_it(config):
    shape = read_config(config())
    half = make_plan(shape, MI300X, 8, tokens("1M"), kv_dtype="fp8")
    assert half.best.kv_bytes == 20 * 2**30


def test_nested_config_and_folder(config, tmp_path):
    path = config({"model_type": "vision", "text_config": LLAMA_70B, "torch_dtype": "bfloat16"})
    assert read_config(path.parent).kv_heads == 8


def test_ten_million_tokens_in_no_time(config):
    started = time.process_time()
    plan = make_plan(read_config(config()), machine("gfx942"), 8, tokens("10M"))
    assert time.process_time() - started < 0.5
    assert not plan.fits and any("longest context" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"num_key_value_heads": 7}, "no multiple of num_key_value_heads 7"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"torch_dtype": "int3"}, "int3"),
    ],
)
def test_bad_configs(config, changes, words):
    with pytest.raises(ModelError, match=words) as error:
        read_config(config(**changes))
    assert "\n" not in str(error.value)


def test_other_bad_input(config, tmp_path):
    shape = read_config(config())
    with pytest.raises(ModelError, match="do not divide over 7 GPUs"):
        make_plan(shape, MI300X, 7, 1024)
    with pytest.raises(ModelError, match="gpus is 0"):
        make_plan(shape, MI300X, 0, 1024)
    with pytest.raises(ModelError, match="2,147,483,647"):
        tokens("99999999999999999999M")
    with pytest.raises(ModelError, match="MI9000"):
        machine("MI9000")
    with pytest.raises(ModelError, match="no number of tokens"):
        tokens("plenty")
    with pytest.raises(ModelError, match="there is no"):
        read_config(tmp_path / "elsewhere" / "config.json")


def test_numbers_of_tokens():
    assert [tokens(word) for word in ("131072", "128k", "1M", "10m", "0.5M")] == [
        131072,
        131072,
        1 << 20,
        10 << 20,
        1 << 19,
    ]

"""A whole engine on a tiny Llama with random weights: every way to start it gives CPU_ATTN's tokens."""

from __future__ import annotations

import pytest

from plugin.engine_runs import BY_OPTION, BY_VARIABLE, MANY, ONE, UNBOUND, make_generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    return make_generate(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def expected(generate):
    tokens, log = generate({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, attention_backend="CPU_ATTN")
    assert "NUMA_SWIZZLE" not in log
    assert tokens[-1] != tokens[-2], (
        "a token far back changes nothing: these weights cannot tell backends apart"
    )
    return tokens


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (ONE | BY_VARIABLE, {"fail_on_environ_validation": True}),
        (ONE, BY_OPTION),
        (MANY | BY_VARIABLE, {"fail_on_environ_validation": True}),
        (MANY, BY_OPTION),
        (UNBOUND | BY_VARIABLE, {"tensor_parallel_size": 2}),
    ],
    ids=["one-process-variable", "one-process-option", "many-variable", "many-option", "tensor-parallel-2"],
)
def test_tokens_as_with_cpu_attn(generate, expected, environment, options):
    tokens, log = generate(environment, **options)
    heads = "3/1" if "tensor_parallel_size" in options else "6/2"
    for phase in ("prefill", "decode"):
        assert f"NUMA_SWIZZLE {phase} of {heads} heads of 32" in log
    assert "Unknown vLLM environment variable" not in log
    assert tokens == expected


def test_explicit_choice_wins_over_the_variable(generate, expected):
    tokens, log = generate(MANY | BY_VARIABLE, attention_backend="CPU_ATTN")
    assert "gives way" in log and "NUMA_SWIZZLE decode" not in log
    assert tokens == expected


def test_sliding_window_model(generate):
    """The window of every layer comes from the model's configuration."""
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
    expected, _ = generate(ONE, attention_backend="CPU_ATTN", hf_overrides=mistral)
    tokens, log = generate(ONE, attention_backend="NUMA_SWIZZLE", hf_overrides=mistral)
    assert "window 19" in log
    assert tokens == expected


def test_wrong_setting_is_one_sentence(generate):
    tokens, log = generate(ONE | BY_VARIABLE | {"NUMA_SWIZZLE_KERNELS": "triton"}, fails=True)
    assert tokens is None
    assert log.rstrip().splitlines()[-1].endswith("unset it, or set it to torch or interpret.")

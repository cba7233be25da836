"""What the backend refuses, and that it says why."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType

from plugin.harness import HEAD_DIM, HEADS, KV_HEADS, rig, write_model
from vllm_numa_backend.backend import NumaSwizzleBackend
from vllm_numa_backend.impl import NumaSwizzleImpl

PLAIN = dict(
    head_size=128,
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    block_size=16,
    use_mla=False,
    has_sink=False,
    use_sparse=False,
    use_mm_prefix=False,
    use_per_head_quant_scales=False,
    device_capability=None,
    attn_type=AttentionType.DECODER,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def reasons(**changes) -> list[str]:
    unknown = set(changes) - set(inspect.signature(AttentionBackend.validate_configuration).parameters)
    if unknown:
        pytest.skip(f"this vLLM does not ask about {unknown}")
    return NumaSwizzleBackend.validate_configuration(**(PLAIN | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 8},
        {"head_size": 56},
        {"head_size": 256},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": None},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"block_size": None},
        {"block_size": 528},
        {"has_sink": True},
        {"has_sliding_window": True},
        {"use_mm_prefix": True},
        {"use_non_causal": True},
        {"attn_type": AttentionType.ENCODER},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"use_kv_connector": True},
        {"use_dcp": True},
    ],
    ids=str,
)
def test_supported(changes):
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"head_size": 100},
            "head_dim 100 (vLLM's head_size) is not a positive multiple of 8: serve it with another",
        ),
        (
            {"head_size": 512},
            "head_dim 512 (vLLM's head_size) is above 256: serve it with another backend, such as",
        ),
        ({"dtype": torch.float64}, "dtype float64 is not one of float16, bfloat16, float32"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype int8_per_token_head is not one of auto,"),
        ({"block_size": 8}, "block_size 8 is not a multiple of 16: give --block-size 16"),
        ({"use_mla": True}, "multi-head latent attention (MLA) is not supported"),
        ({"use_sparse": True}, "sparse attention is not supported"),
        ({"use_per_head_quant_scales": True}, "KV cache scales per head are not supported"),
        ({"attn_type": "sideways"}, "attention type sideways not supported"),
        ({"use_batch_invariant": True}, "VLLM_BATCH_INVARIANT is not supported"),
        ({"use_pcp": True}, "prefill context parallelism is not supported"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_adaptive_verification": True}, "adaptive verification"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused_with_the_reason(changes, reason):
    (given,) = reasons(**changes)
    assert given.startswith(reason) or reason in given
    # what to do is said, in vLLM's own options
    assert any(word in given.partition(": ")[2] for word in ("--", "unset "))


def test_every_reason_is_named():
    given = reasons(head_size=100, dtype=torch.float64, use_sparse=True)
    assert [reason.split()[0] for reason in given] == ["head_dim", "dtype", "sparse"]


def test_wrong_setting_is_a_reason(monkeypatch):
    from vllm_numa_backend import settings

    monkeypatch.setenv("NUMA_SWIZZLE_MAPPING", "diagonal")
    settings.current.cache_clear()
    (given,) = reasons()
    assert "NUMA_SWIZZLE_MAPPING=diagonal" in given


def test_vllm_raises_every_reason(model):
    with (
        pytest.raises(
            ValueError,
            match=r"head_dim 100 .* is not a positive multiple of 8: serve it with another backend",
        ),
        rig(model, head_dim=100),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY, "alibi_slopes": [0.5] * HEADS}, "ALiBi in an encoder"),
        ({"chunk_lookback": 1}, "chunk_lookback=1"),
        ({"block_m": 64}, "block_m=64"),
    ],
    ids=str,
)
def test_layer_options_that_change_the_result(options, message):
    with pytest.raises(NotImplementedError, match=message):
        NumaSwizzleImpl(HEADS, HEAD_DIM, 1.0, KV_HEADS, **options)


def test_layer_options_that_are_off():
    impl = NumaSwizzleImpl(
        HEADS,
        HEAD_DIM,
        1.0,
        KV_HEADS,
        sliding_window=1,
        use_alibi_sqrt=False,
        chunk_lookback=-1,
        later_option=None,
    )
    assert impl.window == 0


def test_wrong_number_of_sinks():
    with pytest.raises(ValueError, match="one sink per query head"):
        NumaSwizzleImpl(HEADS, HEAD_DIM, 1.0, KV_HEADS, sinks=torch.zeros(HEADS + 1))


def test_graphs_only_with_compiled_kernels(monkeypatch):
    from vllm.v1.attention.backend import AttentionCGSupport

    from vllm_numa_backend import settings

    builder = NumaSwizzleBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", "triton")
    settings.current.cache_clear()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH


def test_fp8_is_refused_where_triton_cannot_convert_it(monkeypatch):
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    ampere, hopper = DeviceCapability(8, 0), DeviceCapability(9, 0)
    refused = reasons(kv_cache_dtype="fp8", device_capability=ampere)
    assert refused == [
        "kv_cache_dtype fp8 needs compute capability 8.9, this GPU has 8.0: give --kv-cache-dtype fp8_e5m2 or auto"
    ]
    assert reasons(kv_cache_dtype="fp8", device_capability=hopper) == []
    assert reasons(kv_cache_dtype="fp8_e5m2", device_capability=ampere) == []

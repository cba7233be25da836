"""Encoders, cross attention, images, causal by request and quantised numbers: real layers against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import contextmanager

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from numa_attention import reference
from numa_attention.runner import ran
from plugin.harness import HEAD_DIM, HEADS, KV_HEADS, engine_args, error, make_cache, rig, write_model
from vllm_numa_backend import settings
from vllm_numa_backend.compat import split_kv_cache
from vllm_numa_backend.metadata import image_spans

SCALE = HEAD_DIM**-0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def special_layer(model, layer_class, spec_class, **options):
    """(config, layer, builder) of one encoder-only or cross-attention layer, set up as vLLM's model runner does."""
    args = engine_args(model, attention_backend="NUMA_SWIZZLE", **options.pop("engine", {}))
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        layer = layer_class(
            HEADS, HEAD_DIM, SCALE, num_kv_heads=KV_HEADS, cache_config=config.cache_config, prefix="layers.0.attn",
            **options,
        )  # fmt: skip
        spec = spec_class(block_size=16, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32)
        builder = layer.get_attn_backend().get_builder_cls()(
            spec, [layer.layer_name], config, torch.device("cpu")
        )
        yield config, layer, builder


def step(query_lens: Sequence[int], seq_lens: Sequence[int], **changes) -> CommonAttentionMetadata:
    """What the model runner hands over, with the block table that it makes for groups without a cache."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(query_lens), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )
    if hasattr(common, "seq_lens_cpu_upper_bound"):
        common.seq_lens_cpu_upper_bound = common.seq_lens.clone()
    return dataclasses.replace(common, **changes)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def run(config, layer, metadata, query, key, value, slots) -> torch.Tensor:
    name = layer.layer_name
    with set_forward_context({name: metadata}, config, num_tokens=len(query), slot_mapping={name: slots}):
        key, value = (x if x is None else x.flatten(1) for x in (key, value))
        return layer(query.flatten(1), key, value).view(-1, HEADS, HEAD_DIM)


@pytest.mark.parametrize("kernels", ["torch", "interpret"])
@pytest.mark.parametrize("window", [None, 8])
def test_encoder_only(model, monkeypatch, kernels, window):
    """Every token sees its whole sequence, or a window to both sides; a float8 cache is no matter without a cache."""
    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", kernels)
    settings.current.cache_clear()
    options = {"per_layer_sliding_window": window, "engine": {"kv_cache_dtype": "fp8"}}
    with special_layer(model, EncoderOnlyAttention, EncoderOnlyAttentionSpec, **options) as (
        config,
        layer,
        builder,
    ):
        lens = [17, 1, 40, 5]
        common = step(lens, lens)
        # a sequence length that claims more than its tokens, as in dummy runs, reads no other request's keys
        common.seq_lens[1] = 10**6
        metadata = builder.build(0, common)
        assert metadata.num_decodes == 0
        query, key, value = (
            random(63, HEADS, HEAD_DIM),
            random(63, KV_HEADS, HEAD_DIM),
            random(64, KV_HEADS, HEAD_DIM)[1:],
        )
        ran.clear()
        out = run(config, layer, metadata, query, key, value, common.slot_mapping)
        assert list(ran) == [{"torch": "torch-prefill", "interpret": "portable-prefill"}[kernels]]
        expected, _ = reference.attention(
            query, key[:, None], value[:, None], common.query_start_loc, torch.tensor(lens),
            common.query_start_loc[:-1, None] + torch.arange(63), scale=SCALE, causal=False,
            window=-1 if window is None else window - 1,
        )  # fmt: skip
        assert error(out, expected) < 1e-5


def test_encoder_only_is_not_captured(model):
    from vllm.v1.attention.backend import AttentionCGSupport

    with special_layer(model, EncoderOnlyAttention, EncoderOnlyAttentionSpec) as (config, _, builder):
        assert builder.get_cudagraph_support(config, builder.kv_cache_spec) is AttentionCGSupport.NEVER


def test_cross_attention(model):
    """The encoder's keys are written at a request's first step, and read at all of its steps."""
    with special_layer(model, CrossAttention, CrossAttentionSpec) as (config, layer, builder):
        layer.kv_cache = make_cache(layer, pages=16, page=16, heads_first=False)
        tables = torch.tensor([[3, 9, 10**9], [7, 10**9, 10**9], [1, 2, 14]], dtype=torch.int32)
        encoder_lens = [20, 7, 40]
        key, value = random(67, KV_HEADS, HEAD_DIM), random(68, KV_HEADS, HEAD_DIM)[1:]

        def check(requests, query_lens, seq_lens, keys):
            lengths = torch.tensor([encoder_lens[r] for r in requests], dtype=torch.int32)
            common = step(
                query_lens, seq_lens, block_table_tensor=tables[requests], encoder_seq_lens=lengths,
                encoder_seq_lens_cpu=lengths.numpy().copy(),
            )  # fmt: skip
            query = random(sum(query_lens), HEADS, HEAD_DIM)
            metadata = builder.build(0, common)
            rows = (None, None) if keys is None else (key[keys], value[keys])
            out = run(config, layer, metadata, query, *rows, common.slot_mapping)
            k_pages, v_pages = split_kv_cache(layer.kv_cache, HEAD_DIM)
            expected, _ = reference.attention(
                query,
                k_pages,
                v_pages,
                common.query_start_loc,
                lengths,
                tables[requests],
                scale=SCALE,
                causal=False,
            )
            assert error(out, expected) < 1e-5
            return metadata

        metadata = check([0, 1], [4, 9], [4, 9], slice(0, 27))
        k_pages, _ = split_kv_cache(layer.kv_cache, HEAD_DIM)
        assert torch.equal(k_pages[3, :16], key[:16]) and torch.equal(k_pages[7, :7], key[20:27])
        assert k_pages[7, 7:].isnan().all()
        # two decode, and one comes with its encoder's output
        metadata = check([0, 1, 2], [1, 1, 5], [5, 10, 5], slice(27, 67))
        assert metadata.num_decodes == 2
        check([2, 1, 0], [1, 1, 1], [6, 11, 6], None)


@pytest.mark.parametrize("clamp", [False, True])
def test_images(model, clamp):
    """Tokens of an image see the whole image; a layer that clamps hides what is left of its window."""
    with rig(model) as r:
        a, b = r.new_request(), r.new_request()
        images = {0: [(5, 30), (2, 2)], 1: [(0, 7), (40, 61)]}
        for layer in r.layers:
            layer.mm_prefix_clamp_sliding_window = clamp
        r.images = images
        for (out, expected), layer in zip(r.step([a, b], [50, 63]), r.layers, strict=True):
            assert error(out, expected) < 1e-5, layer.sliding_window
        # decodes lie right of every image: the planners of ordinary steps serve them
        for out, expected in r.step([a, b], [1, 1]):
            assert error(out, expected) < 1e-5
        # a model clears the spans for the layers that it wants causal
        common = r.common([a, b], [3, 3])
        common.mm_req_doc_ranges = {0: [(50, 53)]}
        assert r.builder.build(0, common).mm_prefix_range_tensor.tolist() == [[[50, 53]], [[0, 0]]]


def test_spans_of_a_step():
    """Only images that a query of the step may lie in; lengths of decodes are upper bounds."""
    common = step(
        [1, 20, 1], [90, 50, 8], mm_req_doc_ranges={0: [(0, 80)], 1: [(3, 20), (28, 33), (49, 60)], 2: []}
    )
    assert image_spans(common).tolist() == [[[0, 0]] * 2, [[28, 33], [49, 60]], [[0, 0]] * 2]
    assert image_spans(dataclasses.replace(common, mm_req_doc_ranges={0: [(0, 80)], 2: [(7, 7)]})) is None
    assert image_spans(dataclasses.replace(common, mm_req_doc_ranges=None)) is None


def test_causal_by_request(model):
    with rig(model, windows=(None,)) as r:
        a, b = r.new_request(), r.new_request()
        r.causal = torch.tensor([True, False])
        for out, expected in r.step([a, b], [33, 20]):
            assert error(out, expected) < 1e-5
        r.causal = False
        for out, expected in r.step([a, b], [1, 5]):
            assert error(out, expected) < 1e-5


def test_alibi_with_square_roots(model):
    options = {"alibi_slopes": [2.0**-i for i in range(HEADS)], "use_alibi_sqrt": True}
    with rig(model, layer_options=options) as r:
        a, b = r.new_request(), r.new_request()
        assert all(planner.shape.general for planner in r.builder.planners.values())
        for query_lens in ([33, 20], [1, 1]):
            for out, expected in r.step([a, b], query_lens):
                assert error(out, expected) < 1e-5


def test_float8_queries_as_vllm_quantises_them(model):
    """With a q_scale other than 1: vLLM divides the queries by it."""
    with rig(model, kv_cache_dtype="fp8", dtype=torch.bfloat16, windows=(None,)) as r:
        layer = r.layers[0]
        layer.impl.supports_quant_query_input = True
        r.builder.planners = r.builder._make_planners()
        scale = layer._q_scale.fill_(0.25)
        layer.query_quant = lambda query, given: ((query.float() / given).to(layer.impl.fp8_dtype), given)
        a, b = r.new_request(), r.new_request()
        r.as_quantised = lambda query: (query.float() / scale).to(layer.impl.fp8_dtype).float() * scale
        for query_lens in ([33, 20], [1, 1]):
            for out, expected in r.step([a, b], query_lens):
                assert error(out, expected) < 1e-2


def test_float8_output(model):
    """As vLLM's fusion of attention and quantisation calls it: a float8 output and its scale."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Dynamic128Sym,
        kFp8StaticTensorSym,
    )

    with rig(model, windows=(None,)) as r:
        (layer,) = r.layers
        assert layer.impl.fused_output_quant_supported(kFp8StaticTensorSym)
        assert not layer.impl.fused_output_quant_supported(kFp8Dynamic128Sym)
        a = r.new_request()
        ((plain, _),) = r.step([a], [33])
        common = r.common([a], [1])
        metadata = r.builder.build(0, common)
        query, key = random(3, HEADS, HEAD_DIM), random(3, KV_HEADS, HEAD_DIM)
        layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, common.slot_mapping)
        expected = torch.zeros_like(query)
        layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, expected)
        out = torch.full(query.shape, torch.nan).to(torch.float8_e4m3fn)
        scale = torch.tensor([0.05])
        layer.impl.forward(layer, query, key, key, layer.kv_cache, metadata, out, output_scale=scale)
        assert torch.equal(out[:1].float(), (expected[:1] / scale).clamp(-448, 448).to(out.dtype).float())
        assert out[1:].isnan().all()
        assert not layer.impl.forward(layer, query, key, key, None, None, out).float().any()
        with pytest.raises(NotImplementedError, match="quantised in blocks"):
            layer.impl.forward(
                layer,
                query,
                key,
                key,
                layer.kv_cache,
                metadata,
                out,
                output_scale=scale,
                output_block_scale=scale,
            )

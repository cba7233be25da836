"""Builder and implementation on real layers: outputs against attention over whole sequences in float64."""

from __future__ import annotations

import timeit

import pytest
import torch
from pydantic import ValidationError

from plugin.harness import HEADS, KV_HEADS, error, rig, write_model
from vllm_numa_backend import settings
from vllm_numa_backend.backend import NumaSwizzleBackend
from vllm_numa_backend.compat import backend_names_kv_shape

PASS_MARK = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def check(results, dtype=torch.float32):
    for i, (out, expected) in enumerate(results):
        assert error(out, expected) < PASS_MARK[dtype], f"layer {i}"


@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", PASS_MARK, ids=str)
def test_prefill_then_decode_then_both(model, dtype, heads_first):
    with rig(model, dtype=dtype, heads_first=heads_first) as r:
        a, b, c = r.new_request(), r.new_request(), r.new_request()
        check(r.step([a, b], [17, 63]), dtype)
        check(r.step([a, b], [1, 1]), dtype)
        # a decode, a chunk over a cached prefix and a first chunk
        check(r.step([a, b, c], [1, 30, 100]), dtype)
        check(r.step([c, b, a], [1, 1, 1]), dtype)


@pytest.mark.parametrize("kernels", ["torch", "interpret"])
def test_the_chosen_kernels_run(model, monkeypatch, kernels):
    """The same steps through torch and through the Triton kernels under the interpreter."""
    from numa_attention.runner import ran

    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", kernels)
    settings.current.cache_clear()
    with rig(model) as r:
        a, b, c = r.new_request(), r.new_request(), r.new_request()
        ran.clear()
        check(r.step([a, b], [17, 30]))
        check(r.step([a, b, c], [1, 1, 20]))
        check(r.step([a, b, c], [1, 1, 1], padding=2))
        family = {"torch": "torch", "interpret": "portable"}[kernels]
        assert dict(ran) == {f"{family}-prefill": 4, f"{family}-decode": 4}


@pytest.mark.parametrize("mapping", [None, "block-first", "head-first"])
def test_the_chosen_mapping_reaches_the_schedules(model, monkeypatch, mapping):
    monkeypatch.setenv("NUMA_SWIZZLE_MAPPING", mapping or "auto")
    settings.current.cache_clear()
    with rig(model) as r:
        metadata = r.builder.build(0, r.common([r.new_request()], [9]))
        for schedule in metadata.schedules.values():
            assert schedule.prefill.variant.mapping == (mapping or "swizzled-head-first")


def test_padded_decode(model):
    """Graph replay pads a batch with requests of no query tokens, whose rows and tables hold rubbish."""
    with rig(model) as r:
        a, b = r.new_request(), r.new_request()
        check(r.step([a, b], [5, 40]))
        check(r.step([a, b], [1, 1], padding=3))
        check(r.step([b], [1], padding=1))


@pytest.mark.parametrize("page", [16, 48, 128])
def test_page_sizes(model, page):
    with rig(model, page=page, pages=16) as r:
        a, b = r.new_request(), r.new_request()
        check(r.step([a, b], [page + 1, 2 * page - 1]))
        check(r.step([a, b], [1, 1]))


@pytest.mark.parametrize("head_dim", [8, 56, 80, 256])
def test_head_sizes(model, head_dim):
    with rig(model, head_dim=head_dim) as r:
        a, b = r.new_request(), r.new_request()
        check(r.step([a, b], [33, 2]))
        check(r.step([a, b], [1, 1]))


def test_values_of_another_head_size(model):
    if backend_names_kv_shape():
        with (
            pytest.raises(NotImplementedError, match="0.32 and later only"),
            rig(model, layer_options={"head_size_v": 48}),
        ):
            pass
        return
    with rig(model, layer_options={"head_size_v": 48}) as r:
        a, b = r.new_request(), r.new_request()
        check(r.step([a, b], [33, 2]))
        check(r.step([a, b], [1, 1]))


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 5.0},
        {"alibi_slopes": [2.0**-i for i in range(HEADS)]},
        {"sinks": torch.linspace(-1, 2, HEADS)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_score_options(model, options):
    with rig(model, layer_options=options) as r:
        a, b = r.new_request(), r.new_request()
        check(r.step([a, b], [33, 20]))
        check(r.step([a, b], [1, 1]))


def test_kv_cache_of_another_dtype(model):
    """--kv-cache-dtype bfloat16 under a float32 model: the cache rounds what is written to it."""
    try:
        with rig(model, kv_cache_dtype="bfloat16") as r:
            assert r.builder.planners[HEADS, -1].shape.kv_dtype is torch.bfloat16
            a, b = r.new_request(), r.new_request()
            check(r.step([a, b], [33, 2]), torch.bfloat16)
            check(r.step([a, b], [1, 1]), torch.bfloat16)
    except ValidationError as refusal:
        assert "is incompatible with dtype" in str(refusal)
        pytest.skip("this vLLM refuses a cache of another dtype itself")


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_cache_with_its_scales(model, monkeypatch, kv_cache_dtype):
    """Not offered to users yet; the implementation is ready for it."""
    offered = [*NumaSwizzleBackend.supported_kv_cache_dtypes, kv_cache_dtype]
    monkeypatch.setattr(NumaSwizzleBackend, "supported_kv_cache_dtypes", offered)
    with rig(model, kv_cache_dtype=kv_cache_dtype) as r:
        for layer in r.layers:
            layer._k_scale.fill_(0.5)
            layer._v_scale.fill_(0.25)
        a, b = r.new_request(), r.new_request()
        check(r.step([a, b], [33, 2]))
        check(r.step([a, b], [1, 1]))


def test_speculative_decode_is_decode(model):
    """With k speculated tokens, requests of up to k + 1 query tokens go to the decode kernel."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with rig(model, speculative_config=speculative) as r:
        assert r.builder.reorder_batch_threshold == 4
        a, b, c = r.new_request(), r.new_request(), r.new_request()
        check(r.step([a, b], [20, 37]))
        check(r.step([a, b, c], [4, 2, 5]))
        common = r.common([a, b, c], [4, 3, 5])
        metadata = r.builder.build(0, common)
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 7)


def test_one_schedule_per_layer_shape(model):
    with rig(model, windows=(None, 20, None, 20, 7)) as r:
        request = r.new_request()
        metadata = r.builder.build(0, r.common([request], [9]))
        assert set(metadata.schedules) == {(HEADS, -1), (HEADS, 19), (HEADS, 6)}
        assert {s.shape.window for s in metadata.schedules.values()} == {-1, 19, 6}
        assert all(s.shape.kv_heads == KV_HEADS for s in metadata.schedules.values())
        check(r.step([request], [41]))


def test_profiling_run_gives_zeros(model):
    from vllm.forward_context import set_forward_context

    with rig(model) as r, set_forward_context(None, r.config, slot_mapping={}):
        layer = r.layers[0]
        q, k, v = (torch.ones(3, heads * layer.head_size) for heads in (HEADS, KV_HEADS, KV_HEADS))
        assert torch.equal(layer(q, k, v), torch.zeros(3, HEADS * layer.head_size))


@pytest.mark.parametrize("window", [None, 20])
def test_shared_cache_is_read_not_written(model, window):
    """A layer that shares another's cache attends over it, with its own window, and leaves it as it is."""
    with rig(model, windows=(None, window)) as r:
        first, second = r.layers
        for holder in (second, second.impl):
            holder.kv_sharing_target_layer_name = first.layer_name
        second.kv_cache = first.kv_cache
        a, b = r.new_request(), r.new_request()
        r.shares = {1: 0}
        check(r.step([a, b], [33, 20]))
        check(r.step([a, b], [1, 1]))
        before = first.kv_cache.clone()
        key = torch.ones(1, KV_HEADS, first.head_size)
        second.impl.do_kv_cache_update(second, key, key, second.kv_cache, torch.zeros(1, dtype=torch.int64))
        assert torch.equal(first.kv_cache.nan_to_num(), before.nan_to_num())


def test_capture_uses_short_sequences(model):
    """A graph is captured on one new token a request, whatever lengths the dummy step claims."""
    with rig(model) as r:
        common = r.common([r.new_request(), r.new_request()], [1, 1])
        common.seq_lens.fill_(10**6)
        metadata = r.builder.build_for_cudagraph_capture(common)
        assert metadata.num_decodes == 2
        assert common.seq_lens.tolist() == [1, 1]


def test_largest_graph_fits(model):
    """Batches are padded up to the next captured size, which may exceed max_num_seqs."""
    with rig(model) as r:
        r.config.compilation_config.cudagraph_capture_sizes = [1, 2, 40]
        r.builder.planners = r.builder._make_planners()
        requests = [r.new_request() for _ in range(4)]
        check(r.step(requests, [2, 3, 4, 5]))
        check(r.step(requests, [1, 1, 1, 1], padding=36))


def test_cpu_cost_of_a_call(model, monkeypatch):
    """Outside graphs a layer's call must take under 30 us of CPU beyond its kernels, and so must its write."""
    import vllm_numa_backend.impl as module

    with rig(model) as r, torch.inference_mode():
        layer, common = r.layers[0], r.common([r.new_request(), r.new_request()], [1, 1])
        metadata = r.builder.build(0, common)
        monkeypatch.setattr(module, "attend", lambda *args, **kwargs: None)
        monkeypatch.setattr(module, "write_pages", lambda *args, **kwargs: None)
        q, k = torch.zeros(2, HEADS, layer.head_size), torch.zeros(2, KV_HEADS, layer.head_size)
        out = torch.empty_like(q)

        def call():
            layer.impl.do_kv_cache_update(layer, k, k, layer.kv_cache, common.slot_mapping)
            layer.impl.forward(layer, q, k, k, layer.kv_cache, metadata, out)

        # the best of many: others may be busy on this machine
        assert min(timeit.repeat(call, number=20, repeat=100)) / 20 < 60e-6

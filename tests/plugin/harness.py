"""A small real vLLM configuration, real attention layers and real steps, on the vLLM release at hand.

What vLLM's model runner does around a layer is done here by hand: caches in every physical layout, block
tables with pages in random order, steps of decodes and prefills with padding. Everything unused is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

import vllm_numa_backend
from numa_attention.sharding import WHOLE, Shard
from vllm_numa_backend.compat import backend_names_kv_shape

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32


def write_model(folder: Path, **overrides) -> Path:
    """The configuration of a tiny Llama, for dummy weights."""
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=128,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | overrides))
    return folder


def engine_args(model: Path, **overrides) -> EngineArgs:
    vllm_numa_backend.register()
    defaults = dict(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=16,
        enforce_eager=True,
    )
    return EngineArgs(**(defaults | overrides))


@dataclass
class Request:
    """A sequence in the making: its pages in order, and per layer the keys and values written so far."""

    pages: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def length(self) -> int:
        return len(self.keys[0])


@dataclass
class Rig:
    """Layers of one KV cache group with their caches, and the builder of their metadata.

    shares: by layer, the layer whose keys and values it attends over. causal, images: what the steps say of causality
    and of images, as the model runner does. as_quantised: what becomes of queries. shard: the part of every sequence
    in these caches, where the rig is that of one rank of several; all ranks' rigs draw the same numbers.
    """

    config: object
    layers: list
    builder: object
    page: int
    dtype: torch.dtype
    free: list[int]
    generator: torch.Generator
    shares: dict[int, int] = field(default_factory=dict)
    causal: bool | torch.Tensor = True
    images: dict[int, list[tuple[int, int]]] | None = None
    as_quantised: Callable[[torch.Tensor], torch.Tensor] = lambda query: query
    shard: Shard = WHOLE

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.dtype)

    def new_request(self) -> Request:
        keys = [self.random(0, layer.num_kv_heads, layer.head_size) for layer in self.layers]
        values = [self.random(0, layer.num_kv_heads, layer.head_size_v) for layer in self.layers]
        return Request([], keys, values)

    def step(
        self, requests: Sequence[Request], query_lens: Sequence[int], padding: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run every layer on `query_lens` new random tokens a request. Returns (output, expected) per layer.

        padding: requests without query tokens at the end, and as many rows of query tokens past the last one.
        """
        tokens = sum(query_lens)
        rows = tokens + padding
        queries = [
            self.random(rows, self.shard.ranks, layer.num_heads, layer.head_size)[:, self.shard.rank]
            for layer in self.layers
        ]
        keys = [self.random(rows, layer.num_kv_heads, layer.head_size) for layer in self.layers]
        values = [self.random(rows, layer.num_kv_heads, layer.head_size_v) for layer in self.layers]
        common = self.common(requests, query_lens, padding)
        start = 0
        for request, query_len in zip(requests, query_lens, strict=True):
            for i in range(len(self.layers)):
                impl, new = self.layers[i].impl, slice(start, start + query_len)
                stored = as_stored(keys[i][new], impl.fp8_dtype, self.layers[i]._k_scale)
                request.keys[i] = torch.cat([request.keys[i], stored])
                stored = as_stored(values[i][new], impl.fp8_dtype, self.layers[i]._v_scale)
                request.values[i] = torch.cat([request.values[i], stored])
            start += query_len
        metadata = self.builder.build(0, common)
        by_layer = {layer.layer_name: metadata for layer in self.layers}
        slots = {layer.layer_name: common.slot_mapping for layer in self.layers}
        results = []
        with set_forward_context(by_layer, self.config, num_tokens=tokens + padding, slot_mapping=slots):
            for i, layer in enumerate(self.layers):
                out = layer(queries[i].flatten(1), keys[i].flatten(1), values[i].flatten(1))
                out = out.view(-1, layer.num_heads, layer.head_size_v)[:tokens]
                results.append((out, self.expected(i, queries[i], requests, query_lens)))
        return results

    def common(
        self, requests: Sequence[Request], query_lens: Sequence[int], padding: int = 0
    ) -> CommonAttentionMetadata:
        """What vLLM's model runner hands to a builder, before the step's tokens count as written."""
        span = self.page * self.shard.ranks  # tokens of a sequence that one page on every rank holds
        table_width = max(-(-(r.length + n) // span) for r, n in zip(requests, query_lens, strict=True))
        rows = len(requests) + padding
        # wider than needed and full of pages that do not exist: only the pages of a sequence may be read
        table = torch.full((rows, table_width + 3), 10**9, dtype=torch.int32)
        slots: list[int] = []
        for row, (request, query_len) in enumerate(zip(requests, query_lens, strict=True)):
            end = request.length + query_len
            while len(request.pages) * span < end:
                request.pages.append(self.free.pop())
            table[row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            slots += [self.slot(request, position) for position in range(request.length, end)]
        query_lens = [*query_lens, *[0] * padding]
        seq_lens = [r.length + n for r, n in zip(requests, query_lens, strict=False)] + [0] * padding
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=rows,
            num_actual_tokens=sum(query_lens) + padding,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=table[:, :table_width],
            slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
            causal=self.causal,
            mm_req_doc_ranges=self.images,
            seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        )

    def slot(self, request: Request, position: int) -> int:
        """Where the key and value at a position go in this rank's cache, -1 for nowhere."""
        local = self.shard.count(position)
        if self.shard.position(local) != position:
            return -1
        return request.pages[local // self.page] * self.page + local % self.page

    def expected(self, i: int, queries, requests, query_lens) -> torch.Tensor:
        """Attention of layer `i` in float64 over whole sequences, which knows of no pages."""
        layer, impl = self.layers[i], self.layers[i].impl
        rows, start = [], 0
        for index, (request, query_len) in enumerate(zip(requests, query_lens, strict=True)):
            group = layer.num_heads // layer.num_kv_heads
            q = self.as_quantised(queries[start : start + query_len]).double()
            source = self.shares.get(i, i)
            k = request.keys[source].double().repeat_interleave(group, 1)
            v = request.values[source].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * impl.scale
            if impl.soft_cap:
                scores = impl.soft_cap * torch.tanh(scores / impl.soft_cap)
            positions = torch.arange(request.length)
            distance = positions[-query_len:, None] - positions
            if impl.alibi_slopes is not None:
                slopes = impl.alibi_slopes.unflatten(0, (self.shard.ranks, -1))[self.shard.rank]
                bias = distance.double().clamp(min=0).sqrt() if impl.use_alibi_sqrt else distance
                scores = scores - slopes.double()[:, None, None] * bias
            is_causal = self.causal if isinstance(self.causal, bool) else bool(self.causal[index])
            hidden = (distance < 0) & is_causal
            too_far = torch.zeros_like(hidden)
            if layer.sliding_window is not None:
                too_far = distance >= layer.sliding_window
                hidden = hidden | too_far | (-distance >= layer.sliding_window)
            for first, last in (self.images or {}).get(index, []):
                inside = (positions >= first) & (positions <= last)
                seen = inside[-query_len:, None] & inside
                hidden = hidden & ~(seen & ~too_far if layer.mm_prefix_clamp_sliding_window else seen)
            scores = scores.masked_fill(hidden, -torch.inf)
            if impl.sinks is not None:
                sink = impl.sinks.double()[:, None, None].expand(-1, query_len, 1)
                scores = torch.cat([scores, sink], -1)
            weights = scores.softmax(-1)[..., : request.length]
            rows.append(torch.einsum("hqk,khd->qhd", weights, v))
            start += query_len
        return torch.cat(rows)


@contextmanager
def rig(
    model: Path,
    *,
    windows: Sequence[int | None] = (None, 20),
    dtype: torch.dtype = torch.float32,
    page: int = 16,
    pages: int = 64,
    heads_first: bool = False,
    head_dim: int = HEAD_DIM,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    shard: Shard = WHOLE,
    layer_options: dict | None = None,
    **overrides,
) -> Iterator[Rig]:
    """Real layers, one per window, selected by vLLM itself as --attention-backend NUMA_SWIZZLE would.

    heads, kv_heads: of this rank. shard: what the caches hold, for which vLLM's groups of ranks must exist.
    """
    from vllm.model_executor.layers.attention import Attention

    overrides = {"attention_backend": "NUMA_SWIZZLE", "block_size": page} | overrides
    args = engine_args(model, dtype=str(dtype).removeprefix("torch."), **overrides)
    config = args.create_engine_config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            layers = [
                Attention(
                    heads,
                    head_dim,
                    head_dim**-0.5,
                    num_kv_heads=kv_heads,
                    cache_config=config.cache_config,
                    per_layer_sliding_window=window,
                    prefix=f"model.layers.{i}.attn",
                    **(layer_options or {}),
                )
                for i, window in enumerate(windows)
            ]
            # all in one group, as vLLM has it where its hybrid cache manager is off
            spec = full_spec(layers[0], page)
            for layer in layers:
                layer.kv_cache = make_cache(layer, pages, page, heads_first)
            backend = layers[0].get_attn_backend()
            names = [layer.layer_name for layer in layers]
            builder = backend.get_builder_cls()(spec, names, config, torch.device("cpu"))
            generator = torch.Generator().manual_seed(0)
            free = torch.randperm(pages, generator=generator).tolist()
            yield Rig(config, layers, builder, page, dtype, free, generator, shard=shard)
    finally:
        torch.set_default_dtype(before)


def as_stored(rows: torch.Tensor, fp8_dtype: torch.dtype | None, scale: torch.Tensor) -> torch.Tensor:
    """What a cache gives back of the rows written to it."""
    if fp8_dtype is None:
        return rows
    return (rows.float() / scale).to(fp8_dtype).to(rows.dtype) * scale


def full_spec(layer, page: int):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=page,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        dtype=layer.kv_cache_torch_dtype,
    )


def make_cache(layer, pages: int, page: int, heads_first: bool) -> torch.Tensor:
    """A layer's cache of NaN in the release's logical shape, strided as in the memory of a hybrid model.

    heads_first: a page holds all tokens of one head together (HND), else all heads of one token (NHD).
    """
    heads, dim = layer.num_kv_heads, layer.head_size
    if backend_names_kv_shape():
        shape = layer.get_attn_backend().get_kv_cache_shape(pages, page, heads, dim)
        assert shape == (pages, 2, page, heads, dim)
        order = (0, 1, 3, 2, 4) if heads_first else (0, 1, 2, 3, 4)
    else:
        shape = (pages, heads, page, dim + layer.head_size_v)
        order = (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
    physical = [shape[axis] for axis in order]
    # another layer's page lies between any two of ours
    dtype = layer.kv_cache_torch_dtype
    # vLLM keeps float8 as bytes; this byte is NaN in e4m3fn and in e5m2
    nothing = 0x7F if dtype is torch.uint8 else torch.nan
    memory = torch.full([physical[0], 2, *physical[1:]], nothing, dtype=dtype)[:, 0]
    return memory.permute([order.index(axis) for axis in range(len(shape))])


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||"""
    return float((out.double() - expected).norm() / expected.norm())

"""A real Hugging Face model whose attention runs on our kernels over our pages, without vLLM around it.

`PagedModel` feeds a batch of sequences of equal length step by step: a step of at most `max_decode_query` tokens a
sequence is a decode, a longer one a prefill. `HuggingFaceModel` is the same model with any attention implementation
that transformers knows ("eager", "sdpa", ...). Both give next-token log-probabilities of a given text, so that any
two can be compared, in any dtype and on any device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from numa_attention.kv_cache import write_pages
from numa_attention.runner import attend
from numa_attention.schedule import Planner, Schedule, StepBatch
from numa_attention.shapes import LayerShape

_instances = itertools.count()


class HuggingFaceModel:
    """A model with one of the attention implementations of transformers, fed step by step with its own cache."""

    def __init__(
        self,
        folder: Path,
        implementation: str = "eager",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=implementation
        )
        self.model.to(self.device).eval()
        self.reset()

    def reset(self) -> None:
        """Forget the sequences."""
        self._cache = DynamicCache()
        self._length = 0

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens int64 [sequences, n] and return the logits float32 [sequences, n, vocabulary]."""
        positions = torch.arange(self._length, self._length + tokens.shape[1], device=self.device)
        logits = self.model(
            tokens.to(self.device), position_ids=positions[None], past_key_values=self._cache, use_cache=True
        ).logits
        self._length += tokens.shape[1]
        return logits.float()


class PagedModel:
    """A model whose attention writes K and V into pages of ours and runs `attend` over them.

    Pages belong to the sequences in scattered order, and whatever has not been written is NaN. `schedules` keeps the
    schedule of the last step; `alter` may change a schedule before it is used, to prove that it is used.

    Raises ValueError when a step does not fit max_tokens tokens a sequence.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sequences: int = 1,
        max_tokens: int,
        kernels: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        page_size: int = 16,
        max_decode_query: int = 4,
        mapping: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.kernels = kernels
        self.sequences, self.page_size, self.max_decode_query = sequences, page_size, max_decode_query
        self.pages_each = math.ceil(max_tokens / page_size)
        self.alter: Callable[[Schedule], None] = lambda schedule: None
        self.schedule: Schedule | None = None

        implementation = f"numa_attention_{next(_instances)}"
        AttentionInterface.register(implementation, self._attention)
        # causality and padding are the schedule's business: no mask is built
        AttentionMaskInterface.register(implementation, lambda *_, **__: None)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=implementation
        )
        self.model.to(self.device).eval()

        config = self.model.config
        self.shape = LayerShape(
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            head_dim_v=config.head_dim,
            dtype=dtype,
            kv_dtype=dtype,
            page_size=page_size,
        )
        self.planner = Planner(
            self.shape,
            self.device,
            max_requests=sequences,
            max_tokens=sequences * max_tokens,
            max_decode_query=max_decode_query,
            kernels=kernels,
            mapping=mapping,
        )
        self.reset()

    def reset(self) -> None:
        """Forget the sequences and poison the pages."""
        config, shape = self.model.config, self.shape
        pages = 1 + self.sequences * self.pages_each
        size = (config.num_hidden_layers, 2, pages, self.page_size, shape.kv_heads, shape.head_dim)
        self.cache = torch.full(size, math.nan, dtype=shape.kv_dtype, device=self.device)
        scattered = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.block_table = scattered.view(self.sequences, -1).to(self.device, torch.int32)
        self.length = 0

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens int64 [sequences, n] and return the logits float32 [sequences, n, vocabulary]."""
        sequences, query_len = tokens.shape
        if sequences != self.sequences or self.length + query_len > self.pages_each * self.page_size:
            raise ValueError(f"{sequences} x {query_len} tokens do not fit at length {self.length}")
        positions = torch.arange(self.length, self.length + query_len, device=self.device)
        self.length += query_len
        self._plan(query_len, positions)
        logits = self.model(tokens.to(self.device), position_ids=positions[None], use_cache=False).logits
        return logits.float()

    def _plan(self, query_len: int, positions: torch.Tensor) -> None:
        """The step's schedule, and the slots its K and V go to."""
        starts = torch.arange(self.sequences + 1, dtype=torch.int32) * query_len
        decodes = self.sequences if query_len <= self.max_decode_query else 0
        self.schedule = self.planner.plan(
            StepBatch(
                query_start_loc=starts.to(self.device),
                query_start_loc_cpu=starts,
                seq_lens=torch.full((self.sequences,), self.length, dtype=torch.int32, device=self.device),
                block_table=self.block_table,
                num_decodes=decodes,
                num_decode_tokens=decodes * query_len,
                max_query_len=query_len,
                max_seq_len=self.length,
            )
        )
        self.alter(self.schedule)
        pages = self.block_table.long()[:, positions // self.page_size]
        self.slots = (pages * self.page_size + positions % self.page_size).flatten()

    def _attention(
        self, module, query, key, value, attention_mask, scaling, **_
    ) -> tuple[torch.Tensor, None]:
        """One layer, as transformers calls it: query, key, value [sequences, heads, n, head_dim], new tokens only."""
        k_pages, v_pages = self.cache[module.layer_idx]
        query, key, value = (rows.transpose(1, 2).flatten(0, 1).contiguous() for rows in (query, key, value))
        write_pages(key, value, k_pages, v_pages, self.slots, kernels=self.kernels)
        out = torch.full_like(query, math.nan)
        attend(query, k_pages, v_pages, out, self.schedule, scale=scaling)
        return out.unflatten(0, (self.sequences, -1)), None


def teacher_forced(
    model: HuggingFaceModel | PagedModel, tokens: torch.Tensor, step_lens: Sequence[int]
) -> torch.Tensor:
    """Log-probabilities of the given text, float32 [sequences, length - 1]: entry t is that of token t + 1.

    tokens int64 [sequences, length], fed in steps of step_lens tokens, which must add up to the length.
    """
    assert sum(step_lens) == tokens.shape[1], "the steps cover the text exactly"
    model.reset()
    scores = []
    begin = 0
    for step_len in step_lens:
        logits = model.step(tokens[:, begin : begin + step_len])
        following = tokens[:, begin + 1 : begin + step_len + 1].to(logits.device)
        logits = logits[:, : following.shape[1]]
        # as log_softmax, without a copy of the logits
        scores.append((logits.gather(-1, following[..., None])[..., 0] - logits.logsumexp(-1)).cpu())
        begin += step_len
    return torch.cat(scores, 1)


def steps_of(length: int, prefill: int, decode_query: int) -> list[int]:
    """Step lengths for a text: one prefill, then decode_query tokens at a time."""
    return [prefill, *_chunks(length - prefill, decode_query)]


def _chunks(total: int, size: int) -> Iterator[int]:
    for begin in range(0, total, size):
        yield min(size, total - begin)


def perplexity(log_probs: torch.Tensor) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-log_probs.double().mean().item())

"""The same schedules walked with vectorised torch, for machines without a GPU.

`decode` and `prefill` take the work list and the tile list that the Triton kernels take, item by item; inside an item
everything is one batched product. Float32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from numa_attention.decode.work_list import partial_slot
from numa_attention.merge import merge_states
from numa_attention.shapes import CONTIGUOUS


@contextmanager
def _one_thread() -> Iterator[None]:
    """The products of a decode are small: more threads only wait for one another, for long where cores are busy."""
    threads = torch.get_num_threads()
    # vLLM's CPU worker binds its threads and puts a function in place that only logs a warning, here twice a call
    if threads == 1 or torch.set_num_threads is not torch._C.set_num_threads:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Layer:
    """One layer's call: tensors, scoring and the step's lengths on the host."""

    def __init__(
        self, q, k_pages, v_pages, out, schedule, *, scale, soft_cap=0.0, sinks=None, alibi_slopes=None,
        alibi_sqrt=False, spans=None, clamp_spans=False, q_scale=None, k_scale=None, v_scale=None, out_scale=None,
        lse=None,
    ):  # fmt: skip
        # torch picks float8 numbers by index on no device
        self.q = q if q_scale is None else q.float()
        self.k_pages, self.v_pages, self.out, self.lse = k_pages, v_pages, out, lse
        self.shape, self.batch = schedule.shape, schedule.batch
        self.scale = scale * math.prod(float(x) for x in (q_scale, k_scale) if x is not None)
        self.v_scale = 1.0 if v_scale is None else float(v_scale)
        self.out_scale = None if out_scale is None else float(out_scale)
        self.soft_cap, self.sinks, self.alibi_slopes, self.alibi_sqrt = (
            soft_cap,
            sinks,
            alibi_slopes,
            alibi_sqrt,
        )
        self.spans, self.clamp_spans = None if spans is None else spans.tolist(), clamp_spans
        self.query_start = self.batch.query_start_loc_cpu.tolist()
        self.seq_lens = self.batch.seq_lens.tolist()
        causal = self.batch.causal
        self.causal = [causal] * len(self.seq_lens) if isinstance(causal, bool) else causal.tolist()

    def rows(self, request: int, kv_head: int, block: int, block_m: int):
        """(query tokens [M] in the batch, query heads [M], positions [M]) of one packed tile."""
        group = self.shape.group
        query_len = self.query_start[request + 1] - self.query_start[request]
        begin = block * block_m  # past the last row for a short query in a list made for longer ones
        row = torch.arange(begin, max(begin, min(begin + block_m, query_len * group)))
        query = row // group
        position = self.seq_lens[request] - query_len + query
        return self.query_start[request] + query, kv_head * group + row % group, position

    def tokens_of(self, pages, request: int, kv_head: int, first: int, count: int) -> torch.Tensor:
        """Tokens first to first + count of one KV head, float32 [count, head_dim or head_dim_v], by whole pages."""
        page_size = self.shape.page_size
        if page_size == CONTIGUOUS:
            begin = int(self.batch.block_table[request, 0]) + first
            return pages[begin : begin + count, kv_head].float()
        begin, end = first // page_size, -(-(first + count) // page_size)
        rows = pages[:, :, kv_head][self.batch.block_table[request, begin:end].long()]
        return rows.flatten(0, 1)[first - begin * page_size :][:count].float()

    def sight(self, request: int, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last key that each query sees, both [M] and growing; see `scores.sight`.

        Keys are counted in the cache, which may be one rank's shard of the sequence.
        """
        window, end = self.shape.window, self.seq_lens[request] - 1
        first = torch.zeros_like(position) if window < 0 else (position - window).clamp(min=0)
        if self.causal[request]:
            last = position
        else:
            last = torch.full_like(position, end) if window < 0 else position + window
        for begin, span_end in self.spans[request] if self.spans else ():
            inside = (begin <= position) & (position <= span_end)
            last = torch.where(inside, last.clamp(min=span_end), last)
            if not self.clamp_spans:
                first = torch.where(inside, first.clamp(max=begin), first)
        shard = self.shape.shard
        return shard.count(first), shard.count(last.clamp(min=-1, max=end) + 1) - 1

    def attend(self, request, kv_head, tokens, heads, position, key_begin, key_end):
        """Normalised output [M, head_dim_v] and natural LSE [M] over keys [key_begin, key_end) that the tile sees."""
        if len(position) == 0:
            return self.q.new_zeros(0, self.shape.head_dim_v, dtype=torch.float32), self.q.new_zeros(
                0
            ).float()
        row_first, row_last = self.sight(request, position)
        first = max(key_begin, int(row_first[0]))
        key = torch.arange(first, max(min(key_end, int(row_last[-1]) + 1), first))
        b_k = self.tokens_of(self.k_pages, request, kv_head, first, len(key))
        b_v = self.tokens_of(self.v_pages, request, kv_head, first, len(key))
        score = (self.q[tokens, heads].float() * self.scale) @ b_k.T
        if self.soft_cap > 0.0:
            score = self.soft_cap * torch.tanh(score / self.soft_cap)
        if self.alibi_slopes is not None:
            distance = (self.shape.shard.position(key)[None, :] - position[:, None]).float()
            if self.alibi_sqrt:
                distance = -torch.sqrt((-distance).clamp(min=0))
            score += self.alibi_slopes[heads, None].float() * distance
        # only keys right of what the first query sees or left of what the last one sees are hidden from some row
        edge = max(int(row_last[0]) + 1 - first, 0)
        score[:, edge:].masked_fill_(key[edge:] > row_last[:, None], float("-inf"))
        edge = max(int(row_first[-1]) - first, 0)
        score[:, :edge].masked_fill_(key[:edge] < row_first[:, None], float("-inf"))
        if len(key) == 0:
            return score.new_zeros(len(score), b_v.shape[1]), score.new_full((len(score),), float("-inf"))
        largest = score.amax(1, keepdim=True)
        weight = score.sub_(torch.where(largest == float("-inf"), 0.0, largest)).exp_()
        total = weight.sum(1, keepdim=True)
        output = weight @ b_v / torch.where(total > 0.0, total, 1.0)
        return output, (largest + total.log())[:, 0]

    def write(self, tokens, heads, output, lse):
        """Apply the sink and the value scale, and store one finished tile."""
        if self.sinks is not None:
            with_sink = torch.logaddexp(lse, self.sinks[heads].float())
            output = (
                output * torch.exp(lse - torch.where(with_sink == float("-inf"), 0.0, with_sink))[:, None]
            )
            lse = with_sink
        output = output * self.v_scale
        if self.out_scale is None:
            self.out[tokens, heads] = output.to(self.out.dtype)
        else:
            largest = torch.finfo(self.out.dtype).max
            output = (output / self.out_scale).clamp(-largest, largest).to(self.out.dtype)
            self.out.view(torch.uint8)[tokens, heads] = output.view(torch.uint8)
        if self.lse is not None:
            self.lse[tokens, heads] = lse


@_one_thread()
def decode(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> None:
    """Attention of the decoding requests of `schedule`; see `runner.attend` for shapes."""
    _walk(schedule.decode, _Layer(q, k_pages, v_pages, out, schedule, **options))


@_one_thread()
def extend(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> None:
    """Attention of prefilling requests that are few tiles over long prefixes; see `runner.attend` for shapes."""
    _walk(schedule.extend, _Layer(q, k_pages, v_pages, out, schedule, **options))


def _walk(plan, layer: _Layer) -> None:
    """The items of a work list, and the merge of what is split."""
    block_n, block_m = plan.variant.block_n, plan.variant.block_m
    ranges, items = plan.ranges.numpy(), plan.items.numpy()
    parts: dict[int, tuple] = {}
    for first, count, *_ in ranges.tolist():
        for index in range(first, first + count):
            request, kv_head, row_block, begin, end, split, splits, first_workgroup = items[
                index, :8
            ].tolist()
            tokens, heads, position = layer.rows(request, kv_head, row_block, block_m)
            output, part_lse = layer.attend(
                request, kv_head, tokens, heads, position, begin * block_n, end * block_n
            )
            if splits == 1:
                layer.write(tokens, heads, output, part_lse)
                continue
            parts[partial_slot(split, first_workgroup)] = output, part_lse
            # logical workgroups run in order here, so the last split is the last to arrive
            if split == splits - 1:
                slots = [partial_slot(part, first_workgroup) for part in range(splits)]
                outputs, lses = zip(*(parts.pop(slot) for slot in slots), strict=True)
                layer.write(tokens, heads, *merge_states(torch.stack(outputs), torch.stack(lses)))


def prefill(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor, schedule, **options
) -> None:
    """Attention of the prefilling requests of `schedule`; see `runner.attend` for shapes."""
    layer = _Layer(q, k_pages, v_pages, out, schedule, **options)
    block_m = schedule.prefill.variant.block_m
    first_request = schedule.batch.num_decodes
    for request, kv_head, block, _ in np.asarray(schedule.prefill.tiles).tolist():
        request += first_request
        tokens, heads, position = layer.rows(request, kv_head, block, block_m)
        layer.write(
            tokens,
            heads,
            *layer.attend(request, kv_head, tokens, heads, position, 0, layer.seq_lens[request]),
        )

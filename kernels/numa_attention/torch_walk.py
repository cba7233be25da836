"""The same schedules walked with vectorised torch, for machines without a GPU.

`decode` and `prefill` take the work list and the tile list that the Triton kernels take, item by item; inside an item
everything is one batched product. Float32 throughout.
"""

from __future__ import annotations

import numpy as np
import torch

from numa_attention.decode.work_list import partial_slot
from numa_attention.merge import merge_states


class _Layer:
    """One layer's call: tensors, scoring and the step's lengths on the host."""

    def __init__(
        self, q, k_pages, v_pages, out, schedule, scale, soft_cap, sinks, alibi_slopes, k_scale, v_scale, lse
    ):
        self.q, self.k_pages, self.v_pages, self.out, self.lse = q, k_pages, v_pages, out, lse
        self.shape, self.batch = schedule.shape, schedule.batch
        self.scale = scale if k_scale is None else scale * float(k_scale)
        self.v_scale = 1.0 if v_scale is None else float(v_scale)
        self.soft_cap, self.sinks, self.alibi_slopes = soft_cap, sinks, alibi_slopes
        self.query_start = self.batch.query_start_loc_cpu.tolist()
        self.seq_lens = self.batch.seq_lens.tolist()

    def rows(self, request: int, kv_head: int, block: int, block_m: int):
        """(query tokens [M] in the batch, query heads [M], positions [M]) of one packed tile."""
        group = self.shape.group
        query_len = self.query_start[request + 1] - self.query_start[request]
        row = torch.arange(block * block_m, min((block + 1) * block_m, query_len * group))
        query = row // group
        position = self.seq_lens[request] - query_len + query
        return self.query_start[request] + query, kv_head * group + row % group, position

    def attend(self, request, kv_head, tokens, heads, position, key_begin, key_end):
        """Normalised output [M, head_dim_v] and natural LSE [M] over keys [key_begin, key_end) that the tile sees."""
        window = self.shape.window
        low, high = 0, self.seq_lens[request]
        if len(position):
            low = max(int(position[0]) - window, 0) if window >= 0 else 0
            high = min(high, int(position[-1]) + 1) if self.batch.causal else high
        key = torch.arange(max(key_begin, low), max(min(key_end, high), max(key_begin, low)))
        page = self.batch.block_table[request, key // self.shape.page_size].long()
        offset = key % self.shape.page_size
        b_k = self.k_pages[page, offset, kv_head].float()
        b_v = self.v_pages[page, offset, kv_head].float()
        score = self.q[tokens, heads].float() @ b_k.T * self.scale
        if self.soft_cap > 0.0:
            score = self.soft_cap * torch.tanh(score / self.soft_cap)
        if self.alibi_slopes is not None:
            score += self.alibi_slopes[heads, None].float() * (key[None, :] - position[:, None])
        hidden = torch.zeros(score.shape, dtype=torch.bool)
        if self.batch.causal:
            hidden |= key[None, :] > position[:, None]
        if window >= 0:
            hidden |= key[None, :] + window < position[:, None]
        score.masked_fill_(hidden, float("-inf"))
        lse = torch.logsumexp(score, dim=1)
        weight = torch.exp(score - torch.where(lse == float("-inf"), 0.0, lse)[:, None])
        return weight @ b_v, lse

    def write(self, tokens, heads, output, lse):
        """Apply the sink and the value scale, and store one finished tile."""
        if self.sinks is not None:
            with_sink = torch.logaddexp(lse, self.sinks[heads].float())
            output = (
                output * torch.exp(lse - torch.where(with_sink == float("-inf"), 0.0, with_sink))[:, None]
            )
            lse = with_sink
        self.out[tokens, heads] = (output * self.v_scale).to(self.out.dtype)
        if self.lse is not None:
            self.lse[tokens, heads] = lse


def decode(
    q, k_pages, v_pages, out, schedule, *, scale, soft_cap=0.0, sinks=None, alibi_slopes=None, k_scale=None,
    v_scale=None, lse=None,
) -> None:  # fmt: skip
    """Attention of the decoding requests of `schedule`; see `attention.attend` for shapes."""
    layer = _Layer(
        q, k_pages, v_pages, out, schedule, scale, soft_cap, sinks, alibi_slopes, k_scale, v_scale, lse
    )
    plan = schedule.decode
    block_n, block_m = plan.variant.block_n, plan.variant.block_m
    ranges, items = plan.ranges.numpy(), plan.items.numpy()
    parts: dict[int, tuple] = {}
    for first, count in ranges.tolist():
        for index in range(first, first + count):
            request, kv_head, row_block, begin, end, split, splits, first_workgroup = items[index].tolist()
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
    q, k_pages, v_pages, out, schedule, *, scale, soft_cap=0.0, sinks=None, alibi_slopes=None, k_scale=None,
    v_scale=None, lse=None,
) -> None:  # fmt: skip
    """Attention of the prefilling requests of `schedule`; see `attention.attend` for shapes."""
    layer = _Layer(
        q, k_pages, v_pages, out, schedule, scale, soft_cap, sinks, alibi_slopes, k_scale, v_scale, lse
    )
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

"""The specification in batches, on the device of its tensors: fast enough for thousands of steps on a GPU."""

from __future__ import annotations

import math

import torch

from tests.support import take_tokens

BLOCK_BYTES = 2 << 30  # of scores and what is computed of them at a time
COPIES = 6  # of the scores of a block, at most


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    causal: bool | torch.Tensor = True,
    window: int = -1,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    alibi_sqrt: bool = False,
    spans: torch.Tensor | None = None,
    clamp_spans: bool = False,
    q_scale: float | torch.Tensor = 1.0,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `numa_attention.reference.attention` defines, float64 [tokens, q_heads, head_dim_v] and [tokens, q_heads].

    One computation for a block of query rows of a request, in about `block_bytes` but for the keys and values that
    these rows see. A number that a row does not see takes part in nothing of that row, NaN included.
    """
    device, (tokens, q_heads, _) = q.device, q.shape
    kv_heads = k_pages.shape[2]
    heads = (kv_heads, q_heads // kv_heads)
    out = torch.zeros(tokens, q_heads, v_pages.shape[-1], dtype=torch.float64, device=device)
    lse = torch.full((tokens, q_heads), -math.inf, dtype=torch.float64, device=device)
    # [kv_heads, 1, group, 1], beside scores [kv_heads, rows, group, keys]
    slopes, sink = (
        None if x is None else x.to(device).double().view(kv_heads, 1, -1, 1) for x in (alibi_slopes, sinks)
    )
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    flags = causal.tolist() if isinstance(causal, torch.Tensor) else [causal] * len(lengths)
    for request, length in enumerate(lengths):
        begin, end = starts[request : request + 2]
        step = max(1, int(block_bytes / (8 * COPIES * (q_heads + 2) * max(length, 1))))
        for first in range(begin, end, step):
            rows = slice(first, min(first + step, end))
            position = torch.arange(rows.start, rows.stop, device=device)[:, None] + (length - end)
            seen = _seen(
                position, length, bool(flags[request]), window,
                [] if spans is None else spans[request].tolist(), clamp_spans,
            )  # fmt: skip
            used = seen.any(0).nonzero()[:, 0]
            seen = seen[:, used][:, None]  # [rows, 1, S]
            keys = take_tokens(k_pages, block_table[request], used).double() * float(k_scale)
            queries = q[rows].double() * float(q_scale)
            scores = _product(queries.unflatten(1, heads).transpose(0, 1), keys.permute(1, 2, 0)).mul_(scale)
            if soft_cap:
                scores.div_(soft_cap).tanh_().mul_(soft_cap)
            if slopes is not None:
                scores += slopes * _alibi(used - position, alibi_sqrt)[:, None]
            scores.masked_fill_(~seen, -math.inf)
            total = scores.logsumexp(-1, keepdim=True)  # [kv_heads, rows, group, 1]
            if sink is not None:
                total = torch.logaddexp(total, sink)
            lse[rows] = total.squeeze(-1).transpose(0, 1).flatten(1)
            weights = scores.sub_(total).exp_().masked_fill_(~seen, 0.0)
            values = take_tokens(v_pages, block_table[request], used).double() * float(v_scale)
            out[rows] = _weighted(weights, values, seen).transpose(0, 1).flatten(1, 2)
    return out, lse


def _seen(
    position: torch.Tensor, length: int, causal: bool, window: int, spans: list[list[int]], clamp: bool
) -> torch.Tensor:
    """Which keys the queries at these positions [rows, 1] see: bool [rows, length]."""
    key = torch.arange(length, device=position.device)
    seen = (key <= position) if causal else torch.ones_like(key + position, dtype=torch.bool)
    if window >= 0:
        seen &= (key >= position - window) & (key <= position + window)
    for begin, end in spans:
        inside = (key >= begin) & (key <= end) & (position >= begin) & (position <= end)
        if clamp and window >= 0:
            inside &= key >= position - window
        seen |= inside
    return seen


def _alibi(distance: torch.Tensor, square_root: bool) -> torch.Tensor:
    """What a slope is multiplied by; distance: key position less query position."""
    return -(-distance).clamp(min=0).double().sqrt() if square_root else distance.double()


def _product(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """[kv_heads, rows, group, n] x [kv_heads, n, m] = [kv_heads, rows, group, m]."""
    return (rows.flatten(1, 2) @ matrices).unflatten(1, rows.shape[1:3])


def _weighted(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Sums of values [S, kv_heads, DV] by weights [kv_heads, rows, group, S]: [kv_heads, rows, group, DV].

    A row that does not see a value gets nothing of it, although 0 x NaN is NaN.
    """
    finite = values.isfinite()
    out = _product(weights, values.where(finite, 0.0).transpose(0, 1))
    for key in (~finite).flatten(1).any(1).nonzero()[:, 0].tolist():
        rest = values[key].where(~finite[key], 0.0)[:, None, None]  # [kv_heads, 1, 1, DV]
        out += torch.where(seen[..., key, None], weights[..., key, None] * rest, 0.0)
    return out

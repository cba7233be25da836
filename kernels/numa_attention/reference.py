"""The specification: attention over a paged KV cache in float64, plain and slow."""

from __future__ import annotations

import math

import torch


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output float64 [tokens, q_heads, head_dim_v] and natural-log LSE float64 [tokens, q_heads].

    q [tokens, q_heads, head_dim]: request r owns rows query_start_loc[r] to query_start_loc[r + 1].
    k_pages, v_pages [page, token, kv_head, head_dim or head_dim_v]: any strides. Key j of request r is
    token j % page_size of page block_table[r, j // page_size]. seq_lens [requests]: keys of each request,
    its queries' own ones included. Query i of n in a request of L keys is at position L - n + i.

    causal: a query sees the keys up to its own position; bool, or a bool tensor with one flag per request.
    window: a query at position p sees no key before p - window; -1 is no limit. Without `causal` it sees none
    after p + window either. spans [requests, n, 2]: first and last token of spans whose queries see the whole
    span, what the rules before hide included; with `clamp_spans`, nothing before p - window still. soft_cap:
    scores become soft_cap * tanh(score / soft_cap); 0 is off. alibi_slopes [q_heads]: the score gains
    slope * (j - p); with `alibi_sqrt`, -slope * sqrt(p - j) up to the query's own position and 0 after it. It
    is added after the soft cap. sinks [q_heads]: a score with no key and no value. It adds to the denominator,
    and so to the LSE. q_scale, k_scale, v_scale: what a stored number is multiplied by to get the query, key or value.

    A row that sees no key has output 0, and LSE -inf (the sink's score where there is one). Numbers that a
    query does not see take part in no arithmetic, so that NaN there stays there. Kernels promise as much for
    what no query of a tile sees; a NaN among a step's own values may reach the earlier queries of its tile.
    """
    tokens, q_heads, _ = q.shape
    kv_heads = k_pages.shape[2]
    out = torch.zeros(tokens, q_heads, v_pages.shape[-1], dtype=torch.float64)
    lse = torch.full((tokens, q_heads), -math.inf, dtype=torch.float64)
    queries = (q.cpu().double() * float(q_scale)).unflatten(
        1, (kv_heads, q_heads // kv_heads)
    )  # [tokens, kv_heads, group, D]
    slopes, sink = (None if x is None else x.cpu().double()[:, None] for x in (alibi_slopes, sinks))
    starts = query_start_loc.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        keys = _gather(k_pages, block_table[request], length) * float(k_scale)  # [L, kv_heads, D]
        values = _gather(v_pages, block_table[request], length) * float(v_scale)  # [L, kv_heads, DV]
        is_causal = bool(causal[request]) if isinstance(causal, torch.Tensor) else causal
        for row in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - row)
            seen = _seen(position, length, is_causal, window)  # [S]
            for begin, end in [] if spans is None else spans[request].tolist():
                if begin <= position <= end:
                    first = max(begin, position - window) if clamp_spans and window >= 0 else begin
                    seen = torch.cat([seen, torch.arange(first, min(end, length - 1) + 1)]).unique()
            products = torch.einsum("kgd,skd->kgs", queries[row], keys[seen])
            scores = products.flatten(0, 1) * scale  # [q_heads, S]
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores + slopes * _alibi(seen - position, alibi_sqrt)
            everything = scores if sink is None else torch.cat([scores, sink], 1)
            lse[row] = torch.logsumexp(everything, 1)
            if len(seen):
                weights = torch.exp(scores - lse[row, :, None]).unflatten(0, (kv_heads, -1))
                out[row] = torch.einsum("kgs,skd->kgd", weights, values[seen]).flatten(0, 1)
    return out, lse


def _gather(pages: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a request as float64 [length, kv_heads, dim]."""
    token = torch.arange(length)
    page_size = pages.shape[1]
    page = row.cpu().long()[token // page_size]
    return pages[page.to(pages.device), (token % page_size).to(pages.device)].cpu().double()


def _seen(position: int, length: int, causal: bool, window: int) -> torch.Tensor:
    """Which keys a query sees, ascending."""
    first = 0 if window < 0 else max(0, position - window)
    last = position if causal else length - 1 if window < 0 else min(position + window, length - 1)
    return torch.arange(first, max(first, last + 1))


def _alibi(distance: torch.Tensor, square_root: bool) -> torch.Tensor:
    """What a slope is multiplied by; distance: key position less query position, float64."""
    if not square_root:
        return distance.double()
    return -torch.sqrt((-distance).clamp(min=0).double())

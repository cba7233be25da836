"""The dispatcher: one layer's attention call, run by the kernels that the step's schedule chose."""

from __future__ import annotations

from collections import Counter

import torch

from numa_attention.schedule import Schedule

# launches of each variant since the last `ran.clear()`: what really ran, for tests and reports
ran: Counter[str] = Counter()


def attend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of one layer over its paged cache; the step's own keys and values are in the pages already.

    q [tokens, q_heads, head_dim], out [tokens, q_heads, head_dim_v]: rows of query_start_loc; the last dimension is
    contiguous. k_pages, v_pages: strided views [page, token, kv_head, head_dim or head_dim_v] whose last dimension is
    contiguous. scale: softmax scale. soft_cap: cap * tanh(score / cap), 0 for none. sinks float [q_heads]: a score
    that only adds to the denominator (and to the LSE). alibi_slopes float [q_heads]: slope * (key - query position)
    is added to the score. k_scale, v_scale float32 [1]: factors of the cached values, both or neither.
    lse float32 [tokens, q_heads], any strides: natural log; -inf for rows that see no key, whose output is 0.

    Raises ValueError where the tensors are not what the schedule was planned for.
    """
    shape = schedule.shape
    if q.dtype != shape.dtype or k_pages.dtype != shape.kv_dtype or k_pages.shape[1] != shape.page_size:
        raise ValueError(
            f"the schedule was planned for {shape}; got q {q.dtype}, pages {k_pages.dtype} of {k_pages.shape[1]} tokens"
        )
    if (k_scale is None) != (v_scale is None):
        raise ValueError("give both k_scale and v_scale, or neither")
    options = dict(
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        lse=lse,
    )
    for plan in (schedule.decode, schedule.prefill):
        if plan is not None:
            kernel_of(plan.variant.name)(q, k_pages, v_pages, out, schedule, **options)
            ran[plan.variant.name] += 1


_kernels: dict[str, object] = {}


def kernel_of(name: str):
    """The function that runs a variant, imported when it is first needed."""
    if name not in _kernels:
        if name == "portable-decode":
            from numa_attention.decode.portable import decode as function
        elif name == "portable-prefill":
            from numa_attention.prefill.portable import prefill as function
        elif name == "torch-decode":
            from numa_attention.torch_walk import decode as function
        elif name == "torch-prefill":
            from numa_attention.torch_walk import prefill as function
        else:
            raise ValueError(f"no kernel is called {name!r}")
        _kernels[name] = function
    return _kernels[name]

"""Attention as an operation of its own, on tensors as torch's scaled_dot_product_attention takes them.

::

    from numa_attention import attention

    out = attention(q, k, v, causal=True)     # [batch, heads, tokens, head_dim]

All requests of a call are equally long, so that nothing need be copied. Where a request's heads follow those of the one
before, as in a contiguous tensor, all heads are heads of one request: queries and keys are grouped just the same. Where
its tokens do, as in a transposed [batch, tokens, heads, head_dim], they are requests in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from numa_attention.jit import resolve
from numa_attention.runner import attend
from numa_attention.schedule import EXTEND_KEYS, EXTEND_RATIO, Planner, Schedule, StepBatch
from numa_attention.shapes import CONTIGUOUS, LayerShape, UnsupportedShape
from numa_attention.topology import Topology, detect
from numa_attention.variants import Variant, choose_decode, choose_prefill

MOST_DECODE_QUERIES = 8  # more query tokens than these are a prefill
SMALLEST_PAGE, LARGEST_PAGE = 16, 128
PLANS = 64  # kept, each of some 10 MB on the device at most; of short queries some 30 MB
# kernels that read keys and values in a row as they are; for the others they are pages that follow one another
WITHOUT_PAGES = ("portable-", "torch-")


@dataclass(frozen=True)
class Call:
    """What decides a plan: shape, without pages, and sizes of a call, and what it asks for."""

    device: torch.device
    shape: LayerShape
    requests: int
    queries: int
    keys: int
    causal: bool
    kernels: str
    kernel: str | None
    mapping: str | None
    placement: str

    @property
    def decodes(self) -> bool:
        """Whether the keys of a query are split over workgroups."""
        return 0 < self.queries <= MOST_DECODE_QUERIES and self.keys > 0


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    window: int = -1,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
    kernels: str = "auto",
    kernel: str | None = None,
    mapping: str | None = None,
    placement: str = "dispatch",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v: the output [batch, q_heads, queries, head_dim_v], in the layout of q.

    q [batch, q_heads, queries, head_dim], k [batch, kv_heads, keys, head_dim], v [batch, kv_heads, keys, head_dim_v]:
    on one device, of one dtype (float32, float16, bfloat16). Query head h reads KV head h // (q_heads // kv_heads).
    Contiguous tensors and transposed [batch, tokens, heads, head_dim] are read where they are, others are copied first.

    causal: query i of n sees the first keys - n + i + 1 keys, so that the last query sees all of them; there must be at
    least as many keys as queries. (With fewer queries than keys torch's is_causal begins at the first key instead.)
    scale: 1 / sqrt(head_dim) by default. window: tokens to the left of a query's own position that it still sees, and
    to its right where it is not causal; -1 for all. soft_cap, sinks, alibi_slopes float [q_heads]: see `runner.attend`.
    return_lse: also return the natural log of each row's sum of exponentials, float32 [batch, q_heads, queries]; -inf,
    beside an output of 0, where there are no keys to see.

    kernels: "auto", "triton", "torch" or "interpret". kernel: another kernel than the dispatcher's, by name. mapping,
    placement: see docs/mapping.md. What is planned for a shape is kept for the next call: make one before a graph is
    captured. Calls of one shape must not run on two streams at a time. There is no backward pass.

    Raises ValueError (UnsupportedShape among them), and RuntimeError where a gradient is asked for.
    """
    _check(q, k, v, causal)
    batch, q_heads, queries, head_dim = q.shape
    kv_heads, keys, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    by_tokens = all(map(_tokens_follow, (q, k, v))) and (
        q.stride(1) < q.stride(2) or not all(map(_heads_follow, (q, k, v)))
    )
    if by_tokens:
        out = q.new_empty(batch, queries, q_heads, head_dim_v).transpose(1, 2)
        lse = q.new_empty(batch, queries, q_heads, dtype=torch.float32).transpose(1, 2)
    else:
        q, k, v = (x if _heads_follow(x) else x.contiguous() for x in (q, k, v))
        out = q.new_empty(batch, q_heads, queries, head_dim_v)
        lse = q.new_empty(batch, q_heads, queries, dtype=torch.float32)
        if batch > 1:
            sinks, alibi_slopes = (None if x is None else x.repeat(batch) for x in (sinks, alibi_slopes))
    if out.numel():
        repeats = 1 if by_tokens else batch
        shape = LayerShape(
            q_heads * repeats, kv_heads * repeats, head_dim, head_dim_v, q.dtype, k.dtype, CONTIGUOUS, window
        )
        shape.check()
        requests = batch if by_tokens else 1
        schedule = plan(
            Call(q.device, shape, requests, queries, keys, causal, kernels, kernel, mapping, placement)
        )
        attend(
            *rows_of((q, k, v, out), schedule.shape, by_tokens),
            schedule,
            scale=1 / math.sqrt(head_dim) if scale is None else scale,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            lse=_rows(lse, by_tokens) if return_lse else None,
        )
    return (out, lse) if return_lse else out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim]; got {list(tensor.shape)}")
        if tensor.device != q.device or tensor.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must be on one device and of one dtype; q is {q.dtype} on {q.device}, {name} is "
                f"{tensor.dtype} on {tensor.device}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires a gradient and there is none: call this under torch.no_grad()"
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q [batch, q_heads, queries, head_dim], k [batch, kv_heads, keys, head_dim] and v [batch, kv_heads, keys, "
            f"head_dim_v] must agree; got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries over {k.shape[2]} keys cannot be causal: the last query is at the last key, and the "
            "first would lie before all of them"
        )


def _heads_follow(x: torch.Tensor) -> bool:
    """Whether the heads of a request follow those of the one before, all evenly spaced."""
    batch, heads, _, dim = x.shape
    return x.stride(3) == 1 and (batch == 1 or heads == 1 or x.stride(0) == heads * x.stride(1))


def _tokens_follow(x: torch.Tensor) -> bool:
    """Whether the tokens of a request follow those of the one before, all evenly spaced."""
    batch, _, tokens, _ = x.shape
    return x.stride(3) == 1 and (batch == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(2))


def rows_of(tensors: Sequence[torch.Tensor], shape: LayerShape, by_tokens: bool) -> list[torch.Tensor]:
    """q, k, v and out as `runner.attend` takes them, without a copy. shape: with the pages that the kernel takes."""
    q, k, v, out = (_rows(x, by_tokens) for x in tensors)
    if shape.page_size != CONTIGUOUS:
        k, v = (x.unflatten(0, (-1, shape.page_size)) for x in (k, v))
    return [q, k, v, out]


def _rows(x: torch.Tensor, by_tokens: bool) -> torch.Tensor:
    """[batch, heads, tokens, ...] as [tokens, heads, ...] without a copy, where the heads or the tokens follow."""
    batch, heads, tokens, *rest = x.shape
    strides = list(x.stride())
    if by_tokens:
        token_stride = strides[2] if tokens > 1 else strides[0]
        return x.as_strided((batch * tokens, heads, *rest), (token_stride, strides[1], *strides[3:]))
    head_stride = strides[1] if heads > 1 else strides[0]
    return x.as_strided((tokens, batch * heads, *rest), (strides[2], head_stride, *strides[3:]))


@lru_cache(maxsize=PLANS)
def plan(call: Call) -> Schedule:
    """The schedule of a call, and of all later ones like it."""
    topology = detect(call.device)
    return plan_with(call, topology, *shape_and_variant(call, topology, resolve(call.kernels, call.device)))


def plan_with(call: Call, topology: Topology, shape: LayerShape, variant: Variant) -> Schedule:
    """The schedule of a call with a variant of one's own. shape: with the pages that the variant takes, or without."""
    requests, device = call.requests, call.device
    starts = torch.arange(requests + 1, dtype=torch.int32) * call.queries
    if shape.page_size == CONTIGUOUS:
        block_table = torch.arange(requests, dtype=torch.int32)[:, None] * call.keys
    else:
        block_table = torch.arange(requests * call.keys // shape.page_size, dtype=torch.int32).view(
            requests, -1
        )
    long = call.keys >= max(EXTEND_KEYS, EXTEND_RATIO * call.queries)
    planner = Planner(
        shape,
        device,
        max_requests=requests,
        max_tokens=requests * call.queries,
        max_decode_query=call.queries if call.decodes else 1,
        kernels=call.kernels,
        mapping=call.mapping,
        topology=topology,
        placement=call.placement,
        # a kernel that is asked for is the one that runs
        extend=None if long and not call.decodes and call.kernel is None else False,
        decodes=call.decodes,
        **{"decode_variant" if call.decodes else "prefill_variant": variant},
    )
    return planner.plan(
        StepBatch(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.full((requests,), call.keys, dtype=torch.int32, device=device),
            block_table=block_table.to(device),
            num_decodes=requests if call.decodes else 0,
            num_decode_tokens=requests * call.queries if call.decodes else 0,
            max_query_len=call.queries,
            max_seq_len=call.keys,
            causal=call.causal,
            key_rows=requests * call.keys,
        )
    )


def shape_and_variant(call: Call, topology: Topology, kernels: str) -> tuple[LayerShape, Variant]:
    """The kernel of a call, and the shape with the pages that it takes."""

    def choose(shape: LayerShape, kernel: str | None) -> Variant:
        if call.decodes:
            return choose_decode(shape, topology, kernels, call.queries, call.mapping, kernel=kernel)
        return choose_prefill(shape, topology, kernels, call.mapping, kernel=kernel)

    page = min(call.keys & -call.keys, LARGEST_PAGE)
    if page >= SMALLEST_PAGE:
        paged = replace(call.shape, page_size=page)
        variant = choose(paged, call.kernel)
        if not variant.name.startswith(WITHOUT_PAGES):
            return paged, variant
    elif call.kernel is not None and not call.kernel.startswith(WITHOUT_PAGES):
        raise UnsupportedShape(
            f"{call.kernel} reads keys and values in pages: their number must be a multiple of {SMALLEST_PAGE}, not "
            f"{call.keys}."
        )
    return call.shape, choose(call.shape, None)

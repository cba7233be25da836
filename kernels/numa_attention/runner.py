"""The dispatcher: one layer's attention call, run by the kernels that the step's schedule chose."""

from __future__ import annotations

from collections import Counter

import torch

from numa_attention import aiter_adapter
from numa_attention.direct_launch import Repeat
from numa_attention.jit import pointer_traits
from numa_attention.schedule import DecodeSchedule, Schedule, StepBatch
from numa_attention.shapes import CONTIGUOUS, FLOAT8, LayerShape

# the kernels that take every option; special ones refuse what they lack, and `variants` picks them only for layers
# whose shape is neither `general` nor contiguous
GENERAL = frozenset(
    {
        "portable-decode",
        "portable-prefill",
        "portable-extend",
        "cdna5-decode",
        "cdna5-cluster-decode",
        "cdna5-prefill",
        "torch-decode",
        "torch-prefill",
        "torch-extend",
    }
)
ON_AMD = torch.version.hip is not None
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
    alibi_sqrt: bool = False,
    spans: torch.Tensor | None = None,
    clamp_spans: bool = False,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of one layer over its paged cache; the step's own keys and values are in the pages already.

    q [tokens, q_heads, head_dim], out [tokens, q_heads, head_dim_v]: rows of query_start_loc; the last dimension is
    contiguous. k_pages, v_pages: strided views [page, token, kv_head, head_dim or head_dim_v] whose last dimension is
    contiguous; for a shape without pages [token, kv_head, head_dim or head_dim_v], in which request r has the rows
    from block_table[r, 0] on. scale: softmax scale. soft_cap: cap * tanh(score / cap), 0 for none. sinks float
    [q_heads]: a score that only adds to the denominator (and to the LSE). alibi_slopes float [q_heads]: slope * (key -
    query position) is added to the score, with `alibi_sqrt` -slope * sqrt(query position - key) up to the query's own
    position and 0 after it. spans int32 [requests, n, 2]: first and last token of spans whose queries see the whole
    span, whatever else hides it; with `clamp_spans` the window hides it still. No two spans of a request overlap; one
    that is a single token says nothing. q_scale float32 [1]: factor of queries in float8, which need a float8 cache.
    k_scale, v_scale float32 [1]: factors of the cached values, both or neither. out_scale float32 [1]: what the output
    is divided by before it is clamped to the range of a float8 `out`.
    lse float32 [tokens, q_heads], any strides: natural log; -inf for rows that see no key, whose output is 0.

    Raises ValueError where the tensors are not what the schedule was planned for, or the chosen kernel lacks an option.
    """
    # this runs for every layer of every step: what layers of one layout have in common is checked and prepared for the
    # first of them, and the others only compare layouts and launch
    tensors = (q, k_pages, v_pages, out)
    pointers = (q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr())
    values = (*pointers, float(scale), float(soft_cap))
    q_at, k_at, v_at, out_at = pointers
    layout = (
        q.dtype, q.shape, q.stride(), q.get_device(), q_at & 15, out.dtype, out.shape, out.stride(),
        out.get_device(), out_at & 15, k_pages.dtype, k_pages.shape, k_pages.stride(), k_pages.get_device(),
        k_at & 15, v_pages.dtype, v_pages.shape, v_pages.stride(), v_pages.get_device(), v_at & 15,
        scale > 0.0, soft_cap > 0.0, soft_cap >= 0.0, alibi_sqrt, clamp_spans,
    )  # fmt: skip
    for name, x in (
        ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("spans", spans), ("q_scale", q_scale),
        ("k_scale", k_scale), ("v_scale", v_scale), ("out_scale", out_scale), ("lse", lse),
    ):  # fmt: skip
        if x is not None:
            address = x.data_ptr()
            values += (address,)
            layout += (name, x.dtype, x.shape, x.stride(), x.get_device(), address & 15)
    if ON_AMD:
        layout += (pointer_traits(*tensors), v_at - k_at)
    repeats = schedule.repeats.get(layout)
    if repeats:
        for repeat in repeats:
            repeat(values, tensors)
            ran[repeat.name] += 1
        return
    shape, tokens = schedule.shape, schedule.tokens
    given = dict(
        q=q, k_pages=k_pages, v_pages=v_pages, out=out, scale=scale, soft_cap=soft_cap, sinks=sinks,
        alibi_slopes=alibi_slopes, spans=spans, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_scale=out_scale,
        lse=lse,
    )  # fmt: skip
    if repeats is None:
        _check(
            shape, q, k_pages, v_pages, out, soft_cap, sinks, alibi_slopes, q_scale, k_scale, v_scale, out_scale, lse
        )  # fmt: skip
        _check_step(schedule, given)
    options = dict(
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        lse=lse,
    )
    plans = (schedule.decode, schedule.prefill, schedule.extend)
    if out_scale is not None and any(plan is not None and plan.variant.name not in GENERAL for plan in plans):
        # a special kernel's output is quantised after it
        plain = torch.empty(out.shape, dtype=shape.dtype, device=out.device)
        attend(
            q, k_pages, v_pages, plain, schedule, alibi_sqrt=alibi_sqrt, spans=spans, clamp_spans=clamp_spans,
            q_scale=q_scale, **options,
        )  # fmt: skip
        largest = torch.finfo(out.dtype).max
        out[:tokens].copy_((plain[:tokens].float() / out_scale).clamp(-largest, largest))
        return
    general = _general_options(schedule.batch, alibi_sqrt, spans, clamp_spans, q_scale, out_scale)
    launches = []
    for plan in plans:
        if plan is not None:
            if plan.variant.name not in GENERAL and (general or not isinstance(schedule.batch.causal, bool)):
                lacking = (
                    [*general] if isinstance(schedule.batch.causal, bool) else [*general, "causal by request"]
                )
                raise ValueError(
                    f"the kernel {plan.variant.name} takes no {', '.join(lacking)}: "
                    "plan the layer with a shape that is `general`"
                )
            try:
                launched = kernel_of(plan.variant.name)(
                    q, k_pages, v_pages, out, schedule, **options, **general
                )
            except BaseException:
                # an interpreted launch that stops half-way leaves counts behind that the next would add to
                if q.device.type == "cpu":
                    if isinstance(plan, DecodeSchedule):
                        plan.arrivals.zero_()
                    if getattr(plan, "splits", None) is not None:
                        plan.splits.counts.zero_()
                    if plan.queues is not None:
                        plan.queues[: max(plan.variant.queues, 1) + 1].zero_()
                raise
            launches.append(launched)
            # a kernel that hands a call over says to which other one
            ran[plan.variant.name if launched is None else launched.name] += 1
    # nothing where one of them cannot be repeated
    repeatable = all(launched is not None and launched.direct is not None for launched in launches)
    names = tuple(name for name, x in given.items() if x is not None)  # in the order of `values`
    schedule.repeats[layout] = tuple([Repeat(launched, names) for launched in launches if repeatable])


def _general_options(
    batch: StepBatch, alibi_sqrt, spans, clamp_spans, q_scale, out_scale
) -> dict[str, object]:
    """The options in use that only the kernels of GENERAL take."""
    options: dict[str, object] = {}
    if spans is not None:
        if not batch.has_spans or spans.shape[0] < batch.num_requests:
            raise ValueError(
                f"spans of {spans.shape[0]} requests do not fit a step of {batch.num_requests} that was planned "
                f"with{'' if batch.has_spans else 'out'} spans"
            )
        if spans.dtype != torch.int32 or spans.shape[2:] != (2,) or not spans.is_contiguous():
            raise ValueError(
                f"spans must be contiguous int32 [requests, n, 2]; got {spans.dtype} {list(spans.shape)}"
            )
        options |= {"spans": spans, "clamp_spans": clamp_spans}
    if alibi_sqrt:
        options["alibi_sqrt"] = True
    if q_scale is not None:
        options["q_scale"] = q_scale
    if out_scale is not None:
        options["out_scale"] = out_scale
    return options


def _check_step(schedule: Schedule, given: dict[str, torch.Tensor | float | None]) -> None:
    """Raises ValueError where tensors have fewer rows than the step, or lie on another device."""
    tokens, batch = schedule.tokens, schedule.batch
    k_pages, v_pages = given["k_pages"], given["v_pages"]
    if schedule.shape.page_size == CONTIGUOUS:
        rows = tokens if batch.key_rows is None else batch.key_rows
        if not rows <= len(k_pages) == len(v_pages):
            raise ValueError(
                f"the step has {rows} tokens; keys and values have {len(k_pages)}, {len(v_pages)} rows"
            )
    rows = [len(given[name]) for name in ("q", "out", "lse") if given[name] is not None]
    if min(rows) < tokens:
        raise ValueError(
            f"the step has {tokens} query tokens; q, out and lse have {', '.join(map(str, rows))} rows"
        )
    device = batch.seq_lens.device
    for name, x in given.items():
        # kernels take addresses as they are
        if isinstance(x, torch.Tensor) and x.device != device:
            raise ValueError(f"{name} is on {x.device}; the step was planned on {device}")


def _check(
    shape: LayerShape, q, k_pages, v_pages, out, soft_cap, sinks, alibi_slopes, q_scale, k_scale, v_scale, out_scale,
    lse,
) -> None:  # fmt: skip
    """Raises ValueError where the kernels would read or write past a tensor, or take one number for another."""
    pages = (shape.kv_heads,) if shape.page_size == CONTIGUOUS else (shape.page_size, shape.kv_heads)
    for name, tensor, dtype, sizes in (
        ("q", q, shape.dtype if q_scale is None else q.dtype, (shape.q_heads, shape.head_dim)),
        ("k_pages", k_pages, shape.kv_dtype, (*pages, shape.head_dim)),
        ("v_pages", v_pages, shape.kv_dtype, (*pages, shape.head_dim_v)),
        ("out", out, out.dtype, (shape.q_heads, shape.head_dim_v)),
    ):
        if tensor.dtype != dtype or tensor.shape[1:] != sizes:
            raise ValueError(
                f"the schedule was planned for {name} {dtype} [*, {', '.join(map(str, sizes))}]; "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous; its stride is {tensor.stride(-1)}"
            )
    for name, vector in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if vector is not None and (vector.shape != (shape.q_heads,) or not vector.is_contiguous()):
            raise ValueError(
                f"{name} must be contiguous, one number for each of {shape.q_heads} query heads; got "
                f"{list(vector.shape)} with strides {vector.stride()}"
            )
    if (k_scale is None) != (v_scale is None):
        raise ValueError("give both k_scale and v_scale, or neither")
    if q_scale is not None and (q.dtype not in FLOAT8 or shape.kv_dtype not in FLOAT8):
        raise ValueError(
            f"q_scale is for float8 queries over a float8 cache; got {q.dtype} over {shape.kv_dtype}"
        )
    if (out_scale is None) != (out.dtype not in FLOAT8):
        raise ValueError(f"give out_scale for a float8 output and for no other; out is {out.dtype}")
    for name, factor in (
        ("q_scale", q_scale),
        ("k_scale", k_scale),
        ("v_scale", v_scale),
        ("out_scale", out_scale),
    ):
        if factor is not None and (factor.dtype != torch.float32 or factor.numel() != 1):
            raise ValueError(f"{name} must be one float32 number; got {factor.dtype} {list(factor.shape)}")
    if lse is not None and (lse.dtype != torch.float32 or lse.shape[1:] != (shape.q_heads,)):
        raise ValueError(f"lse must be float32 [tokens, {shape.q_heads}]; got {lse.dtype} {list(lse.shape)}")
    if soft_cap < 0.0:
        raise ValueError(f"soft_cap is {soft_cap}: give a positive number, or 0 for none")


_kernels: dict[str, object] = {}


def kernel_of(name: str):
    """The function that runs a variant, imported when it is first needed."""
    if name not in _kernels:
        if name == "portable-decode":
            from numa_attention.decode.portable import decode as function
        elif name == "portable-extend":
            from numa_attention.decode.portable import extend as function
        elif name == "portable-prefill":
            from numa_attention.prefill.portable import prefill as function
        elif name == aiter_adapter.DECODE:
            function = aiter_adapter.decode
        elif name == aiter_adapter.PREFILL:
            function = aiter_adapter.prefill
        elif name == "hopper-prefill":
            from numa_attention.prefill.hopper_launch import prefill as function
        elif name == "hopper-decode":
            from numa_attention.decode.hopper_launch import decode as function
        elif name == "cdna5-decode":
            from numa_attention.decode.cdna5 import decode as function
        elif name == "cdna5-cluster-decode":
            from numa_attention.decode.cdna5_cluster import decode as function
        elif name == "cdna5-prefill":
            from numa_attention.prefill.cdna5 import prefill as function
        elif name == "torch-decode":
            from numa_attention.torch_walk import decode as function
        elif name == "torch-extend":
            from numa_attention.torch_walk import extend as function
        elif name == "torch-prefill":
            from numa_attention.torch_walk import prefill as function
        else:
            raise ValueError(f"no kernel is called {name!r}")
        _kernels[name] = function
    return _kernels[name]

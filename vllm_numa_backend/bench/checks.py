"""Every kernel that the dispatcher takes on this device, against the float64 specification.

Outputs, workspaces, unused pages and the unused ends of pages hold NaN before a kernel runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from numa_attention import reference, runner
from numa_attention.schedule import Planner, StepBatch
from numa_attention.shapes import LayerShape

# ||out - reference|| / ||reference||
MARKS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
PAGES_BESIDE = 3


@dataclass(frozen=True)
class Check:
    """One step of one layer. variants: what really ran. error: relative, of the output; NaN where it did not run."""

    name: str
    variants: str
    error: float
    mark: float
    passed: bool
    complaint: str = ""


@dataclass(frozen=True)
class Step:
    """query_lens, seq_lens: of each request, decodes (at most `most_decode` query tokens) first."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    decodes: int
    q_heads: int
    kv_heads: int
    head_dim: int = 128
    head_dim_v: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int = -1
    most_decode: int = 1
    options: dict = field(default_factory=dict)


MIXED = ((1, 1, 1, 100, 63, 17), (1, 63, 1000, 100, 200, 17), 3)


def steps(float8: torch.dtype, *, tiny: bool) -> list[Step]:
    """Odd lengths first. tiny: those that a CPU takes in seconds."""
    found = [
        Step(f"group {q // kv}, head_dim {d}", *MIXED, q, kv, d)
        for q, kv, d in ((4, 4, 64), (10, 2, 128), (16, 2, 80), (8, 1, 256), (64, 1, 128), (9, 3, 64))
    ]
    found += [
        Step("values of another size", *MIXED, 16, 2, 192, 128),
        Step("float16", *MIXED, 8, 2, dtype=torch.float16),
        Step("float32", *MIXED, 8, 2, 64, dtype=torch.float32),
        Step("pages of 64", *MIXED, 8, 2, page_size=64),
        Step("pages of 48", *MIXED, 8, 2, page_size=48),
        Step("pages of 128", *MIXED, 8, 2, page_size=128),
        Step("float8 cache", *MIXED, 8, 2, kv_dtype=float8, options={"scales": True}),
        Step("float8 cache, pages of 64", *MIXED, 8, 1, page_size=64, kv_dtype=float8, options={"scales": True}),
        Step("window", *MIXED, 8, 2, window=50),
        Step("soft cap", *MIXED, 8, 2, options={"soft_cap": 20.0}),
        Step("sinks", *MIXED, 8, 2, options={"sinks": True}),
        Step("ALiBi", *MIXED, 8, 2, options={"alibi": True}),
        Step("LSE", *MIXED, 8, 2, options={"lse": True}),
        Step("window, soft cap and sinks", *MIXED, 8, 2, 64, window=50, options={"soft_cap": 20.0, "sinks": True}),
        Step("4 tokens decoded", (4, 3, 1), (200, 4, 17), 3, 8, 2, most_decode=4),
    ]  # fmt: skip
    if not tiny:
        found += [
            Step("one long request", (1,), (100_003,), 1, 64, 8),
            Step("many requests", (1,) * 200, tuple(range(1, 4001, 20)), 200, 32, 8),
            Step("long prompts", (4097, 1023), (4097, 9001), 0, 32, 8),
        ]
    return found


def run_check(step: Step, device: torch.device, kernels: str = "auto", **planner_options) -> Check:
    """Run one step and compare; a kernel that does not run is a failed check with its complaint."""
    mark = MARKS[step.dtype]
    runner.ran.clear()
    try:
        error, complaint = _compare(step, device, kernels, planner_options)
    except Exception as failure:  # the report tells of every kernel, whatever one of them does
        words = str(failure).strip().splitlines() or [""]
        return Check(step.name, _ran(), math.nan, mark, False, f"{type(failure).__name__}: {words[0]}")
    return Check(step.name, _ran(), error, mark, error <= mark and not complaint, complaint)


def _ran() -> str:
    return ", ".join(sorted(runner.ran))


def _compare(step: Step, device: torch.device, kernels: str, planner_options: dict) -> tuple[float, str]:
    head_dim_v = step.head_dim_v or step.head_dim
    kv_dtype = step.kv_dtype or step.dtype
    shape = LayerShape(
        step.q_heads, step.kv_heads, step.head_dim, head_dim_v, step.dtype, kv_dtype, step.page_size, step.window
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    pages_of = [-(-length // step.page_size) for length in step.seq_lens]
    order = torch.randperm(sum(pages_of) + PAGES_BESIDE, generator=random)[: sum(pages_of)].int()
    table = torch.zeros(len(pages_of), max(pages_of), dtype=torch.int32)
    caches = []
    for size in (step.head_dim, head_dim_v):
        pages = torch.full((sum(pages_of) + PAGES_BESIDE, step.page_size, step.kv_heads, size), math.nan)
        first = 0
        for request, (length, count) in enumerate(zip(step.seq_lens, pages_of, strict=True)):
            own = order[first : first + count]
            table[request, :count] = own
            tokens = torch.full((count * step.page_size, step.kv_heads, size), math.nan)
            tokens[:length] = torch.randn(length, step.kv_heads, size, generator=random)
            pages[own.long()] = tokens.view(count, step.page_size, step.kv_heads, size)
            first += count
        caches.append(pages.to(kv_dtype).to(device))
    starts = torch.tensor((0, *step.query_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = int(starts[-1])
    q = torch.randn(tokens, step.q_heads, step.head_dim, generator=random).to(step.dtype).to(device)
    options: dict = {"scale": step.head_dim**-0.5}
    if "soft_cap" in step.options:
        options["soft_cap"] = step.options["soft_cap"]
    if "sinks" in step.options:
        options["sinks"] = torch.randn(step.q_heads, generator=random).to(step.dtype).to(device)
    if "alibi" in step.options:
        options["alibi_slopes"] = -torch.rand(step.q_heads, generator=random).to(device) / 10
    scales = {"k_scale": 0.5, "v_scale": 0.25} if "scales" in step.options else {}
    device_scales = {name: torch.full((1,), value, device=device) for name, value in scales.items()}
    features = frozenset({"sinks", "alibi", "soft_cap", "lse"} & set(step.options))
    planner = Planner(
        shape, device, max_requests=len(pages_of), max_tokens=tokens, max_decode_query=step.most_decode,
        kernels=kernels, features=features, **planner_options,
    )  # fmt: skip
    planner.decode_buffers.partial_acc.fill_(math.nan)
    planner.decode_buffers.partial_ml.fill_(math.nan)
    seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32, device=device)
    batch = StepBatch(
        starts.to(device), starts, seq_lens, table.to(device), step.decodes, int(starts[step.decodes]),
        max(step.query_lens), max(step.seq_lens),
    )  # fmt: skip
    out = torch.full((tokens, step.q_heads, head_dim_v), math.nan, dtype=step.dtype, device=device)
    lse = torch.full((tokens, step.q_heads), math.nan, device=device) if "lse" in step.options else None
    runner.attend(q, *caches, out, planner.plan(batch), **options, **device_scales, lse=lse)
    expected, expected_lse = reference.attention(
        q, *caches, starts.to(device), seq_lens, table.to(device), window=step.window, **options, **scales
    )
    error = float((out.double() - expected).norm() / expected.norm())
    if lse is not None and not float((lse.double() - expected_lse).abs().max()) < 2e-2:
        return error, "the LSE is wrong"
    return error, "" if math.isfinite(error) else "the output has NaN"

"""Every kernel that the dispatcher takes on this device, against the float64 specification.

Outputs, workspaces, unused pages and the unused ends of pages hold NaN before a kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from numa_attention import reference, runner
from numa_attention.kv_cache import write_pages
from numa_attention.schedule import Planner, StepBatch
from numa_attention.shapes import LayerShape

# ||out - reference|| / ||reference||
MARKS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
PAGES_BESIDE = 3
MOST_ROWS = 200  # query tokens of a step that are compared: the specification takes one at a time


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
    """query_lens, seq_lens: of each request, decodes (at most `most_decode` query tokens) first.

    packed: values beside keys and a page of each KV head in one run, as vLLM 0.32 and later lay a cache out. clusters:
    for the planner.
    """

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
    packed: bool = False
    clusters: bool = False


MIXED = ((1, 1, 1, 100, 63, 17), (1, 63, 1000, 100, 200, 17), 3)


def steps(float8: torch.dtype, *, tiny: bool) -> list[Step]:
    """Odd lengths first. float8: the e4m3 type of the device. tiny: those that a CPU takes in seconds."""
    e5m2 = torch.float8_e5m2fnuz if float8 == torch.float8_e4m3fnuz else torch.float8_e5m2
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
        Step("float8 cache, e5m2", *MIXED, 8, 2, kv_dtype=e5m2, options={"scales": True}),
        Step("keys beside values", *MIXED, 8, 2, 64, page_size=64, packed=True),
        Step("float8 keys beside values", *MIXED, 8, 2, page_size=128, kv_dtype=float8, options={"scales": True},
             packed=True),
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
            Step("few queries over a long prefix", (33,), (30_011,), 0, 8, 2),
            Step("many requests", (1,) * 200, tuple(range(1, 4001, 20)), 200, 32, 8),
            Step("long prompts", (4097, 1023), (4097, 9001), 0, 32, 8),
        ]
    return found


def cluster_steps(float8: torch.dtype) -> list[Step]:
    """Decoding that fills an MI450 with clusters of workgroups; float8: the e4m3 type of the device."""
    found = []
    for name, requests, q_heads, kv_heads, page_size in (
        ("clusters of 4", 64, 64, 2, 256),
        ("clusters of 2, 3 query heads", 32, 24, 8, 128),
    ):
        lengths = tuple(1 + 97 * request for request in range(requests))
        step = Step(
            name, (1,) * requests, lengths, requests, q_heads, kv_heads, page_size=page_size, clusters=True
        )
        scales = {"scales": True}
        found += [step, replace(step, name=f"{name}, float8 cache", kv_dtype=float8, options=scales)]
        found.append(replace(found[-1], name=f"{name}, float8 keys beside values", packed=True))
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
    k_pages, v_pages, table = _cache(step, head_dim_v, kv_dtype, random, device)
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
        shape, device, max_requests=len(table), max_tokens=tokens, max_decode_query=step.most_decode,
        kernels=kernels, features=features, clusters=step.clusters, **planner_options,
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
    runner.attend(q, k_pages, v_pages, out, planner.plan(batch), **options, **device_scales, lse=lse)
    if not bool(out.isfinite().all()):
        return math.nan, "the output has NaN"
    rows, request_of, position = _compared_rows(step)
    expected, expected_lse = reference.attention(
        q[rows.to(device)], k_pages, v_pages, torch.arange(len(rows) + 1), position + 1, table[request_of],
        window=step.window, **options, **scales,
    )  # fmt: skip
    error = float((out.cpu().double()[rows] - expected).norm() / expected.norm())
    if lse is not None and not float((lse.cpu().double()[rows] - expected_lse).abs().max()) < 2e-2:
        return error, "the LSE is wrong"
    return error, ""


def _cache(
    step: Step, head_dim_v: int, kv_dtype: torch.dtype, random: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of keys and of values, NaN but for the tokens of the requests, and the block table, which stays here."""
    pages_of = [-(-length // step.page_size) for length in step.seq_lens]
    total = sum(pages_of) + PAGES_BESIDE
    order = torch.randperm(total, generator=random)[: sum(pages_of)].int()
    table = torch.zeros(len(pages_of), max(pages_of), dtype=torch.int32)
    caches = []
    for size in (step.head_dim, head_dim_v):
        pages = torch.full((total, step.page_size, step.kv_heads, size), math.nan)
        first = 0
        for request, (length, count) in enumerate(zip(step.seq_lens, pages_of, strict=True)):
            own = order[first : first + count]
            table[request, :count] = own
            tokens = torch.full((count * step.page_size, step.kv_heads, size), math.nan)
            tokens[:length] = torch.randn(length, step.kv_heads, size, generator=random)
            pages[own.long()] = tokens.view(count, step.page_size, step.kv_heads, size)
            first += count
        caches.append(pages.to(kv_dtype))
    keys, values = caches
    if step.packed:
        memory = torch.cat([keys.transpose(1, 2), values.transpose(1, 2)], 3).to(device).transpose(1, 2)
        return memory[..., : step.head_dim], memory[..., step.head_dim :], table
    return keys.to(device), values.to(device), table


def _compared_rows(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the queries, the request of each and its position there; of long steps the ends and some between."""
    found = []
    share = max(step.query_lens)
    if sum(step.query_lens) > MOST_ROWS:
        share = max(2, MOST_ROWS // len(step.query_lens))
    first = 0
    for request, (count, length) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        taken = min(count, share)
        spread = [round(number * (count - 1) / max(taken - 1, 1)) for number in range(taken)]
        found += [(first + row, request, length - count + row) for row in spread]
        first += count
    return torch.tensor(found).unbind(1)


def write_checks(float8: torch.dtype, device: torch.device, kernels: str) -> list[Callable[[], Check]]:
    """Writing a step's keys and values into a cache, quantised or not; float8: the e4m3 type of the device."""
    types = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, float8))
    return [
        partial(_check_writing, dtype, kv_dtype, packed, device, kernels)
        for dtype, kv_dtype in types
        for packed in (False, True)
    ]


def _check_writing(
    dtype: torch.dtype, kv_dtype: torch.dtype, packed: bool, device: torch.device, kernels: str
) -> Check:
    """The whole cache, to the bit, is what plain torch makes of it on the CPU. error: bytes that differ."""
    name = f"writing {str(kv_dtype).removeprefix('torch.')}{' keys beside values' if packed else ''}"
    step = Step("", (1,), (100,), 1, 2, 2, 128, dtype=dtype, page_size=16, packed=packed)
    random = torch.Generator().manual_seed(0)
    key, value = (3 * torch.randn(2, 63, 2, 128, generator=random)).to(dtype)
    slots = torch.randperm(100, generator=random)[:63]
    slots[1::4] = -1
    scales = [torch.tensor([scale]) for scale in (0.5, 0.25)] if kv_dtype != dtype else []

    def written(place: torch.device, kernels: str) -> torch.Tensor:
        pages = _cache(step, 128, kv_dtype, torch.Generator().manual_seed(1), place)[:2]
        write_pages(
            *(x.to(place) for x in (key, value)), *pages, slots.to(place), *(x.to(place) for x in scales),
            kernels=kernels,
        )  # fmt: skip
        return torch.cat([x.cpu().contiguous().view(torch.uint8).flatten() for x in pages])

    try:
        differing = int((written(device, kernels) != written(torch.device("cpu"), "torch")).sum())
    except Exception as failure:  # as in `run_check`
        words = str(failure).strip().splitlines() or [""]
        return Check(name, "write", math.nan, 0.0, False, f"{type(failure).__name__}: {words[0]}")
    complaint = f"{differing} bytes of the cache are wrong" if differing else ""
    return Check(name, "write", float(differing), 0.0, not differing, complaint)

"""Plan and run one step of a paged case on the kernels under test, with every buffer poisoned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from numa_attention import reference, runner
from numa_attention.schedule import Planner, Schedule, StepBatch
from numa_attention.shapes import CONTIGUOUS, FLOAT8, LayerShape
from numa_attention.topology import Topology, detect, pretend
from tests import batched_reference
from tests.support import PagedCase, assert_close, relative_error

# parametrises a test over the kernels that attend here
kernels = pytest.mark.parametrize(
    "kernels",
    [
        "triton",
        pytest.param(
            "torch",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="the torch kernels attend on the CPU only"
            ),
        ),
    ],
)
GENERAL_OPTIONS = ("alibi_sqrt", "spans", "q_scale", "out_scale")


def test_topology(device: torch.device, workgroups: int = 8, domains: int = 4) -> Topology:
    """The GPU itself, or a small pretended device with several domains, so that units are split and placed."""
    if device.type == "cuda":
        return detect(device)
    return dataclasses.replace(
        pretend("cpu"), compute_units=workgroups, domains=domains, dispatch_domains=domains
    )


test_topology.__test__ = False


def shape_of(case: PagedCase, window: int = -1, general: bool = False) -> LayerShape:
    """The layer shape of a case; its type is bfloat16 where queries are float8."""
    return LayerShape(
        q_heads=case.q.shape[1],
        kv_heads=case.k_pages.shape[-2],
        head_dim=case.q.shape[2],
        head_dim_v=case.v_pages.shape[-1],
        dtype=torch.bfloat16 if case.q.dtype in FLOAT8 else case.q.dtype,
        kv_dtype=case.k_pages.dtype,
        page_size=CONTIGUOUS if case.k_pages.ndim == 3 else case.k_pages.shape[1],
        window=window,
        general=general,
    )


def step_of(
    case: PagedCase, num_decodes: int, causal: bool | torch.Tensor = True, has_spans: bool = False
) -> StepBatch:
    """The step of a case whose first requests decode."""
    starts = case.query_start_loc.cpu()
    return StepBatch(
        query_start_loc=case.query_start_loc,
        query_start_loc_cpu=starts,
        seq_lens=case.seq_lens,
        block_table=case.block_table,
        num_decodes=num_decodes,
        num_decode_tokens=int(starts[num_decodes]),
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(case.seq_lens.max()),
        causal=causal,
        has_spans=has_spans,
    )


def make_planner(
    case: PagedCase,
    *,
    window: int = -1,
    kernels: str,
    general: bool = False,
    shape: LayerShape | None = None,
    **options,
) -> Planner:
    """A planner with room for the case, whose workspace is full of NaN. shape: instead of the case's own."""
    device = case.q.device
    planner = Planner(
        shape or shape_of(case, window, general),
        device,
        max_requests=max(8, len(case.seq_lens)),
        max_tokens=max(64, len(case.q)),
        kernels=kernels,
        topology=options.pop("topology", test_topology(device)),
        **options,
    )
    for buffers in (planner.decode_buffers, planner.extend_buffers):
        if buffers is not None:
            buffers.partial_acc.fill_(math.nan)
            buffers.partial_ml.fill_(math.nan)
    if planner.splits is not None:
        planner.splits.partial.fill_(math.nan)
        planner.splits.counts.zero_()
    return planner


def run(
    case: PagedCase, schedule: Schedule, lse_columns: int = 0, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one layer's call, from buffers that held NaN.

    The LSE is written through a transposed view, of a tensor that has lse_columns at least.
    """
    out = case.poisoned_output()
    if options.get("q_scale") is not None:
        out = out.bfloat16()
    if options.get("out_scale") is not None:
        out = out.to(case.k_pages.dtype if case.k_pages.dtype in FLOAT8 else torch.float8_e4m3fn)
    lse = torch.full((out.shape[1], max(out.shape[0], lse_columns)), math.nan, device=out.device)
    lse = lse[:, : out.shape[0]].T
    runner.attend(case.q, case.k_pages, case.v_pages, out, schedule, lse=lse, **options)
    return out, lse


def check(
    case: PagedCase,
    *,
    kernels: str,
    num_decodes: int,
    window: int = -1,
    causal: bool | torch.Tensor = True,
    planner_options: dict | None = None,
    **options,
) -> Schedule:
    """Run a case and compare output and LSE with the float64 reference; returns the schedule that ran."""
    general = isinstance(causal, torch.Tensor) or any(
        options.get(name) is not None for name in GENERAL_OPTIONS
    )
    planner = make_planner(case, window=window, kernels=kernels, general=general, **(planner_options or {}))
    return check_planned(case, planner, num_decodes=num_decodes, causal=causal, **options)


def check_planned(
    case: PagedCase,
    planner: Planner,
    *,
    num_decodes: int,
    causal: bool | torch.Tensor = True,
    mark: torch.dtype | float | None = None,
    handed_to: str | None = None,
    lse_columns: int = 0,
    attention: Callable | None = None,
    **options,
) -> Schedule:
    """The same with a planner at hand.

    mark: the pass mark or the type whose it is, None for the output's. handed_to: the kernel that takes the call over.
    lse_columns: see `run`. attention: the reference, by default the specification, and on a GPU the batched one.
    """
    options.setdefault("scale", case.q.shape[2] ** -0.5)
    schedule = planner.plan(step_of(case, num_decodes, causal, options.get("spans") is not None))
    runner.ran.clear()
    out, lse = run(case, schedule, lse_columns, **options)
    ran = {
        plan.variant.name for plan in (schedule.decode, schedule.prefill, schedule.extend) if plan is not None
    }
    assert set(runner.ran) == ({handed_to} if handed_to else ran), "other kernels ran than the schedule names"
    factors = ("q_scale", "k_scale", "v_scale")
    factors = {name: 1.0 if options.get(name) is None else options[name] for name in factors}
    out_scale = options.pop("out_scale", None)
    attention = attention or reference_on(case.q.device)
    expected, expected_lse = attention(
        *case.arguments(), window=planner.shape.window, causal=causal, **{**options, **factors}
    )
    if out_scale is None:
        assert_close(out, expected, mark)
    else:
        check_float8(out, expected / float(out_scale), 1e-2 if case.q.dtype == torch.float32 else 4e-2)
    lse = lse.to(expected_lse.device).double()
    seen = expected_lse.isfinite()
    assert torch.equal(lse == -math.inf, ~seen), "rows that see no key have an LSE of -inf, and no others"
    assert not seen.any() or (lse - expected_lse)[seen].abs().max() < (
        0.1 if isinstance(mark, float) else 1e-4 if case.q.dtype == torch.float32 else 2e-2
    )
    return schedule


def reference_on(device: torch.device) -> Callable:
    """The specification itself where kernels run on the CPU, which goes over one row at a time."""
    return batched_reference.attention if device.type == "cuda" else reference.attention


def check_float8(out: torch.Tensor, expected: torch.Tensor, mark: float) -> None:
    """A float8 output is the expected one, clamped and rounded, but for numbers near a tie; truncation gives 8e-2."""
    largest = torch.finfo(out.dtype).max
    assert out.dtype in FLOAT8
    rounded = expected.clamp(-largest, largest).float().to(out.dtype)
    assert relative_error(out.float(), rounded.float()) <= mark

"""Plan and run one step of a paged case on the kernels under test, with every buffer poisoned."""

from __future__ import annotations

import dataclasses
import math

import torch

from numa_attention import attention, reference
from numa_attention.schedule import Planner, Schedule, StepBatch
from numa_attention.shapes import LayerShape
from numa_attention.topology import Topology, detect, pretend
from tests.support import PagedCase, assert_close


def test_topology(device: torch.device, workgroups: int = 8, domains: int = 4) -> Topology:
    """The GPU itself, or a small pretended device with several domains, so that units are split and placed."""
    if device.type == "cuda":
        return detect(device)
    return dataclasses.replace(
        pretend("cpu"), compute_units=workgroups, domains=domains, dispatch_domains=domains
    )


test_topology.__test__ = False


def shape_of(case: PagedCase, window: int = -1) -> LayerShape:
    """The layer shape of a case."""
    return LayerShape(
        q_heads=case.q.shape[1],
        kv_heads=case.k_pages.shape[2],
        head_dim=case.q.shape[2],
        head_dim_v=case.v_pages.shape[3],
        dtype=case.q.dtype,
        kv_dtype=case.k_pages.dtype,
        page_size=case.k_pages.shape[1],
        window=window,
    )


def step_of(case: PagedCase, num_decodes: int, causal: bool = True) -> StepBatch:
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
    )


def make_planner(case: PagedCase, *, window: int = -1, kernels: str, **options) -> Planner:
    """A planner with room for the case, whose workspace is full of NaN."""
    device = case.q.device
    planner = Planner(
        shape_of(case, window),
        device,
        max_requests=max(8, len(case.seq_lens)),
        max_tokens=max(64, len(case.q)),
        kernels=kernels,
        topology=options.pop("topology", test_topology(device)),
        **options,
    )
    planner.decode_buffers.partial_acc.fill_(math.nan)
    planner.decode_buffers.partial_ml.fill_(math.nan)
    return planner


def run(case: PagedCase, schedule: Schedule, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one layer's call, from buffers that held NaN; the LSE is written through a transposed view."""
    out = case.poisoned_output()
    lse = torch.full((out.shape[1], out.shape[0]), math.nan, device=out.device).T
    attention.attend(case.q, case.k_pages, case.v_pages, out, schedule, lse=lse, **options)
    return out, lse


def check(
    case: PagedCase,
    *,
    kernels: str,
    num_decodes: int,
    window: int = -1,
    causal: bool = True,
    planner_options: dict | None = None,
    **options,
) -> Schedule:
    """Run a case and compare output and LSE with the float64 reference; returns the schedule that ran."""
    options.setdefault("scale", case.q.shape[2] ** -0.5)
    planner = make_planner(case, window=window, kernels=kernels, **(planner_options or {}))
    schedule = planner.plan(step_of(case, num_decodes, causal))
    attention.ran.clear()
    out, lse = run(case, schedule, **options)
    ran = {plan.variant.name for plan in (schedule.decode, schedule.prefill) if plan is not None}
    assert set(attention.ran) == ran, "other kernels ran than the schedule names"
    factors = {name: 1.0 if options.get(name) is None else options[name] for name in ("k_scale", "v_scale")}
    expected, expected_lse = reference.attention(
        *case.arguments(), window=window, causal=causal, **{**options, **factors}
    )
    assert_close(out, expected)
    lse = lse.cpu().double()
    seen = expected_lse.isfinite()
    assert torch.equal(lse == -math.inf, ~seen), "rows that see no key have an LSE of -inf, and no others"
    assert not seen.any() or (lse - expected_lse)[seen].abs().max() < (
        1e-4 if case.q.dtype == torch.float32 else 2e-2
    )
    return schedule

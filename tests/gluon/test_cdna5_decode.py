"""The gfx1250 decode kernel under the Gluon interpreter, against the float64 reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from numa_attention import reference
from numa_attention.decode import cdna5
from numa_attention.testing import interpret
from tests.kernel_step import make_planner, step_of, test_topology
from tests.support import assert_close, make_paged_case

forms = pytest.mark.parametrize("form", cdna5.FORMS)


def check(case, form: str, *, workgroups: int = 5, block_n: int = 32, window: int = -1, seed: int = 0, **options):
    """Run a decode step and compare; returns the schedule."""
    topology = test_topology(case.q.device, workgroups=workgroups, domains=1)
    planner = make_planner(case, window=window, kernels="triton", topology=topology, **options.pop("planner", {}))
    assert planner is not None
    schedule = planner.plan(step_of(case, len(case.seq_lens)))
    options.setdefault("scale", case.q.shape[2] ** -0.5)
    out = case.poisoned_output()
    lse = torch.full((out.shape[1], out.shape[0]), math.nan).T
    grid, arguments, constants = cdna5.launch_of(
        case.q, case.k_pages, case.v_pages, out, schedule, form=form, lse=lse, **options
    )
    interpret(cdna5.decode_kernel)[grid](*arguments, **constants, seed=seed)
    factors = {name: 1.0 if options.get(name) is None else options[name] for name in ("k_scale", "v_scale")}
    expected, expected_lse = reference.attention(*case.arguments(), window=window, **{**options, **factors})
    assert_close(out, expected)
    seen = expected_lse.isfinite()
    assert torch.equal(lse == -math.inf, ~seen)
    assert (lse.double() - expected_lse)[seen].abs().max() < 2e-2
    assert not schedule.decode.arrivals.any(), "counters must be zero again"
    return schedule


@forms
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_forms(form, kv_dtype):
    case = make_paged_case([1, 1, 1], [1, 150, 333], head_dim=64, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    check(case, form)

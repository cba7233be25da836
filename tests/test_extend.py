"""A few query tiles over a long cached prefix: split over the device, as decode is, instead of prefilled."""

from __future__ import annotations

import pytest
import torch

from numa_attention.decode.work_list import KV_HEAD, REQUEST, ROW_BLOCK, SPLITS
from tests.kernel_step import check, kernels, make_planner, step_of, test_topology
from tests.support import make_paged_case


def options(device, workgroups: int = 40, **more) -> dict:
    """Planner options for a device wide enough that a chunk of few tiles leaves most of it idle."""
    return {"topology": test_topology(device, workgroups), "extend": True, **more}


@kernels
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_over_long_prefixes(kernels, causal, device):
    case = make_paged_case([30, 100], [2500, 900], q_heads=4, kv_heads=2, device=device)
    schedule = check(case, kernels=kernels, num_decodes=0, causal=causal, planner_options=options(device))
    plan = schedule.extend
    assert plan.variant.name.endswith("-extend") and schedule.prefill is None
    ranges, items = plan.ranges[:, :2].cpu().tolist(), plan.items.cpu()
    listed = [items[i] for first, count in ranges for i in range(first, first + count)]
    # 60 rows are one block, 200 are four
    units = {(int(i[REQUEST]), int(i[KV_HEAD]), int(i[ROW_BLOCK])) for i in listed}
    assert units == {(0, h, 0) for h in range(2)} | {(1, h, b) for h in range(2) for b in range(4)}
    assert max(int(item[SPLITS]) for item in listed) > 1
    if device.type == "cpu":
        assert sum(count > 0 for _, count in ranges) > len(units), "more workgroups than a prefill would have"


@kernels
def test_beside_decodes_with_every_option(kernels, device):
    case = make_paged_case([1, 2, 20], [70, 130, 2100], q_heads=4, kv_heads=1, device=device)
    schedule = check(
        case, kernels=kernels, num_decodes=2, window=1500, soft_cap=5.0,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=device),
        alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1], device=device) * 0.01,
        planner_options=options(device, max_decode_query=2),
    )  # fmt: skip
    assert schedule.decode is not None and schedule.extend is not None


@kernels
def test_spans_in_a_chunk(kernels, device):
    case = make_paged_case([40], [2100], q_heads=4, kv_heads=2, device=device)
    spans = torch.tensor([[(2050, 2090)]], dtype=torch.int32, device=device)
    schedule = check(
        case, kernels=kernels, num_decodes=0, spans=spans, window=30, planner_options=options(device)
    )
    assert schedule.extend is not None


PREFILLED = {
    "a short prefix": ([30], [1900], {}),
    "a chunk as long as a good part of its prefix": ([300], [2300], {"workgroups": 80}),
    "tiles enough to fill the device": ([30] * 6, [2300] * 6, {"workgroups": 20}),
    "not asked for": ([30], [2500], {"extend": None}),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a pretended one")
@pytest.mark.parametrize("why", PREFILLED)
def test_what_is_prefilled(why, device):
    query_lens, seq_lens, more = PREFILLED[why]
    case = make_paged_case(query_lens, seq_lens, q_heads=4, kv_heads=2, device=device)
    schedule = make_planner(case, kernels="torch", **options(device, **more)).plan(step_of(case, 0))
    assert schedule.extend is None and schedule.prefill is not None


def test_planners_for_gpus_have_it():
    from numa_attention.schedule import Planner
    from numa_attention.topology import pretend
    from tests.kernel_step import shape_of

    case = make_paged_case([1], [5], dtype=torch.bfloat16)
    limits = {"max_requests": 2, "max_tokens": 64, "kernels": "triton"}
    for device, expected in (("MI300X", True), ("H200", True), ("cpu", False)):
        planner = Planner(shape_of(case), "meta", topology=pretend(device), **limits)
        assert (planner.extend_buffers is not None) == expected

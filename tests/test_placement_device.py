"""Hardware placement: whoever asks gets each piece of work once, from its own domain while that has any."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from numa_attention import runner
from numa_attention.jit import kernel
from numa_attention.placement_device import own_domain, take
from numa_attention.schedule import Planner
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode, choose_prefill, place
from tests.kernel_step import check, make_planner, run, shape_of, step_of
from tests.support import make_paged_case


@kernel
def take_kernel(rows, own, queues, DOMAINS: tl.constexpr, DEALT: tl.constexpr):
    program = tl.program_id(0)
    tl.store(own + program, own_domain(DOMAINS))
    tl.store(rows + program, take(queues, DOMAINS, DEALT))


@pytest.fixture
def interpreted(device):
    if device.type != "cpu":
        pytest.skip("a GPU says itself where a workgroup runs; the domains here are pretended")
    return device


@pytest.mark.parametrize("dealt", [True, False])
@pytest.mark.parametrize(("workgroups", "domains"), [(1, 1), (3, 8), (24, 4), (50, 5), (64, 8)])
def test_each_row_is_taken_once(interpreted, workgroups, domains, dealt):
    if not dealt and workgroups % domains:
        workgroups = -(-workgroups // domains) * domains
    queues = torch.zeros(domains + 1, dtype=torch.int32)
    for _ in range(2):  # the second launch finds what the first one left
        rows, own = torch.full((2, workgroups), -7, dtype=torch.int32)
        take_kernel[(workgroups,)](rows, own, queues, DOMAINS=domains, DEALT=dealt)
        assert sorted(rows.tolist()) == list(range(workgroups))
        assert not queues.any()
        domain_of_row = rows % domains if dealt else rows // (workgroups // domains)
        # only who found its own queue empty takes another domain's work
        capacity = torch.bincount(torch.arange(workgroups) % domains, minlength=domains)
        asked = torch.bincount(own, minlength=domains)
        at_home = torch.bincount(own[domain_of_row == own], minlength=domains)
        assert (at_home <= torch.minimum(asked, capacity)).all()
        if workgroups >= 2 * domains and domains > 1:
            assert (domain_of_row == own).any() and (domain_of_row != own).any()
    # the first to ask is never sent away
    assert domain_of_row[0] == own[0]


@pytest.mark.parametrize("mapping", [None, "head-first", "swizzled-block-first"])
def test_decode_and_prefill(interpreted, mapping):
    case = make_paged_case(
        [1, 1, 1, 100, 63], [40, 900, 333, 100, 200], q_heads=4, kv_heads=2, device=interpreted
    )
    schedule = check(
        case,
        kernels="triton",
        num_decodes=3,
        planner_options={"placement": "hardware", "mapping": mapping},
    )
    placed = mapping != "head-first"
    for plan in (schedule.decode, schedule.prefill):
        assert ("placed by hardware" in plan.variant.describe()) == placed
        assert plan.queues is not None and not plan.queues.any()


def test_who_computes_what_does_not_change_the_result(interpreted):
    case = make_paged_case([1, 1, 1], [40, 900, 333], q_heads=4, kv_heads=2, device=interpreted)
    results = []
    for placement in ("dispatch", "hardware"):
        planner = make_planner(case, kernels="triton", placement=placement)
        results.append(run(case, planner.plan(step_of(case, 3)), scale=0.125)[0])
    assert not results[0].isnan().any() and torch.equal(*results)


def test_a_launch_that_stops_leaves_the_queues_usable(interpreted, monkeypatch):
    case = make_paged_case([1, 1], [40, 900], q_heads=4, kv_heads=2, device=interpreted)
    planner = make_planner(case, kernels="triton", placement="hardware")
    right, _ = run(case, planner.plan(step_of(case, 2)), scale=0.125)

    def stop(name):
        def kernel(q, k_pages, v_pages, out, schedule, **options):
            schedule.decode.queues.fill_(3)
            raise RuntimeError("half-way")

        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(runner, "kernel_of", stop)
        with pytest.raises(RuntimeError, match="half-way"):
            run(case, planner.plan(step_of(case, 2)), scale=0.125)
    assert torch.equal(run(case, planner.plan(step_of(case, 2)), scale=0.125)[0], right)


@pytest.mark.parametrize("device_name", ["gfx1250", "sm_90"])
def test_where_no_workgroup_can_tell(device_name):
    case = make_paged_case([1], [40], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="leave NUMA_SWIZZLE_PLACEMENT at dispatch"):
        Planner(
            shape_of(case), "meta", max_requests=1, max_tokens=8, kernels="triton",
            topology=pretend(device_name), placement="hardware",
        )  # fmt: skip


def test_what_cannot_be_placed(device):
    shape = shape_of(make_paged_case([1], [40], dtype=torch.bfloat16))
    mi300x = pretend("MI300X")
    for variant in (choose_decode(shape, mi300x, "triton", 1), choose_prefill(shape, mi300x, "triton")):
        assert place(variant, "hardware", mi300x).queues == 8 and variant.queues == 0
        with pytest.raises(ValueError, match="placement='elsewhere' is unknown"):
            place(variant, "elsewhere", mi300x)
    with pytest.raises(ValueError, match="not for torch-prefill"):
        place(choose_prefill(shape, mi300x, "torch"), "hardware", mi300x)

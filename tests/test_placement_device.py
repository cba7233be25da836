"""Hardware placement: whoever asks gets each piece of work once, from its own domain while that has any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl

from numa_attention import domain_map, runner
from numa_attention.jit import kernel
from numa_attention.placement_device import own_domain, take
from numa_attention.schedule import Planner
from numa_attention.topology import detect, pretend
from numa_attention.variants import PLACED_BY_HARDWARE, PLACED_BY_SM, choose_decode, choose_prefill, place
from tests.kernel_step import check, make_planner, run, shape_of, step_of
from tests.support import make_paged_case


@kernel
def take_kernel(rows, own, queues, DOMAINS: tl.constexpr, DEALT: tl.constexpr):
    program = tl.program_id(0)
    tl.store(own + program, own_domain(queues, DOMAINS))
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


@pytest.mark.parametrize("device_name", ["gfx1250", "sm_100"])
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


def test_on_hopper_prefill_is_placed_over_the_measured_domains():
    shape = shape_of(make_paged_case([1], [40], dtype=torch.bfloat16))
    options = dict(
        max_requests=4, max_tokens=64, kernels="triton", topology=pretend("H200"), placement="hardware"
    )
    planner = Planner(shape, "meta", mapping="swizzled-head-first", **options)
    assert planner.prefill_variant.queues == planner.prefill_variant.domains == 2
    assert "over 2 domains, placed by hardware" in planner.prefill_variant.describe()
    assert planner.decode_variant.placement == "dispatch"
    # a naive mapping has no queues
    assert Planner(shape, "meta", mapping="head-first", **options).prefill_variant.queues == 0


def test_the_queues_of_hopper_hold_the_map(monkeypatch):
    table = torch.arange(domain_map.SM_IDS, dtype=torch.int32) % 2
    monkeypatch.setattr(domain_map, "table", lambda device: table)
    planner = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        prefill_variant=SimpleNamespace(queues=2),
    )
    monkeypatch.setattr(
        torch, "zeros", lambda *size, dtype, device, zeros=torch.zeros: zeros(*size, dtype=dtype)
    )
    queues = Planner._make_queues(planner, pretend("H200"))
    assert queues.shape == (2, 3 + domain_map.SM_IDS)
    assert not queues[:, :3].any() and all(torch.equal(row[3:], table) for row in queues)


@pytest.mark.gpu
def test_a_gpu_takes_each_row_once(device):
    topology = detect(device)
    if topology.generation not in PLACED_BY_HARDWARE:
        pytest.skip(f"{topology.generation} does not tell a workgroup on which domain it runs")
    domains = topology.domains
    queues = torch.zeros(domains + 1, dtype=torch.int32, device=device)
    if topology.generation in PLACED_BY_SM:
        queues = torch.cat([queues, domain_map.table(device)])
    workgroups = 16 * topology.compute_units
    rows, own = torch.full((2, workgroups), -7, dtype=torch.int32, device=device)
    for _ in range(3):
        take_kernel[(workgroups,)](rows, own, queues, DOMAINS=domains, DEALT=True)
        assert rows.sort().values.tolist() == list(range(workgroups))
        assert not queues[: domains + 1].any()
        # workgroups so short may all run on few units: half of the rows are then another domain's
        assert (rows % domains == own).float().mean() > 0.4


@pytest.mark.gpu
def test_placed_by_the_gpu_itself(device):
    if detect(device).generation not in PLACED_BY_HARDWARE:
        pytest.skip("no workgroup can tell here")
    case = make_paged_case(
        [1, 200, 100, 63], [40, 900, 100, 200], q_heads=4, kv_heads=2, dtype=torch.bfloat16, device=device
    )
    options = {"placement": "hardware", "mapping": "swizzled-head-first"}
    schedule = check(case, kernels="triton", num_decodes=1, planner_options=options)
    variant = schedule.prefill.variant
    assert (
        variant.queues == detect(device).domains and not schedule.prefill.queues[: variant.queues + 1].any()
    )

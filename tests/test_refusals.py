"""Calls and steps that the kernels could only get wrong: each is refused with a sentence, or made safe."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from numa_attention import reference, runner
from numa_attention.schedule import Planner
from tests.kernel_step import check, kernels, make_planner, run, shape_of, step_of
from tests.support import PagedCase, assert_close, make_paged_case


@pytest.fixture
def case(device) -> PagedCase:
    return make_paged_case([1, 4, 9], [70, 4, 80], device=device)


def last_strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last dimension not contiguous."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


CALLS = {
    "14 query tokens; q, out and lse have 11, 14 rows": {"q": lambda q: q[:-3]},
    "q must be contiguous": {"q": last_strided},
    r"q torch.float32 \[\*, 4, 64\]": {"q": lambda q: q[:, :2]},
    r"4, 64\]; got torch.float16": {"q": lambda q: q.half()},
    "k_pages must be contiguous": {"k_pages": last_strided},
    r"k_pages torch.float32 \[\*, 16, 2, 64\]": {"k_pages": lambda k: k[:, :, :1]},
    "v_pages torch.float32": {"v_pages": lambda v: v[..., :32]},
    r"got torch.bfloat16 \[15, 16": {"v_pages": lambda v: v.bfloat16()},
    "lse have 14, 12 rows": {"out": lambda out: out[:-2]},
    "last dimension of out": {"out": last_strided},
    "sinks must be contiguous, one number for each": {"sinks": lambda _: torch.zeros(2)},
    r"with strides \(2,\)": {"alibi_slopes": lambda _: torch.zeros(8)[::2]},
    "lse must be float32": {"lse": lambda _: torch.zeros(14, 4, dtype=torch.float16)},
    "lse have 14, 14, 13 rows": {"lse": lambda _: torch.zeros(13, 4)},
    "both k_scale and v_scale": {"k_scale": lambda _: torch.ones(1)},
    "v_scale must be one float32 number": {
        "k_scale": lambda _: torch.ones(1),
        "v_scale": lambda _: torch.ones(4),
    },
    "soft_cap is -3": {"soft_cap": lambda _: -3.0},
}


@kernels
@pytest.mark.parametrize("sentence", CALLS)
def test_tensors_the_schedule_was_not_planned_for(kernels, sentence, case, device):
    schedule = make_planner(case, kernels=kernels).plan(step_of(case, 1))
    call = {"q": case.q, "k_pages": case.k_pages, "v_pages": case.v_pages, "out": case.poisoned_output()}
    runner.attend(**call, schedule=schedule, scale=1.0)
    for name, change in CALLS[sentence].items():
        changed = change(call.get(name))
        call[name] = changed.to(device) if isinstance(changed, torch.Tensor) else changed
    with pytest.raises(ValueError, match=sentence):
        runner.attend(**call, schedule=schedule, scale=1.0)


@kernels
@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "out", "sinks", "lse"])
def test_tensors_on_another_device_than_the_step(kernels, name, case, device):
    # kernels take addresses as they are
    schedule = make_planner(case, kernels=kernels).plan(step_of(case, 1))
    call = {"q": case.q, "k_pages": case.k_pages, "v_pages": case.v_pages, "out": case.poisoned_output()}
    call |= {"sinks": torch.zeros(4, device=device), "lse": torch.zeros(14, 4, device=device)}
    call[name] = call[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta; the step was planned on {device}"):
        runner.attend(**call, schedule=schedule, scale=1.0)


STEPS = {
    "exceeds max_requests=8": lambda step: {"seq_lens": step.seq_lens.repeat(3)},
    "seq_lens is torch.int64": lambda step: {"seq_lens": step.seq_lens.long()},
    r"seq_lens is torch.int32 with strides \(2,\)": lambda step: {
        "seq_lens": step.seq_lens.repeat_interleave(2)[::2]
    },
    "block_table is torch.int64": lambda step: {"block_table": step.block_table.long()},
    "block_table is torch.int32 with strides": lambda step: {"block_table": last_strided(step.block_table)},
    "query_start_loc is torch.int64": lambda step: {"query_start_loc": step.query_start_loc.long()},
    "block_table is on meta and the planner on": lambda step: {"block_table": step.block_table.to("meta")},
    "query_start_loc is on meta and the planner on": lambda step: {
        "query_start_loc": step.query_start_loc.to("meta")
    },
    "num_decodes is 4 in a step of 3": lambda step: {"num_decodes": 4},
    "9 query tokens, more than max_decode_query=4": lambda step: {"num_decodes": 3},
}


@kernels
@pytest.mark.parametrize("sentence", STEPS)
def test_steps_that_cannot_be_planned(kernels, sentence, case):
    planner = make_planner(case, kernels=kernels, max_decode_query=4)
    step = step_of(case, 2)
    planner.plan(step)
    with pytest.raises(ValueError, match=sentence):
        planner.plan(dataclasses.replace(step, **STEPS[sentence](step)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mapping": "swizzled"}, "unknown mapping 'swizzled'"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_decode_query": 0}, "max_decode_query is 0"),
    ],
)
def test_planners_that_cannot_plan(options, sentence, case):
    with pytest.raises(ValueError, match=sentence):
        Planner(shape_of(case), case.q.device, **{"max_requests": 3, "max_tokens": 14, **options})


def test_torch_kernels_on_a_gpu(case):
    with pytest.raises(ValueError, match="attends on the CPU only and the device is cuda"):
        Planner(shape_of(case), "cuda", max_requests=3, max_tokens=14, kernels="torch")


@kernels
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_sequence_longer_than_its_block_table_row_is_cut(kernels, num_decodes, device):
    # dummy runs of vLLM plan such steps; past the row lies memory that belongs to something else
    case = make_paged_case([1, 3], [64, 48], device=device)
    expected, _ = reference.attention(*case.arguments(), scale=0.125)
    wider = case.block_table.new_full((2, 400), 1 << 30)  # what is read past the row is no page at all
    wider[:, :4] = case.block_table
    case.block_table = wider[:, :4]
    case.seq_lens = torch.tensor([6000, 48], dtype=torch.int32, device=device)
    planner = make_planner(case, kernels=kernels, max_decode_query=4)
    out = case.poisoned_output()
    runner.attend(
        case.q, case.k_pages, case.v_pages, out, planner.plan(step_of(case, num_decodes)), scale=0.125
    )
    assert_close(out, expected)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_slopes_and_sinks_of_other_types(kernels, dtype, case, device):
    slopes = torch.tensor([0.13, 0.2, 0.31, 0.47], dtype=dtype, device=device)
    sinks = torch.tensor([0.3, -math.inf, 2.0, -1.0], dtype=dtype, device=device)
    check(case, kernels=kernels, num_decodes=1, alibi_slopes=slopes, sinks=sinks)
    check(case, kernels=kernels, num_decodes=1, alibi_slopes=slopes, soft_cap=5.0)


def test_a_launch_that_stopped_half_way_leaves_nothing_behind(device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("a kernel that fails on a GPU takes the process with it")
    from triton.runtime.interpreter import InterpreterBuilder

    case = make_paged_case([1, 1, 1], [700, 300, 64], q_heads=8, kv_heads=2, device=device)
    planner = make_planner(case, kernels="triton")
    arrive = InterpreterBuilder.create_atomic_rmw
    arrivals = []

    def arrive_twice(*arguments, **options):
        arrivals.append(1)
        if len(arrivals) == 3:
            raise KeyboardInterrupt
        return arrive(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", arrive_twice)
        with pytest.raises((KeyboardInterrupt, Exception)):
            run(case, planner.plan(step_of(case, 3)), scale=0.1)
    assert len(arrivals) == 3
    out, _ = run(case, planner.plan(step_of(case, 3)), scale=0.1)
    assert_close(out, reference.attention(*case.arguments(), scale=0.1)[0])

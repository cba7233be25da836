"""The gfx1250 decode kernel under the Gluon interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from numa_attention import gluon_compat, reference
from numa_attention.decode import cdna5
from numa_attention.shapes import UnsupportedShape
from numa_attention.testing import interpret
from numa_attention.testing.gluon import OutOfBounds, Race, Refused
from tests.kernel_step import make_planner, step_of, test_topology
from tests.support import LAYOUTS, assert_close, make_paged_case

forms = pytest.mark.parametrize("form", cdna5.FORMS)


def check(case, form: str, *, workgroups: int = 5, window: int = -1, seed: int = 0, debug=False, **options):
    """Run a decode step of all requests and compare output and LSE; returns the schedule."""
    topology = test_topology(case.q.device, workgroups=workgroups, domains=1)
    max_query = int(case.query_start_loc.diff().max())
    planner = make_planner(
        case, window=window, kernels="triton", topology=topology, max_decode_query=max_query
    )
    schedule = planner.plan(step_of(case, len(case.seq_lens)))
    options.setdefault("scale", case.q.shape[2] ** -0.5)
    out = case.poisoned_output()
    lse = torch.full((out.shape[1], out.shape[0]), math.nan).T
    grid, arguments, constants = cdna5.launch_of(
        case.q, case.k_pages, case.v_pages, out, schedule, form=form, lse=lse, **options
    )
    interpret(cdna5.decode_kernel)[grid](*arguments, **constants, seed=seed, debug=debug)
    factors = {name: 1.0 if options.get(name) is None else options[name] for name in ("k_scale", "v_scale")}
    expected, expected_lse = reference.attention(*case.arguments(), window=window, **{**options, **factors})
    assert_close(out, expected)
    seen = expected_lse.isfinite()
    assert torch.equal(lse == -math.inf, ~seen)
    assert not seen.any() or (lse.double() - expected_lse)[seen].abs().max() < 2e-2
    assert not schedule.decode.arrivals.any(), "the counters must be zero again"
    return schedule


def splits_of(schedule) -> torch.Tensor:
    ranges, items = schedule.decode.ranges, schedule.decode.items
    return torch.stack([items[f + n, 6] for f, count in ranges.tolist() for n in range(count)])


def bf16_case(*arguments, **options):
    return make_paged_case(*arguments, dtype=torch.bfloat16, **options)


@forms
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_split_and_whole_units(form, kv_dtype):
    case = bf16_case([1, 1, 1], [1, 150, 300], kv_dtype=kv_dtype, page_size=32)
    scales = {}
    if kv_dtype != torch.bfloat16:
        scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    schedule = check(case, form, debug=form == "four-stage", **scales)
    assert splits_of(schedule).max() > 1 and splits_of(schedule).min() == 1


@pytest.mark.parametrize(("form", "page_size"), [(form, 128) for form in cdna5.FORMS] + [("four-stage", 48)])
def test_page_sizes(form, page_size):
    check(bf16_case([1, 1], [65, 250], page_size=page_size, q_heads=2, kv_heads=1), form)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_at_head_dim_128(layout):
    check(bf16_case([1], [130], layout=layout, head_dim=128, page_size=64), "four-stage", workgroups=3)


@pytest.mark.parametrize("seed", range(2))
def test_splits_are_merged_in_two_levels_by_whoever_is_last(seed):
    case = bf16_case([1], [2500], q_heads=2, kv_heads=1, page_size=64)
    schedule = check(case, "two-stage", workgroups=20, seed=seed)
    assert splits_of(schedule).max() > cdna5.FAN_IN


@pytest.mark.parametrize(("form", "window"), [(form, 33) for form in cdna5.FORMS] + [("four-stage", 0)])
def test_window_reads_nothing_left_of_it(form, window):
    case = bf16_case([1, 1], [30, 200], q_heads=2, kv_heads=1)
    for request, length in enumerate([30, 200]):
        token = torch.arange(max(length - 1 - window, 0))
        for cache in (case.k_pages, case.v_pages):
            cache[case.block_table[request].long()[token // 16], token % 16] = math.nan
    check(case, form, window=window)


def test_several_query_tokens_and_a_wide_group():
    schedule = check(bf16_case([3, 1, 3], [100, 63, 3], q_heads=24, kv_heads=2), "four-stage")
    assert schedule.decode.variant.block_m == 64, "four warps"


@forms
def test_soft_cap_sinks_and_alibi(form):
    case = bf16_case([1, 1], [70, 150], q_heads=6, kv_heads=2)
    random = torch.Generator().manual_seed(1)
    sinks, slopes = (torch.randn(6, generator=random) for _ in range(2))
    check(case, form, soft_cap=3.0, sinks=sinks, alibi_slopes=slopes.abs() * 0.1)


@forms
def test_requests_without_keys_or_queries(form):
    check(bf16_case([1, 0, 1, 0], [70, 0, 0, 0], q_heads=2, kv_heads=1), form)


def test_scores_stay_in_their_lanes():
    """The layouts make the move of probabilities from the first product to the second one free."""
    # convert_layout(assert_trivial=True) in the kernel is the check: another layout of the result must fail it
    case = bf16_case([1], [20], q_heads=2, kv_heads=1)
    schedule = make_planner(case, kernels="triton").plan(step_of(case, 1))
    grid, arguments, constants = cdna5.launch_of(
        case.q, case.k_pages, case.v_pages, case.poisoned_output(), schedule, scale=1.0
    )
    constants["ACC"] = gluon_compat.wmma_layout(1, 1, cdna5.WMMA, transposed=False)
    with pytest.raises(Refused, match="is not trivial"):
        interpret(cdna5.decode_kernel)[grid](*arguments, **constants)


def test_too_few_buffers_are_found():
    case = bf16_case([1], [200], q_heads=2, kv_heads=1)
    schedule = make_planner(case, kernels="triton").plan(step_of(case, 1))
    grid, arguments, constants = cdna5.launch_of(
        case.q, case.k_pages, case.v_pages, case.poisoned_output(), schedule, scale=1.0
    )
    constants["BUFFERS"] = 2
    with pytest.raises(OutOfBounds, match=r"of 2 buffers, at cdna5\.py:\d+ in decode_kernel"):
        interpret(cdna5.decode_kernel)[grid](*arguments, **constants)


def test_layers_for_other_kernels():
    case = bf16_case([1], [20], head_dim=80)
    schedule = make_planner(case, kernels="triton").plan(step_of(case, 1))
    with pytest.raises(UnsupportedShape, match="decode/portable.py"):
        cdna5.launch_of(case.q, case.k_pages, case.v_pages, case.q, schedule, scale=1.0)
    case = bf16_case([1], [20])
    schedule = make_planner(case, kernels="triton").plan(step_of(case, 1))
    with pytest.raises(ValueError, match="single, two-stage, four-stage"):
        cdna5.launch_of(case.q, case.k_pages, case.v_pages, case.q, schedule, scale=1.0, form="three")


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("four-stage", "async_wait(4 * COPIES)", "async_wait(4 * COPIES + 1)"),
        ("four-stage", "buffers_k.index(step % 3), HEAD", "buffers_k.index((step + 1) % 3), HEAD"),
        ("four-stage", "buffers_v.index((step + 2) % 3), HEAD", "buffers_v.index((step + 1) % 3), HEAD"),
        ("two-stage", "async_wait(2 * AHEAD * COPIES)", "async_wait(2 * AHEAD * COPIES + 1)"),
        ("two-stage", "AHEAD) % BUFFERS", "AHEAD + 1) % BUFFERS"),
        ("single", "async_wait(2 * AHEAD * COPIES)", "async_wait(1)"),
        ("two-stage", "        cdna5.tdm.async_wait(0)\n", "        pass\n"),
    ],
)
def test_mistakes_in_the_pipeline_are_found(form, right, wrong, tmp_path):
    """The kernel with one wrong number."""
    with open(cdna5.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, "the kernel changed: change this test"
    (tmp_path / "wrong_decode.py").write_text(source.replace(right, wrong))
    specification = importlib.util.spec_from_file_location("wrong_decode", tmp_path / "wrong_decode.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    case = bf16_case([1], [200], q_heads=2, kv_heads=1, page_size=64)
    topology = test_topology(case.q.device, workgroups=1, domains=1)
    schedule = make_planner(case, kernels="triton", topology=topology).plan(step_of(case, 1))
    grid, arguments, constants = module.launch_of(
        case.q, case.k_pages, case.v_pages, case.poisoned_output(), schedule, scale=1.0, form=form
    )
    with pytest.raises(Race, match=r"wrong_decode\.py:\d+"):
        interpret(module.decode_kernel)[grid](*arguments, **constants)

"""AMD's kernels as a variant: called with the parameters they have, right, and only where they can run."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from numa_attention import aiter_adapter, reference, runner
from numa_attention.schedule import Planner
from numa_attention.shapes import LayerShape
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode, choose_prefill
from tests import aiter_stub
from tests.kernel_step import shape_of, step_of
from tests.support import assert_close, make_paged_case

SHAPE = LayerShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16, 128)
MI300X = pretend("gfx942")
NONE: frozenset[str] = frozenset()


@pytest.fixture
def aiter(monkeypatch):
    """amd-aiter as if it were installed."""
    monkeypatch.setitem(sys.modules, "aiter", aiter_stub)
    aiter_adapter.entry_point.cache_clear()
    monkeypatch.setattr(aiter_adapter, "installed", lambda: "0.1.7")
    aiter_stub.calls.clear()
    yield aiter_stub
    aiter_adapter.entry_point.cache_clear()


def run(case, schedule, **options):
    out = case.poisoned_output()
    runner.ran.clear()
    runner.attend(case.q, case.k_pages, case.v_pages, out, schedule, scale=case.q.shape[2] ** -0.5, **options)
    return out


def planner_for(case, **options) -> Planner:
    return Planner(
        shape_of(case), case.q.device, max_requests=8, max_tokens=1024, kernels="triton", topology=MI300X,
        aiter="always", **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0}], ids=["plain", "soft_cap"])
def test_decode(aiter, device, options):
    case = make_paged_case(
        [1, 1, 1], [17, 300, 1], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device
    )
    schedule = planner_for(case).plan(step_of(case, 3))
    out = run(case, schedule, **options)
    assert dict(runner.ran) == {"aiter-decode": 1} and aiter.calls == ["paged_attention_v1"]
    expected, _ = reference.attention(*case.arguments(), scale=case.q.shape[2] ** -0.5, **options)
    assert_close(out, expected)


def test_float8_decode(aiter, device):
    case = make_paged_case(
        [1, 1], [17, 300], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device,
        kv_dtype=torch.float8_e4m3fnuz,
    )  # fmt: skip
    scales = {name: torch.full((1,), 0.5, device=device) for name in ("k_scale", "v_scale")}
    out = run(case, planner_for(case).plan(step_of(case, 2)), **scales)
    assert aiter.calls == ["paged_attention_v1"]
    expected, _ = reference.attention(
        *case.arguments(), scale=case.q.shape[2] ** -0.5, k_scale=0.5, v_scale=0.5
    )
    assert_close(out, expected)


def test_prefill_beside_our_decode(aiter, device):
    """Two decodes, then prompts of odd lengths, one with a cached prefix."""
    case = make_paged_case(
        [1, 1, 100, 63], [40, 5, 100, 200], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        page_size=128, device=device,
    )  # fmt: skip
    out = run(case, planner_for(case).plan(step_of(case, 2)))
    assert dict(runner.ran) == {"portable-decode": 1, "aiter-prefill": 1}
    assert aiter.calls == ["flash_attn_varlen_func"]
    expected, _ = reference.attention(*case.arguments(), scale=case.q.shape[2] ** -0.5)
    assert_close(out, expected)


def test_what_it_lacks_is_refused(aiter, device):
    case = make_paged_case([1], [40], q_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    schedule = planner_for(case).plan(step_of(case, 1))
    with pytest.raises(ValueError, match="has no sinks"):
        run(case, schedule, sinks=torch.zeros(8, device=device))
    with pytest.raises(ValueError, match="has no lse"):
        run(case, schedule, lse=torch.zeros(1, 8, device=device))
    assert not aiter.calls
    # planned with them, our own kernel runs
    schedule = planner_for(case, features=frozenset({"sinks"})).plan(step_of(case, 1))
    assert schedule.decode.variant.name == "portable-decode"
    values = case.v_pages.transpose(1, 2).contiguous().transpose(1, 2)
    schedule = planner_for(case).plan(step_of(case, 1))
    with pytest.raises(ValueError, match="same strides"):
        runner.attend(case.q, case.k_pages, values, case.poisoned_output(), schedule, scale=1.0)


@pytest.mark.parametrize(
    ("changes", "features", "phase", "setting", "taken"),
    [
        ({}, NONE, "prefill", "auto", True),
        ({}, NONE, "prefill", "never", False),
        ({"page_size": 64}, NONE, "prefill", "always", False),
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, NONE, "prefill", "auto", False),
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, NONE, "prefill", "always", True),
        ({"head_dim": 64, "head_dim_v": 64}, NONE, "prefill", "auto", False),
        ({"window": 100}, NONE, "prefill", "auto", False),
        ({"window": 100}, NONE, "prefill", "always", True),
        ({"kv_dtype": torch.float8_e4m3fnuz}, NONE, "prefill", "always", False),
        ({}, frozenset({"soft_cap"}), "prefill", "auto", False),
        ({}, frozenset({"soft_cap"}), "prefill", "always", True),
        ({}, frozenset({"sinks"}), "prefill", "always", False),
        ({"page_size": 16}, NONE, "decode", "auto", False),
        ({"page_size": 16}, NONE, "decode", "always", True),
        ({"page_size": 16}, frozenset({"lse"}), "decode", "always", False),
        ({"page_size": 16, "window": 5}, NONE, "decode", "always", False),
        ({"page_size": 16, "q_heads": 256}, NONE, "decode", "always", False),
        ({"page_size": 16, "head_dim_v": 64}, NONE, "decode", "always", False),
        ({"page_size": 16, "kv_dtype": torch.float8_e5m2}, NONE, "decode", "always", False),
        ({"general": True}, NONE, "prefill", "always", False),
        ({"page_size": 0}, NONE, "prefill", "always", False),
        ({"page_size": 48}, NONE, "decode", "always", False),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, NONE, "prefill", "always", False),
    ],
)
def test_when_it_is_chosen(aiter, changes, features, phase, setting, taken):
    shape = dataclasses.replace(SHAPE, **changes)
    options = {"aiter": setting, "features": features}
    if phase == "decode":
        variant = choose_decode(shape, MI300X, "triton", 1, **options)
        assert choose_decode(shape, MI300X, "triton", 2, **options).name == "portable-decode"
    else:
        variant = choose_prefill(shape, MI300X, "triton", **options)
        # a mapping that is asked for is kept
        assert choose_prefill(shape, MI300X, "triton", "head-first", **options).name == "portable-prefill"
    assert (variant.name == f"aiter-{phase}") == taken
    assert ("amd-aiter 0.1.7" in variant.describe()) == taken


@pytest.mark.parametrize("device_name", ["gfx1250", "sm_90", "cpu"])
def test_other_devices_never_take_it(aiter, device_name):
    assert choose_prefill(SHAPE, pretend(device_name), "triton", aiter="always").name != aiter_adapter.PREFILL


def test_without_it():
    if importlib.util.find_spec("aiter") is None:
        assert aiter_adapter.installed() is None
        assert choose_prefill(SHAPE, MI300X, "triton", aiter="always").name == "portable-prefill"
    with pytest.raises(ValueError, match="aiter='yes' is unknown"):
        choose_prefill(SHAPE, MI300X, "triton", aiter="yes")


def test_a_package_of_the_same_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", ast)
    aiter_adapter.entry_point.cache_clear()
    with pytest.raises(ImportError, match="it is not AMD's"):
        aiter_adapter.entry_point("paged_attention_v1")
    aiter_adapter.entry_point.cache_clear()


@pytest.mark.parametrize("name", aiter_adapter.CALLS)
def test_the_parameters_exist(name):
    assert set(aiter_adapter.CALLS[name]) <= set(inspect.signature(getattr(aiter_stub, name)).parameters)


@pytest.mark.parametrize(("name", "source"), [
    ("paged_attention_v1", "ops/attention.py"), ("flash_attn_varlen_func", "ops/mha.py"),
])  # fmt: skip
def test_the_stub_has_the_signatures_of_the_package(name, source):
    """Read, not imported: the package wants a GPU."""
    try:
        files = importlib.metadata.files("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("amd-aiter is not installed")
    path = next(Path(str(file.locate())) for file in files if str(file) == f"aiter/{source}")
    function = next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    ours = list(inspect.signature(getattr(aiter_stub, name)).parameters)
    assert [argument.arg for argument in function.args.args] == ours

"""numa-swizzle bench report, from end to end on a CPU: files, verdicts, and that a wrong kernel is found."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from numa_attention import aiter_adapter, runner
from numa_attention.mapping import MAPPINGS
from numa_attention.topology import pretend
from vllm_numa_backend import cli, settings
from vllm_numa_backend.bench import checks, contestants, report, report_files
from vllm_numa_backend.bench.cases import decode_cases, make_tensors, prefill_cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch):
    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", "torch")
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def command(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["numa-swizzle", "bench", "report", *map(str, arguments)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ending:
        cli.main()
    return ending.value.code


def test_a_report(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need the extra `model`")
    assert command(monkeypatch, "--out", tmp_path, "--rows", 2, "--json") == 0
    answer = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(capsys.readouterr().out) == answer
    assert (
        answer["tiny"] and len(answer["checks"]) == 2 and all(check["passed"] for check in answer["checks"])
    )
    tables = {timing["table"] for timing in answer["timings"]}
    assert tables == {"mappings", "prefill", "decode", "decode, float8 cache"}
    assert all(timing["seconds"] > 0 for timing in answer["timings"])
    assert {timing["variant"] for timing in answer["timings"]} == {"torch-decode", "torch-prefill"}
    text = (tmp_path / "report.md").read_text()
    assert "Its times mean nothing" in text and "2 of 2 steps agree" in text and "torch 2" not in text
    for name in ("mappings.png", "decode-float8-cache.png"):
        assert f"({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("fault", ["scaled", "missing row", "raises"])
def test_a_wrong_kernel_is_found(monkeypatch, tmp_path, fault):
    right = runner.kernel_of

    def wrong(name):
        def kernel(q, k_pages, v_pages, out, schedule, **options):
            if fault == "raises":
                raise RuntimeError("out of registers\nand more")
            before = out[0].clone()
            right(name)(q, k_pages, v_pages, out, schedule, **options)
            if fault == "scaled":
                out *= 1.05
            else:
                out[0] = before

        return kernel

    monkeypatch.setattr(runner, "kernel_of", wrong)
    assert command(monkeypatch, "--out", tmp_path, "--rows", 1) == 1
    answer = json.loads((tmp_path / "report.json").read_text())
    assert [check["passed"] for check in answer["checks"]] == [False]
    text = (tmp_path / "report.md").read_text()
    assert "WRONG" in text and "0 of 1 steps agree" in text
    if fault != "scaled":
        assert "did not run" in text
    assert ("RuntimeError: out of registers |" in text) == (fault == "raises")


@pytest.mark.parametrize("step", checks.steps(torch.float8_e4m3fnuz, tiny=True), ids=lambda step: step.name)
def test_every_step_passes_with_the_torch_kernels(step):
    check = checks.run_check(step, CPU, "torch")
    assert check.passed, check
    assert "torch-decode" in check.variants


def test_a_rival_that_disagrees_or_is_missing_is_told(tmp_path):
    case = report.tiny_cases(decode_cases(torch.bfloat16))[0]
    tensors = make_tensors(case, device=CPU)
    found = report.Report({}, {}, True)
    call, schedule = contestants.ours(tensors, kernels="torch")
    expected = report.add_timing(found, "decode", case, "ours", "torch-decode", call, tensors, None)

    def far(copy):
        call(copy)
        tensors.out.mul_(1.5)

    report.add_timing(found, "decode", case, "far", "", far, tensors, expected)
    report.add_timing(found, "decode", case, "silent", "", lambda copy: None, tensors, expected)
    report.add_timing(found, "decode", case, "other", "portable-decode", call, tensors, expected)
    report.note_rival(found, "decode", case, "gone", ImportError("no such kernel"))
    ours, *others = found.timings
    assert ours.seconds > 0 and ours.unit == "TB/s"
    assert all(math.isnan(each.seconds) for each in others)
    for timing, words in zip(others, ("away", "NaN", "the schedule names", "no such kernel"), strict=True):
        assert words in timing.note
    json.dumps(report_files.as_dict(found), allow_nan=False)


def test_what_an_owner_may_choose_is_measured_too(monkeypatch):
    monkeypatch.setattr(aiter_adapter, "installed", lambda: "0.1.7")
    assert [options for _, options in report.ways(pretend("gfx942"))] == [
        {},
        {"placement": "hardware"},
        {"aiter": "always"},
    ]
    assert [options for _, options in report.ways(pretend("sm_90"))] == [{}, {"placement": "hardware"}]
    for name in ("gfx1250", "cpu"):
        assert report.ways(pretend(name)) == [("", {})]
    # timed beside the mappings, and told where it cannot run
    case = report.tiny_cases(report.MAPPED)[0]
    found = report.Report({}, {}, True)
    monkeypatch.setattr(report, "ways", lambda topology: [("", {}), (", moved", {"placement": "dispatch"})])
    report.measure_mappings(found, case, CPU, pretend("gfx942"), "torch")
    assert [each.contestant for each in found.timings] == [*MAPPINGS, "swizzled-head-first, moved"]
    assert set(found.predicted[case.name]) == set(MAPPINGS)


def test_tiny_cases_keep_the_kinds_of_steps():
    for cases in (decode_cases(torch.bfloat16), prefill_cases(torch.bfloat16)):
        tiny = report.tiny_cases(cases)
        assert {case.q_heads // case.kv_heads for case in tiny} == {
            case.q_heads // case.kv_heads for case in cases
        }
        assert all(case.length == 96 and case.query_len in (1, 96) for case in tiny)

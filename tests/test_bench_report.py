"""numa-swizzle bench report, from end to end on a CPU: files, verdicts, and that a wrong kernel is found."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest
import torch

from numa_attention import aiter_adapter, domains_probe, runner, schedule
from numa_attention.decode import cdna5_variant
from numa_attention.mapping import MAPPINGS
from numa_attention.shapes import LayerShape
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode
from vllm_numa_backend import cli, settings
from vllm_numa_backend.bench import checks, contestants, report, report_files, report_parts
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
        answer["tiny"] and len(answer["checks"]) == 4 and all(check["passed"] for check in answer["checks"])
    )
    tables = {timing["table"] for timing in answer["timings"]}
    assert tables == {"mappings", "prefill", "decode", "decode, float8 cache"}
    assert all(timing["seconds"] > 0 for timing in answer["timings"])
    assert {timing["variant"] for timing in answer["timings"]} == {"torch-decode", "torch-prefill"}
    text = (tmp_path / "report.md").read_text()
    assert "Its times mean nothing" in text and "4 of 4 steps agree" in text and "torch 2" not in text
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
    assert [check["passed"] for check in answer["checks"]] == [False, True]  # the other one is of writing
    text = (tmp_path / "report.md").read_text()
    assert "WRONG" in text and "1 of 2 steps agree" in text
    if fault != "scaled":
        assert "did not run" in text
    assert ("RuntimeError: out of registers |" in text) == (fault == "raises")


@pytest.mark.parametrize("step", checks.steps(torch.float8_e4m3fnuz, tiny=True), ids=lambda step: step.name)
def test_every_step_passes_with_the_torch_kernels(step):
    check = checks.run_check(step, CPU, "torch")
    assert check.passed, check
    assert "torch-decode" in check.variants


def test_a_rival_that_disagrees_or_is_missing_is_told(tmp_path):
    case = report_parts.tiny_cases(decode_cases(torch.bfloat16))[0]
    tensors = make_tensors(case, device=CPU)
    found = report.Report({}, {}, True)
    call, schedule = contestants.ours(tensors, kernels="torch")
    expected = report_parts.add_timing(found, "decode", case, "ours", "torch-decode", call, tensors, None)

    def far(copy):
        call(copy)
        tensors.out.mul_(1.5)

    report_parts.add_timing(found, "decode", case, "far", "", far, tensors, expected)
    report_parts.add_timing(found, "decode", case, "silent", "", lambda copy: None, tensors, expected)
    report_parts.add_timing(found, "decode", case, "other", "portable-decode", call, tensors, expected)
    report_parts.note_failure(found, "decode", case, "gone", ImportError("no such kernel"))
    ours, *others = found.timings
    assert ours.seconds > 0 and ours.unit == "TB/s"
    assert all(math.isnan(each.seconds) for each in others)
    for timing, words in zip(others, ("away", "NaN", "the schedule names", "no such kernel"), strict=True):
        assert words in timing.note
    json.dumps(report_files.as_dict(found), allow_nan=False)


def test_what_an_owner_may_choose_is_measured_too(monkeypatch):
    monkeypatch.setattr(aiter_adapter, "installed", lambda: "0.1.7")
    assert [options for _, options in report_parts.ways(pretend("gfx942"))] == [
        {},
        {"placement": "hardware"},
        {"aiter": "always"},
    ]
    assert [options for _, options in report_parts.ways(pretend("sm_90"))] == [{}, {"placement": "hardware"}]
    for name in ("gfx1250", "cpu"):
        assert report_parts.ways(pretend(name)) == [("", {})]
    # timed beside the mappings, and told where it cannot run
    case = report_parts.tiny_cases(report_parts.MAPPED)[0]
    found = report.Report({}, {}, True)
    monkeypatch.setattr(
        report_parts, "ways", lambda topology: [("", {}), (", moved", {"placement": "dispatch"})]
    )
    report_parts.measure_mappings(found, case, CPU, pretend("gfx942"), "torch")
    assert [each.contestant for each in found.timings] == [*MAPPINGS, "swizzled-head-first, moved"]
    assert set(found.predicted[case.name]) == set(MAPPINGS)


def parts_on(monkeypatch, name: str) -> list[report_parts.Part]:
    """What is measured on a device that is not there."""
    monkeypatch.setattr(report_parts, "detect", lambda device=None: pretend(name))
    monkeypatch.setattr(aiter_adapter, "installed", lambda: "0.1.7")
    return report_parts.parts(device="cuda")


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "gfx1250", "sm_90"])
def test_what_is_measured_on_a_device(monkeypatch, name):
    found = parts_on(monkeypatch, name)
    names = [part.name for part in found if part.table == "checks"]
    assert len(set(names)) == len(names)
    amd = name in ("gfx942", "gfx950")
    assert (names[0] == "dealing") == amd
    for words, there in (
        (", placed by hardware", name != "gfx1250"),
        (", amd-aiter where it can", amd),
        ("clusters of 4, float8 keys beside values", name == "gfx1250"),
    ):
        assert any(words in each for each in names) == there, words
    assert {"one long request", "few queries over a long prefix", "long prompts", "cache write 5"} <= set(
        names
    )
    sizes = {table: sum(part.table == table for part in found) for table in {part.table for part in found}}
    article = {"decode of AMD's article, float8 cache": 10} if name == "gfx1250" else {}
    assert (
        sizes
        == {"checks": len(names), "mappings": 2, "prefill": 4, "decode": 10, "decode, float8 cache": 10}
        | article
    )


def test_the_steps_for_clusters_run_in_clusters():
    """On the whole device: units fill it, and pages hold a tile of each workgroup."""
    mi450 = pretend("gfx1250")
    for step in checks.cluster_steps(torch.float8_e4m3fn):
        kv_dtype = step.kv_dtype or step.dtype
        shape = LayerShape(
            step.q_heads, step.kv_heads, step.head_dim, step.head_dim, step.dtype, kv_dtype, step.page_size
        )
        workgroups = choose_decode(shape, mi450, "triton", 1).workgroups
        cluster, _ = cdna5_variant.cluster_of(shape, step.decodes * step.kv_heads, workgroups)
        assert cluster > 1 and f"clusters of {cluster}" in step.name


@pytest.mark.slow
def test_an_mi300x_from_end_to_end(monkeypatch):
    """Its kernels, interpreted, in tiny shapes: both placements, the mappings and what the model says of them."""
    small = dataclasses.replace(pretend("gfx942"), compute_units=16)
    for module in (report_parts, schedule):
        monkeypatch.setattr(module, "detect", lambda device=None: small)
    monkeypatch.setattr(domains_probe, "probe_xccs", lambda device, workgroups: torch.arange(workgroups) % 8)
    found = report_parts.make_report(rows=1, device=CPU, kernels="interpret")
    assert found.dealt["dealt_in_turn"] == 1.0 and "100.0% of the workgroups" in report_files.as_markdown(
        found, []
    )
    assert report.failures(found) == []
    assert [check.variants for check in found.checks[:2]] == ["portable-decode, portable-prefill"] * 2
    assert found.checks[1].name.endswith(", placed by hardware")
    contestants_of = {table: [] for table in ("mappings", "prefill", "decode", "decode, float8 cache")}
    for timing in found.timings:
        contestants_of[timing.table].append(timing.contestant)
    assert contestants_of["mappings"] == [*MAPPINGS, "swizzled-head-first, placed by hardware"]
    assert contestants_of["prefill"] == [report.OURS]
    assert contestants_of["decode"] == [report.OURS, f"{report.OURS}, placed by hardware"]
    (hits,) = found.predicted.values()
    assert set(hits) == set(MAPPINGS) and all(0 <= rate <= 1 for rate in hits.values())


def test_compared_rows_are_those_of_the_requests():
    step = checks.Step("", (1, 4097, 63), (9, 5000, 63), 1, 8, 2)
    rows, requests, positions = checks._compared_rows(step)
    assert len(rows) <= checks.MOST_ROWS and rows.tolist() == sorted(set(rows.tolist()))
    for request, (first, count, length) in enumerate(((0, 1, 9), (1, 4097, 5000), (4098, 63, 63))):
        mine = rows[requests == request]
        assert mine[0] == first and mine[-1] == first + count - 1
        assert (positions[requests == request] == length - count + mine - first).all()
    # a short step is compared whole
    assert len(checks._compared_rows(checks.Step("", (1, 100), (9, 100), 1, 8, 2))[0]) == 101


@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_write_is_found(monkeypatch, packed):
    run = next(
        check for check in checks.write_checks(torch.float8_e4m3fn, CPU, "torch") if check.args[2] == packed
    )
    assert run().passed
    right = checks.write_pages
    calls = []

    def wrong(key, value, k_pages, v_pages, *rest, **options):
        right(key, value, k_pages, v_pages, *rest, **options)
        if not calls:
            k_pages[5, 3, 1, 7] = 0.0  # where nothing was to be written, or something else
        calls.append(1)

    monkeypatch.setattr(checks, "write_pages", wrong)
    check = run()
    assert not check.passed and check.error >= 1 and "bytes of the cache are wrong" in check.complaint


def test_a_kernel_of_ours_that_does_not_run_is_a_failure(tmp_path):
    found = report.Report({}, {"name": "x", "generation": "x", "compute_units": 1, "domains": 1}, False)
    for contestant, seconds in ((report.OURS, math.nan), ("TRITON_ATTN split", 1.0), ("aiter", math.nan)):
        found.timings.append(
            report.Timing("decode", "1, 2", contestant, "", seconds, seconds, "TB/s", "lost | away")
        )
    assert report.failures(found) == ["decode, 1, 2, NUMA_SWIZZLE: lost | away"]
    report_files.write_report(found, tmp_path, plots=False)
    text = (tmp_path / "report.md").read_text()
    # relative to what ran, and no cell is cut in two
    assert "| TRITON_ATTN split |  | 1000000.0 | 1 TB/s | 1.00 |" in text
    assert "did not run: lost \\| away |" in text


def test_tiny_cases_keep_the_kinds_of_steps():
    for cases in (decode_cases(torch.bfloat16), prefill_cases(torch.bfloat16)):
        tiny = report_parts.tiny_cases(cases)
        assert {case.q_heads // case.kv_heads for case in tiny} == {
            case.q_heads // case.kv_heads for case in cases
        }
        assert all(case.length == 96 and case.query_len in (1, 96) for case in tiny)

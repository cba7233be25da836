"""A report in processes of their own: one that a kernel takes down, or holds for ever, costs one part and no more."""

from __future__ import annotations

import math
import sys

import pytest

from vllm_numa_backend.bench import report_process
from vllm_numa_backend.bench.report import failures
from vllm_numa_backend.bench.report_process import NothingMeasured, measure_apart

# what a GPU's kernels do to their process, at the parts that the tests name
CHILD = """
import os, sys, time
from vllm_numa_backend.bench import report_parts, report_process
from vllm_numa_backend.bench.report import Timing

def kill(report):
    print("Memory access fault by GPU node-1", flush=True)
    os.abort()

def wait(report):
    time.sleep(600)

def leave(report):
    os._exit(3)

def time_it(report):
    report.timings.append(Timing("decode", "right", "NUMA_SWIZZLE", "portable-decode", 1.0, 1.0, "TB/s"))
    report.predicted["right"] = {"head-first": 0.5}

def break_it(report):
    report_process.device_answers = lambda: False
    time_it(report)

WHAT = dict(kill=kill, wait=wait, leave=leave, right=time_it, breaks=break_it)
report_parts.parts = lambda rows, kernels: [
    report_parts.Part("checks" if name != "right" else "decode", name, WHAT[name]) for name in NAMES
]
sys.exit(report_process.main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
"""


def measured(tmp_path, *names, seconds=120.0, **options):
    script = tmp_path / "child.py"
    script.write_text(f"NAMES = {names}\n{CHILD}")
    return measure_apart(
        tmp_path / "report.log", command=[sys.executable, str(script)], seconds=seconds, **options
    )


def test_a_part_that_ends_its_process(tmp_path):
    said, kept = [], []
    report = measured(
        tmp_path, "right", "kill", "right", "leave", progress=said.append,
        keep=lambda so_far: kept.append(len(so_far.timings) + len(so_far.checks)),
    )  # fmt: skip
    assert said == [
        "1 of 4: decode, right",
        "2 of 4: checks, kill",
        "3 of 4: decode, right",
        "4 of 4: checks, leave",
    ]
    assert [check.name for check in report.checks] == ["kill", "leave"]
    assert not any(check.passed for check in report.checks) and math.isnan(report.checks[0].error)
    assert report.checks[0].complaint == "its process ended by SIGABRT: Memory access fault by GPU node-1"
    assert report.checks[1].complaint.startswith("its process ended with exit code 3: ")
    assert len(report.timings) == 2 and report.predicted == {"right": {"head-first": 0.5}}
    assert kept == [1, 2, 3, 4] and len(failures(report)) == 2
    assert report.device["generation"] == "cpu" and report.environment["python"]


def test_a_part_that_never_ends(tmp_path):
    report = measured(tmp_path, "wait", "right", seconds=15.0)
    (check,) = report.checks
    assert check.complaint.startswith("it did not end within 15 s: ") and len(report.timings) == 1


def test_a_device_that_answers_no_more_gets_a_new_process(tmp_path):
    """What the broken process measured last is kept."""
    report = measured(tmp_path, "breaks", "right", "breaks")
    assert len(report.timings) == 3 and not failures(report)


def test_a_process_that_cannot_begin(tmp_path):
    with pytest.raises(
        NothingMeasured, match="ended with exit code 1: NameError: name 'NAMES' is not defined"
    ):
        (tmp_path / "child.py").write_text(CHILD)
        measure_apart(tmp_path / "report.log", command=[sys.executable, str(tmp_path / "child.py")])


def test_the_module_itself(tmp_path, monkeypatch):
    """The command that a GPU gets, on the CPU: all of its parts come through."""
    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", "torch")
    report = measure_apart(tmp_path / "report.log", rows=1, kernels="torch")
    assert report.tiny and [check.passed for check in report.checks] == [True, True]
    assert {timing.table for timing in report.timings} == {
        "mappings", "prefill", "decode", "decode, float8 cache",
    }  # fmt: skip
    assert report_process.MODULE[1:] == ("-m", "vllm_numa_backend.bench.report_process")

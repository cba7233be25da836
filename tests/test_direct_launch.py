"""Launches past Triton's Python hand to the driver what Triton would, for every kernel and with a profiler's hooks.

Over a stub of the driver, so that no GPU is needed; the compiler of C that Triton itself needs is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compiled import reports_of

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="torch has loaded the real driver"
)
KERNELS = {
    "hopper-decode": 2,
    "portable-decode": 0,
    "hopper-prefill": 5,
    "portable-prefill": 0,
}  # tensor maps
# pointers that no kernel reads: the calls have no such options
UNUSED = ("spans", "q_scale", "out_scale", "causal_flags")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    script = Path(__file__).with_name("launch_directly.py")
    return reports_of(script, tmp_path_factory.mktemp("cache"), str(tmp_path_factory.mktemp("driver")))


def arguments(launch: dict) -> dict[str, str]:
    return {name: value for name, value in launch["arguments"].items() if name not in UNUSED}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", ["repeated", "again"])
def test_a_layers_call_hands_over_what_triton_does(way, kernel, reports):
    report = reports[kernel]
    assert report["ran"] == {kernel: 1}
    assert report["by Triton"]["launches"] == report[way]["launches"] == 1
    assert report[way]["grid"] == report["by Triton"]["grid"]
    assert arguments(report[way]) == arguments(report["by Triton"])
    scale = report["by Triton"]["arguments"]["scale"]
    assert scale == "0000803e"  # 0.25, that of the second call


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_repeated_call_asks_the_driver_for_nothing_else(kernel, reports):
    repeated, by_triton = reports[kernel]["repeated"], reports[kernel]["by Triton"]
    assert repeated["encodings"] == repeated["pointers"] == 0
    # once for Triton's launch, and once to be kept
    assert by_triton["encodings"] == 2 * KERNELS[kernel]
    assert by_triton["pointers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_hands_over_what_triton_does(kernel, reports):
    again, by_triton = reports[kernel]["planned again"], reports[kernel]["planned by Triton"]
    assert again["launches"] == by_triton["launches"] == (1 if kernel.endswith("decode") else 2)
    assert again["grid"] == by_triton["grid"]
    assert again["arguments"] == by_triton["arguments"]
    assert again["pointers"] == 0 and by_triton["pointers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_profiler_is_told_of_direct_launches(kernel, reports):
    name = f"{kernel.split('-')[1]}_kernel"
    assert reports[kernel]["hooked"] == [name, name]

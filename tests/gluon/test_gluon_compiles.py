"""The compiler takes the kernels that the interpreter runs: each sees mistakes that the other one cannot see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from numa_attention.jit import SETTING

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", SETTING)
    }
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    script = Path(__file__).with_name("compile_cases.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    return {report["case"]: report for report in map(json.loads, done.stdout.splitlines())}


def count(report: dict, *texts: str) -> int:
    """Instructions whose name has all the texts in it."""
    return sum(n for opcode, n in report["opcodes"].items() if all(text in opcode for text in texts))


def test_what_gfx1250_runs(reports):
    for name in ("tdm gemm", "tdm attention"):
        assert count(reports[name], "tensor_load_to_lds") and count(reports[name], "v_wmma_f32_16x16x32_bf16")


def test_the_language(reports):
    assert count(reports["wmma float8"], "v_wmma_f32_16x16x128_fp8_fp8")
    assert count(reports["wmma scaled"], "v_wmma_scale_f32_16x16x128_f8f6f4")
    assert count(reports["gfx950 gemm"], "v_mfma_f32_32x32x16") and count(
        reports["gfx950 gemm"], "buffer_load_dwordx4"
    )
    assert count(reports["tdm store"], "tensor_store_from_lds")


def test_what_sm90_runs(reports):
    for name in ("tma gemm", "tma attention"):
        assert count(reports[name], "wgmma.mma_async")
    assert count(reports["warp specialisation"], "setmaxnreg")

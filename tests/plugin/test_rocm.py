"""vLLM's own ROCm platform, on a pretended device, selects us where it is asked to, and only there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugin.harness import write_model

PROBE = Path(__file__).with_name("rocm_probe.py")
OURS = "vllm_numa_backend.backend.NumaSwizzleBackend"


def probe(arch: str, model: Path, variables: dict[str, str], **options) -> dict:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMA_SWIZZLE_", "VLLM_TARGET_DEVICE", "VLLM_ATTENTION_BACKEND", "TRITON_"))
    }
    command = [sys.executable, str(PROBE), arch, str(model), json.dumps(options)]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["platform"] == "RocmPlatform"
    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if importlib.util.find_spec("vllm.platforms.rocm") is None:
        pytest.skip("this vLLM has no ROCm platform")
    return write_model(tmp_path_factory.mktemp("tiny"), torch_dtype="bfloat16")


def test_asked_by_the_environment(model):
    answer = probe("gfx942", model, {"VLLM_ATTENTION_BACKEND": "NUMA_SWIZZLE"}, kv_cache_dtype="fp8")
    assert answer["backend"] == OURS and answer["graphs"] == "UNIFORM_BATCH"
    assert answer["fp8"] == "torch.float8_e4m3fnuz"


def test_asked_by_an_option(model):
    answer = probe(
        "gfx950", model, {}, attention_backend="NUMA_SWIZZLE", kv_cache_dtype="fp8", block_size=128
    )
    assert answer["backend"] == OURS and answer["fp8"] == "torch.float8_e4m3fn"


def test_another_backend_given_explicitly_wins(model):
    variables = {"VLLM_ATTENTION_BACKEND": "NUMA_SWIZZLE"}
    answer = probe("gfx942", model, variables, attention_backend="TRITON_ATTN")
    assert answer["backend"].endswith(".TritonAttentionBackend")

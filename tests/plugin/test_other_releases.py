"""The plugin's tests on the other vLLM releases, whose Python files lie beside the environment.

Nothing of vLLM is replaced: its real registry, configuration, attention layers and base classes run, with the
torch and the dependencies of this environment. Only serving needs a release's own compiled operations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASES = {"0.25.1": ".venv-vllm025", "0.33.0": ".venv-vllm033"}
MODULES = (
    "test_step.py",
    "test_attention_types.py",
    "test_context_parallel.py",
    "test_support.py",
    "test_selection.py",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", RELEASES)
def test_release(release):
    folder = ROOT / RELEASES[release]
    if not (folder / "vllm" / "__init__.py").exists():
        complaint = f"{folder.name} does not hold vLLM {release}; run `make` to fetch it"
        if os.environ.get("NUMA_TEST_ALL_RELEASES") == "1":
            pytest.fail(complaint)
        pytest.skip(complaint)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "kernels")))
    modules = [Path(__file__).with_name(name) for name in MODULES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--timeout=600", *modules],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "NUMA_TEST_VLLM": release},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout + done.stderr

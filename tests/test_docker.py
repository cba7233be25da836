"""The images, as far as they can be checked without building them: what they start from, copy, set and run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vllm_numa_backend import NAME
from vllm_numa_backend.settings import TABLE

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
# the releases that the plugin is tested with; compat.py holds them and imports vLLM
RELEASES = re.search(
    r"TESTED_RELEASES = \((.*?)\)", (ROOT / "vllm_numa_backend" / "compat.py").read_text(), re.DOTALL
)[1]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined and comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def rest(path: Path, word: str) -> list[str]:
    return [text for name, text in instructions(path) if name == word]


def test_there_are_three():
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "rocm.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_image(path):
    parsed = instructions(path)
    known = {"ARG", "FROM", "COPY", "RUN", "ENV", "ENTRYPOINT", "WORKDIR"}
    assert {word for word, _ in parsed} <= known
    # the base is an argument with a default, so that another release takes no edit
    (base,) = rest(path, "FROM")
    argument = re.fullmatch(r"\$\{(\w+)\}", base)[1]
    assert parsed[0][0] == "ARG" and parsed[0][1].startswith(f"{argument}=")
    image, tag = parsed[0][1].split("=")[1].split(":")
    assert image.count("/") <= 1 and "latest" not in tag
    if "vllm" in image:
        assert f'"{tag.removeprefix("v")}"' in RELEASES
    # the program is started directly, so that it gets the signals
    assert json.loads(rest(path, "ENTRYPOINT")[-1]) == ["vllm", "serve"]
    assert parsed[-1][0] == "ENTRYPOINT"
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(rest(path, "ENV"))))
    assert variables["VLLM_ATTENTION_BACKEND"] == NAME
    settings = {name for name in variables if name.startswith("NUMA_SWIZZLE_")}
    assert settings <= {row.variable for row in TABLE}
    for line in rest(path, "COPY"):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    assert f"-f docker/{path.name}" in path.read_text()


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_gpu_images_keep_their_torch_and_triton(name):
    (run,) = rest(ROOT / "docker" / f"{name}.Dockerfile", "RUN")
    assert "pip install" in run and "--no-deps" in run
    # all that pip would have fetched is there, or the image does not build
    declared = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
    for requirement in re.findall(r'"([\w-]+)', declared):
        assert requirement in run
    copied = {line.split()[0] for line in rest(ROOT / "docker" / f"{name}.Dockerfile", "COPY")}
    assert {"vllm_numa_backend", "kernels", "pyproject.toml"} <= copied


def test_environments_are_not_sent_to_the_builder():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "models"} <= set(ignored)

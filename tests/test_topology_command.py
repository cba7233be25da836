"""numa-swizzle topology: the map of a pretended GPU, and what is said where there is none."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from numa_attention import domains_probe, topology
from tests.test_domain_map import made_latencies
from vllm_numa_backend import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line here; returns (exit code, what it printed, what it complained)."""

    def call(line):
        monkeypatch.setattr(sys, "argv", ["numa-swizzle", "topology", *line.split()])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        shown = capsys.readouterr()
        return ending.value.code, shown.out, shown.err

    return call


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An H200 whose SMs are of domain 0 and 1 in turn; returns what it can be made to answer."""
    answers = {method: made_latencies([0, 1] * 66)[0] for method in domains_probe.METHODS}
    properties = SimpleNamespace(name="GPU", uuid="1234", multi_processor_count=132)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(topology, "detect", lambda: topology.pretend("H200"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(domains_probe, "probe_latencies", lambda device, method: answers[method])
    return answers


def test_measured_and_kept(run, gpu):
    code, out, _ = run("")
    assert code == 0 and "    0: 0 1 0 1" in out and "by" in out
    assert [line.split() for line in out.splitlines() if line.startswith(("0 ", "1 "))] == [
        ["0", "66"],
        ["1", "66"],
    ]
    gpu.clear()  # the second time nothing is measured
    assert run("")[1] == out
    answer = json.loads(run("--json")[1])
    assert answer["measured"] and answer["domain_of_sm"] == [0, 1] * 66 and answer["uuid"] == "1234"
    assert answer["device"]["name"] == "H200" and answer["far_cycles"] > answer["near_cycles"]


def test_fresh_with_a_picture_and_the_latencies(run, gpu, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `model`")
    run("")
    gpu["read"] = made_latencies([0] * 66 + [1] * 66)[0]
    picture, kept = tmp_path / "map.png", tmp_path / "latencies.pt"
    code, out, _ = run(f"--plot {picture} --latencies {kept}")
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert torch.equal(torch.load(kept)["read"], gpu["read"])
    assert json.loads(run("--json")[1])["domain_of_sm"] == [0] * 66 + [1] * 66
    assert "   64: 0 0 1 1" in out


def test_latencies_that_tell_nothing_are_kept(run, gpu, tmp_path):
    for method in gpu:
        gpu[method] = made_latencies([0, 1] * 66, gap=0.0)[0]
    code, _, said = run(f"--latencies {tmp_path / 'latencies.pt'}")
    assert code == 2 and "cannot be told" in said and "Traceback" not in said
    assert torch.load(tmp_path / "latencies.pt").keys() == {"read", "add"}
    assert not list((tmp_path / "cache").glob("**/*.json"))


def test_files_that_cannot_be_written(run, gpu, tmp_path):
    gpu.clear()  # refused before anything is measured
    for option in ("--plot", "--latencies"):
        code, _, said = run(f"{option} {tmp_path}/none/file.png")
        assert code == 2 and "there is no folder" in said


def test_an_amd_device_shows_how_it_deals(run, monkeypatch):
    known = topology.pretend("MI300X")
    monkeypatch.setattr(topology, "detect", lambda: known)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(
        domains_probe,
        "probe_xccs",
        lambda device, number: torch.arange(number) % 8 * (torch.arange(number) % 4 > 0),
    )
    answer = json.loads(run("--json")[1])
    assert sum(answer["workgroups_of_xcc"].values()) == 4 * known.compute_units
    assert answer["dealt_in_turn"] == 0.875 and answer["first_xccs"][:8] == [0, 1, 2, 3, 0, 5, 6, 7]
    assert "87.5% of the workgroups w ran on XCD w mod 8" in run("")[1]


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("H200", "2 domains are measured by the latency of L2 hits: run this command on the device"),
        ("MI300X", "8 domains are its XCDs"),
        ("gfx1250", "8 domains are its XCDs"),
        ("cpu", "there is nothing to map"),
    ],
)
def test_devices_that_are_not_here(run, device, says):
    code, out, _ = run(f"--device {device}")
    assert code == 0 and says in out
    answer = json.loads(run(f"--device {device} --json")[1])
    assert says in answer["how"] and not answer["measured"]


def test_refusals(run, monkeypatch):
    monkeypatch.setattr(topology, "detect", lambda: topology.pretend("cpu"))
    for line, says in (
        ("", "there is no GPU here"),
        ("--device H2", "unknown device 'H2'"),
        ("--device H200 --fresh", "leave out --device"),
    ):
        code, _, said = run(line)
        assert code == 2 and says in said and len(said.splitlines()) == 1

"""The numa-swizzle command: what a user sees when something is wrong, and what programs read."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import numa_attention
import vllm_numa_backend
from vllm_numa_backend import checkpoints, settings
from vllm_numa_backend.commands import demo, doctor, installed
from vllm_numa_backend.commands.server import Server, ServerFailed, free_port

ROOT = Path(__file__).resolve().parent.parent
# the kernels' own tests set these
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "NUMA_SWIZZLE_"))
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_numa_backend.cli", *arguments]
    return subprocess.run(
        command, env=CLEAN | environment, capture_output=True, text=True, timeout=300, check=False
    )


def assert_one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_version_is_one():
    assert run("--version").stdout.strip() == numa_attention.__version__ == vllm_numa_backend.VERSION


def test_demo_without_a_model_folder(tmp_path):
    assert_one_sentence(run("demo", str(tmp_path / "none")), "no model folder", "numa-swizzle checkpoint")
    file = tmp_path / "file"
    file.write_text("mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    for model, suggested in ((file, demo.EXAMPLE_MODEL), (tmp_path, demo.EXAMPLE_MODEL), (empty, empty)):
        with pytest.raises(demo.UserError, match=f"make one with: numa-swizzle checkpoint {suggested}$"):
            demo.check_model(model)
    # the command that is suggested is not refused
    checkpoints.check_request(empty, checkpoints.SOURCE_HEADS, "fp32", overwrite=False)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan, math.inf])
def test_demo_with_a_wrong_timeout(seconds):
    with pytest.raises(demo.UserError, match="--timeout"):
        demo.check_timeout(seconds)


@pytest.mark.parametrize(
    ("variable", "value"), [("NUMA_SWIZZLE_MAPPING", "sideways"), ("NUMA_SWIZZLE_SPEED", "high")]
)
def test_demo_with_a_wrong_setting(variable, value, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert_one_sentence(run("demo", str(tmp_path), **{variable: value}), variable)


def test_demo_without_triton_where_it_is_needed(monkeypatch):
    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", "interpret")
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(demo.UserError, match="not installed"):
        demo.check_settings()


def test_unknown_device():
    assert_one_sentence(run("doctor", "--device", "MI9000"), "MI9000", "MI300X", "gfx942")


def test_checkpoint_of_an_impossible_shape(tmp_path):
    assert_one_sentence(run("checkpoint", str(tmp_path / "model"), "--head-dim", "100"), "head_dim 100")


@pytest.mark.parametrize(
    "heads", [(9, 3, 0), (9, 3, -64), (9, 3, 320), (0, 0, 64), (9, 0, 64), (-9, -3, 64), (4096, 4, 64)]
)
def test_shapes_without_a_twin(heads, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=str(heads[2] if heads[2] != 64 else heads[0])):
        checkpoints.check_request(tmp_path, checkpoints.Heads(*heads), "fp32", overwrite=False)


def test_checkpoint_replaces_only_a_model_folder(tmp_path):
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    assert_one_sentence(run("checkpoint", str(kept)), "is a file", "name another folder")
    for folder in (tmp_path, kept):
        for overwrite in (True, False):
            with pytest.raises(checkpoints.CheckpointError, match="is not replaced; name another folder"):
                checkpoints.check_request(folder, checkpoints.SOURCE_HEADS, "fp32", overwrite)
    assert kept.read_text() == "mine"
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(checkpoints.CheckpointError, match="pass --overwrite"):
        checkpoints.check_request(tmp_path, checkpoints.SOURCE_HEADS, "fp32", overwrite=False)
    checkpoints.check_request(tmp_path, checkpoints.SOURCE_HEADS, "fp32", overwrite=True)


def test_checkpoint_where_nothing_can_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for place in (file / "model", Path("/proc/model")):
        assert_one_sentence(run("checkpoint", str(place)), "cannot be written")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    with pytest.raises(checkpoints.CheckpointError, match="has 100 MiB free, the model takes 513"):
        checkpoints.check_place(tmp_path / "model", "fp32")
    assert list(tmp_path.iterdir()) == [file]


def test_doctor_explains_another_device():
    result = run("doctor", "--device", "MI300X", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["device"]["generation"] == "gfx942"
    assert report["device"]["domains"] == 8
    assert report["kernels"] == "triton"
    assert len(report["choices"]) == len(doctor.EXAMPLE_SHAPES)
    assert all("over 8 domains" in choice["prefill"] for choice in report["choices"])
    assert report["packages"]["vllm"]
    assert report["problems"] == []


def test_doctor_names_the_kernels_of_gfx1250():
    result = run("doctor", "--device", "gfx1250", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    for choice in json.loads(result.stdout)["choices"]:
        assert choice["decode"].startswith("variant cdna5-decode (four-stage), tile 16 x 32, "), choice


def test_doctor_refuses_torch_kernels_on_a_gpu(monkeypatch):
    from numa_attention.topology import pretend

    report = doctor.Report()
    doctor.choose(report, pretend("MI300X"), settings.Settings(kernels="torch"), pretended=True)
    assert ["attends on the CPU only" in problem for problem in report.problems] == [True]
    assert not report.choices


def test_doctor_names_a_wrong_setting_once():
    result = run("doctor", "--json", NUMA_SWIZZLE_MAPPING="sideways")
    assert result.returncode == 1
    problems = json.loads(result.stdout)["problems"]
    assert len(problems) == 1
    assert "NUMA_SWIZZLE_MAPPING=sideways" in problems[0]


def test_doctor_notices_that_vllm_skips_the_plugin(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    report = doctor.Report()
    doctor.check_plugin(report)
    assert ["VLLM_PLUGINS=another" in problem for problem in report.problems] == [True]


@pytest.mark.parametrize(("version", "wrong"), [("3.5.1", True), ("3.6.0", False), ("3.10.0+git1", False)])
def test_doctor_knows_the_oldest_triton(version, wrong):
    report = doctor.Report(packages={"triton": version})
    doctor.check_triton(report)
    assert bool(report.problems) == wrong


@pytest.mark.parametrize(
    ("device", "version", "noted"),
    [("MI450", "3.6.0", True), ("MI450", "3.7.1", False), ("MI300X", "3.6.0", False), ("MI450", None, False)],
)
def test_doctor_says_what_an_old_triton_costs_on_an_mi450(device, version, noted):
    from numa_attention.topology import pretend

    report = doctor.Report(packages={"triton": version})
    doctor.explain_old_triton(report, pretend(device))
    assert ["take 3.7 or later" in note for note in report.notes] == [True] * noted


@pytest.mark.parametrize(
    ("chosen", "version", "device", "words"),
    [
        ({}, None, "MI300X", "all kernels are ours"),
        ({}, "0.1.7", "MI300X", "--block-size 128"),
        ({"aiter": "never"}, "0.1.7", "MI355X", "not used: NUMA_SWIZZLE_AITER=never"),
        ({"mapping": "head-first"}, "0.1.7", "MI300X", "NUMA_SWIZZLE_MAPPING"),
        ({"placement": "hardware"}, "0.1.7", "MI300X", "NUMA_SWIZZLE_PLACEMENT"),
        ({"aiter": "always"}, "0.1.7", "MI300X", "wherever it can run"),
        ({"aiter": "always"}, "0.1.7", "MI450", None),
    ],
)
def test_doctor_says_when_aiter_is_taken(chosen, version, device, words):
    from numa_attention.topology import pretend
    from vllm_numa_backend import settings

    report = doctor.Report(packages={"amd-aiter": version}, kernels="triton")
    doctor.explain_aiter(report, pretend(device), settings.Settings(**chosen))
    assert len(report.notes) == (words is not None)
    assert words is None or words in report.notes[0]


@pytest.mark.parametrize(
    ("device", "words"), [("MI300X", None), ("MI450", "leave NUMA_SWIZZLE_PLACEMENT at dispatch")]
)
def test_doctor_shows_the_placement(device, words):
    from numa_attention.topology import pretend
    from vllm_numa_backend import settings

    report = doctor.Report(packages={"amd-aiter": None})
    chosen = settings.Settings(placement="hardware")
    doctor.choose(report, pretend(device), chosen, pretended=True)
    assert len(report.problems) == (words is not None)
    if words:
        assert words in report.problems[0] and not report.choices
    else:
        assert all("placed by hardware" in choice.decode + choice.prefill for choice in report.choices)


@pytest.mark.parametrize(
    ("device", "words"), [("MI450", None), ("MI300X", "leave NUMA_SWIZZLE_CLUSTERS at off")]
)
def test_doctor_says_where_there_are_no_clusters(device, words, monkeypatch):
    from numa_attention.topology import pretend
    from vllm_numa_backend import settings

    monkeypatch.setattr("numa_attention.variants.triton_release", lambda: (3, 8))
    report = doctor.Report(packages={"amd-aiter": None})
    doctor.choose(report, pretend(device), settings.Settings(clusters=True), pretended=True)
    assert len(report.problems) == (words is not None)
    assert words is None or words in report.problems[0]


@pytest.mark.parametrize("on_rocm", [True, False])
def test_doctor_tells_the_two_aiters_apart(on_rocm, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "hip", "7.0" if on_rocm else None)
    monkeypatch.setattr(installed, "version_of", {"aiter": "0.13.20191203"}.get)
    report = doctor.Report(packages={"amd-aiter": None})
    doctor.check_aiter(report)
    found = report.problems if on_rocm else report.notes
    assert any("asynchronous iterators" in message and "amd-aiter" in message for message in found)
    assert bool(report.problems) == on_rocm


def test_missing_vllm_and_torch_are_named(monkeypatch):
    monkeypatch.setattr(installed, "version_of", lambda distribution: None)
    report = doctor.examine(None)
    text = " ".join(report.problems)
    assert "vLLM is not installed" in text
    assert "torch is not installed" in text


def test_what_ran_is_read_from_the_log():
    log = (
        "(Worker pid=1) INFO [metadata.py:154] NUMA_SWIZZLE prefill of 9/3 heads of 64: variant a, tile 1\n"
        "(Worker pid=1) INFO [metadata.py:154] NUMA_SWIZZLE decode of 9/3 heads of 64: variant b\n"
    )
    assert demo.what_ran(log) == {"prefill": "variant a, tile 1", "decode": "variant b"}
    assert demo.what_ran("NUMA_SWIZZLE is available") == {}


def test_first_error_is_the_cause():
    lines = [
        "INFO 11-30 10:00:00 [a.py:1] errors such as `OSError: [Errno 24]` may follow",
        "(Worker pid=11081) ERROR 11-30 18:03:21 [executor.py:953] ModuleNotFoundError: No module named 'x'",
        "RuntimeError: Engine core initialization failed.",
    ]
    assert demo.first_error(lines) == "ModuleNotFoundError: No module named 'x'"
    assert demo.first_error(lines[:1]) is None


PREFIX = "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1] "


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [
                f"{PREFIX}{line}"
                for line in ("ValueError: first,", "  second,", "third", "Traceback (most", "  File")
            ],
            "ValueError: first, second, third",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, no such model [type=value_error]",
                "    For further information visit a page",
            ],
            "ValidationError: 1 validation error for ModelConfig Value error, no such model [type=value_error]",
        ),
        (["OSError: one", "INFO 11-30 10:00:00 [a.py:1] two"], "OSError: one"),
        (["OSError: one", "(Worker pid=8) two"], "OSError: one"),
        (["KeyError: 'a'", "ValueError: b"], "KeyError: 'a'"),
    ],
)
def test_a_cause_of_several_lines_is_whole(lines, cause):
    assert demo.first_error(["INFO 11-30 10:00:00 [a.py:1] before", *lines]) == cause


def test_the_last_message_of_a_log_says_something():
    info = PREFIX.replace("ERROR", "INFO")
    told = f"{info}Starting to load model x..."
    noise = [f"{info}{text}" for text in ("  ", " █ █▄ v0.32", "  reserved_cpus=[1]")]
    noise += ["Loading safetensors weights now:  50%|#####", f'{PREFIX}  File "a.py", line 1, in call of it']
    assert demo.last_message([told, *noise]) == "Starting to load model x..."
    assert demo.last_message([]) == "loading vLLM"
    assert demo.shorten("one two three four five six seven", 20) == "one two three ..."


@pytest.mark.parametrize(
    ("log", "shown", "words"),
    [
        ("", "", "was not ready. The server's log is {log}"),
        ("only this\n", "only this", "The end of the server's log is above, all of it is {log}"),
        ("a\nOSError: broken.\n", "", "was not ready: OSError: broken. The server's log is {log}"),
    ],
    ids=["empty", "no cause", "cause"],
)
def test_a_failure_names_the_cause_or_shows_the_log(log, shown, words, capsys):
    with (
        pytest.raises(demo.UserError) as error,
        Server([sys.executable, "-c", ""], {}, free_port()) as server,
    ):
        server.log_path.write_text(log)
        demo.fail(server, "it was not ready")
    assert words.format(log=server.log_path) in str(error.value)
    assert capsys.readouterr().err.strip() == shown
    server.log_path.unlink()  # kept for the user


# A stand-in for `vllm serve`: it ignores the polite signal, has a child in its group, and writes both process ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # a zombie of a stranger is as good as gone
    return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] != "Z"


def started_processes(log: Path) -> list[int]:
    """The process ids that the stand-in has written by now."""
    deadline = time.monotonic() + 30
    while not log.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(number) for number in log.read_text().split()]


def test_no_process_outlives_its_server(monkeypatch):
    monkeypatch.setattr("vllm_numa_backend.commands.server.STOP_PATIENCE_S", 1.0)
    with (
        pytest.raises(KeyboardInterrupt),
        Server([sys.executable, "-c", STUBBORN], {}, free_port()) as server,
    ):
        processes = started_processes(server.log_path)
        assert all(map(alive, processes))
        raise KeyboardInterrupt
    assert len(processes) == 2
    assert not any(map(alive, processes))
    assert not server.log_path.exists()


def test_a_server_that_dies_is_reported_at_once():
    dying = Server([sys.executable, "-c", "raise SystemExit(3)"], {}, free_port())
    with dying as server, pytest.raises(ServerFailed, match="exit code 3"):
        server.wait_until_ready(60, lambda elapsed: None)


def test_a_server_that_never_answers_is_given_up():
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Server(sleeper, {}, free_port()) as server, pytest.raises(ServerFailed, match="not ready after 1 s"):
        server.wait_until_ready(1, lambda elapsed: None)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "kill", "kill -9"]
)
def test_demo_stops_its_server_when_interrupted(number, tmp_path):
    """`vllm` is a stand-in here, found because it lies beside a Python of its own."""
    (tmp_path / "config.json").write_text("{}")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    vllm = bin_folder / "vllm"
    vllm.write_text(f"#!{sys.executable}\n{STUBBORN.replace('signal.SIG_IGN', 'signal.SIG_DFL')}")
    vllm.chmod(0o755)
    (bin_folder / "python").symlink_to(sys.executable)
    code = (
        f"import sys; sys.executable = {str(bin_folder / 'python')!r}\n"
        f"sys.argv = ['numa-swizzle', 'demo', {str(tmp_path)!r}]\n"
        "from vllm_numa_backend.cli import main; main()"
    )
    # as a shell starts a background job: without SIGINT
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen([sys.executable, "-c", code], env=CLEAN, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, inherited)
    servers: list[int] = []
    try:
        first_line = process.stdout.readline()
        log = Path(re.search(r"log: (.+)\)", first_line)[1])
        servers = started_processes(log)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
        if number == signal.SIGKILL:
            deadline = time.monotonic() + 30
            while any(map(alive, servers)) and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            assert process.returncode == 130
            assert "stopping the server" in rest
            assert not log.exists()
        assert not any(map(alive, servers))
    finally:
        process.kill()
        for server in filter(alive, servers):
            os.kill(server, signal.SIGKILL)
    log.unlink(missing_ok=True)


def test_the_set_up_says_what_pip_is_at():
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    log = "Collecting a==1\n  Using cached a.whl\nInstalling collected packages: a, bb, ccc\n"
    log += "  Attempting uninstall: a\n    Successfully uninstalled a-0\nWARNING: b\n\n"
    assert environment.what_pip_is_at(log, 100) == "Installing collected packages: a, bb, ccc"
    assert environment.what_pip_is_at(log, 37) == "Installing collected packages: a, ..."
    assert environment.what_pip_is_at("", 100) == "starting pip"


def test_readme_lists_every_setting_and_value():
    readme = (ROOT / "README.md").read_text()
    for row in settings.TABLE:
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| `{row.variable}`")]
        for value in row.allowed:
            assert f"`{value}`" in line

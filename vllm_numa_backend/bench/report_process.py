"""A report measured in a process of its own, which a kernel may take down: what it was at is told, the rest goes on.

    python -m vllm_numa_backend.bench.report_process DESCRIPTOR FIRST ROWS KERNELS

On a GPU a wrong address ends the process (AMD) or all later calls of it (NVIDIA), and a wait that is never met lasts
forever. The process writes one JSON object a line to the file descriptor: what there is to do, then the number of each
part that it begins, then its results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from vllm_numa_backend.bench.checks import Check
from vllm_numa_backend.bench.report import Report, Timing, add_failure

PART_SECONDS = 1800  # amd-aiter compiles its kernels when they are first called
BROKEN = 75  # exit code of a process whose device answers no more after a part
KILLED_SECONDS = 30
MODULE = (sys.executable, "-m", "vllm_numa_backend.bench.report_process")


class NothingMeasured(RuntimeError):
    """The process ended before it could say what there is to measure."""


def measure_apart(
    log: Path,
    *,
    rows: int = 100,
    kernels: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
    command: Sequence[str] = MODULE,
    seconds: float = PART_SECONDS,
) -> Report:
    """Measure everything, in as many processes as it takes; see `report_parts.make_report`.

    log: where their output goes. seconds: what a part may take.

    Raises NothingMeasured where a process does not come to its first part.
    """
    report: Report | None = None
    todo: list[list[str]] = []
    first = 0
    with log.open("w") as output:
        while report is None or first < len(todo):
            start, begun = first, None
            with _Process([*command, str(first), str(rows), kernels], output) as process:
                for message in process.messages(seconds):
                    if "parts" in message:
                        todo = message["parts"]
                        report = report or Report(**message["report"])
                    elif "begin" in message:
                        begun = message["begin"]
                        progress(f"{begun + 1} of {len(todo)}: {', '.join(todo[begun])}")
                    else:
                        add_results(report, message)
                        first, begun = begun + 1, None
                        keep(report)
                ending = process.ending()
            if begun is not None:
                add_failure(report, *todo[begun], f"{ending}: {last_line(log)}")
                first = begun + 1
                keep(report)
            if report is None or (first == start and todo):
                raise NothingMeasured(f"{ending}: {last_line(log)}")
    return report


def add_results(report: Report, message: dict) -> None:
    """What a process sent of one part."""
    report.checks += [Check(**check) for check in message["checks"]]
    report.timings += [Timing(**timing) for timing in message["timings"]]
    report.predicted.update(message["predicted"])
    report.dealt = report.dealt or message["dealt"]


def last_line(log: Path) -> str:
    """The last words of the processes' output."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else f"{log.name} is empty"


class _Process:
    """One process, and the messages that come from it."""

    def __init__(self, command: Sequence[str], output: IO[str]):
        read, write = os.pipe()
        # the descriptor comes first, behind the module
        at = len(command) - 3
        words = [*command[:at], str(write), *command[at:]]
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(write,)
        )
        os.close(write)
        self._read = read
        self._late = 0.0

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_) -> None:
        os.close(self._read)
        if self._process.poll() is None:
            self._process.kill()
            # where the driver holds it, a new process may still get the device
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)

    def messages(self, seconds: float) -> Iterator[dict]:
        """Until the process ends or is silent for so long."""
        buffer = b""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while True:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    self._late = seconds
                    return
                data = os.read(self._read, 1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                    deadline = time.monotonic() + seconds

    def ending(self) -> str:
        """How it ended, once there are no more messages."""
        if self._late:
            return f"it did not end within {self._late:.0f} s"
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}"


def device_answers() -> bool:
    """Whether the GPU still computes; a sticky error of an earlier launch shows here."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        return float(torch.ones(2, device="cuda").sum()) == 2.0
    except Exception:  # whatever a driver raises
        return False


def main(descriptor: int, first: int, rows: int, kernels: str) -> int:
    """Measure the parts from `first` on; the exit code."""
    from vllm_numa_backend.bench.report import new_report
    from vllm_numa_backend.bench.report_parts import measure_part, parts

    todo = parts(rows=rows, kernels=kernels)

    def send(**message) -> None:
        os.write(descriptor, json.dumps(message).encode() + b"\n")

    send(parts=[(part.table, part.name) for part in todo], report=dataclasses.asdict(new_report()))
    for number in range(first, len(todo)):
        send(begin=number)
        results = Report({}, {}, False)
        measure_part(results, todo[number])
        found = dataclasses.asdict(results)
        send(**{name: found[name] for name in ("checks", "timings", "predicted", "dealt")})
        if not device_answers():
            return BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))

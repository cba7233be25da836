"""CPU time of a step's plan and of a layer's call, outside of graphs, on this GPU.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --requests 256 --kernel portable-decode

Both are timed while the GPU has work enough to be behind, so that nothing waits for it: medians of many calls. These
times matter in steps that run without a graph; in a graph there are none.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from numa_attention import runner  # noqa: E402
from numa_attention.schedule import Planner, Schedule  # noqa: E402
from numa_attention.terminal import output_errors_in_one_sentence, print_table, table  # noqa: E402
from vllm_numa_backend.bench.cases import Case, make_tensors  # noqa: E402
from vllm_numa_backend.bench.rows import asked_for  # noqa: E402

CALLS = 150  # with all their kernels fewer than the driver queues
GOAL_US = {"plan of a step": 100, "first layer of a step": None, "call of a layer": 30}


def cpu_us(call: Callable[[], object]) -> float:
    """Median microseconds until `call` returns."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    # a second of work that the calls queue behind
    torch.cuda._sleep(int(1.5e9))
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests of the step.")] = 256,
    length: Annotated[int, typer.Option(min=1, help="Cached tokens of each.")] = 512,
    kernel: Annotated[str | None, typer.Option(help="hopper-decode or portable-decode: that kernel.")] = None,
) -> None:
    """Measure the CPU time of planning and launching decode and prefill."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU here")
    shown = table("what", "phase", "us", "goal", title=f"CPU time, {requests} requests of {length} tokens")
    for phase, query_len in (("decode", 1), ("prefill", 16)):
        case = Case(requests, length, 32, 8, 16, query_len)
        tensors = make_tensors(case)
        planner = Planner(
            case.shape, "cuda", max_requests=requests, max_tokens=len(tensors.out), max_decode_query=1,
            **(asked_for(case, kernel) if phase == "decode" else {}),
        )  # fmt: skip
        step = dataclasses.replace(tensors.step)
        schedule = planner.plan(step)
        kv = tensors.kv[0]
        keys, values = kv[:, 0], kv[:, 1]

        def attend(schedule: Schedule, q=tensors.q[0], keys=keys, values=values, out=tensors.out) -> None:
            runner.attend(q, keys, values, out, schedule, scale=0.1)

        for what, call in (
            ("plan of a step", lambda planner=planner, step=step: planner.plan(step)),
            # what the other layers share is prepared for the first one
            (
                "first layer of a step",
                lambda attend=attend, schedule=schedule: attend(dataclasses.replace(schedule)),
            ),
            ("call of a layer", lambda attend=attend, schedule=schedule: attend(schedule)),
        ):
            shown.add_row(what, phase, f"{cpu_us(call):.1f}", str(GOAL_US[what] or ""))
    print_table(Console(highlight=False), shown)


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        typer.run(main)

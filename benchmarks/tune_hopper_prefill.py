"""Which tiles and forms of the sm_90 prefill kernel are fastest on this GPU, beside FlashAttention-3.

    python benchmarks/tune_hopper_prefill.py --seconds 240
    python benchmarks/tune_hopper_prefill.py --kv-dtype fp8
    python benchmarks/tune_hopper_prefill.py --rows 0 --candidates "2x128x2 ahead turns copied persistent;2x128x3 ahead"

A candidate is consumers of a workgroup x KV tokens of a tile x buffers, and the words of its form
(prefill/hopper_variant.py). First all are checked at once on small odd steps, of which unused memory is NaN, against a
float64 reference; this compiles them too. Those that are right are then timed by graph replay, each in turns with
FlashAttention-3, so that both have the same clocks: compare the ratios. Each candidate has a process of its own, which
is stopped when it takes too long, so that one that hangs or fails costs no more. Figures are printed as they come.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from numa_attention import reference, runner  # noqa: E402
from numa_attention.jit import triton_release  # noqa: E402
from numa_attention.prefill import hopper_variant  # noqa: E402
from numa_attention.schedule import Planner  # noqa: E402
from numa_attention.shapes import LayerShape  # noqa: E402
from numa_attention.terminal import output_errors_in_one_sentence  # noqa: E402
from numa_attention.topology import detect  # noqa: E402
from numa_attention.variants import Variant, choose_prefill  # noqa: E402
from vllm_numa_backend.bench.cases import Case, make_tensors, prefill_cases  # noqa: E402
from vllm_numa_backend.bench.contestants import flash_attention_3, is_fp8, ours  # noqa: E402
from vllm_numa_backend.bench.timing import time_in_turns  # noqa: E402

CANDIDATES = (
    "2x128x2 ahead turns copied persistent",
    "2x128x3 ahead turns copied persistent",
    "2x128x2 ahead copied persistent",
    "2x128x2 turns copied persistent",
    "2x128x2 copied persistent",
    "2x128x3 ahead copied persistent",
    "2x64x4 ahead turns copied persistent",
    "2x128x2 ahead turns copied",
    "2x128x2 ahead turns persistent",
    "2x128x2 ahead turns copied persistent roomy",
    "2x128x2 ahead turns copied persistent staged",
    "3x64x3 ahead turns copied persistent",
)
# with releases of Triton that have clusters on sm_90
CLUSTER_CANDIDATES = (
    "2x128x3 ahead copied persistent cluster",
    "2x128x2 ahead copied persistent cluster",
    "2x128x3 ahead copied cluster",
)
FLOAT8_CANDIDATES = (
    "2x128x3 ahead copied persistent",
    "2x128x3 copied persistent",
    "2x128x2 ahead copied persistent",
    "2x128x3 ahead turns copied persistent",
    "2x128x3 ahead copied persistent rounded-queries",
    "2x64x3 ahead copied persistent",
)
# the first one leaves what others are compared with: over a float8 cache that which does not round queries to float8
PEERS = {"auto": ("FA3", "portable-prefill"), "fp8": ("portable-prefill", "FA3")}
CHECK_SECONDS = 100
TIME_SECONDS = 60
PASS_MARK = 1e-2  # ||out - reference|| / ||reference||, of bfloat16
ROUNDED_MARK = 4e-2  # where queries are e4m3: 2.6e-2 by rounding (computed)
FLOAT8_PEER_MARK = 1e-1  # FA3's, whose queries have one scale for all
SAMPLE = 61  # rows of the output of which one is compared


def mark_of(text: str, case: Case) -> float:
    """The pass mark of a contestant."""
    if text == "FA3" and is_fp8(case):
        return FLOAT8_PEER_MARK
    return ROUNDED_MARK if "rounded" in text else PASS_MARK


def candidate_of(text: str, shape: LayerShape) -> Variant:
    """The variant that a candidate's name stands for."""
    sizes, _, form = text.partition(" ")
    consumers, block_n, stages = map(int, sizes.split("x"))
    chosen = choose_prefill(shape, detect("cuda"), "triton", kernel=hopper_variant.NAME)
    rows = consumers * hopper_variant.ROWS * hopper_variant.ctas_of(form)
    return dataclasses.replace(chosen, form=form, block_m=rows, block_n=block_n, num_stages=stages)


def fits(text: str, shape: LayerShape) -> bool:
    """Whether a candidate's buffers fit into shared memory."""
    sizes, _, form = text.partition(" ")
    return (
        hopper_variant.shared_bytes(shape, *map(int, sizes.split("x")), form) <= hopper_variant.SHARED_BYTES
    )


# ---- one process of a candidate ----


def check(text: str, cases: list[Case]) -> None:
    """Small odd steps with the heads and pages of the rows, and one that has everything; prints what is right."""
    from tests.hopper_prefill_cases import check_prefill, windowed_case
    from tests.kernel_step import shape_of, step_of
    from tests.support import assert_close, make_paged_case

    for row in cases:
        case = make_paged_case(
            [200, 1, 77], [777, 300, 77], q_heads=row.q_heads, kv_heads=row.kv_heads, head_dim=row.head_dim,
            page_size=row.page_size, dtype=row.dtype, kv_dtype=row.kv_dtype, device="cuda",
        )  # fmt: skip
        shape = shape_of(case)
        planner = Planner(
            shape, "cuda", max_requests=8, max_tokens=512, prefill_variant=candidate_of(text, shape)
        )
        out = case.poisoned_output()
        scale = row.head_dim**-0.5
        schedule = planner.plan(step_of(case, 0))
        expected = reference.attention(*case.arguments(), scale=scale)[0]
        for _ in range(20):  # a race shows in some of many
            out.fill_(math.nan)
            runner.attend(case.q, case.k_pages, case.v_pages, out, schedule, scale=scale)
            assert_close(out, expected, mark_of(text, row))
        print(f"right: {row.name}", flush=True)
    variant = candidate_of(text, cases[0].shape)
    options = dict(
        device="cuda",
        block_n=variant.block_n,
        stages=variant.num_stages,
        consumers=int(text.partition("x")[0]),
    )
    sinks = torch.randn(14, device="cuda")
    row = cases[0]
    case = windowed_case(
        [170, 1, 700], [400, 500, 700], 300, q_heads=14, kv_heads=2, head_dim=row.head_dim, kv_dtype=row.kv_dtype,
        device="cuda",
    )  # fmt: skip
    check_prefill(case, variant.form, window=300, sinks=sinks, mark=mark_of(text, row), **options)
    print("right: a window, sinks, a group of 7, LSE", flush=True)


def measure(text: str, cases: dict[int, Case], folder: Path) -> None:
    """Time one contestant; the first that runs leaves a sample of its output for the others in `folder`."""
    for number, case in cases.items():
        try:
            tensors = make_tensors(case)
            call = contestant(text, case, tensors)
            tensors.out.fill_(math.nan)
            runner.ran.clear()
            call(0)
            torch.cuda.synchronize()
            sample, path = tensors.out[::SAMPLE].float(), folder / f"{number}.pt"
            if not path.exists():
                torch.save(sample, path)
            expected = torch.load(path, map_location="cuda")
            error = float((sample - expected).norm() / expected.norm())
            right = error <= mark_of(text, case) and set(runner.ran) <= {
                "portable-prefill",
                hopper_variant.NAME,
            }
            if text not in ("FA3", "portable-prefill"):
                right &= set(runner.ran) == {hopper_variant.NAME}
            seconds, peer = time_in_turns([call, flash_attention_3(tensors)], 1)
            print(
                json.dumps(
                    dict(
                        row=number, ms=seconds * 1e3, tflops=case.flops / seconds / 1e12, ratio=peer / seconds,
                        error=error, right=right,
                    )
                ),
                flush=True,
            )  # fmt: skip
            del tensors, call
            torch.cuda.empty_cache()
        except Exception as error:  # the other rows are still worth their time
            print(
                json.dumps(dict(row=number, failed=f"{type(error).__name__} {str(error)[:300]}")), flush=True
            )


def contestant(text: str, case: Case, tensors) -> Callable[[int], None]:
    if text == "FA3":
        return flash_attention_3(tensors)
    if text == "portable-prefill":
        variant = choose_prefill(case.shape, detect("cuda"), "triton", kernel=text)
        return ours(tensors, prefill_variant=variant)[0]
    return ours(tensors, prefill_variant=candidate_of(text, case.shape))[0]


# ---- all of them ----


def start(mode: str, text: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, mode, text, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # the reference's products are small
    )  # fmt: skip


def finish(process: subprocess.Popen, seconds: float) -> tuple[str, str, str]:
    """(what became of it, its output, the end of its errors)."""
    try:
        out, errors = process.communicate(timeout=max(seconds, 1))
        became = "done" if process.returncode == 0 else "FAILED"
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        became = f"STOPPED after {seconds:.0f} s"
    return became, out, errors[-1500:]


def main(
    rows: Annotated[str, typer.Option(help="Rows of the table of shapes, such as 0,2; all by default.")] = "",
    candidates: Annotated[
        str, typer.Option(help="Candidates, by semicolons; those of the file by default.")
    ] = "",
    kv_dtype: Annotated[str, typer.Option(help="Of the cache: auto, as the queries, or fp8.")] = "auto",
    head_dim: Annotated[int, typer.Option(help="Of keys and values: 64, 128 or 256.")] = 128,
    seconds: Annotated[int, typer.Option(help="Time for all of it.")] = 240,
    skip_check: Annotated[bool, typer.Option(help="Time without checking first.")] = False,
) -> None:
    """Check and time candidates of the sm_90 prefill kernel."""
    deadline = time.time() + seconds
    cases = chosen_cases(rows, head_dim, kv_dtype)
    default = FLOAT8_CANDIDATES if kv_dtype == "fp8" else CANDIDATES
    if kv_dtype != "fp8" and triton_release() >= hopper_variant.OLDEST_TRITON_WITH_CLUSTERS:
        default += CLUSTER_CANDIDATES
    names = [name.strip() for name in candidates.split(";")] if candidates else list(default)
    for name in [name for name in names if not fits(name, next(iter(cases.values())).shape)]:
        print(f"{name}: too large for shared memory", flush=True)
        names.remove(name)
    where = json.dumps([rows, head_dim, kv_dtype])
    if not skip_check:
        started = time.time()
        running = {name: start("--check", name, where) for name in names}
        for name, process in running.items():
            left = min(started + CHECK_SECONDS, deadline) - time.time()
            became, out, errors = finish(process, left)
            verdict = "right" if became == "done" else f"{became}\n{out}{errors}"
            print(f"{name}: {verdict}, {time.time() - started:.0f} s", flush=True)
            if became != "done":
                names.remove(name)
    results: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*PEERS[kv_dtype], *names):
            if time.time() > deadline:
                print(f"{name}: not timed, the time is used up", flush=True)
                continue
            became, out, errors = finish(
                start("--measure", name, where, folder), min(TIME_SECONDS, deadline + 15 - time.time())
            )
            for line in (json.loads(text) for text in out.splitlines() if text.startswith("{")):
                case = cases[line["row"]]
                if "failed" in line:
                    print(f"{name} | {case.name}: FAILED {line['failed']}", flush=True)
                    continue
                results.setdefault(name, {})[line["row"]] = line["ratio"] if line["right"] else math.nan
                print(
                    f"{name} | {case.name}: {line['tflops']:.0f} TFLOP/s, {line['ms']:.3f} ms, "
                    f"{line['ratio']:.2f} x FA3, "
                    f"error {line['error']:.1e}{'' if line['right'] else ' WRONG'}",
                    flush=True,
                )
            if became != "done":
                print(f"{name}: {became}\n{errors}", flush=True)
    print("\nx FA3 by row: " + "; ".join(case.name for case in cases.values()))
    for name, row in sorted(results.items(), key=lambda item: -sum(filter(math.isfinite, item[1].values()))):
        print(" ".join(f"{row.get(number, math.nan):5.2f}" for number in cases), name)


def chosen_cases(rows: str, head_dim: int, kv_dtype: str) -> dict[int, Case]:
    """The rows asked for, by their number. Raises BadParameter for an unknown kv_dtype."""
    if kv_dtype not in PEERS:
        raise typer.BadParameter(f"--kv-dtype {kv_dtype} is unknown: give auto or fp8.")
    element = torch.float8_e4m3fn if kv_dtype == "fp8" else torch.bfloat16
    cases = [dataclasses.replace(case, head_dim=head_dim) for case in prefill_cases(element)]
    return {number: cases[number] for number in (map(int, rows.split(",")) if rows else range(len(cases)))}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2], list(chosen_cases(*json.loads(sys.argv[3])).values()))
    elif sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], chosen_cases(*json.loads(sys.argv[3])), Path(sys.argv[4]))
    else:
        with output_errors_in_one_sentence():
            typer.run(main)

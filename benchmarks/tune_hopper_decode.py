"""Which tiles, forms and ring depths of the sm_90 decode kernel are fastest on this GPU, beside FlashAttention-3.

    python benchmarks/tune_hopper_decode.py --seconds 240
    python benchmarks/tune_hopper_decode.py --kv-dtype fp8 --rows 0,6 --forms two-stage,four-stage

Small odd steps are checked against a float64 reference first, each form in a process of its own that is stopped after a
minute, so that a kernel that hangs costs no more. Then every candidate is timed by graph replay, each figure printed as
it comes, until the time is used up. Candidates: rows of the packed query tile x form x workgroups an SM; the ring takes
the shared memory that is left.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from numa_attention import runner  # noqa: E402
from numa_attention.decode import hopper_variant  # noqa: E402
from numa_attention.terminal import output_errors_in_one_sentence  # noqa: E402
from numa_attention.topology import detect  # noqa: E402
from numa_attention.variants import Variant, choose_decode  # noqa: E402
from vllm_numa_backend.bench.cases import Case, decode_cases, make_tensors  # noqa: E402
from vllm_numa_backend.bench.contestants import flash_attention_3, ours  # noqa: E402
from vllm_numa_backend.bench.rows import AGREEMENT  # noqa: E402
from vllm_numa_backend.bench.timing import time_calls  # noqa: E402

CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CHECK_SECONDS = 90


def candidate(case: Case, rows: int, form: str, per_unit: int) -> Variant | None:
    """One variant for a case; None where the shared memory holds too little of it."""
    topology = detect("cuda")
    stages = 1 if form == "single" else hopper_variant.stages_of(case.shape, rows, per_unit)
    if stages < (1 if form == "single" else 2):
        return None
    chosen = choose_decode(case.shape, topology, "triton", case.query_len, kernel="hopper-decode")
    return dataclasses.replace(
        chosen, block_m=rows, form=form, num_stages=stages, workgroups=topology.compute_units * per_unit
    )


def check(form: str) -> None:
    """Small steps of every kind against the reference: raises AssertionError."""
    from tests.hopper_decode_cases import check_all

    check_all(form, "cuda")


def checked(form: str) -> bool:
    """Whether a form is right, found out in a process of its own."""
    started = time.time()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--check", form],
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # the reference's products are small
        )
    except subprocess.TimeoutExpired as expired:
        print(
            f"{form}: HANGS or compiles for more than {CHECK_SECONDS} s\n{expired.stdout or ''}", flush=True
        )
        return False
    verdict = "right" if done.returncode == 0 else "WRONG"
    print(f"{form}: {verdict}, {time.time() - started:.0f} s\n{done.stdout}{done.stderr[-1500:]}", flush=True)
    return done.returncode == 0


def tune(case: Case, forms: list[str], workgroups: list[int], deadline: float) -> None:
    """Time all candidates of one case and FlashAttention-3."""
    tensors = make_tensors(case)
    copies = len(tensors.kv)
    peer = flash_attention_3(tensors)
    peer(0)
    expected = tensors.out.float()
    fa3 = time_calls(peer, copies)
    print(f"{case.name} FA3 {fa3 * 1e6:.1f} us {case.kv_bytes / fa3 / 1e12:.2f} TB/s", flush=True)
    needed = case.q_heads // case.kv_heads * case.query_len
    for rows in (8, 16, 32, 64):
        if rows < min(needed, 64) or rows > max(16, 2 * needed):
            continue
        for per_unit in workgroups:
            for form in forms:
                variant = candidate(case, rows, form, per_unit)
                if variant is None or time.time() > deadline:
                    continue
                name = f"{case.name} rows {rows} {form} x{per_unit} stages {variant.num_stages}"
                try:
                    call, _ = ours(tensors, decode_variant=variant)
                    tensors.out.fill_(math.nan)
                    runner.ran.clear()
                    call(0)
                    error = float((tensors.out.float() - expected).norm() / expected.norm())
                    ran = dict(runner.ran)
                    right = error <= AGREEMENT[case.kv_dtype.itemsize == 1] and set(runner.ran) == {
                        variant.name
                    }
                    seconds = time_calls(call, copies)
                    print(
                        f"{name}: {seconds * 1e6:.1f} us {case.kv_bytes / seconds / 1e12:.2f} TB/s "
                        f"x{fa3 / seconds:.2f} error {error:.1e}{'' if right else f' WRONG, ran {ran}'}",
                        flush=True,
                    )
                except Exception as error:  # the other candidates are still worth their time
                    print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)
    del tensors
    torch.cuda.empty_cache()


def main(
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp8 or both.")] = "both",
    rows: Annotated[str, typer.Option(help="Rows of the table of shapes, such as 0,6; all by default.")] = "",
    forms: Annotated[str, typer.Option(help="Forms to try.")] = "two-stage,four-stage",
    workgroups: Annotated[str, typer.Option(help="Workgroups an SM to try.")] = "2,1",
    query_len: Annotated[int, typer.Option(min=1, max=8, help="New tokens a request.")] = 1,
    seconds: Annotated[int, typer.Option(help="Time for all of it.")] = 240,
    skip_check: Annotated[bool, typer.Option(help="Time without checking the forms first.")] = False,
) -> None:
    """Time candidates of the sm_90 decode kernel."""
    deadline = time.time() + seconds
    chosen = [form for form in forms.split(",") if skip_check or checked(form)]
    if not chosen:
        raise SystemExit("no form is right")
    for name in CACHES if kv_dtype == "both" else [kv_dtype]:
        cases = decode_cases(CACHES[name], query_len)
        for index in map(int, rows.split(",")) if rows else range(len(cases)):
            if time.time() < deadline:
                print(f"-- {name}", flush=True)
                tune(cases[index], chosen, list(map(int, workgroups.split(","))), deadline)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2])
    else:
        with output_errors_in_one_sentence():
            typer.run(main)

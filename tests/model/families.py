"""Tiny models of several families with random weights: between them every option of an attention layer.

Weights are so large that a token depends on the whole sequence before it. Hugging Face's own implementation of a
family gives log-probabilities to compare with, and those of a model that differs in one detail of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    PretrainedConfig,
    Qwen2Config,
)

VOCABULARY, POSITIONS, WINDOW = 160, 256, 24
ALTERNATING = ["sliding_attention", "full_attention"]
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One tiny model. heads: "query/KV heads of head_dim", as the plugin's log names a layer.

    windows: every layer's window as the log names it. flaws: names of `flawed` that this family must notice.
    """

    config: PretrainedConfig
    heads: str
    windows: tuple[str, ...]
    flaws: tuple[str, ...] = field(default=())


FAMILIES = {
    "qwen2": Family(
        Qwen2Config(
            hidden_size=448,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **COMMON,
        ),
        heads="14/2 heads of 32",
        windows=("",),
        flaws=("no-qkv-bias",),
    ),
    "gemma2": Family(
        Gemma2Config(
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=None,
            **COMMON,
        ),
        heads="4/2 heads of 256",
        windows=(f", window {WINDOW - 1}", ""),
        flaws=("window-one-longer", "window-one-shorter", "no-soft-cap"),
    ),
    "gpt-oss": Family(
        GptOssConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": POSITIONS // 4,
            },
            tie_word_embeddings=False,
            **COMMON,
        ),
        heads="8/2 heads of 64",
        windows=(f", window {WINDOW - 1}", ""),
        flaws=("window-one-longer", "window-one-shorter", "no-sinks"),
    ),
    "bloom": Family(
        BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            n_layer=2,
            n_head=6,  # not a power of two, which Bloom's slopes treat apart
            seq_length=POSITIONS,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        heads="6/6 heads of 32",
        windows=("",),
        flaws=("half-slopes",),
    ),
}


def write_family(family: Family, folder: Path) -> None:
    """The model's folder: float32 weights, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)  # with test_families' prompts no two choices lie closer than 0.004
        model = AutoModelForCausalLM.from_config(family.config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, family.config.model_type)
    model.save_pretrained(folder)


def _fill(name: str, parameter: torch.Tensor, model_type: str) -> None:
    mean, deviation = 1.0, 0.0  # norms
    if name.endswith("sinks"):
        mean, deviation = 2.0, 1.0  # as much as the strongest of some keys
    elif name.endswith("bias"):
        # a norm's would drown what tells tokens apart
        mean, deviation = 0.0, 0.0 if "norm" in name or "ln_f" in name else 0.5
    elif parameter.dim() > 1:
        # experts are stored [experts, input, output], everything else [output, input]
        inputs = parameter.shape[-2] if "experts" in name else parameter.shape[-1]
        mean, deviation = 0.0, 2 * inputs**-0.5
    # where the embedding is the output layer too, a large one makes every token its own successor
    if model_type == "gemma2" and name == "model.embed_tokens.weight":
        deviation /= 10
    if model_type == "gemma2" and name == "model.norm.weight":
        mean = 9.0  # for a small embedding's logits to lie apart; Gemma adds one
    elif model_type == "gemma2" and name.endswith("norm.weight"):
        mean = 0.0
    if model_type == "bloom" and name.endswith("word_embeddings_layernorm.weight"):
        mean = 0.1
    parameter.normal_(mean, deviation) if deviation else parameter.fill_(mean)


class Reference:
    """A family in Hugging Face's own implementation, in float32; reads whole sequences, without a cache."""

    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **overrides
        ).eval()
        for module in self.model.modules():
            if hasattr(module, "gelu_impl"):
                module.gelu_impl = torch.nn.GELU()  # as vLLM has it; Hugging Face's Bloom approximates it

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]"""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    def scores(self, prompts: list[list[int]]) -> torch.Tensor:
        """The log-probability of each prompt token but the first, all prompts in a row, float32 [tokens]."""
        rows = [
            self.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None])[:, 0]
            for prompt in prompts
        ]
        return torch.cat(rows)

    def choices(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
        """What greedy choice continues each prompt with, given the answer so far."""
        return [
            self.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


@contextmanager
def flawed(folder: Path, flaw: str) -> Iterator[Reference]:
    """The model with one detail of its attention wrong."""
    overrides = {
        "window-one-longer": {"sliding_window": WINDOW + 1},
        "window-one-shorter": {"sliding_window": WINDOW - 1},
        "no-soft-cap": {"attn_logit_softcapping": None},
    }
    reference = Reference(folder, **overrides.get(flaw, {}))
    if flaw in overrides:
        yield reference
    elif flaw == "half-slopes":
        from transformers.models.bloom import modeling_bloom

        slopes = modeling_bloom.build_alibi_tensor
        with mock.patch.object(modeling_bloom, "build_alibi_tensor", lambda *args: slopes(*args) / 2):
            yield reference
    else:
        ending, value = {"no-sinks": ("sinks", -1e9), "no-qkv-bias": ("_proj.bias", 0.0)}[flaw]
        for name, parameter in reference.model.named_parameters():
            if name.endswith(ending):
                parameter.data.fill_(value)
        yield reference

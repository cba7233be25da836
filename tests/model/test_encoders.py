"""Tiny encoders served through NUMA_SWIZZLE: the embeddings of Hugging Face.

bert: full attention. modernbert: rotary positions, a window to both sides on every other layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModel, BertConfig, ModernBertConfig, PreTrainedTokenizerFast

from .engine import Job, Outcome, run_engines

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on vLLM's CPU platform")

VOCABULARY, REACH = 120, 10  # tokens to both sides that a window shows
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS = {
    "bert": BertConfig(**COMMON),
    "modernbert": ModernBertConfig(
        **COMMON, local_attention=2 * REACH, global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    ),
}  # fmt: skip
# the last two differ in their last token only, which the first one, whose state is the embedding, sees all the same
PROMPTS = [[1 + (7 * i + i * i) % (VOCABULARY - 1) for i in range(n)] for n in (1, 17, 63, 150, 90)]
PROMPTS.append([*PROMPTS[-1][:-1], 2])
OPTIONS = {
    "runner": "pooling",
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
}
TOLERANCE = 2e-5  # of an embedding's numbers, whose squares add up to 1


@dataclass
class Embeddings:
    """An encoder's folder, and what vLLM makes of the prompts."""

    folder: Path
    ours: Outcome


def write_encoder(config, folder: Path) -> None:
    """Weights so large that each token's state depends on the others."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = AutoModel.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    # prompts are token ids, but vLLM starts no pooling model without a tokenizer
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(folder)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory) -> dict[str, Embeddings]:
    """By encoder; all engines in one process."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in folders.items():
        write_encoder(CONFIGS[name], folder)
    outcomes = iter(
        run_engines(
            [
                Job(str(folder), "NUMA_SWIZZLE", PROMPTS, embed=True, options=OPTIONS)
                for folder in folders.values()
            ]
        )
    )
    return {name: Embeddings(folder, next(outcomes)) for name, folder in folders.items()}


@torch.no_grad()
def hugging_face(folder: Path, **overrides) -> torch.Tensor:
    """The first token's last state of each prompt, made as long as 1."""
    model = AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **overrides
    ).eval()
    states = [model(torch.tensor([prompt])).last_hidden_state[0, 0] for prompt in PROMPTS]
    return torch.nn.functional.normalize(torch.stack(states), dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_equal_those_of_hugging_face(embeddings, name):
    assert embeddings[name].ours.ran.keys() == {"torch-prefill"}
    difference = torch.tensor(embeddings[name].ours.embeddings) - hugging_face(embeddings[name].folder)
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_token_sees_the_last_one(embeddings, name):
    one, other = torch.tensor(embeddings[name].ours.embeddings)[-2:]
    assert (one - other).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("reach", [REACH - 1, REACH + 1])
def test_a_window_of_another_width_would_show(embeddings, reach):
    other = hugging_face(embeddings["modernbert"].folder, local_attention=2 * reach)
    assert (torch.tensor(embeddings["modernbert"].ours.embeddings) - other).abs().max() > 100 * TOLERANCE

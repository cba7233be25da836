"""Launching the portable kernels: what is compiled once is launched again, and never for a call it does not fit."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

from numa_attention import portable_launch
from numa_attention.decode import cdna5, cdna5_variant
from numa_attention.decode import portable as decode
from numa_attention.prefill import portable as prefill
from numa_attention.shapes import LayerShape
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode

SHAPE = LayerShape(8, 2, 64, 64, torch.float32, torch.float32, 16)
VARIANT = choose_decode(SHAPE, pretend("gfx942"), "triton", 1)


class Recorder:
    """A kernel that compiles nothing and remembers what it would have compiled and launched."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def first(*arguments, **constants):
            self.compiled.append(constants)
            self.launched.append(arguments)
            return SimpleKernel(self)

        return first


class SimpleKernel:
    def __init__(self, recorder):
        self.recorder = recorder

    def __getitem__(self, grid):
        return lambda *arguments: self.recorder.launched.append(arguments)


def empty(*size, **options):
    return torch.empty(size, **options)


def call(launch, variant=VARIANT, shape=SHAPE, causal=True, **changes):
    arguments = {
        "q": empty(3, 8, 64),
        "k_pages": empty(4, 16, 2, 64),
        "v_pages": empty(4, 16, 2, 64),
        "out": empty(3, 8, 64),
        "scale": 0.125,
    }
    batch = SimpleNamespace(
        block_table=empty(3, 4, dtype=torch.int32),
        query_start_loc=empty(4, dtype=torch.int32),
        seq_lens=empty(3, dtype=torch.int32),
        causal=causal,
    )
    schedule = SimpleNamespace(shape=shape, batch=batch)
    launch(7, (), variant, schedule=schedule, **{**arguments, **changes})


def misaligned(*size):
    elements = torch.Size(size).numel()
    return torch.empty(elements + 1)[1:].view(size)


CHANGES = {
    "variant": {"variant": dataclasses.replace(VARIANT, num_warps=8)},
    "window": {"shape": dataclasses.replace(SHAPE, window=3)},
    "not causal": {"causal": False},
    "causal by request": {"causal": empty(3, dtype=torch.int32)},
    "spans": {"spans": empty(3, 2, 2, dtype=torch.int32)},
    "float8 queries": {"q": empty(3, 8, 64).to(torch.float8_e5m2), "q_scale": empty(1)},
    "float8 output": {"out": empty(3, 8, 64).to(torch.float8_e5m2), "out_scale": empty(1)},
    "square roots": {"alibi_slopes": empty(8), "alibi_sqrt": True},
    "without pages": {
        "k_pages": empty(40, 2, 64),
        "v_pages": empty(40, 2, 64),
        "shape": dataclasses.replace(SHAPE, page_size=0),
    },
    "query stride": {"q": empty(3, 16, 64)[:, :8]},
    "page stride": {"k_pages": empty(4, 2, 16, 2, 64)[:, 0]},
    "query alignment": {"q": misaligned(3, 8, 64)},
    "page alignment": {"v_pages": misaligned(4, 16, 2, 64)},
    "output dtype": {"out": empty(3, 8, 64, dtype=torch.bfloat16)},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": empty(8)},
    "half sinks": {"sinks": empty(8, dtype=torch.float16)},
    "alibi": {"alibi_slopes": empty(8)},
    "scales": {"k_scale": empty(1), "v_scale": empty(1)},
    "lse": {"lse": empty(3, 8)},
    "transposed lse": {"lse": empty(8, 3).T},
}


def test_equal_calls_compile_once():
    kernel = Recorder()
    launch = portable_launch.LayerLauncher(kernel)
    for _ in range(3):
        call(launch)
    call(launch, scale=0.5, q=empty(5, 8, 64), out=empty(5, 8, 64))
    assert len(kernel.compiled) == 1 and len(kernel.launched) == 4
    names = [name for name in kernel.compiled[0] if name not in ("num_warps", "num_stages")]
    again, first = kernel.launched[1], kernel.launched[0]
    assert list(again[len(first) :]) == [kernel.compiled[0][name] for name in names]


@pytest.mark.parametrize("change", CHANGES)
def test_calls_that_differ_compile_again(change):
    kernel = Recorder()
    launch = portable_launch.LayerLauncher(kernel)
    call(launch)
    call(launch, **CHANGES[change])
    assert len(kernel.compiled) == 2
    call(launch)
    call(launch, **CHANGES[change])
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize(
    ("kernel", "own", "own_constants"),
    [
        (
            decode.decode_kernel,
            ["ranges", "items", "arrivals", "partial_acc", "partial_ml", "queues"],
            decode.constants,
        ),
        (prefill.prefill_kernel, ["tiles", "first_request", "queues"], prefill.constants),
        (
            cdna5.decode_kernel,
            ["ranges", "items", "arrivals", "partial_acc", "partial_ml"],
            lambda shape, variant: cdna5.constants(
                shape, dataclasses.replace(variant, form="single"), cdna5_variant.Rows()
            ),
        ),
    ],
)
def test_constants_are_handed_over_in_the_order_in_which_kernels_declare_them(kernel, own, own_constants):
    names = list(inspect.signature(kernel.fn).parameters)
    flags = [
        name
        for name, p in inspect.signature(portable_launch.constants).parameters.items()
        if p.kind == p.KEYWORD_ONLY
    ]
    constants = portable_launch.constants(SHAPE, VARIANT, **dict.fromkeys(flags, 0)) | own_constants(
        SHAPE, VARIANT
    )
    assert names[: len(own)] == own
    assert names[-len(constants) :] == list(constants)

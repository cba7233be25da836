"""Launches over a driver that runs nothing: what Triton hands to the driver, and what direct launches hand to it.

Prints a JSON object for each kernel. Its argument is a folder for the stub of the driver.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

FOLDER = Path(sys.argv[1])
subprocess.run(
    [
        os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", FOLDER / "libcuda.so.1",
        Path(__file__).with_name("driver_stub.c"),
    ],
    check=True,
)  # fmt: skip
(FOLDER / "libcuda.so").symlink_to("libcuda.so.1")
os.environ["TRITON_LIBCUDA_PATH"] = str(FOLDER)
stub = ctypes.CDLL(str(FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import triton  # noqa: E402

torch._C._cuda_getCurrentRawStream = lambda device: 0
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
with mock.patch.object(torch.cuda, "is_available", lambda: True):
    triton.runtime.driver.active.get_current_target()

from numa_attention import mapping_device, runner, schedule  # noqa: E402
from numa_attention.decode import hopper_launch as hopper_decode  # noqa: E402
from numa_attention.decode import portable as portable_decode  # noqa: E402
from numa_attention.decode import work_list_device  # noqa: E402
from numa_attention.prefill import hopper_launch as hopper_prefill  # noqa: E402
from numa_attention.prefill import portable as portable_prefill  # noqa: E402
from numa_attention.prefill import tile_list  # noqa: E402
from numa_attention.shapes import LayerShape  # noqa: E402
from numa_attention.topology import pretend  # noqa: E402
from numa_attention.variants import choose_decode, choose_prefill  # noqa: E402

schedule.resolve = lambda kernels, device: "triton"  # tensors on the CPU stand for tensors on a GPU
LAUNCHERS = {
    "hopper-decode": hopper_decode._launch,
    "portable-decode": portable_decode._launch._launch,
    "hopper-prefill": hopper_prefill._launch,
    "portable-prefill": portable_prefill._launch._launch,
    "work list": work_list_device._launch,
    "block prefix": tile_list._launch,
    "tiles": mapping_device._launch,
}
PARAMETERS: dict[int, dict[str, list[int]]] = {}  # by function, the bytes of each argument's parameters
SHAPE = LayerShape(8, 2, 64, 64, torch.bfloat16, torch.bfloat16, 64)
BYTES = {"i1": 1, "u1": 1, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}
MAP_BYTES = 128
REQUESTS, PAGES = 5, 3


def sizes_of(type_: str) -> list[int]:
    """The bytes of the parameters that an argument becomes."""
    if type_ == "constexpr":
        return []
    if type_.startswith("tensordesc"):
        rank = re.search(r"\[([^\]]*)\]", type_)[1].count(",") + 1
        return [MAP_BYTES, *[4] * rank, *[8] * rank]
    return [8 if type_.startswith("*") else BYTES[type_]]


def tell_sizes() -> None:
    """Tell the stub about the parameters of all kernels that are loaded."""
    for launcher in LAUNCHERS.values():
        for compiled, _ in launcher._compiled.values():
            sizes = {name: sizes_of(str(type_)) for name, type_ in compiled.src.signature.items()}
            PARAMETERS[compiled.function] = sizes
            function = ctypes.cast(compiled.function, ctypes.POINTER(ctypes.c_int))
            flat = sum(sizes.values(), [])
            for place, number in enumerate((len(flat), *flat)):
                function[place] = number


def counts() -> dict[str, int]:
    return {name: ctypes.c_int.in_dll(stub, name).value for name in ("launches", "encodings", "pointers")}


def handed_over(call: Callable[[], object]) -> dict[str, object]:
    """How often `call` calls the driver, and what its last launch hands over: the bytes of each argument."""
    before = counts()
    call()
    found = {name: number - before[name] for name, number in counts().items()}
    found["grid"] = list((ctypes.c_uint * 3).in_dll(stub, "grid"))
    parameters, begin = bytes((ctypes.c_ubyte * (1 << 14)).in_dll(stub, "handed_over")), 0
    arguments = found["arguments"] = {}
    for name, sizes in PARAMETERS[ctypes.c_void_p.in_dll(stub, "launched").value].items():
        arguments[name] = parameters[begin : begin + sum(sizes)].hex()
        begin += sum(sizes)
    return found


def forget() -> None:
    """Make every launcher launch by Triton, as the first time."""
    for launcher in LAUNCHERS.values():
        launcher._compiled.clear()


def step_of(query_len: int, length: int) -> schedule.StepBatch:
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * query_len
    decodes = REQUESTS if query_len == 1 else 0
    return schedule.StepBatch(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((REQUESTS,), length, dtype=torch.int32),
        block_table=torch.arange(REQUESTS * PAGES, dtype=torch.int32).view(REQUESTS, PAGES),
        num_decodes=decodes,
        num_decode_tokens=decodes * query_len,
        max_query_len=query_len,
        max_seq_len=length,
    )


def call_of(tokens: int) -> dict[str, torch.Tensor]:
    """A layer's tensors, nowhere else in memory than those of another call."""
    kv = torch.empty(REQUESTS * PAGES, 2, 64, 2, 64, dtype=SHAPE.dtype)
    return dict(
        q=torch.empty(tokens, 8, 64, dtype=SHAPE.dtype),
        k_pages=kv[:, 0],
        v_pages=kv[:, 1],
        out=torch.empty(tokens, 8, 64, dtype=SHAPE.dtype),
        sinks=torch.empty(8),
        alibi_slopes=torch.empty(8),
        k_scale=torch.empty(1),
        v_scale=torch.empty(1),
        lse=torch.empty(tokens, 8),
    )


def report(name: str) -> None:
    topology = pretend("sm_90")
    decoding = name.endswith("decode")
    choose, phase = (choose_decode, "decode") if decoding else (choose_prefill, "prefill")
    variant = choose(SHAPE, topology, "triton", *([1] if decoding else []), kernel=name)
    planner = schedule.Planner(
        SHAPE, "cpu", max_requests=8, max_tokens=256, topology=topology, **{f"{phase}_variant": variant}
    )
    step, other_step = (step_of(1 if decoding else 20 + n, 100 + n) for n in range(2))
    first, other = (call_of(int(step.query_start_loc[-1])) for _ in range(2))
    options = {"scale": 0.25, "soft_cap": 2.0}
    runner.ran.clear()
    planned = planner.plan(step)
    runner.attend(**first, schedule=planned, scale=0.5, soft_cap=3.0)
    tell_sizes()

    def hooked() -> list[str]:
        told: list[str] = []
        hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
        for hook in hooks:
            hook.add(lambda metadata: told.append(metadata.get()["name"]))
        runner.attend(**other, schedule=planned, **options)
        for hook in hooks:
            hook.calls.clear()
        return told

    found: dict[str, object] = {"name": name, "ran": dict(runner.ran), "hooked": hooked()}
    found["repeated"] = handed_over(lambda: runner.attend(**other, schedule=planned, **options))
    found["again"] = handed_over(
        lambda: runner.attend(**other, schedule=dataclasses.replace(planned), **options)
    )
    found["planned again"] = handed_over(lambda: planner.plan(other_step))
    forget()
    planner._lists.clear()
    planner._tile_lists.clear()
    found["by Triton"] = handed_over(
        lambda: runner.attend(**other, schedule=dataclasses.replace(planned), **options)
    )
    found["planned by Triton"] = handed_over(lambda: planner.plan(other_step))
    print(json.dumps(found), flush=True)


for name in [*LAUNCHERS][:4]:
    report(name)

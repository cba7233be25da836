"""What the launch code would compile for a device that is not there.

The real planner and the real dispatcher run on tensors without memory, over a stand-in for Triton's driver that names
the device and cannot launch. What Triton then compiles is, argument by argument, what it would compile on that device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from numa_attention import runner
from numa_attention.jit import Launcher, interpreting
from numa_attention.kv_cache import FLOAT8, write_pages
from numa_attention.schedule import Planner, PrefillSchedule, Schedule, StepBatch
from numa_attention.shapes import CONTIGUOUS, LayerShape
from numa_attention.topology import pretend
from numa_attention.variants import Variant, choose_decode, choose_prefill

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}
STEPS = ("decode", "prefill", "plan", "write")
REQUESTS = 256
TOKENS = 8192
CACHE_BYTES = 4 << 30  # more than AMD's buffer instructions reach, as in production


@dataclass(frozen=True)
class Call:
    """A layer's call, in what decides how it is compiled. The flags say what it has.

    side_by_side: the cache is [page, KV head, token, key and value], as vLLM 0.32 and later lay it out.
    portable: on sm_90, the portable kernels also where the dispatcher chooses others. clusters: see `schedule.Planner`.
    """

    shape: LayerShape
    sinks: bool = False
    soft_cap: bool = False
    alibi: bool = False
    alibi_sqrt: bool = False
    spans: bool = False
    causal_by_request: bool = False
    float8_query: bool = False
    float8_output: bool = False
    lse: bool = False
    max_decode_query: int = 1
    placement: str = "dispatch"
    side_by_side: bool = False
    portable: bool = False
    clusters: bool = False

    def kernel(self, phase: str) -> str | None:
        """What to ask the dispatcher for, None for its own choice."""
        return f"portable-{phase}" if self.portable else None

    @property
    def features(self) -> frozenset[str]:
        """What the dispatcher is told of the call."""
        used = {"sinks": self.sinks, "soft_cap": self.soft_cap, "alibi": self.alibi or self.alibi_sqrt}
        return frozenset(name for name, has in used.items() if has)


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. variant: None for kernels that have none."""

    kernel: str
    step: str
    variant: Variant | None
    result: CompiledKernel


class _Device:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, generation: str) -> None:
        self.generation = generation

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.generation]

    def get_current_device(self) -> str:
        # Triton keeps what it compiled by device
        return self.generation

    def get_current_stream(self, device) -> int:
        return 0


@contextmanager
def compiling_for(generation: str) -> Iterator[list[tuple[str, CompiledKernel]]]:
    """Inside, launching a kernel compiles it for `generation` and puts its name and itself on the list.

    Raises RuntimeError in a process whose kernels are interpreted.
    """
    if interpreting():
        raise RuntimeError(
            "kernels are interpreted in this process: unset TRITON_INTERPRET and NUMA_SWIZZLE_KERNELS."
        )
    captured: list[tuple[str, CompiledKernel]] = []
    run, launch = JITFunction.run, Launcher.__call__

    def compile_only(kernel, *arguments, grid, warmup, **options):
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        captured.append((kernel.fn.__name__, compiled))
        return compiled

    def launch_as_the_first_time(launcher, key, grid, arguments, constants, options=None):
        launcher._kernel[grid](*arguments, **constants, **(options or {}))

    active = triton.runtime.driver._active
    JITFunction.run, Launcher.__call__ = compile_only, launch_as_the_first_time
    triton.runtime.driver.set_active(_Device(generation))
    try:
        yield captured
    finally:
        JITFunction.run, Launcher.__call__ = run, launch
        # reset_active would look for a GPU
        triton.runtime.driver.set_active(active)


def compile_call(call: Call, generation: str, step: str, **tile: int | str) -> list[Compiled]:
    """Compile every kernel that one step of a layer's call launches.

    step: one of STEPS. tile: fields of the variant to be replaced, such as block_n or num_warps.
    """
    own = {}
    if call.portable:
        device = pretend(generation)
        own = dict(
            decode_variant=choose_decode(
                call.shape, device, "triton", call.max_decode_query, kernel=call.kernel("decode")
            ),
            prefill_variant=choose_prefill(
                call.shape, device, "triton", features=call.features, kernel=call.kernel("prefill")
            ),
        )
    planner = Planner(
        call.shape,
        "meta",
        max_requests=REQUESTS,
        max_tokens=TOKENS,
        max_decode_query=call.max_decode_query,
        kernels="triton",
        topology=pretend(generation),
        placement=call.placement,
        features=call.features,
        clusters=call.clusters,
        **own,
    )
    shape, variant, decode, prefill = call.shape, None, None, None
    batch = batch_of(num_decodes=REQUESTS if step == "decode" else 0 if step == "prefill" else 1)
    if step == "decode":
        # no launch lists the work of clusters, so that planning them compiles nothing
        chosen = planner.plan(batch).decode if call.clusters else planner.decode_buffers
        variant = replace(chosen.variant, **tile)
        decode = replace(chosen, variant=variant)
    elif step == "prefill":
        variant = replace(planner.prefill_variant, **tile)
        tiles, queues = _empty(TOKENS, 4, dtype=torch.int32), _empty(2, dtype=torch.int32)
        prefill = PrefillSchedule(variant, tiles, queues=queues, splits=planner.splits)
    with compiling_for(generation) as captured:
        if step == "plan":
            planner.plan(batch)
        elif step == "write":
            _write(call)
        else:
            causal = shape.page_size != CONTIGUOUS
            if call.causal_by_request:
                causal = _empty(REQUESTS, dtype=torch.int32)
            batch = replace(batch, causal=causal, has_spans=call.spans)
            attend_once(call, Schedule(batch, shape, "triton", decode=decode, prefill=prefill))
    return [Compiled(name, step, variant, result) for name, result in captured]


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def batch_of(num_decodes: int) -> StepBatch:
    """One query token for each decode, and for each other request 17 or 33."""
    query_lens = torch.ones(REQUESTS, dtype=torch.int32)
    query_lens[num_decodes::2], query_lens[num_decodes + 1 :: 2] = 17, 33
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0, dtype=torch.int32)])
    return StepBatch(
        query_start_loc=_empty(REQUESTS + 1, dtype=torch.int32),
        query_start_loc_cpu=starts,
        seq_lens=_empty(REQUESTS, dtype=torch.int32),
        block_table=_empty(REQUESTS, 8192, dtype=torch.int32),
        num_decodes=num_decodes,
        num_decode_tokens=num_decodes,
        max_query_len=int(query_lens.max()),
        max_seq_len=1 << 17,
    )


def _pages(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    shape = call.shape
    if shape.page_size == CONTIGUOUS:
        dims = shape.head_dim, shape.head_dim_v
        return tuple(_empty(TOKENS, shape.kv_heads, dim, dtype=shape.kv_dtype) for dim in dims)
    page_bytes = shape.page_size * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize
    pages = CACHE_BYTES // page_bytes
    if call.side_by_side:
        both = _empty(
            pages, shape.kv_heads, shape.page_size, shape.head_dim + shape.head_dim_v, dtype=shape.kv_dtype
        )
        both = both.transpose(1, 2)
        return both[..., : shape.head_dim], both[..., shape.head_dim :]
    rows = (pages, shape.page_size, shape.kv_heads)
    return tuple(_empty(*rows, dim, dtype=shape.kv_dtype) for dim in (shape.head_dim, shape.head_dim_v))


def _scales(shape: LayerShape, *more: str) -> dict[str, torch.Tensor]:
    names = (*more, *(("k_scale", "v_scale") if shape.kv_dtype in FLOAT8 else ()))
    return {name: _empty(1, dtype=torch.float32) for name in names}


def attend_once(call: Call, schedule: Schedule) -> None:
    shape = call.shape
    heads = shape.q_heads
    scales = [
        name for name, used in (("q_scale", call.float8_query), ("out_scale", call.float8_output)) if used
    ]
    runner.attend(
        _empty(TOKENS, heads, shape.head_dim, dtype=shape.kv_dtype if call.float8_query else shape.dtype),
        *_pages(call),
        _empty(TOKENS, heads, shape.head_dim_v, dtype=_output_dtype(call)),
        schedule,
        scale=shape.head_dim**-0.5,
        soft_cap=30.0 if call.soft_cap else 0.0,
        sinks=_empty(heads, dtype=shape.dtype) if call.sinks else None,
        alibi_slopes=_empty(heads, dtype=torch.float32) if call.alibi or call.alibi_sqrt else None,
        alibi_sqrt=call.alibi_sqrt,
        spans=_empty(REQUESTS, 4, 2, dtype=torch.int32) if call.spans else None,
        lse=_empty(heads, TOKENS, dtype=torch.float32).T if call.lse else None,
        **_scales(shape, *scales),
    )


def _output_dtype(call: Call) -> torch.dtype:
    if not call.shape.shard.is_whole:
        return torch.float32  # a part that is merged across ranks
    return call.shape.kv_dtype if call.float8_output else call.shape.dtype


def _write(call: Call) -> None:
    shape = call.shape
    key, value = (
        _empty(TOKENS, shape.kv_heads, dim, dtype=shape.dtype) for dim in (shape.head_dim, shape.head_dim_v)
    )
    slots = _empty(TOKENS, dtype=torch.int64)
    write_pages(key, value, *_pages(call), slots, **_scales(shape), kernels="triton")

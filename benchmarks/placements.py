"""The six placements of a KV cache over ranks and units inside a rank, as decode steps that run.

One request, one layer. The outer axis are the ranks (GPUs), the inner one what works inside a rank: split workgroups,
or slices of head_dim. Every rank ends with its own query heads. Cases 1, 2, 3 and 6 run the decode kernel; head_dim is
cut in plain torch, whose partial scores are written out and summed, as no kernel has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from numa_attention import across_devices, runner
from numa_attention.across_devices import Workspace
from numa_attention.machine.placement import Axis, Placement
from numa_attention.merge import merge_across_ranks
from numa_attention.ranks import Ranks
from numa_attention.schedule import Planner, StepBatch
from numa_attention.shapes import FLOAT8, LayerShape

INNER_UNITS = 8  # slices of head_dim inside a rank
PAGE_SIZE = 64


@dataclass(frozen=True)
class Layer:
    """One decode step of one request: `context` cached tokens, q_heads query heads over kv_heads KV heads."""

    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def check(self, world: int) -> None:
        """Raises ValueError where the step does not divide over `world` ranks."""
        if self.context % (world * PAGE_SIZE):
            raise ValueError(
                f"context is {self.context}: give a multiple of {world * PAGE_SIZE}, pages for each rank"
            )
        if self.q_heads % (world * self.kv_heads) or self.head_dim % (INNER_UNITS * world):
            raise ValueError(
                f"{self.q_heads} query heads over {self.kv_heads} KV heads of {self.head_dim} do not divide over "
                f"{world} ranks and {INNER_UNITS} slices"
            )


@dataclass(frozen=True)
class Data:
    """q [1, q_heads, head_dim] and pages [pages, 2, PAGE_SIZE, kv_heads, head_dim], the same on every rank."""

    layer: Layer
    q: torch.Tensor
    pages: torch.Tensor

    def expected(self) -> torch.Tensor:
        """The attention of all heads, float32 [q_heads, head_dim]."""
        keys, values = (self.tokens(which, slice(None)).float() for which in (0, 1))
        probabilities = (scores_of(self.q[0], keys).double() * self.layer.scale).softmax(-1).float()
        return weigh(probabilities, values)

    def tokens(self, which: int, columns: slice) -> torch.Tensor:
        """Keys (0) or values (1) in a row, [context, kv_heads, columns]."""
        return self.pages[:, which, ..., columns].flatten(0, 1)


def make_data(layer: Layer, device: torch.device) -> Data:
    generator = torch.Generator(device).manual_seed(0)
    pages = torch.empty(
        layer.context // PAGE_SIZE, 2, PAGE_SIZE, layer.kv_heads, layer.head_dim, dtype=layer.kv_dtype, device=device
    )  # fmt: skip
    # page ranges at a time: random numbers of a large cache would not fit beside it
    for part in pages.split(max(1, (64 << 20) // pages[0].numel())):
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    q = torch.randn(1, layer.q_heads, layer.head_dim, generator=generator, device=device)
    return Data(layer, q.to(layer.dtype), pages)


def scores_of(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Raw scores float32 [q_heads, tokens] of q [q_heads, D] and keys [tokens, kv_heads, D]."""
    grouped = q.unflatten(0, (keys.shape[1], -1)).to(keys.dtype)  # [kv_heads, group, D]
    return (grouped @ keys.permute(1, 2, 0)).float().flatten(0, 1)


def weigh(probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float32 [q_heads, D]: values [tokens, kv_heads, D] weighed by probabilities [q_heads, tokens]."""
    grouped = probabilities.unflatten(0, (values.shape[1], -1)).to(values.dtype)
    return (grouped @ values.permute(1, 0, 2)).float().flatten(0, 1)


@dataclass(frozen=True)
class Step:
    """A placement that runs: `call` leaves this rank's own heads in merged [1, own heads, head_dim].

    sent_bytes: that this rank sends in a call.
    """

    placement: Placement
    call: Callable[[], None]
    merged: torch.Tensor
    sent_bytes: int


def make_step(
    placement: Placement,
    data: Data,
    group: dist.ProcessGroup,
    workspace: Workspace | None,
    kernels: str = "auto",
    exchange: str = "ag_rs",
) -> Step | None:
    """A placement's decode step on this rank; None for slices of head_dim of a float8 cache, which torch cannot
    multiply with queries.

    workspace: merge across ranks in the kernel; None: by collectives, which `exchange` names (`merge.EXCHANGES`).
    kernels: as for a `Planner`.
    """
    layer, world, rank = data.layer, group.size(), group.rank()
    own_heads = layer.q_heads // world
    merged = torch.full((1, own_heads, layer.head_dim), math.nan, dtype=layer.dtype, device=data.q.device)
    if Axis.HEAD_DIM in (placement.outer, placement.inner) and layer.kv_dtype in FLOAT8:
        return None
    if placement.outer is Axis.HEAD_DIM:
        call, sent = _head_dim_over_ranks(data, group, merged)
        return Step(placement, call, merged, sent)
    if placement.outer is Axis.REPLICATE:
        # every rank has all keys and its own heads: nothing is left to exchange
        heads = slice(rank * own_heads, (rank + 1) * own_heads)
        attend = _decode(data, data.pages, heads, placement.inner, kernels, merged, None)
        return Step(placement, attend, merged, 0)
    out = torch.full((1, layer.q_heads, layer.head_dim), math.nan, device=data.q.device)
    lse = torch.full((1, layer.q_heads), math.nan, device=data.q.device)
    own_pages = data.pages.unflatten(0, (world, -1))[rank]
    if placement.inner is Axis.HEAD_DIM:
        attend = _head_dim_inside(data, own_pages, out, lse)
    else:
        attend = _decode(data, own_pages, slice(None), placement.inner, kernels, out, lse)
    if workspace is not None:

        def call() -> None:
            attend()
            across_devices.merge(out, lse, workspace, merged)

        return Step(placement, call, merged, workspace.bytes_sent(1))

    ranks = Ranks(group)

    def call_collectives() -> None:
        attend()
        merged.copy_(merge_across_ranks(out, lse, ranks, exchange)[0])

    # both exchanges bring a rank's outputs to their owners; to gather the LSEs takes those of all heads everywhere
    lses = layer.q_heads if exchange == "ag_rs" else own_heads
    sent = (world - 1) * (own_heads * layer.head_dim + lses) * 4
    return Step(placement, call_collectives, merged, sent)


def _decode(data: Data, pages, heads: slice, inner: Axis, kernels: str, out, lse) -> Callable[[], None]:
    """The decode kernel over some pages and heads, its context split or, where units replicate, on one workgroup."""
    layer, device = data.layer, data.q.device
    q = data.q[:, heads]
    # heads of a group that no longer is whole have their one KV head
    first = (heads.start or 0) * layer.kv_heads // layer.q_heads
    kv_heads = max(1, q.shape[1] * layer.kv_heads // layer.q_heads)
    keys, values = (pages[:, which, :, first : first + kv_heads] for which in (0, 1))
    shape = LayerShape(
        q.shape[1], kv_heads, layer.head_dim, layer.head_dim, layer.dtype, layer.kv_dtype, PAGE_SIZE
    )
    options = dict(max_requests=1, max_tokens=1, kernels=kernels)
    planner = Planner(shape, device, **options)
    if inner is Axis.REPLICATE:
        one = replace(planner.decode_variant, workgroups=1, mapping="head-first", domains=1)
        planner = Planner(shape, device, **options, decode_variant=one)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    tokens = len(pages) * PAGE_SIZE
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(1)).to(device, torch.int32)
    schedule = planner.plan(
        StepBatch(
            starts.to(device), starts, torch.tensor([tokens], dtype=torch.int32, device=device), order[None], 1, 1, 1,
            tokens,
        )
    )  # fmt: skip
    one = torch.ones(1, device=device) if layer.kv_dtype in FLOAT8 else None

    def call() -> None:
        runner.attend(
            q, keys, values, out, schedule, scale=layer.scale, k_scale=one, v_scale=one, lse=lse
        )  # fmt: skip

    return call


def _head_dim_inside(data: Data, pages, out, lse) -> Callable[[], None]:
    """Units inside a rank have slices of every head: their partial scores are summed before the softmax."""
    keys, values = (pages[:, which].flatten(0, 1) for which in (0, 1))
    columns = data.layer.head_dim // INNER_UNITS
    slices = [slice(unit * columns, (unit + 1) * columns) for unit in range(INNER_UNITS)]

    def call() -> None:
        partial = torch.stack([scores_of(data.q[0, :, each], keys[..., each]) for each in slices])
        scores = partial.sum(0) * data.layer.scale
        lse[0] = scores.logsumexp(-1)
        probabilities = torch.exp(scores - lse[0, :, None])
        for each in slices:
            out[0, :, each] = weigh(probabilities, values[..., each])

    return call


def _head_dim_over_ranks(
    data: Data, group: dist.ProcessGroup, merged: torch.Tensor
) -> tuple[Callable[[], None], int]:
    """Ranks have slices of every head: partial scores are all-reduced, then slices of the output change places."""
    layer, world = data.layer, group.size()
    columns = layer.head_dim // world
    own = slice(group.rank() * columns, (group.rank() + 1) * columns)
    keys, values = (data.tokens(which, own).contiguous() for which in (0, 1))
    q = data.q[0, :, own].contiguous()

    def call() -> None:
        scores = scores_of(q, keys)
        dist.all_reduce(scores, group=group)
        sent = weigh((scores * layer.scale).softmax(-1), values)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        merged[0] = received.unflatten(0, (world, -1)).movedim(0, 1).flatten(1)

    scores_bytes = 2 * (world - 1) * layer.q_heads * layer.context * 4 // world
    return call, scores_bytes + (world - 1) * layer.q_heads // world * columns * 4

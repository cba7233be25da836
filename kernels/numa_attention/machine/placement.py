"""Where the KV cache goes on a machine with two axes: memory, communication, operations and latency of a decode step.

An outer axis (CUBEs, or GPUs) of inner units (PEs, or NUMA domains). Each axis replicates the cache or shards it along
the sequence or along the head. Everything here but three time constants follows from that structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil

from . import ModelError

MERGED_TENSORS = 3  # m, l and O of a softmax merge
STATE_BYTES = 4  # of an element of m, l or O


class Axis(Enum):
    """What one axis does with the KV cache."""

    REPLICATE = "replicate"
    SEQUENCE = "shard sequence"
    HEAD_DIM = "shard head_dim"


@dataclass(frozen=True)
class Attention:
    """The attention of a model as placement sees it; the placement of one group of KV heads is the same for all.

    kv_heads: that share the machine's memory. q_heads: query heads that read each of them.
    """

    kv_heads: int
    q_heads: int
    head_dim: int
    layers: int
    element_bytes: int = 2

    def check(self) -> None:
        for name in ("kv_heads", "q_heads", "head_dim", "layers", "element_bytes"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be at least 1.")

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes * self.layers


@dataclass(frozen=True)
class Placement:
    """One of the six: a number, and what each axis does."""

    case: int
    outer: Axis
    inner: Axis

    @property
    def name(self) -> str:
        return f"outer {self.outer.value}, inner {self.inner.value}"


CASES = (
    Placement(1, Axis.REPLICATE, Axis.REPLICATE),
    Placement(2, Axis.SEQUENCE, Axis.REPLICATE),
    Placement(3, Axis.REPLICATE, Axis.SEQUENCE),
    Placement(4, Axis.SEQUENCE, Axis.HEAD_DIM),
    Placement(5, Axis.HEAD_DIM, Axis.SEQUENCE),
    Placement(6, Axis.SEQUENCE, Axis.SEQUENCE),
)


@dataclass(frozen=True)
class Cost:
    """What a placement costs at one context length.

    unit_kv_bytes: KV of one inner unit. active_units: units that work. local_tokens: tokens a unit attends.
    unit_tokens: active units x local tokens, the work; the least is one pass over the context.
    inner_hops, outer_hops: longest chain of transfers. copies: tensors moved by the merges. writes: of the output.
    score_bytes, state_bytes: partial scores all-reduced, and softmax states merged, per token and over all layers.
    """

    case: int
    name: str
    unit_kv_bytes: float
    active_units: int
    local_tokens: int
    unit_tokens: int
    inner_hops: int
    outer_hops: int
    copies: int
    writes: int
    score_bytes: float
    state_bytes: float


def merges(parts: int) -> int:
    """Merging `parts` partial results into one takes one merge per part but the first."""
    return parts - 1


def all_reduce_copies(parts: int) -> int:
    """A chain there (reduce) and back (broadcast)."""
    return 2 * merges(parts)


def cost(placement: Placement, attention: Attention, context: int, outer: int, inner: int) -> Cost:
    """The cost of one placement over `outer` x `inner` units.

    Raises ModelError where a count is not positive or head_dim does not divide over the axis that shards it.
    """
    attention.check()
    for name, value in (("context", context), ("outer units", outer), ("inner units", inner)):
        if value < 1:
            raise ModelError(f"{name} is {value}: it must be at least 1.")
    sizes = ((placement.outer, outer), (placement.inner, inner))
    sequence = head = 1
    for axis, size in sizes:
        sequence *= size if axis is Axis.SEQUENCE else 1
        head *= size if axis is Axis.HEAD_DIM else 1
    if attention.head_dim % head:
        raise ModelError(f"head_dim is {attention.head_dim}: it does not divide over {head} units.")
    local_tokens = ceil(context / sequence)
    # where both axes replicate one unit does everything; with one replicated axis all its members do the same
    active = 1 if placement.case == 1 else outer * inner
    # independent groups that each do their own merge: copies of the cache, or slices of the output
    replicas = 1
    for axis, size in sizes:
        replicas *= size if axis is Axis.REPLICATE and active > 1 else 1
    merge_groups = replicas * head
    copies = merge_groups * merges(sequence) * MERGED_TENSORS
    inner_hops = merges(inner) if placement.inner is Axis.SEQUENCE else 0
    outer_hops = merges(outer) if placement.outer is Axis.SEQUENCE else 0
    score_bytes = 0.0
    if head > 1:
        # each group of slice owners all-reduces its partial scores before the softmax
        copies += sequence * all_reduce_copies(head)
        score_bytes = (
            attention.q_heads * attention.kv_heads * local_tokens * attention.element_bytes * attention.layers
        )
        if placement.inner is Axis.HEAD_DIM:
            inner_hops += all_reduce_copies(inner)
        else:
            outer_hops += all_reduce_copies(outer)
    state = attention.q_heads * attention.kv_heads * (attention.head_dim + 2 * head) / head * STATE_BYTES
    return Cost(
        placement.case,
        placement.name,
        attention.token_bytes * local_tokens / head,
        active,
        local_tokens,
        active * local_tokens,
        inner_hops,
        outer_hops,
        copies,
        head if head > 1 or replicas == 1 else replicas,
        score_bytes,
        merge_groups * merges(sequence) * state * attention.layers,
    )


def costs(attention: Attention, context: int, outer: int, inner: int) -> list[Cost]:
    """All six placements; those that cannot shard head_dim so far are left out."""
    return [
        cost(case, attention, context, outer, inner)
        for case in CASES
        if attention.head_dim
        % ((outer if case.outer is Axis.HEAD_DIM else 1) * (inner if case.inner is Axis.HEAD_DIM else 1))
        == 0
    ]


@dataclass(frozen=True)
class Times:
    """The three constants of all latencies, in seconds.

    token: a unit's time for one token with its whole head; a slice of the head costs its share.
    inner_hop, outer_hop: one transfer of a chain.
    """

    token: float
    inner_hop: float
    outer_hop: float

    def latency(self, cost: Cost, attention: Attention) -> float:
        """Latency of one decode step (the longest chain, and what a unit reads)."""
        whole = cost.unit_kv_bytes / attention.token_bytes
        return self.token * whole + self.inner_hop * cost.inner_hops + self.outer_hop * cost.outer_hops


def fit_times(points: list[tuple[Cost, float]], attention: Attention) -> Times:
    """The constants that fit measured latencies (seconds) best, by least squares of the relative error."""
    import numpy as np  # only here: planning starts faster without

    rows = [
        [part.unit_kv_bytes / attention.token_bytes, part.inner_hops, part.outer_hops] for part, _ in points
    ]
    measured = np.array([seconds for _, seconds in points])
    solution, *_ = np.linalg.lstsq(np.array(rows) / measured[:, None], np.ones(len(points)), rcond=None)
    return Times(*(float(value) for value in solution))


@dataclass(frozen=True)
class ShortMapping:
    """A short-context mapping: how many KV heads share a CUBE. Bytes per PE and per step, one layer."""

    heads_per_cube: int
    cubes: int
    pes_per_head: int
    local_tokens: int
    pe_bytes: float
    cube_kv_bytes: float
    chain_hops: int
    seconds: float


def short_mapping(
    heads_per_cube: int, attention: Attention, context: int, pes: int, bandwidth: float
) -> ShortMapping:
    """The mapping that puts `heads_per_cube` KV heads on a CUBE; time is what reading the KV takes at `bandwidth`.

    Raises ModelError where the PEs or the heads do not divide.
    """
    if heads_per_cube < 1 or pes % heads_per_cube or attention.kv_heads % heads_per_cube:
        raise ModelError(
            f"{heads_per_cube} KV heads a CUBE: it must divide the {attention.kv_heads} KV heads and the {pes} PEs."
        )
    group = pes // heads_per_cube
    local = ceil(context / group)
    token = 2 * attention.head_dim * attention.element_bytes
    return ShortMapping(
        heads_per_cube,
        attention.kv_heads // heads_per_cube,
        group,
        local,
        float(local * token),
        float(heads_per_cube * context * token),
        merges(group),
        local * token / bandwidth,
    )

"""One schedule a step: computed once, shared by every layer of the same shape.

::

    step (query_start_loc, seq_lens, block_table)
      |  requests [0, num_decodes): few query tokens each  ->  decode work list   (decode/work_list.py)
      |  requests [num_decodes, R): the rest                ->  prefill tile list  (prefill/tile_list.py)
      |     few tiles of them over long prefixes             ->  work list again, as in decode

A `Planner` belongs to one layer shape and owns every buffer that a schedule points to, with sizes that depend on the
planner alone. Planning reads nothing back from the device, and a decode launch has a fixed grid, so that a captured
graph can be replayed after any later `plan` of a decode-only step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from numa_attention import aiter_adapter, domain_map
from numa_attention.decode import cdna5_variant, work_list
from numa_attention.direct_launch import Repeat
from numa_attention.jit import resolve
from numa_attention.machine.dispatch import MIN_TILES
from numa_attention.mapping import check_mapping
from numa_attention.mapping import tiles as host_tiles
from numa_attention.prefill import hopper_variant as hopper_prefill_variant
from numa_attention.shapes import CONTIGUOUS, LayerShape, UnsupportedShape
from numa_attention.topology import Topology, detect
from numa_attention.variants import (
    PLACED_BY_SM,
    Variant,
    check_clusters,
    choose_decode,
    choose_extend,
    choose_prefill,
    next_power_of_2,
    place,
)


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step; decoding requests come first.

    query_start_loc, query_start_loc_cpu: int32 [R + 1], first query token of each request, on the device and the host.
    seq_lens: int32 [R] on the device, cached tokens of each request, the step's own included, on all ranks together.
    block_table: int32 [R, pages] on the device, pages of this rank's cache, as many columns on every rank; rows may lie
    further apart than they are long.
    num_decodes: leading requests that decode, each with at most the planner's `max_decode_query` query tokens; a
    request without query tokens is padding. num_decode_tokens: their query tokens.
    causal: whether a query sees no key after its own, for all requests or int32 or bool [R] on the device for each.
    has_spans: calls may pass `spans`.

    For a shape without pages, block_table [R, 1] is the row in keys and values of each request's first key. key_rows:
    the rows that they have at least, None for as many as there are query tokens.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool | torch.Tensor = True
    has_spans: bool = False
    key_rows: int | None = None

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True)
class DecodeSchedule:
    """Work list and workspace of the decode launch; see `decode/work_list.py`. Other kernels than ours ignore both.

    arrivals int32 [2, 2 * workgroups]: parts that have arrived, by level and slot; zero between launches.
    partial_acc float32 [2 * workgroups, block_m, block_dv], partial_ml float32 [2 * workgroups, 2, block_m].
    """

    variant: Variant
    ranges: torch.Tensor
    items: torch.Tensor
    arrivals: torch.Tensor
    partial_acc: torch.Tensor
    partial_ml: torch.Tensor
    one: torch.Tensor | None = None  # float32 [1]: a scale for kernels that want one
    queues: torch.Tensor | None = None  # of hardware placement, see `placement_device.take`


@dataclass(frozen=True)
class PrefillSplits:
    """What the sm_90 prefill kernel needs to split tiles; see `prefill/tile_splits.py`.

    rows int32 [PLACES + tiles, 4]: the tile list with the rows of further parts before it. table int32
    [1 + the most requests, 2]. partial float32 [PLACES, consumers, head_dim_v + 3, 64], of each part and consumer:
    maxima, in base 2, sums, a count, and the accumulator [64, head_dim_v].

    It is one tensor because a consumer has no registers to spare for the address of another.
    """

    rows: torch.Tensor
    table: torch.Tensor
    partial: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """int32 [PLACES, consumers]: parts that have arrived of the tile whose first part has the place.

        Zero between launches.
        """
        return self.partial.view(torch.int32)[:, :, 2, 0]


def make_splits(
    shape: LayerShape, variant: Variant, device: torch.device | str, requests: int, tiles: int
) -> PrefillSplits | None:
    """Buffers for steps of so many requests and tiles at most, and the table of none split; None for other kernels."""
    if variant.name != hopper_prefill_variant.NAME or not hopper_prefill_variant.splits_of(
        shape, variant.form
    ):
        return None
    places, rows = hopper_prefill_variant.PLACES, hopper_prefill_variant.ROWS
    table = torch.ones(1 + requests, 2, dtype=torch.int32, device=device)
    table[0] = 0
    consumers = variant.block_m // rows
    return PrefillSplits(
        torch.empty(places + tiles, 4, dtype=torch.int32, device=device),
        table,
        torch.zeros(places, consumers, shape.head_dim_v + 3, rows, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True)
class PrefillSchedule:
    """Tile list of the prefill launch, int32 [workgroups, 4]; see `prefill/tile_list.py`.

    query_starts, key_starts: int32 [prefilling requests + 1], where each request's queries and keys begin if they are
    laid one after the other; made for kernels other than ours.
    """

    variant: Variant
    tiles: torch.Tensor
    query_starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    queues: torch.Tensor | None = None
    splits: PrefillSplits | None = None


@dataclass(frozen=True)
class Schedule:
    """What every layer of one shape does in one step of `tokens` query tokens. kernels: "triton" or "torch"."""

    batch: StepBatch
    shape: LayerShape
    kernels: str
    decode: DecodeSchedule | None
    prefill: PrefillSchedule | None
    tokens: int = 0
    extend: DecodeSchedule | None = None
    # by the layout of a layer's call, what launches its kernels again for other layers; see `runner.attend`
    repeats: dict[tuple, tuple[Repeat, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


# when prefilling requests are split as in decode: prefixes this long and this many times their queries, and units that
# leave so much of the device idle; computed from what idles, not measured
EXTEND_KEYS, EXTEND_RATIO, EXTEND_FILL = 2048, 8, 4
EXTEND_TILES = (
    4  # of KV that a workgroup is given at least: a part of 64 rows costs as much as half a tile or one
)


class Planner:
    """Plans the steps of the layers of one shape on one device.

    max_requests, max_tokens: the most requests and query tokens a step has. max_decode_query: the most query tokens a
    request may have and still be a decode (1 + speculated tokens). kernels: "auto", "triton", "torch" or "interpret".
    mapping: one of `mapping.MAPPINGS`, None for the variant's own. topology: another device than the detected one.
    aiter: "auto", "never" or "always" use AMD's own kernels; features: what the layer's calls have, of "sinks",
    "alibi", "soft_cap" and "lse"; see `aiter_adapter`. decode_variant, prefill_variant: instead of the dispatcher's, to
    measure others.
    decodes: whether steps may have decoding requests, for which buffers are made.
    extend: whether a few query tiles over a long prefix are split over the device instead of prefilled, None for GPUs
    only.
    clusters: on gfx1250, steps whose units fill the device and whose pages are long enough are decoded in clusters of
    workgroups (`decode/cdna5_cluster.py`), which does not balance uneven lengths.

    Raises UnsupportedShape, ValueError (kernels that cannot run on the device, an unknown mapping, a limit below 1),
    NoDomainMap (placement "hardware" where the domains of an NVIDIA device cannot be told) or MissingTriton.
    """

    def __init__(
        self,
        shape: LayerShape,
        device: torch.device | str,
        *,
        max_requests: int,
        max_tokens: int,
        max_decode_query: int = 1,
        kernels: str = "auto",
        mapping: str | None = None,
        topology: Topology | None = None,
        clusters: bool = False,
        aiter: str = "never",
        features: frozenset[str] = frozenset(),
        placement: str = "dispatch",
        decodes: bool = True,
        extend: bool | None = None,
        decode_variant: Variant | None = None,
        prefill_variant: Variant | None = None,
    ):
        shape.check()
        if mapping is not None:
            check_mapping(mapping)
        limits = {
            "max_requests": max_requests,
            "max_tokens": max_tokens,
            "max_decode_query": max_decode_query,
        }
        for name, limit in limits.items():
            if limit < 1:
                raise ValueError(f"{name} is {limit}: it must be at least 1.")
        self.shape = shape
        self.device = torch.device(device)
        self.kernels = resolve(kernels, self.device)
        if self.kernels == "torch" and self.device.type != "cpu":
            raise ValueError(
                f"kernels='torch' attends on the CPU only and the device is {self.device}: use 'auto' or 'triton'."
            )
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.max_decode_query = max_decode_query
        topology = topology or detect(self.device)
        if placement != "dispatch":
            aiter = "never"
        self.decode_variant = decode_variant or choose_decode(
            shape, topology, self.kernels, max_decode_query, mapping, aiter=aiter, features=features
        )
        self.prefill_variant = prefill_variant or choose_prefill(
            shape, topology, self.kernels, mapping, aiter=aiter, features=features
        )
        for variant in (self.decode_variant, self.prefill_variant):
            if not shape.shard.is_whole and not variant.name.startswith(("portable-", "torch-")):
                raise UnsupportedShape(
                    f"{variant.name} takes whole sequences, not a cache sharded over ranks."
                )
        self.decode_variant = place(self.decode_variant, placement, topology)
        self.prefill_variant = place(self.prefill_variant, placement, topology)
        self._queues = self._make_queues(topology).unbind()
        if clusters:
            check_clusters(self.decode_variant)
        self.clusters = clusters
        self._clusters: dict[int, DecodeSchedule | None] = {}  # by decoding requests
        self.row_blocks = -(-shape.group * max_decode_query // self.decode_variant.block_m)
        self.decode_buffers = self._make_decode_buffers() if decodes else None
        self.extend_buffers = None
        if topology.generation != "cpu" if extend is None else extend:
            variant = choose_extend(shape, topology, self.kernels, mapping)
            self.extend_buffers = self._make_buffers(variant, 2 * variant.workgroups)
        self._seq_lens = torch.empty(max_requests, dtype=torch.int32, device=self.device)
        self._first_lens: dict[int, torch.Tensor] = {}  # the first so many of them
        self._lists: dict[tuple, Repeat] = {}  # launches of `_list_work`
        self._tile_lists: dict[tuple, tuple[Repeat, Repeat]] = {}  # and of `_plan_prefill`
        self._causal = torch.empty(max_requests, dtype=torch.int32, device=self.device)
        self._starts = torch.zeros(2, max_requests + 1, dtype=torch.int32, device=self.device)
        self._prefix = torch.empty(max_requests + 1, dtype=torch.int32, device=self.device)
        tiles = shape.kv_heads * (max_tokens * shape.group // self.prefill_variant.block_m + max_requests)
        self.splits = make_splits(shape, self.prefill_variant, self.device, max_requests, tiles)
        if self.splits is None:
            self._tiles = torch.empty(tiles, 4, dtype=torch.int32, device=self.device)
        else:
            self._tiles = self.splits.rows[hopper_prefill_variant.PLACES :]
            self._unsplit = replace(self.splits, table=self.splits.table.clone())
        self._units = topology.compute_units
        self._split_lists: dict[tuple, Repeat] = {}  # launches of `_split_tiles`

    def _make_queues(self, topology: Topology) -> torch.Tensor:
        """Those of decode and of prefill; see `placement_device.take`. Raises NoDomainMap where a map is needed."""
        domains = max(topology.domains, topology.dispatch_domains)
        queues = torch.zeros(2, domains + 1, dtype=torch.int32, device=self.device)
        if self.prefill_variant.queues and topology.generation in PLACED_BY_SM:
            if self.device.type == "cuda":
                table = domain_map.table(self.device)
            else:  # a device that is not there: SMs in turn
                table = torch.arange(domain_map.SM_IDS, dtype=torch.int32, device=self.device) % domains
            queues = torch.cat([queues, table.expand(2, -1)], 1)
        return queues

    def _make_decode_buffers(self) -> DecodeSchedule:
        variant = self.decode_variant
        items = work_list.capacity(
            self.max_requests, self.shape.kv_heads, self.row_blocks, variant.workgroups
        )
        buffers = self._make_buffers(variant, items)
        one = torch.ones(1, dtype=torch.float32, device=self.device)
        return replace(buffers, one=one, queues=self._queues[0])

    def _make_buffers(self, variant: Variant, items: int) -> DecodeSchedule:
        workgroups, block_m = variant.workgroups, variant.block_m
        block_dv = next_power_of_2(max(self.shape.head_dim_v, 16))

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        return DecodeSchedule(
            variant,
            ranges=empty(workgroups, work_list.ROW_FIELDS, dtype=torch.int32),
            items=empty(items, work_list.ROW_FIELDS, dtype=torch.int32),
            arrivals=torch.zeros(2, 2 * workgroups, dtype=torch.int32, device=self.device),
            partial_acc=empty(2 * workgroups, block_m, block_dv, dtype=torch.float32),
            partial_ml=empty(2 * workgroups, 2, block_m, dtype=torch.float32),
        )

    def plan(self, batch: StepBatch) -> Schedule:
        """The schedule of one step. It stays valid until the next `plan`, whose work list overwrites this one's.

        A sequence longer than its row of the block table, as in some dummy runs of vLLM, is cut to what the row holds.

        Raises ValueError where the step does not fit the planner or its tensors cannot be read as they are.
        """
        starts = batch.query_start_loc_cpu.numpy()
        self._check(batch, starts)
        requests = batch.num_requests
        seq_lens = self._first_lens.get(requests)
        if seq_lens is None:
            seq_lens = self._first_lens[requests] = self._seq_lens[:requests]
        if self.shape.page_size == CONTIGUOUS:
            seq_lens.copy_(batch.seq_lens)
        else:
            held = batch.block_table.shape[1] * self.shape.page_size * self.shape.shard.ranks
            torch.clamp(batch.seq_lens, max=held, out=seq_lens)
        causal = batch.causal
        if not isinstance(causal, bool):
            causal = self._causal[:requests].copy_(batch.causal)
        batch = replace(batch, seq_lens=seq_lens, causal=causal)
        decode = self._plan_decode(batch) if batch.num_decodes else None
        extend = prefill = None
        if batch.num_decodes < requests:
            query_lens = _lengths(starts[batch.num_decodes :])
            extend = self._plan_extend(batch, query_lens)
            prefill = self._plan_prefill(batch, query_lens) if extend is None else None
        return Schedule(batch, self.shape, self.kernels, decode, prefill, int(starts[-1]), extend)

    def _check(self, batch: StepBatch, starts: np.ndarray) -> None:
        requests, decodes = batch.num_requests, batch.num_decodes
        if requests > self.max_requests:
            raise ValueError(f"a step of {requests} requests exceeds max_requests={self.max_requests}")
        device = self._seq_lens.device
        for name, tensor in (
            ("query_start_loc", batch.query_start_loc),
            ("seq_lens", batch.seq_lens),
            ("block_table", batch.block_table),
        ):
            if tensor.dtype != torch.int32 or (tensor.stride()[-1] != 1 and tensor.shape[-1] > 1):
                raise ValueError(
                    f"{name} is {tensor.dtype} with strides {tensor.stride()}: "
                    "it must be int32 and contiguous in its last dimension"
                )
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device} and the planner on {device}")
        if not isinstance(batch.causal, bool) and batch.causal.shape != (requests,):
            raise ValueError(
                f"causal is {list(batch.causal.shape)}: give one flag for each of {requests} requests"
            )
        if not 0 <= decodes <= requests:
            raise ValueError(f"num_decodes is {decodes} in a step of {requests} requests")
        if decodes and self.decode_buffers is None:
            raise ValueError(f"num_decodes is {decodes} and the planner was made with decodes=False")
        if decodes and batch.max_query_len > self.max_decode_query:
            longest = int(_lengths(starts[: decodes + 1]).max())
            if longest > self.max_decode_query:
                raise ValueError(
                    f"a decoding request has {longest} query tokens, more than "
                    f"max_decode_query={self.max_decode_query}"
                )

    def _in_clusters(self, number: int) -> DecodeSchedule | None:
        """The schedule of `number` decoding requests in clusters: no list at all; None where they do not fit."""
        if number not in self._clusters:
            own, shape = self.decode_variant, self.shape
            units = number * shape.kv_heads * self.row_blocks
            found = cdna5_variant.cluster_of(shape, units, own.workgroups)
            if found is None:
                self._clusters[number] = None
            else:
                cluster, block_n = found
                variant = replace(
                    own, name="cdna5-cluster-decode", form="", block_n=block_n, cluster=cluster,
                    workgroups=units * cluster, row_blocks=self.row_blocks,
                )  # fmt: skip
                self._clusters[number] = replace(self.decode_buffers, variant=variant)
        return self._clusters[number]

    def _plan_decode(self, batch: StepBatch) -> DecodeSchedule:
        if self.clusters and (in_clusters := self._in_clusters(batch.num_decodes)):
            return in_clusters
        plan = self.decode_buffers
        if self.decode_variant.name == aiter_adapter.DECODE:
            return plan
        self._list_work(plan, batch, 0, batch.num_decodes, MIN_TILES)
        return plan

    def _plan_extend(self, batch: StepBatch, query_lens: np.ndarray) -> DecodeSchedule | None:
        """The work list of the prefilling requests, or None where prefill tiles are many or prefixes short."""
        plan, shape = self.extend_buffers, self.shape
        if plan is None or self.prefill_variant.name == aiter_adapter.PREFILL:
            return None
        if shape.shard.most(batch.max_seq_len) < max(EXTEND_KEYS, EXTEND_RATIO * batch.max_query_len):
            return None
        units = int((-(-query_lens * shape.group // plan.variant.block_m)).sum()) * shape.kv_heads
        if units == 0 or EXTEND_FILL * units > plan.variant.workgroups:
            return None
        self._list_work(plan, batch, batch.num_decodes, len(query_lens), EXTEND_TILES)
        return plan

    def _list_work(
        self, plan: DecodeSchedule, batch: StepBatch, first: int, number: int, min_tiles: int
    ) -> None:
        """Fill a work list with `number` requests from `first` on."""
        variant, shape = plan.variant, self.shape
        # in all else, launches for one plan are alike
        given = batch.query_start_loc.data_ptr(), first, number
        key = (plan is self.extend_buffers, batch.has_spans, given[0] & 15)
        repeat = self._lists.get(key)
        if repeat is not None:
            repeat(given)
            return
        options = dict(
            kv_heads=shape.kv_heads,
            group=shape.group,
            block_m=variant.block_m,
            block_n=variant.block_n,
            # a span may begin left of every window; the kernel masks what is too much
            window=-1 if batch.has_spans else shape.window,
            min_tiles=min_tiles,
            domains=variant.domains_used,
            first_request=first,
            shard=shape.shard,
        )
        if self.kernels == "triton":
            from numa_attention.decode.work_list_device import build_on_device

            launched = build_on_device(
                batch.seq_lens,
                batch.query_start_loc,
                plan.ranges,
                plan.items,
                num_requests=number,
                max_requests=self.max_requests,
                **options,
            )
            if launched.direct is not None:
                names = ("query_start_loc", "first_request", "num_requests")
                self._lists[key] = Repeat(launched, names)
        else:
            starts = batch.query_start_loc_cpu[first : first + number + 1].numpy()
            seq_lens = batch.seq_lens[first : first + number].cpu().numpy()
            ranges, items = work_list.build_on_host(seq_lens, starts, workgroups=len(plan.ranges), **options)
            plan.ranges.copy_(torch.from_numpy(ranges))
            plan.items[: len(items)] = torch.from_numpy(items)

    def _plan_prefill(self, batch: StepBatch, query_lens: np.ndarray) -> PrefillSchedule | None:
        variant, shape = self.prefill_variant, self.shape
        blocks = -(-query_lens * shape.group // variant.block_m)
        workgroups = int(blocks.sum()) * shape.kv_heads
        if workgroups == 0:
            return None
        tokens = int(query_lens.sum())
        if tokens > self.max_tokens:
            raise ValueError(f"a step of {tokens} prefilled tokens exceeds max_tokens={self.max_tokens}")
        if variant.name == aiter_adapter.PREFILL:
            return self._plan_prefill_by_starts(batch)
        tiles = self._tiles[:workgroups]
        longest_first = batch.causal is not False
        if self.kernels == "triton":
            from numa_attention.prefill.tile_list import build_on_device

            build_on_device(
                batch.query_start_loc,
                batch.num_decodes,
                blocks,
                self._prefix,
                tiles,
                variant,
                kv_heads=shape.kv_heads,
                group=shape.group,
                longest_first=longest_first,
                repeats=self._tile_lists,
            )
        else:
            rows = host_tiles(
                variant.mapping,
                len(blocks),
                shape.kv_heads,
                shape.kv_heads,
                blocks,
                variant.domains,
                longest_first=longest_first,
            )
            tiles[:, :3] = torch.from_numpy(rows)
        return PrefillSchedule(
            variant, tiles, queues=self._queues[1], splits=self._split_tiles(batch, blocks, query_lens)
        )

    def _split_tiles(
        self, batch: StepBatch, blocks: np.ndarray, query_lens: np.ndarray
    ) -> PrefillSplits | None:
        """The parts of tiles that would take longer than all others; None for kernels that split none."""
        variant, shape = self.prefill_variant, self.shape
        if self.splits is None:
            return None
        causal = batch.causal is True
        # what the queries see of one another alone: the lengths of cached prefixes are on the device
        seen = query_lens // 2 if causal else query_lens
        least_share = shape.kv_heads * int((blocks * seen).sum()) / self._units
        if batch.max_seq_len <= max(least_share, hopper_prefill_variant.LEAST_SPLIT):
            return self._unsplit
        from numa_attention.prefill.tile_splits import build_on_device

        given = batch.query_start_loc.data_ptr(), batch.num_decodes, len(blocks)
        key = causal, given[0] & 15
        repeat = self._split_lists.get(key)
        if repeat is not None:
            repeat(given)
            return self.splits
        launched = build_on_device(
            batch.query_start_loc,
            batch.seq_lens,
            self.splits.table,
            self.splits.rows,
            batch.num_decodes,
            len(blocks),
            self._units,
            kv_heads=shape.kv_heads,
            group=shape.group,
            block_m=variant.block_m,
            block_n=variant.block_n,
            causal=causal,
        )
        if launched.direct is not None:
            self._split_lists[key] = Repeat(launched, ("query_start_loc", "first_request", "requests"))
        return self.splits

    def _plan_prefill_by_starts(self, batch: StepBatch) -> PrefillSchedule:
        """The starts of queries and keys, computed on the device."""
        first, requests = batch.num_decodes, batch.num_requests - batch.num_decodes
        query_starts, key_starts = self._starts[:, : requests + 1].unbind()
        torch.sub(batch.query_start_loc[first:], batch.query_start_loc[first], out=query_starts)
        torch.cumsum(batch.seq_lens[first:], 0, dtype=torch.int32, out=key_starts[1:])
        return PrefillSchedule(self.prefill_variant, self._tiles[:0], query_starts, key_starts)


def _lengths(starts: np.ndarray) -> np.ndarray:
    """int64 [n] from int32 [n + 1]."""
    return np.subtract(starts[1:], starts[:-1], dtype=np.int64)

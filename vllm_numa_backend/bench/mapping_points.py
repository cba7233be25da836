"""The launches of the mapping study: ten layers, each under every way of placing its workgroups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from numa_attention import operation
from numa_attention.machine.closed_form import estimate, streams_per_domain
from numa_attention.machine.grid import Grid
from numa_attention.shapes import CONTIGUOUS, LayerShape, UnsupportedShape
from numa_attention.topology import Topology
from numa_attention.variants import PLACED_BY_HARDWARE, Variant, machine_of, place


@dataclass(frozen=True)
class Layer:
    """One prefill of `batch` equal requests without cached prefixes. counted: whether ncu watches it."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = False
    counted: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of both products, half of the square under a causal mask."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2.0 * (self.head_dim + self.head_dim_v) * pairs * self.q_heads * self.batch


@dataclass(frozen=True)
class Way:
    """A mapping, and who sees to it that a domain gets the workgroups meant for it; see Variant."""

    mapping: str
    placement: str

    @property
    def name(self) -> str:
        return self.mapping + (" placed by hardware" if self.placement == "hardware" else "")


@dataclass(frozen=True)
class Point:
    layer: Layer
    way: Way

    @property
    def name(self) -> str:
        return f"{self.layer.name}: {self.way.name}"


# heads 8 to 128, lengths 2k to 128k, batches 1 to 8; multi-head, grouped, and the shapes of DeepSeek-V3. Those that a
# study cannot do without come first
LAYERS = (
    Layer("mha128-32k", 1, 128, 128, 32768, counted=True),
    Layer("mha128-128k", 1, 128, 128, 131072, counted=True),
    Layer("gqa64/8-128k", 1, 64, 8, 131072, counted=True),
    Layer("gqa64/8-32k-causal", 1, 64, 8, 32768, causal=True),
    Layer("deepseek56-32k", 1, 128, 128, 32768, 56, 56),
    Layer("deepseek192-16k-causal", 1, 128, 128, 16384, 192, 128, causal=True),
    Layer("mha64-16k-b2-causal", 2, 64, 64, 16384, causal=True),
    Layer("mha32-8k-b4", 4, 32, 32, 8192),
    Layer("gqa32/8-8k-b8-causal", 8, 32, 8, 8192, causal=True),
    Layer("mha8-2k-b8", 8, 8, 8, 2048),
)
# the longest launches take so long under ncu that only these ways of them are counted
COUNTED_OF_LONG = (
    "block-first",
    "head-first",
    "swizzled-head-first",
    "swizzled-head-first placed by hardware",
)
LONG = 1e15  # floating-point operations
TINY_LENGTH = 96


def ways(topology: Topology) -> list[Way]:
    """What can be told apart on a device. Naive mappings have no domains: hardware placement changes nothing there."""
    naive, swizzled = ("block-first", "head-first"), ("swizzled-block-first", "swizzled-head-first")
    found = [Way(mapping, "dispatch") for mapping in (*naive, *swizzled)]
    if topology.generation in PLACED_BY_HARDWARE:
        found += [Way(mapping, "hardware") for mapping in swizzled]
    return found


def points(topology: Topology, *, tiny: bool = False) -> list[Point]:
    """The study. tiny: the same kinds of layers, as small as a CPU wants them."""
    layers = [tiny_layer(layer) for layer in LAYERS] if tiny else LAYERS
    return [Point(layer, way) for layer in layers for way in ways(topology)]


def tiny_layer(layer: Layer) -> Layer:
    group = layer.q_heads // layer.kv_heads
    kv_heads = min(layer.kv_heads, 2)
    return replace(
        layer, batch=min(layer.batch, 2), q_heads=group * kv_heads, kv_heads=kv_heads, length=TINY_LENGTH
    )


def is_counted(point: Point) -> bool:
    """Whether ncu is to watch a point."""
    return point.layer.counted and (point.layer.flops < LONG or point.way.name in COUNTED_OF_LONG)


def call_of(point: Point, device: torch.device, kernels: str, kernel: str | None) -> operation.Call:
    """The call of a point on contiguous tensors, as `numa_attention.attention` makes it."""
    layer = point.layer
    heads = layer.batch * layer.q_heads, layer.batch * layer.kv_heads
    shape = LayerShape(*heads, layer.head_dim, layer.head_dim_v, torch.bfloat16, torch.bfloat16, CONTIGUOUS)
    return operation.Call(
        device=device,
        shape=shape,
        requests=1,
        queries=layer.length,
        keys=layer.length,
        causal=layer.causal,
        kernels=kernels,
        kernel=kernel,
        mapping=point.way.mapping,
        placement=point.way.placement,
    )


def chosen(call: operation.Call, topology: Topology, kernels: str) -> tuple[LayerShape, Variant]:
    """The kernel of a call, whose swizzled mappings place over all domains, whoever sees to it.

    A layer that the kernel asked for does not take gets the dispatcher's choice.
    """
    try:
        shape, variant = operation.shape_and_variant(call, topology, kernels)
    except UnsupportedShape:
        if call.kernel is None:
            raise
        shape, variant = operation.shape_and_variant(replace(call, kernel=None), topology, kernels)
    domains = topology.domains if variant.mapping.startswith("swizzled") else 1
    return shape, place(replace(variant, domains=domains), call.placement, topology)


@dataclass(frozen=True)
class Predicted:
    """What the closed form says of a point. streams: K/V streams that a domain reads at a time."""

    streams: float
    hit_rate: float
    hbm_bytes: float


def predict(point: Point, variant: Variant, topology: Topology) -> Predicted | None:
    """None on a device that the machine model does not know, and where a query block is longer than the layer."""
    machine = machine_of(topology)
    if machine is None:
        return None
    layer = point.layer
    if point.way.placement == "hardware":
        machine = replace(machine, dispatch_domains=machine.domains)
    grid = Grid(
        point.way.mapping,
        layer.batch,
        layer.kv_heads,
        layer.kv_heads,
        layer.length,
        (layer.head_dim + layer.head_dim_v) // 2,
        variant.block_m,
        variant.block_n,
        causal=layer.causal,
        domains=variant.domains_used,
        longest_first=layer.causal,
        query_length=layer.length * (layer.q_heads // layer.kv_heads),
    )
    found = estimate(grid, machine)
    return Predicted(streams_per_domain(grid, machine), found.hit_rate, found.hbm_bytes)

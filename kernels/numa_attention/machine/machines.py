"""The machines as data. Every figure carries its source; what nobody has measured or published says `assumed`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import ModelError
from .grid import Grid

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB, TB, TERA = 1e9, 1e12, 1e12
US = 1e-6

CDNA3 = "AMD CDNA 3 white paper and Instinct MI300X data sheet"
CDNA4 = "AMD CDNA 4 white paper and Instinct MI355X data sheet"
MI450_TALK = "AMD's announcement of the MI450 series"
GLUON = "AMD's article on attention decode in Gluon for the MI450"
HOPPER = "NVIDIA H100 architecture white paper and data sheet"
H200_SHEET = "NVIDIA H200 data sheet"
BLACKWELL = "NVIDIA Blackwell B200 data sheet"
H200_MEASURED = "measured on one H200: latency of L2 hits by SM and address"
FUSED_GQA = "fused GQA report, data placement policy"


@dataclass(frozen=True)
class Figure:
    """One number in SI units (bytes, bytes/s, FLOP/s, s) and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Cache:
    """What the L2 simulation and the closed form need beyond the data sheet: one set per machine, for all shapes.

    The desynchronisation (start_delay, tile_jitter, unit_spread) and the order of replacement cannot be looked up: they
    are calibrated, on the points that `source` names, and then hold for every shape.

    partitioned: the domains are partitions of one L2 (a far line is looked up at home before memory is read), not
        private caches of their own.
    kernel_flops: FLOP/s of a plain Triton FlashAttention-2 forward kernel when every load hits.
    read_bandwidth: bytes/s behind the L2 at best. l2_bandwidth: bytes/s of one domain's L2.
    miss_latency, far_latency: seconds by which memory, and the other partition, answer later than the own L2.
    depth: tiles whose loads are issued before they are needed; 0: loads are waited for.
    start_delay: largest random delay of a workgroup, in tile times (uniform from 0), at most 1/8 of its walk.
    tile_jitter: standard deviation of the time of one tile, in tile times.
    unit_spread: standard deviation of the units' lasting speeds, relative.
    joined_is_hit: whether a request for a line whose fill is under way counts as a hit.
    source: where these come from.
    """

    partitioned: bool
    kernel_flops: float
    read_bandwidth: float
    l2_bandwidth: float
    miss_latency: float
    far_latency: float
    depth: int
    start_delay: float
    tile_jitter: float
    unit_spread: float
    joined_is_hit: bool
    source: str
    workgroups_per_unit: int = 1

    def delay_tiles(self, grid: Grid) -> float:
        """Largest random delay of the grid's workgroups, in tile times."""
        return min(self.start_delay, grid.visits / grid.workgroups / 8)

    def tile_seconds(self, grid: Grid, units: int) -> float:
        """Time of one K/V tile on a unit when every load hits; head sizes are padded to what Triton takes."""
        padded = 1 << max(4, (grid.head_dim - 1).bit_length())
        return 4.0 * grid.block_m * grid.block_n * padded * units / self.kernel_flops


@dataclass(frozen=True)
class Machine:
    """One device.

    units: CUs, WGPs or SMs. domains: caches (XCDs) or L2 partitions. dispatch_domains: domains over which the
    hardware deals workgroups in turn, 1 where it does not. link_bandwidth: bytes/s out of one device to its peers.
    """

    name: str
    units: int
    domains: int
    dispatch_domains: int
    l2_bytes: Figure
    memory_bytes: Figure
    memory_bandwidth: Figure
    flops: Figure
    link_bandwidth: Figure
    layout_source: str
    cache: Cache


# Same kernel source, same kind of scheduler: the jitter of a tile and the spread of the units' speeds found on the
# H200 serve for every machine.
TILE_JITTER = 0.03
UNIT_SPREAD = 3.7e-4

H200_CACHE = Cache(
    partitioned=True,
    kernel_flops=490 * TERA,
    read_bandwidth=3.1 * TB,
    l2_bandwidth=3.5 * TB,
    miss_latency=0.6 * US,
    far_latency=0.1 * US,
    depth=2,
    start_delay=8.0,
    tile_jitter=TILE_JITTER,
    unit_spread=UNIT_SPREAD,
    joined_is_hit=True,
    source="kernel: measured on one H200, 486 TFLOP/s head-first; bandwidth: what its block-first run read, 551 GB at "
    "395 TFLOP/s. Jitter, delay, spread, joined fills: calibrated on four hit "
    "rates measured with ncu (128 heads: block-first, head-first, swizzled over 8 at 32k; head-first at 128k). "
    "Latencies, L2 bandwidth: of that order, without effect on these points",
)
MI300X_CACHE = Cache(
    partitioned=False,
    kernel_flops=500 * TERA,
    read_bandwidth=2.05 * TB,
    l2_bandwidth=2.0 * TB,
    miss_latency=0.5 * US,
    far_latency=0.0,
    depth=0,
    start_delay=64.0,
    tile_jitter=TILE_JITTER,
    unit_spread=UNIT_SPREAD,
    joined_is_hit=True,
    source="calibrated on four figures of the first seed, 128 query heads: block-first 0.64 of swizzled head-first and "
    "about 1 % hits, swizzled head-first 90-97 %, and block-first 0.75 with 8 KV heads. Jitter and spread as on the "
    "H200. Loads are waited for (one stage), as Triton compiles this tile for gfx942; no Infinity Cache",
)


def scaled(cache: Cache, share: float, bandwidth: float, why: str, **changes: float) -> Cache:
    """The cache model of a machine nobody measured: rates in proportion to a calibrated one, the rest as there."""
    return replace(
        cache,
        kernel_flops=cache.kernel_flops * share,
        read_bandwidth=cache.read_bandwidth * bandwidth,
        source=f"assumed: {why}",
        **changes,
    )


def amd(name, units, memory, bandwidth, flops, link, source, cache) -> Machine:
    return Machine(
        name,
        units,
        8,
        8,
        Figure(32 * MIB, source),
        memory,
        bandwidth,
        flops,
        link,
        f"{source}: 8 XCDs, workgroups dealt in turn",
        cache,
    )


def nvidia(name, units, l2, memory, bandwidth, flops, link, layout, cache) -> Machine:
    return Machine(name, units, 2, 1, l2, memory, bandwidth, flops, link, layout, cache)


MI300X = amd(
    "MI300X",
    304,
    Figure(192 * GB, CDNA3),
    Figure(5.3 * TB, CDNA3),
    Figure(1307.4 * TERA, f"{CDNA3}: bf16, dense"),
    Figure(448 * GB, f"{CDNA3}: 7 Infinity Fabric links of 64 GB/s each way"),
    CDNA3,
    MI300X_CACHE,
)
MI355X = amd(
    "MI355X",
    256,
    Figure(288 * GB, CDNA4),
    Figure(8.0 * TB, CDNA4),
    Figure(2516.6 * TERA, f"{CDNA4}: bf16, dense"),
    Figure(537.6 * GB, f"{CDNA4}: 7 Infinity Fabric links of 76.8 GB/s each way"),
    CDNA4,
    scaled(MI300X_CACHE, 2516.6 / 1307.4, 8.0 / 5.3, "as MI300X, in proportion to peak and HBM"),
)
MI450 = amd(
    "MI450",
    256,
    Figure(432 * GB, MI450_TALK),
    Figure(19.6 * TB, GLUON),
    Figure(10_000 * TERA, f"assumed: half of the FP8 rate in {MI450_TALK}"),
    Figure(1.8 * TB, f"{MI450_TALK}: 3.6 TB/s of scale-up links, both ways"),
    f"{GLUON}: 256 WGPs; eight domains of 4 MiB assumed",
    scaled(MI300X_CACHE, 10_000 / 1307.4, 19.6 / 5.3, "as MI300X, in proportion to peak and HBM"),
)
H100 = nvidia(
    "H100",
    132,
    Figure(50 * MIB, HOPPER),
    Figure(80 * GB, HOPPER),
    Figure(3.35 * TB, HOPPER),
    Figure(989.4 * TERA, f"{HOPPER}: bf16, dense"),
    Figure(450 * GB, f"{HOPPER}: NVLink, each way"),
    f"{HOPPER}: two partitions; 66 SMs each as on the H200",
    scaled(H200_CACHE, 1.0, 3.35 / 4.8, "as H200, in proportion to HBM"),
)
H200 = nvidia(
    "H200",
    132,
    Figure(60 * MIB, "reported by the device"),
    Figure(141 * GB, H200_SHEET),
    Figure(4.8 * TB, H200_SHEET),
    Figure(989.4 * TERA, f"{H200_SHEET}: bf16, dense"),
    Figure(450 * GB, f"{H200_SHEET}: NVLink, each way"),
    f"{H200_MEASURED}: two partitions of 66 SMs",
    H200_CACHE,
)
B200 = nvidia(
    "B200",
    148,
    Figure(126 * MIB, "reported by the device"),
    Figure(180 * GB, BLACKWELL),
    Figure(8.0 * TB, BLACKWELL),
    Figure(2250 * TERA, f"{BLACKWELL}: bf16, dense"),
    Figure(900 * GB, f"{BLACKWELL}: NVLink, each way"),
    "two dies, one L2 kept coherent by hardware: assumed to act as two partitions",
    scaled(H200_CACHE, 2250 / 989.4, 8.0 / 4.8, "as H200, in proportion to peak and HBM"),
)
MACHINES = {machine.name.lower(): machine for machine in (MI300X, MI355X, MI450, H100, H200, B200)}
# the product that stands for a generation
GENERATIONS = {"gfx942": MI300X, "gfx950": MI355X, "gfx1250": MI450, "sm_90": H200, "sm_100": B200}


@dataclass(frozen=True)
class Fabric:
    """The second seed's machine: CUBEs of PEs, each PE with memory of its own. Bytes, bytes/s, FLOP/s."""

    name: str
    cubes: int
    pes: int
    pe_memory: Figure
    pe_weights: Figure
    pe_bandwidth: Figure
    pe_flops: Figure
    tile: tuple[int, int, int]


SIP = Fabric(
    "SIP",
    8,
    8,
    Figure(6.0 * GB, FUSED_GQA),
    Figure(1.76 * GB, f"{FUSED_GQA}: attention weights"),
    Figure(256 * GB, f"{FUSED_GQA}: ceiling of a PE"),
    Figure(8 * TERA, "fused GQA report, compute-bound prefill"),
    (32, 64, 32),
)


def machine(name: str) -> Machine:
    """The machine of that name, or the one that stands for a generation.

    Raises ModelError with the known names.
    """
    wanted = name.lower()
    if wanted in MACHINES:
        return MACHINES[wanted]
    if wanted in GENERATIONS:
        return GENERATIONS[wanted]
    if wanted == "cpu":
        raise ModelError("the machine model has no CPU: it knows the L2 caches of GPUs alone. Name a GPU.")
    known = ", ".join(known.name for known in MACHINES.values())
    raise ModelError(
        f"unknown machine {name!r}: choose one of {known}, or a generation: {', '.join(GENERATIONS)}."
    )


def like(
    name: str, generation: str, units: int, domains: int, dispatch_domains: int, l2_bytes: int
) -> Machine | None:
    """The machine that a detected device is: a known product, with the units and domains that it shows.

    A device in a partitioned mode shows fewer than the product has. None where the generation is not known.
    """
    found = GENERATIONS.get(generation)
    for known in MACHINES.values():
        if known.name in name:
            found = known
    if found is None or (found.units, found.domains, found.dispatch_domains) == (
        units,
        domains,
        dispatch_domains,
    ):
        return found
    share = units / found.units
    cache = replace(
        found.cache,
        kernel_flops=found.cache.kernel_flops * share,
        read_bandwidth=found.cache.read_bandwidth * share,
    )
    return replace(
        found,
        units=units,
        domains=domains,
        dispatch_domains=dispatch_domains,
        l2_bytes=Figure(l2_bytes, "reported by the device"),
        memory_bandwidth=replace(found.memory_bandwidth, value=found.memory_bandwidth.value * share),
        cache=cache,
    )

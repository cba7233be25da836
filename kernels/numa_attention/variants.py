"""The table of kernel variants: phase x GQA shape x dtype x generation -> kernel and tile sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from numa_attention import aiter_adapter
from numa_attention.decode import cdna5_variant, hopper_variant
from numa_attention.jit import interpreting, triton_release
from numa_attention.machine import dispatch
from numa_attention.machine.machines import Machine, like
from numa_attention.prefill import hopper_variant as hopper_prefill_variant
from numa_attention.shapes import FLOAT8, MAX_HEAD_DIM, LayerShape, UnsupportedShape
from numa_attention.topology import Topology, pretend

MIN_DOT_ROWS = 16  # the fewest rows a matrix instruction of any generation takes


@dataclass(frozen=True)
class Variant:
    """One way to run one phase of one layer shape.

    block_m: rows of the packed GQA tile (query positions x query heads of one KV head). block_n: KV tokens a tile.
    workgroups: workgroups of a decode launch, 0 for prefill, whose grid follows the step. mapping, domains: which
    workgroup takes which tile. form: how a kernel that has several overlaps copies, products and the softmax.
    instead_of: the generation's own kernel that cannot run the layer, and why. cluster: workgroups that share a unit
    and meet at a barrier, of which `workgroups` is a multiple. row_blocks: of a KV head, where the kernel has to know.
    matrix_rows, kpack: rows of AMD's matrix instructions, 0 for the compiler's choice; products that one read feeds.
    placement: "dispatch" trusts the hardware to deal workgroups to domains in turn, "hardware" asks where one runs.
    in_float16: whether bfloat16 queries and a float8 cache are multiplied in float16. two_terms: whether keys stay
    float8 all the same, multiplied by queries that are sums of two float8 numbers. staged_values: whether float8 values
    are converted on their way to shared memory, not when the product reads them.
    """

    name: str
    phase: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    workgroups: int
    mapping: str
    domains: int
    form: str = ""
    instead_of: str = ""
    cluster: int = 1
    row_blocks: int = 1
    placement: str = "dispatch"
    in_float16: bool = False
    two_terms: bool = False
    staged_values: bool = False
    matrix_rows: int = 0
    kpack: int = 1

    @property
    def queues(self) -> int:
        """Queues of hardware placement, one a domain; 0 with dispatch placement and over one domain."""
        return self.domains_used if self.placement == "hardware" and self.domains_used > 1 else 0

    @property
    def domains_used(self) -> int:
        """Domains that the mapping places by: 1 for the naive ones."""
        return self.domains if self.mapping.startswith("swizzled") else 1

    def describe(self) -> str:
        """One line for the log: kernel, tile, mapping."""
        if self.name in (aiter_adapter.DECODE, aiter_adapter.PREFILL):
            package = f"{aiter_adapter.DISTRIBUTION} {aiter_adapter.installed()}"
            return f"variant {self.name}: {package}, its own tile and mapping"
        grid = f", {self.workgroups} workgroups, splits merged by the last arriver" if self.workgroups else ""
        if self.cluster > 1:
            grid = f", {self.workgroups} workgroups in clusters of {self.cluster}, merged at the cluster's barrier"
        form = f" ({self.form})" if self.form else ""
        placed = ", placed by hardware" if self.queues else ""
        instead = f"; {self.instead_of}" if self.instead_of else ""
        return (
            f"variant {self.name}{form}, tile {self.block_m} x {self.block_n}{grid}, "
            f"mapping {self.mapping} over {self.domains} domain{'s' if self.domains != 1 else ''}{placed}{instead}"
        )


@dataclass(frozen=True)
class Tile:
    """Tile sizes for head sizes up to `head_dim` and pages of a multiple of `page_multiple` tokens.

    rows: of the packed GQA tile; for decode, the most that this line serves, and least_rows those that fewer are padded
    to. block_n: KV tokens. two_terms, staged_values: see `Variant`.
    """

    head_dim: int
    rows: int
    block_n: int
    num_warps: int
    num_stages: int
    page_multiple: int = 16
    least_rows: int = MIN_DOT_ROWS
    two_terms: bool = False
    staged_values: bool = False


# (generation or its family, bytes of a query element) -> tiles, of which the first that fits is taken. They keep
# kernels of 16-bit queries free of spilled registers and within the LDS, as testing/offline.py checks. One exception:
# on an H200, head_dim 128, pages of 16, four warps that spill are faster than eight that do not (397 TFLOP/s).
# Float32 on NVIDIA runs without matrix instructions and spills whatever the tile.
PREFILL_TILES = {
    ("sm_90", 2): (
        Tile(64, 128, 128, 8, 3),
        Tile(128, 128, 128, 8, 2, page_multiple=64),  # 443 TFLOP/s on an H200
        Tile(128, 128, 64, 4, 3),
        Tile(256, 128, 64, 8, 2, page_multiple=64),
        Tile(256, 128, 32, 8, 2),
    ),
    ("nvidia", 2): (Tile(64, 128, 128, 8, 3), Tile(128, 128, 64, 8, 3), Tile(256, 128, 32, 8, 2)),
    ("nvidia", 4): (Tile(64, 64, 32, 8, 2), Tile(128, 32, 32, 8, 2), Tile(256, 32, 32, 8, 2)),
    # 64 KB of LDS hold no second tile of head_dim 128
    ("gfx942", 2): (Tile(64, 128, 64, 4, 2), Tile(128, 128, 64, 8, 1), Tile(256, 64, 32, 4, 1)),
    ("amd", 2): (Tile(64, 128, 64, 4, 2), Tile(128, 128, 64, 8, 2), Tile(256, 64, 32, 4, 2)),
    ("amd", 4): (Tile(64, 64, 32, 4, 1), Tile(128, 64, 32, 4, 1), Tile(256, 32, 16, 4, 1)),
    ("cpu", 2): (Tile(256, 128, 128, 1, 1),),
    ("cpu", 4): (Tile(256, 128, 128, 1, 1),),
}
# a tile that crosses pages spends instructions on addresses: with few rows, wider tiles hide them
DECODE_TILES = {
    ("nvidia", 2): (
        Tile(64, 16, 128, 4, 3, page_multiple=128),
        Tile(64, 16, 128, 4, 2),
        Tile(64, 64, 128, 4, 3),
        Tile(128, 16, 64, 4, 3, page_multiple=64),
        Tile(128, 16, 128, 4, 2),
        Tile(128, 64, 64, 4, 3),
        Tile(256, 16, 32, 4, 3, page_multiple=32),
        Tile(256, 16, 64, 4, 2),
        Tile(256, 32, 32, 4, 3),
        Tile(256, 64, 32, 8, 3),
    ),
    ("nvidia", 4): (
        Tile(64, 64, 64, 4, 2),
        Tile(128, 64, 32, 4, 2),
        Tile(256, 32, 16, 4, 2),
        Tile(256, 64, 16, 8, 2),
    ),
    ("gfx942", 2): (Tile(64, 64, 64, 4, 2), Tile(128, 64, 64, 4, 1), Tile(256, 64, 32, 4, 1)),
    ("amd", 2): (Tile(64, 64, 64, 4, 2), Tile(128, 64, 64, 4, 2), Tile(256, 64, 32, 4, 2)),
    ("amd", 4): (Tile(64, 64, 32, 4, 1), Tile(128, 64, 32, 4, 1), Tile(256, 64, 16, 4, 1)),
    ("cpu", 2): (Tile(256, 64, 64, 1, 1),),
    ("cpu", 4): (Tile(256, 64, 64, 1, 1),),
}
# the same for queries in bfloat16 over a float8 cache, in front of those above. Each tile waits for its page's number
# first, then for keys and values: of five stages, two tiles of these are on their way. Of three it is one, and that one
# does not begin before the tile at hand is done, as Triton keeps one buffer of what it loads in order to convert it.
# From 64 rows on products are wgmma, which reads float8 keys where they are; 32 rows take half the instructions so.
FLOAT8_DECODE_TILES = {
    "sm_90": (
        Tile(128, 16, 128, 4, 5, staged_values=True),
        Tile(128, 64, 64, 4, 5, least_rows=64, two_terms=True),
    ),
}
DECODE_MAX_ROWS = 64  # a larger packed tile is cut into row blocks, each of which reads the KV again
# a tile of the torch kernels is a matrix product: fewer, taller ones gather K and V less often
TORCH_BLOCK_M = 512


def family(topology: Topology) -> str:
    """ "cpu", "amd" or "nvidia": whose tile sizes a device takes."""
    if topology.generation == "cpu":
        return "cpu"
    if topology.generation.startswith("gfx") or (topology.generation == "gpu" and torch.version.hip):
        return "amd"
    return "nvidia"


def _tile(
    table: dict[tuple[str, int], tuple[Tile, ...]], shape: LayerShape, topology: Topology, rows: int = 0
) -> Tile:
    head_dim, size = max(shape.head_dim, shape.head_dim_v), shape.dtype.itemsize
    tiles = table.get((topology.generation, size)) or table[family(topology), size]
    if table is DECODE_TILES and _in_float16(shape, topology):
        tiles = FLOAT8_DECODE_TILES.get(topology.generation, ()) + tiles
    for tile in tiles:
        if head_dim <= tile.head_dim and rows <= tile.rows and shape.page_size % tile.page_multiple == 0:
            return tile
    raise ValueError(f"no variant for head_dim {head_dim}: the largest is 256")


UNSPILLED_FROM = (3, 9)  # the first release of Triton for which the next function narrows nothing


def _narrowed(tile: Tile, shape: LayerShape, topology: Topology, features: frozenset[str]) -> Tile:
    """The prefill tile, half as wide where older releases of Triton spill registers of a full one.

    That is on gfx942 with 64 tokens and eight warps, for a cache that is converted (3.6, 3.8) and for ALiBi (3.8).
    """
    spills = shape.kv_dtype != shape.dtype or "alibi" in features
    old = (triton_release() or UNSPILLED_FROM) < UNSPILLED_FROM
    if topology.generation == "gfx942" and old and spills and (tile.block_n, tile.num_warps) == (64, 8):
        return replace(tile, block_n=32)
    return tile


MFMA_GENERATIONS = ("gfx942", "gfx950")


def with_matrix_shape(variant: Variant, shape: LayerShape, topology: Topology) -> Variant:
    """The variant with the matrix instructions of MI300X and MI355X that its tile wants; others as they are.

    A warp with 16 rows of the tile gets instructions of 16: with 32 x 32, which the compiler takes, half the warps
    repeat the others' products, and probabilities go through the LDS one by one. Compiled for gfx942, head_dim 128,
    prefill then has 368 instructions a tile instead of 560, decode of 64 rows runs two waves a SIMD instead of one.
    Reads that feed two products (`kpack`) save another ten on gfx942. Prefill of a float8 cache there is left alone:
    it would spill.
    """
    if topology.generation not in MFMA_GENERATIONS or not variant.name.startswith("portable-"):
        return variant
    converts = shape.kv_dtype != shape.dtype
    if shape.dtype.itemsize != 2 or variant.block_m // variant.num_warps >= 32:
        return variant
    on_gfx942_prefill = topology.generation == "gfx942" and variant.phase == "prefill"
    if on_gfx942_prefill and converts:
        return variant
    return replace(variant, matrix_rows=16, kpack=2 if on_gfx942_prefill else 1)


PLACEMENTS = ("dispatch", "hardware")
PLACED_BY_SM = ("sm_90",)  # a workgroup reads its SM, whose domain has been measured
PLACED_BY_HARDWARE = ("gfx942", "gfx950", *PLACED_BY_SM)


def place(variant: Variant, placement: str, topology: Topology) -> Variant:
    """The variant with a placement of PLACEMENTS.

    Where workgroups read their SM, "hardware" places prefill over the domains that the mapping could not swizzle over;
    decode, in which nothing is read twice, stays as it is.

    Raises ValueError for another one, and for "hardware" where workgroups cannot tell on which domain they run or the
    kernel does not ask.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r} is unknown: choose one of {', '.join(PLACEMENTS)}.")
    if placement == "dispatch":
        return variant
    by_sm = topology.generation in PLACED_BY_SM
    if by_sm and variant.phase == "decode":
        return variant
    told = topology.generation in PLACED_BY_HARDWARE or (topology.generation == "cpu" and interpreting())
    if not told or not variant.name.startswith(("portable-", hopper_prefill_variant.NAME)):
        raise ValueError(
            f"placement='hardware' is for our kernels on {', '.join(PLACED_BY_HARDWARE)}, not for {variant.name} on "
            f"{topology.generation}: leave NUMA_SWIZZLE_PLACEMENT at dispatch"
        )
    return replace(variant, placement=placement, domains=topology.domains if by_sm else variant.domains)


def check_clusters(variant: Variant) -> None:
    """Raises ValueError where a decode variant cannot run in clusters of workgroups."""
    if variant.name != "cdna5-decode":
        raise ValueError(
            f"clusters are for the kernel cdna5-decode; this layer has {variant.describe()}: "
            "leave NUMA_SWIZZLE_CLUSTERS at off"
        )
    release, oldest = triton_release(), cdna5_variant.OLDEST_TRITON_WITH_CLUSTERS
    if release is None or release < oldest:
        found = "none" if release is None else f"{release[0]}.{release[1]}"
        raise ValueError(
            f"clusters need Triton {oldest[0]}.{oldest[1]} or later, found {found}: "
            "leave NUMA_SWIZZLE_CLUSTERS at off"
        )


def machine_of(topology: Topology) -> Machine | None:
    """What the machine model knows of a device, None where it knows nothing."""
    return like(
        topology.name,
        topology.generation,
        topology.compute_units,
        topology.domains,
        topology.dispatch_domains,
        topology.l2_bytes,
    )


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for values below 1)."""
    return 1 << max(value - 1, 0).bit_length()


def choose_prefill(
    shape: LayerShape,
    topology: Topology,
    kernels: str,
    mapping: str | None = None,
    *,
    aiter: str = "never",
    features: frozenset[str] = frozenset(),
    kernel: str | None = None,
) -> Variant:
    """The prefill variant for a layer shape. kernels: "triton" or "torch". aiter, features: see `aiter_adapter`.

    A mapping that is asked for keeps to the kernels that have it. On sm_90 hopper-prefill is chosen where it takes the
    layer. kernel: "hopper-prefill" or "portable-prefill" insists on one of
    them: raises UnsupportedShape where it does not take the layer, ValueError for another name.
    """
    own = kernels != "triton" or mapping is not None
    if not own and aiter_adapter.chosen("prefill", shape, topology, aiter, features):
        return Variant(aiter_adapter.PREFILL, "prefill", 128, 128, 4, 1, 0, "block-first", 1)
    known = (hopper_prefill_variant.NAME, "portable-prefill")
    hopper_obstacle = _hopper_obstacle(
        shape, topology, kernels, kernel, known, hopper_prefill_variant.why_not
    )
    obstacle = _cdna5_obstacle(shape, topology, kernels)
    form = ""
    if hopper_obstacle is None:
        hopper = hopper_prefill_variant.tile_of(shape)
        name, form = hopper_prefill_variant.NAME, hopper_prefill_variant.FORM
        # four warps of each consumer of 64 rows, and those of the producer
        tile = Tile(MAX_HEAD_DIM, 2 * hopper_prefill_variant.ROWS, hopper.block_n, 12, hopper.stages)
    elif obstacle is None:
        name = "cdna5-prefill"
        rows, block_n, warps = cdna5_variant.prefill_tile_of(shape)
        tile = Tile(MAX_HEAD_DIM, rows, block_n, warps, 3)
    else:
        name = "portable-prefill" if kernels == "triton" else "torch-prefill"
        tile = _narrowed(_tile(PREFILL_TILES, shape, topology), shape, topology, features)
    if kernels == "torch":
        tile = replace(tile, rows=TORCH_BLOCK_M)
    variant = Variant(
        name,
        "prefill",
        tile.rows,
        tile.block_n,
        tile.num_warps,
        tile.num_stages,
        0,
        mapping
        or dispatch.prefill_mapping(machine_of(topology), shape.q_heads, shape.kv_heads, shape.head_dim),
        topology.dispatch_domains,
        form,
        _not_taken("cdna5-prefill", obstacle) or _not_taken(hopper_prefill_variant.NAME, hopper_obstacle),
        in_float16=_in_float16(shape, topology),
    )
    return with_matrix_shape(variant, shape, topology)


def portable_prefill(shape: LayerShape, variant: Variant) -> Variant:
    """The portable variant of sm_90 for the tile list of another variant, whose rows it keeps."""
    tile = _tile(PREFILL_TILES, shape, pretend("sm_90"))
    sizes = dict(block_n=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return replace(variant, name="portable-prefill", form="", **sizes)


def choose_decode(
    shape: LayerShape,
    topology: Topology,
    kernels: str,
    max_decode_query: int,
    mapping: str | None = None,
    *,
    aiter: str = "never",
    features: frozenset[str] = frozenset(),
    kernel: str | None = None,
) -> Variant:
    """The decode variant for a layer shape and the most query tokens a decoding request has; see `choose_prefill`.

    On sm_90 hopper-decode is chosen where it takes the layer. kernel: "hopper-decode" or "portable-decode" insists on
    one of them: raises UnsupportedShape where it does not take the layer, ValueError for another name.
    """
    own = kernels != "triton" or mapping is not None
    if not own and aiter_adapter.chosen(
        "decode", shape, topology, aiter, features, max_decode_query=max_decode_query
    ):
        return Variant(aiter_adapter.DECODE, "decode", 16, aiter_adapter.PARTITION, 4, 1, 1, "block-first", 1)
    packed = next_power_of_2(shape.group * max_decode_query)
    rows = min(max(packed, MIN_DOT_ROWS), DECODE_MAX_ROWS)
    known = (hopper_variant.NAME, "portable-decode")
    hopper_obstacle = _hopper_obstacle(shape, topology, kernels, kernel, known, hopper_variant.why_not)
    obstacle = _cdna5_obstacle(shape, topology, kernels)
    per_unit = None
    if hopper_obstacle is None:
        rows = hopper_variant.rows_of(packed)
        hopper = hopper_variant.tile_of(shape, rows)
        name, form, per_unit = hopper_variant.NAME, hopper.form, hopper.workgroups_per_unit
        tile = Tile(MAX_HEAD_DIM, rows, hopper.block_n, 4, hopper.stages)
    elif obstacle is None:
        cdna5 = cdna5_variant.tile_of(shape)
        name, form, buffers = "cdna5-decode", cdna5.form, cdna5_variant.FORMS.index(cdna5.form) + 1
        tile = Tile(MAX_HEAD_DIM, rows, cdna5.block_n, rows // MIN_DOT_ROWS, buffers)  # a warp has 16 rows
    else:
        name, form = "portable-decode" if kernels == "triton" else "torch-decode", ""
        tile = _tile(DECODE_TILES, shape, topology, rows)
        rows = max(rows, tile.least_rows)
    variant = Variant(
        name,
        "decode",
        rows,
        tile.block_n,
        tile.num_warps,
        tile.num_stages,
        _decode_workgroups(shape, topology, tile, per_unit),
        _decode_mapping(mapping),
        topology.dispatch_domains,
        form,
        _not_taken("cdna5-decode", obstacle) or _not_taken(hopper_variant.NAME, hopper_obstacle),
        in_float16=_in_float16(shape, topology),
        two_terms=tile.two_terms,
        staged_values=tile.staged_values,
    )
    return with_matrix_shape(variant, shape, topology)


def _in_float16(shape: LayerShape, topology: Topology) -> bool:
    """Where float8 becomes float16 in fewer instructions than bfloat16; not so on AMD."""
    return shape.kv_dtype in FLOAT8 and shape.dtype == torch.bfloat16 and family(topology) != "amd"


def choose_extend(shape: LayerShape, topology: Topology, kernels: str, mapping: str | None = None) -> Variant:
    """The variant for a few query tiles over a long cached prefix, which a prefill launch would not fill a device with.

    It is the portable decode kernel with its splits and its tallest tile; how many row blocks there are follows the
    step.
    """
    tile = _tile(DECODE_TILES, shape, topology, DECODE_MAX_ROWS)
    variant = Variant(
        "portable-extend" if kernels == "triton" else "torch-extend",
        "extend",
        DECODE_MAX_ROWS,
        tile.block_n,
        tile.num_warps,
        tile.num_stages,
        _decode_workgroups(shape, topology, tile),
        _decode_mapping(mapping),
        topology.dispatch_domains,
        in_float16=_in_float16(shape, topology),
        two_terms=tile.two_terms,
        staged_values=tile.staged_values,
    )
    return with_matrix_shape(variant, shape, topology)


def _decode_workgroups(shape: LayerShape, topology: Topology, tile: Tile, per_unit: int | None = None) -> int:
    """Workgroups that fill a device, a multiple of its domains. per_unit: of a compute unit, None for the model's."""
    domains = topology.dispatch_domains
    tile_bytes = tile.block_n * (shape.head_dim + shape.head_dim_v) * shape.kv_dtype.itemsize
    workgroups = topology.compute_units
    if topology.generation != "cpu":
        workgroups *= per_unit or dispatch.workgroups_per_unit(
            machine_of(topology), tile_bytes * tile.num_stages
        )
    return -(-workgroups // domains) * domains


def _decode_mapping(mapping: str | None) -> str:
    """A work list is head-first by construction (one tile holds a whole group): only the placement varies."""
    if mapping is None:
        return dispatch.DECODE_MAPPING
    return "swizzled-head-first" if mapping.startswith("swizzled") else "head-first"


def _cdna5_obstacle(shape: LayerShape, topology: Topology, kernels: str) -> str | None:
    """Why the kernels for gfx1250 do not run a layer: None if they do, "" on devices that they are not for."""
    if topology.generation != "gfx1250" or kernels != "triton":
        return ""
    return cdna5_variant.why_not(shape, triton_release())


def _hopper_obstacle(
    shape: LayerShape, topology: Topology, kernels: str, kernel: str | None, known: tuple[str, str], why_not: Callable
) -> str | None:  # fmt: skip
    """Why a kernel for sm_90 does not run a layer: None if it does, "" where it is not meant to.

    kernel: the one of `known`, that for sm_90 and the portable one, that is insisted on.
    """
    if kernel is not None and kernel not in known:
        raise ValueError(f"kernel={kernel!r} is unknown: {' and '.join(known)} are the ones to ask for.")
    own, portable = known
    meant = topology.generation == "sm_90" and kernels == "triton"
    if kernel == own and not meant:
        raise UnsupportedShape(
            f"{own} runs on sm_90 with Triton, not on {topology.generation} with {kernels}."
        )
    if not meant or kernel == portable:
        return ""
    reason = why_not(shape, triton_release())
    if kernel == own and reason is not None:
        raise UnsupportedShape(f"{own} {reason}.")
    return reason


def _not_taken(name: str, obstacle: str | None) -> str:
    """What the log says of a kernel that does not take a layer that it is meant for."""
    return f"{name} {obstacle}" if obstacle else ""

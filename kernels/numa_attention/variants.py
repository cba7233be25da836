"""The table of kernel variants: phase x GQA shape x dtype x generation -> kernel and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from numa_attention.shapes import LayerShape
from numa_attention.topology import Topology

MIN_DOT_ROWS = 16  # the fewest rows a matrix instruction of any generation takes


@dataclass(frozen=True)
class Variant:
    """One way to run one phase of one layer shape.

    block_m: rows of the packed GQA tile (query positions x query heads of one KV head). block_n: KV tokens a tile.
    workgroups: workgroups of a decode launch, 0 for prefill, whose grid follows the step. mapping, domains: which
    workgroup takes which tile.
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

    def describe(self) -> str:
        """One line for the log: kernel, tile, mapping."""
        grid = f", {self.workgroups} workgroups, splits merged by the last arriver" if self.workgroups else ""
        return (
            f"variant {self.name}, tile {self.block_m} x {self.block_n}{grid}, "
            f"mapping {self.mapping} over {self.domains} domain{'s' if self.domains != 1 else ''}"
        )


@dataclass(frozen=True)
class Tile:
    """Tile sizes of one kernel for head sizes up to `head_dim`, per bytes of a cached element."""

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (generation family, bytes of a query element) -> tiles by growing head_dim; block_m of decode follows the group
PREFILL_TILES = {
    ("nvidia", 2): (Tile(64, 128, 128, 8, 3), Tile(128, 128, 64, 8, 3), Tile(256, 128, 64, 8, 2)),
    ("nvidia", 4): (Tile(64, 64, 64, 4, 2), Tile(128, 64, 32, 4, 2), Tile(256, 32, 32, 4, 2)),
    ("amd", 2): (Tile(64, 128, 64, 4, 2), Tile(128, 128, 64, 8, 1), Tile(256, 64, 32, 4, 1)),
    ("amd", 4): (Tile(64, 64, 32, 4, 1), Tile(128, 64, 32, 4, 1), Tile(256, 32, 16, 4, 1)),
    ("cpu", 2): (Tile(256, 128, 128, 1, 1),),
    ("cpu", 4): (Tile(256, 128, 128, 1, 1),),
}
DECODE_TILES = {
    ("nvidia", 2): (Tile(64, 0, 128, 4, 3), Tile(128, 0, 64, 4, 3), Tile(256, 0, 32, 4, 3)),
    ("nvidia", 4): (Tile(64, 0, 64, 4, 2), Tile(128, 0, 32, 4, 2), Tile(256, 0, 16, 4, 2)),
    ("amd", 2): (Tile(64, 0, 64, 4, 2), Tile(128, 0, 64, 4, 1), Tile(256, 0, 32, 4, 1)),
    ("amd", 4): (Tile(64, 0, 32, 4, 1), Tile(128, 0, 32, 4, 1), Tile(256, 0, 16, 4, 1)),
    ("cpu", 2): (Tile(256, 0, 64, 1, 1),),
    ("cpu", 4): (Tile(256, 0, 64, 1, 1),),
}
DECODE_MAX_ROWS = 64  # a larger packed tile is cut into row blocks, each of which reads the KV again
FOUR_WARPS_ELEMENTS = 64 * 128  # float32 elements of the accumulator that the registers of four warps hold
DECODE_WORKGROUPS_PER_UNIT = {"nvidia": 2, "amd": 2, "cpu": 1}
TORCH_BLOCK_M = 512  # a tile of the torch kernels is a matrix product: fewer, taller ones gather K and V less often
MAPPING = "swizzled-head-first"


def family(topology: Topology) -> str:
    """ "cpu", "amd" or "nvidia": whose tile sizes a device takes."""
    if topology.generation == "cpu":
        return "cpu"
    if topology.generation.startswith("gfx") or (topology.generation == "gpu" and torch.version.hip):
        return "amd"
    return "nvidia"


def _tile(table: dict[tuple[str, int], tuple[Tile, ...]], shape: LayerShape, topology: Topology) -> Tile:
    head_dim = max(shape.head_dim, shape.head_dim_v)
    for tile in table[family(topology), shape.dtype.itemsize]:
        if head_dim <= tile.head_dim:
            return tile
    raise ValueError(f"no variant for head_dim {head_dim}: the largest is 256")


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for values below 1)."""
    return 1 << max(value - 1, 0).bit_length()


def choose_prefill(
    shape: LayerShape, topology: Topology, kernels: str, mapping: str | None = None
) -> Variant:
    """The prefill variant for a layer shape. kernels: "triton" or "torch"."""
    tile = _tile(PREFILL_TILES, shape, topology)
    if kernels == "torch":
        tile = replace(tile, block_m=TORCH_BLOCK_M)
    name = "portable-prefill" if kernels == "triton" else "torch-prefill"
    return Variant(
        name,
        "prefill",
        tile.block_m,
        tile.block_n,
        tile.num_warps,
        tile.num_stages,
        0,
        mapping or MAPPING,
        topology.dispatch_domains,
    )


def choose_decode(
    shape: LayerShape, topology: Topology, kernels: str, max_decode_query: int, mapping: str | None = None
) -> Variant:
    """The decode variant for a layer shape and the most query tokens a decoding request has."""
    tile = _tile(DECODE_TILES, shape, topology)
    rows = next_power_of_2(shape.group * max_decode_query)
    if family(topology) == "nvidia":
        if rows * shape.head_dim_v > FOUR_WARPS_ELEMENTS:
            tile = replace(tile, num_warps=8)
        elif rows <= MIN_DOT_ROWS and shape.dtype.itemsize == 2 and shape.page_size % tile.block_n:
            # a tile that crosses pages spends instructions on addresses: fewer, wider tiles hide them
            tile = replace(tile, block_n=2 * tile.block_n, num_stages=2)
    name = "portable-decode" if kernels == "triton" else "torch-decode"
    domains = topology.dispatch_domains
    workgroups = topology.compute_units * DECODE_WORKGROUPS_PER_UNIT[family(topology)]
    # a decode work list is head-first by construction (one tile holds a whole group): only the placement varies
    if mapping is not None:
        mapping = "swizzled-head-first" if mapping.startswith("swizzled") else "head-first"
    return Variant(
        name,
        "decode",
        min(max(rows, MIN_DOT_ROWS), DECODE_MAX_ROWS),
        tile.block_n,
        tile.num_warps,
        tile.num_stages,
        -(-workgroups // domains) * domains,
        mapping or MAPPING,
        domains,
    )

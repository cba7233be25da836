"""One forward launch, as the cache model sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from . import ModelError

MAPPINGS = ("block-first", "swizzled-block-first", "head-first", "swizzled-head-first")


@dataclass(frozen=True)
class Grid:
    """A forward launch: heads, tokens, elements; every request has the same length.

    mapping: one of MAPPINGS. block_m: query rows a workgroup. block_n: tokens of a K/V tile.
    query_length: query rows of a head, 0 for as many as tokens; a tile that packs a GQA group has more.
    domains: NUMA domains that the mapping swizzles over. longest_first: the last query blocks start first.
    in_waves: as many workgroups as there are units start together, when all before them are done. alternate: every
    other wave walks its K/V tiles from the last to the first.
    """

    mapping: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    block_m: int = 128
    block_n: int = 64
    causal: bool = False
    domains: int = 1
    longest_first: bool = False
    element_bytes: int = 2
    query_length: int = 0
    in_waves: bool = False
    alternate: bool = False

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def blocks(self) -> int:
        """Query blocks of one head."""
        return -(-(self.query_length or self.length) // self.block_m)

    @property
    def tiles(self) -> int:
        """K/V tiles of one stream."""
        return -(-self.length // self.block_n)

    @property
    def workgroups(self) -> int:
        return self.batch * self.q_heads * self.blocks

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile of K and one of V."""
        return 2 * self.block_n * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of the query rows of one workgroup, or of its output rows."""
        return self.block_m * self.head_dim * self.element_bytes

    def walk(self, block: int) -> int:
        """K/V tiles that query block number `block` visits."""
        if not self.causal:
            return self.tiles
        return min(self.tiles, -(-(block + 1) * self.block_m // self.block_n))

    def walks(self) -> Iterator[int]:
        return (self.walk(block) for block in range(self.blocks))

    @cached_property
    def visits(self) -> int:
        """Tile visits of the whole launch."""
        return self.batch * self.q_heads * sum(self.walks())

    @property
    def flops(self) -> float:
        """Operations that count: both products, half of the square under a causal mask."""
        pairs = (self.query_length or self.length) * self.length * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * self.q_heads * pairs * self.head_dim

    @property
    def requested_bytes(self) -> int:
        """What all workgroups ask the L2 for: K, V and Q read, O written."""
        return self.visits * self.tile_bytes + 2 * self.workgroups * self.block_bytes

    def check(self) -> None:
        """Raises ModelError, one sentence, where the shape is impossible."""
        if self.mapping not in MAPPINGS:
            raise ModelError(f"unknown mapping {self.mapping!r}: choose one of {', '.join(MAPPINGS)}.")
        if self.query_length < 0:
            raise ModelError(f"query_length is {self.query_length}: it must not be negative.")
        for name in (
            "batch",
            "q_heads",
            "kv_heads",
            "length",
            "head_dim",
            "block_m",
            "block_n",
            "domains",
            "element_bytes",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if self.q_heads % self.kv_heads:
            raise ModelError(
                f"q_heads is {self.q_heads}: it must be a multiple of kv_heads, which is {self.kv_heads}."
            )

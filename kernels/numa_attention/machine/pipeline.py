"""Issue and pipeline: commands a PE issues, utilisation of its MAC array, latency that decode loops leave exposed."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from . import ModelError

DECODE_TILE_TOKENS = 1024  # tokens of a hand-issued tile


@dataclass(frozen=True)
class CommandCounts:
    """Commands of one decode step: those that do not depend on the context, and those of each hand-issued tile.

    The primitive form issues `tile` commands per tile. The composite forms hand the tiling to the scheduler, whatever
    the context: the plain one takes `step` commands less than a single tile, the one with the merge in it `step` more.
    """

    fixed: int
    tile: int
    step: int

    def primitive_total(self, local_tokens: int) -> int:
        return self.fixed + self.tile * tiles(local_tokens)

    def composite_total(self) -> int:
        return self.fixed + self.tile - self.step

    def composite_merge_total(self) -> int:
        return self.fixed + self.tile + self.step


def tiles(local_tokens: int) -> int:
    """Hand-issued tiles of a PE's tokens."""
    if local_tokens < 1:
        raise ModelError(f"local_tokens is {local_tokens}: it must be at least 1.")
    return ceil(local_tokens / DECODE_TILE_TOKENS)


def counts_from(one_tile: int, many: int, many_tiles: int, composite: int) -> CommandCounts:
    """The three counts behind the primitive form's totals at one tile and at `many_tiles`, and the composite form's.

    Raises ModelError where the totals do not lie on a line with a whole number of commands per tile.
    """
    each, rest = divmod(many - one_tile, many_tiles - 1)
    if rest:
        raise ModelError(
            f"{one_tile} to {many} commands over {many_tiles} tiles is no whole number per tile."
        )
    return CommandCounts(one_tile - each, each, one_tile - composite)


def attention_flops(rows: int, context: int, head_dim: int) -> float:
    """Operations of both products for `rows` query rows (positions x query heads of a KV head)."""
    return 4.0 * rows * context * head_dim


def utilisation(rows: int, context: int, head_dim: int, peak: float, seconds: float) -> float:
    """Share of the peak that a prefill reached."""
    return attention_flops(rows, context, head_dim) / peak / seconds


@dataclass(frozen=True)
class LoopStages:
    """Durations of one iteration of a decode loop, in cycles.

    load: latency of a K/V tile. qk, pv: the two products on the matrix unit. vec0, vec1: the halves of the softmax.
    """

    load: float
    qk: float
    vec0: float
    vec1: float
    pv: float

    @property
    def matrix(self) -> float:
        return self.qk + self.pv

    @property
    def vector(self) -> float:
        return self.vec0 + self.vec1

    def single(self) -> float:
        """Exposed cycles where each step waits for the one before: everything but the products."""
        return self.load + self.vector

    def two_stage(self) -> float:
        """Loading overlaps computing: what is left is the softmax, or the part of the load longer than computing."""
        return max(self.load, self.matrix + self.vector) - self.matrix

    def four_stage(self, loads_ahead: int = 2) -> float:
        """Each half of the softmax runs beside a product of the next tile, loads run `loads_ahead` iterations ahead."""
        period = max(self.qk, self.vec0) + max(self.pv, self.vec1)
        return max(self.load / loads_ahead, period) - self.matrix


def stages_from(two_stage: float, four_stage: float, load: float) -> LoopStages:
    """Stages with two equal halves that leave these cycles exposed; `load` must be hidden by the two-stage loop.

    Two stages expose the softmax; four hide under each half of it one product: each takes (two - four) / 2.
    """
    half, product = two_stage / 2, (two_stage - four_stage) / 2
    if load > two_stage + 2 * product:
        raise ModelError(
            f"a load of {load} cycles is not hidden by a two-stage loop of {two_stage + 2 * product}."
        )
    return LoopStages(load, product, half, half, product)

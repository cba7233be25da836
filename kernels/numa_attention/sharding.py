"""Which tokens of a sequence a rank holds, where the KV cache is sharded over ranks along the sequence.

::

    ranks 2, interleave 4          position  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 ...
                                   rank      0       | 1       | 0         | 1
    in the cache of rank 0         token     0 1 2 3             4 5 6  7

Runs of `interleave` tokens are dealt to the ranks in turn. A rank keeps its tokens in the order of their positions,
without gaps, so that the keys that a query sees are one run of the rank's cache too: `Shard.count` turns both ends of
a run of positions into those of a run of tokens. Everything follows from positions. The difference of two local lengths
says nothing: of 4 new tokens a rank may hold any number from 0 to 4.

Imports neither torch nor Triton; `sharding_device.py` is the form that kernels use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Numbers = TypeVar("Numbers")  # an int, or integers in a numpy array or a torch tensor


@dataclass(frozen=True)
class Shard:
    """The part of every sequence that rank `rank` of `ranks` holds, in runs of `interleave` tokens."""

    ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.interleave < 1:
            raise ValueError(
                f"a sequence cannot be sharded over {self.ranks} ranks in runs of {self.interleave} tokens: "
                "both must be at least 1"
            )
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is none of {self.ranks}: they are numbered from 0")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}, runs of {self.interleave}"

    @property
    def is_whole(self) -> bool:
        """Whether this one rank holds every token."""
        return self.ranks == 1

    def count(self, length: Numbers) -> Numbers:
        """How many of the first `length` >= 0 tokens of a sequence the rank holds, element by element.

        That is also the place, in the rank's cache, of its first token at a position >= length.
        """
        if self.is_whole:
            return length
        period = self.ranks * self.interleave
        # clamped by products, which numbers, arrays and tensors all have
        rest = length % period - self.rank * self.interleave
        rest = rest * (rest > 0)
        over = rest - self.interleave
        return length // period * self.interleave + rest - over * (over > 0)

    def position(self, token: Numbers) -> Numbers:
        """The position, in its sequence, of token number `token` of the rank's cache, element by element."""
        if self.is_whole:
            return token
        return (token // self.interleave * self.ranks + self.rank) * self.interleave + token % self.interleave

    def most(self, length: int) -> int:
        """The most tokens that any rank holds of a sequence of `length`."""
        return Shard(self.ranks, 0, self.interleave).count(length)


WHOLE = Shard()

"""The ranks that hold the shards of a sequence, and the collectives between them.

Rank r of the group holds `sharding.Shard(size, r, interleave)`. All ranks make the same calls in the same order, with
tensors of the same sizes. A rank that dies or stalls ends the call of every other one in LostRank: on a CPU at once, or
after the time limit of the process group. On GPUs a collective is only put into the queue, and NCCL's watchdog ends the
process after that limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

# the names that torch gave them in 2.13, and those from before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class LostRank(RuntimeError):
    """Another rank did not take part in a merge or a collective: it has died, stalls, or failed in its own part."""


class Ranks:
    """The ranks of a process group, which need not be the whole world."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self._lost: LostRank | None = None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, [size, *x.shape]. Raises LostRank."""
        return self._together("all-gather", self._all_gather, x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of their x[own rank], for x [size, ...]. Raises LostRank."""
        return self._together("reduce-scatter", self._reduce_scatter, x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """x[own rank] of every rank, [size, ...], for x [size, ...]. Raises LostRank."""
        return self._together("all-to-all", self._all_to_all, x)

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        _all_gather(gathered.view(-1), x.view(-1), group=self.group)
        return gathered

    def _reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_empty(x.shape[1:])
        _reduce_scatter(total.view(-1), x.view(-1), group=self.group)
        return total

    def _all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self.group)
        return received

    def _together(self, name: str, collective: Callable, x: torch.Tensor) -> torch.Tensor:
        if self._lost is not None:
            # whatever arrives now may belong to the call that failed
            raise self._lost
        try:
            return collective(x.contiguous())
        except RuntimeError as error:
            self._lost = LostRank(
                f"rank {self.rank} of {self.size} waited in vain for the others in an {name} of shards of attention: "
                f"one of them has died, stalls, or has failed; its log says why. Start all ranks again. ({error})"
            )
            raise self._lost from error

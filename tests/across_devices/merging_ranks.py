"""What the tests of merging across devices share: random partials, the expected merges, launches of every rank."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from numa_attention.across_devices import Workspace, merge
from numa_attention.jit import interpreting
from numa_attention.merge import merge_states

# ranks of one process, or of processes that share the host's memory; test_merge_on_gpus.py runs compiled kernels
interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are compiled where there is a GPU")


@dataclass
class Step:
    """One merge of all ranks. outs, lses: by rank, of all heads; merged, merged_lses: by rank, of its own heads."""

    outs: list[torch.Tensor]
    lses: list[torch.Tensor]
    merged: list[torch.Tensor]
    merged_lses: list[torch.Tensor]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [tokens, q_heads, head_dim_v] and LSEs of all heads in float64."""
        outs = torch.stack([out.double() for out in self.outs])
        return merge_states(outs, torch.stack([lse.double() for lse in self.lses]))

    def check(self, ranks=None, tolerance: float = 1e-5) -> None:
        """Each of `ranks`, all if None, has the merge of its own heads."""
        out, lse = self.expected()
        world, heads = len(self.outs), self.merged[0].shape[1]
        for rank in range(world) if ranks is None else ranks:
            own = slice(rank * heads, (rank + 1) * heads)
            torch.testing.assert_close(
                self.merged[rank].double(), out[:, own], rtol=tolerance, atol=tolerance
            )
            torch.testing.assert_close(self.merged_lses[rank].double(), lse[:, own], rtol=1e-5, atol=1e-5)

    def run(self, rank: int, workspace: Workspace) -> None:
        merge(self.outs[rank], self.lses[rank], workspace, self.merged[rank], self.merged_lses[rank])


def random_step(
    world: int,
    tokens: int,
    q_heads: int,
    head_dim_v: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    merged_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Step:
    """Random partials of very different weight. Every seventh row is empty on one rank, every eleventh on all; the
    outputs of empty rows are NaN, as are the results before they are merged."""
    random = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    number = torch.arange(tokens * q_heads).reshape(tokens, q_heads)
    for rank in range(world):
        out = torch.randn(tokens, q_heads, head_dim_v, generator=random)
        lse = torch.randn(tokens, q_heads, generator=random) * 10
        empty = (number % 7 == rank) | (number % 11 == 10)
        lse[empty] = -torch.inf
        out[empty] = torch.nan
        outs.append(out.to(device, dtype))
        lses.append(lse.to(device))
    own = (tokens, q_heads // world)

    def unset(*size: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.full(size, torch.nan, dtype=dtype, device=device) for _ in range(world)]

    return Step(
        outs, lses, unset(*own, head_dim_v, dtype=merged_dtype), unset(*own, dtype=torch.float32)
    )  # fmt: skip

"""Several ranks in one process: pieces of memory that stand for those of several GPUs."""

from __future__ import annotations

import torch

from numa_attention.across_devices import Workspace, bytes_needed
from numa_attention.peer_memory import PeerMemory


def pretend_memories(world: int, size: int, device: torch.device | str = "cpu") -> list[PeerMemory]:
    """Zeroed pieces of `size` bytes for `world` ranks on one device; on a CPU shared with processes forked later."""
    pieces = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
    if torch.device(device).type == "cpu":
        pieces = [piece.share_memory_() for piece in pieces]
    addresses = tuple(piece.data_ptr() for piece in pieces)
    return [PeerMemory(piece, addresses, rank, keep=pieces) for rank, piece in enumerate(pieces)]


def pretend_workspaces(
    world: int,
    *,
    max_tokens: int,
    q_heads: int,
    head_dim_v: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options,
) -> list[Workspace]:
    """A workspace for each of `world` ranks on one device, whose partials are NaN before the first launch.

    options: those of `Workspace`.
    """
    size = bytes_needed(world, max_tokens, q_heads, head_dim_v, dtype)
    workspaces = [
        Workspace(
            memory, max_tokens=max_tokens, q_heads=q_heads, head_dim_v=head_dim_v, dtype=dtype, **options
        )
        for memory in pretend_memories(world, size, device)
    ]
    for workspace in workspaces:
        poison(workspace)
    return workspaces


def poison(workspace: Workspace) -> None:
    """Fill the LSEs and partials that a rank's memory holds with NaN."""
    constants, own = workspace._constants, workspace.memory.own
    own[constants["LSE_BYTES"] : constants["PARTIAL_BYTES"]].view(torch.float32).fill_(torch.nan)
    own[constants["PARTIAL_BYTES"] :].view(workspace.dtype).fill_(torch.nan)

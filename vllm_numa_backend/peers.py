"""Merging across ranks in a kernel, where NUMA_SWIZZLE_EXCHANGE=peers asks for it and GPUs reach each other's memory.

All layers whose results have one size share a workspace. A step of more tokens than it holds, such as a prefill, is
merged by collectives, on every rank alike.
"""

from __future__ import annotations

import torch
from vllm.logger import init_logger

from numa_attention import across_devices
from numa_attention.across_devices import Workspace
from numa_attention.peer_memory import Unreachable
from numa_attention.ranks import Ranks
from numa_attention.shapes import LayerShape
from vllm_numa_backend import NAME, settings

EXCHANGE = "peers"
MOST_TOKENS = 1024  # of a step that is merged in a kernel: as many rows for every rank are held twice

logger = init_logger("vllm.numa_swizzle")
# (query heads of all ranks, columns) -> None where the ranks cannot reach each other's memory
_workspaces: dict[tuple[int, int], Workspace | None] = {}


def join(ranks: Ranks, shape: LayerShape, device: torch.device, max_tokens: int) -> None:
    """Make ready to merge layers of this shape in a kernel, if the setting says so and it has not been done yet.

    max_tokens: query tokens of the largest step. All ranks call this together, and the log says what came of it.
    """
    key = shape.q_heads, shape.head_dim_v
    if settings.current().exchange != EXCHANGE or key in _workspaces:
        return
    most = min(max_tokens, MOST_TOKENS)
    try:
        _workspaces[key] = across_devices.allocate(
            ranks.group, device, max_tokens=most, q_heads=shape.q_heads, head_dim_v=shape.head_dim_v
        )
    except Unreachable as reason:
        _workspaces[key] = None
        logger.warning(
            "%s merges what ranks found by collectives, although NUMA_SWIZZLE_EXCHANGE=%s: %s",
            NAME, EXCHANGE, reason,
        )  # fmt: skip
        return
    logger.info(
        "%s merges what %d ranks found in a kernel, in steps of up to %d tokens; longer ones by collectives",
        NAME, ranks.size, most,
    )  # fmt: skip


def workspace_for(shape: LayerShape, tokens: int) -> Workspace | None:
    """What merges a step of so many tokens, None where collectives do."""
    workspace = _workspaces.get((shape.q_heads, shape.head_dim_v))
    return workspace if workspace is not None and tokens <= workspace.max_tokens else None


def check() -> None:
    """Raises LostRank if a rank was missed in an earlier step."""
    for workspace in _workspaces.values():
        if workspace is not None:
            workspace.check()

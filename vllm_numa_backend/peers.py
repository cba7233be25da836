"""Exchanging between ranks in kernels, where NUMA_SWIZZLE_EXCHANGE=peers asks and GPUs reach each other's memory.

All layers of one size share their workspaces. A step of more tokens than these hold, such as a prefill, is exchanged by
collectives, on every rank alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.logger import init_logger

from numa_attention import across_devices
from numa_attention.across_devices import Workspace
from numa_attention.peer_memory import Unreachable
from numa_attention.ranks import Ranks
from numa_attention.shapes import LayerShape
from vllm_numa_backend import NAME, settings

EXCHANGE = "peers"
MOST_TOKENS = 1024  # of a step that is exchanged in kernels: as many rows for every rank are held twice

logger = init_logger("vllm.numa_swizzle")


class Workspaces(NamedTuple):
    """Of the queries, which all ranks need of all, and of the partial results."""

    queries: Workspace
    partials: Workspace


# query heads of all ranks, columns of keys and of values, type of the queries -> None where the ranks cannot reach each
# other's memory
_workspaces: dict[tuple[int, int, int, torch.dtype], Workspaces | None] = {}


def _key(shape: LayerShape) -> tuple[int, int, int, torch.dtype]:
    return shape.q_heads, shape.head_dim, shape.head_dim_v, shape.dtype


def join(ranks: Ranks, shape: LayerShape, device: torch.device, max_tokens: int) -> None:
    """Make ready to exchange for layers of this shape in kernels, if the setting says so and it has not been done yet.

    max_tokens: query tokens of the largest step. All ranks call this together, and the log says what came of it.
    """
    key = _key(shape)
    if settings.current().exchange != EXCHANGE or key in _workspaces:
        return
    most = min(max_tokens, MOST_TOKENS)
    try:
        queries, partials = (
            across_devices.allocate(
                ranks.group, device, max_tokens=most, q_heads=shape.q_heads, head_dim_v=columns, dtype=dtype
            )
            for columns, dtype in ((shape.head_dim, shape.dtype), (shape.head_dim_v, torch.float32))
        )
        _workspaces[key] = Workspaces(queries, partials)
    except Unreachable as reason:
        _workspaces[key] = None
        logger.warning(
            "%s exchanges between ranks by collectives, although NUMA_SWIZZLE_EXCHANGE=%s: %s",
            NAME, EXCHANGE, reason,
        )  # fmt: skip
        return
    logger.info(
        "%s exchanges between %d ranks in kernels, in steps of up to %d tokens; in longer ones by collectives",
        NAME, ranks.size, most,
    )  # fmt: skip


def workspaces_for(shape: LayerShape, tokens: int) -> Workspaces | None:
    """What exchanges in a step of so many tokens, None where collectives do."""
    found = _workspaces.get(_key(shape))
    return found if found is not None and tokens <= found.partials.max_tokens else None


def check() -> None:
    """Raises LostRank if a rank was missed in an earlier step."""
    for found in _workspaces.values():
        for workspace in found or ():
            workspace.check()

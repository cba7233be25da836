"""What no kernel goes beyond, in plain Python: for those who ask before torch is imported."""

from __future__ import annotations

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


def fault_of_head_dim(head_dim: int) -> str | None:
    """What is wrong with a head size, to follow its name and value: "is above 256". None where kernels take it."""
    if head_dim > MAX_HEAD_DIM:
        return f"is above {MAX_HEAD_DIM}"
    if head_dim < 1 or head_dim % HEAD_DIM_MULTIPLE:
        return f"is not a positive multiple of {HEAD_DIM_MULTIPLE}"
    return None

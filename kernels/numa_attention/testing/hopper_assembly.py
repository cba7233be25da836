"""What the inline assembly of the sm_90 kernels computes, for the Gluon interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numa_attention.decode.hopper_products import UNPACK_E4M3, UNPACK_E5M2
from numa_attention.testing.gluon import register_asm


def _unpack(float8: torch.dtype) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def model(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int16 words of two float8 numbers -> float16 of the lower bytes, and of the upper ones."""
        numbers = words.contiguous().view(float8).to(torch.float16).unflatten(-1, (-1, 2))
        return numbers[..., 0], numbers[..., 1]

    return model


def register() -> None:
    """Make the assembly known to the interpreter."""
    register_asm(UNPACK_E4M3.value, _unpack(torch.float8_e4m3fn))
    register_asm(UNPACK_E5M2.value, _unpack(torch.float8_e5m2))

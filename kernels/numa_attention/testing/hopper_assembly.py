"""What the inline assembly of the sm_90 kernels computes, for the Gluon interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch

from numa_attention.decode.hopper_products import UNPACK_E4M3, UNPACK_E5M2
from numa_attention.placement_device import SM_ID
from numa_attention.prefill.hopper_float8 import SPLIT
from numa_attention.testing.gluon import register_asm

SMS = 5  # that the interpreter pretends to have


def _unpack(float8: torch.dtype) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def model(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int16 words of two float8 numbers -> float16 of the lower bytes, and of the upper ones."""
        numbers = words.contiguous().view(float8).to(torch.float16).unflatten(-1, (-1, 2))
        return numbers[..., 0], numbers[..., 1]

    return model


_sm_ids = count()


def _some_sm() -> torch.Tensor:
    """Three workgroups in turn on an SM: unevenly over domains that have every other SM."""
    return torch.tensor(next(_sm_ids) // 3 % SMS, dtype=torch.int32)


def _split(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 numbers -> e4m3 of four bits, halves away from zero, and e4m3 of what float16 has left."""
    half = numbers.half()
    high = ((half.view(torch.int16) + 0x40) & -0x80).view(torch.float16)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return tuple(x.clamp(-largest, largest).to(torch.float8_e4m3fn) for x in (high, half - high))


def register() -> None:
    """Make the assembly known to the interpreter."""
    register_asm(SM_ID, _some_sm)
    register_asm(UNPACK_E4M3.value, _unpack(torch.float8_e4m3fn))
    register_asm(UNPACK_E5M2.value, _unpack(torch.float8_e5m2))
    register_asm(SPLIT.value, _split)

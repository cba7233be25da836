"""How a kernel runs: compiled by Triton, interpreted on the CPU, or replaced by torch.

Importing this file imports neither Triton nor any kernel.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from numa_attention.direct_launch import Direct

SETTING = "NUMA_SWIZZLE_KERNELS"
CHOICES = ("auto", "triton", "torch", "interpret")
_TRUTHY = frozenset({"1", "true", "on", "yes", "y"})


class MissingTriton(ImportError):
    """Triton was asked for and cannot be imported."""


def require_triton() -> None:
    """Import Triton, or raise MissingTriton, which says how to get along without it."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise MissingTriton(
            f"Triton cannot be imported ({error}): install it with `pip install 'triton>=3.6'`, "
            f"or set {SETTING}=torch to run without it."
        ) from error


def interpreting() -> bool:
    """Whether kernels built now are to run under Triton's interpreter.

    True if NUMA_SWIZZLE_KERNELS=interpret, or if TRITON_INTERPRET is set as Triton itself understands it.
    """
    return (
        os.environ.get(SETTING, "").strip().lower() == "interpret"
        or os.environ.get("TRITON_INTERPRET", "").strip().lower() in _TRUTHY
    )


def kernel(fn: Callable | None = None, **options):
    """The decorator of every Triton kernel and device function here.

    `fn` becomes a compiled kernel, or an interpreted one where `interpreting()`: decided once, when the
    kernel's file is imported. `options` are those of `triton.jit`, for instance
    `@kernel(do_not_specialize=["tokens"])`.

    Raises MissingTriton.
    """
    if fn is None:
        return lambda fn: kernel(fn, **options)
    require_triton()
    if interpreting():
        from numa_attention.testing import interpreter

        interpreter.enable()
        return interpreter.interpret(fn, **options)
    import triton

    return triton.jit(fn, **options)


def gluon_entry(kernel, target: str = "gfx1250"):
    """A `@gluon.jit` kernel as launch code takes it: itself, or in the Gluon interpreter where `interpreting()`.

    target: the generation that the interpreter pretends to be.
    """
    if interpreting():
        from numa_attention.testing import interpret

        return interpret(kernel, target=target)
    return kernel


def triton_release() -> tuple[int, int] | None:
    """Major and minor number of the Triton that would run, None where there is none."""
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def resolve(kernels: str, device: torch.device) -> str:
    """Turn a `kernels` argument into what really runs on `device`: "triton" or "torch".

    "auto" is torch on a CPU unless `interpreting()`, else Triton; "interpret" insists on the interpreter.

    Raises ValueError for a choice that is unknown or cannot run there, MissingTriton where Triton is needed.
    """
    if kernels not in CHOICES:
        raise ValueError(f"kernels={kernels!r} is unknown: choose one of {', '.join(CHOICES)}.")
    if kernels == "interpret" and not interpreting():
        raise ValueError(
            f"kernels='interpret' needs {SETTING}=interpret set before the kernels are imported."
        )
    on_cpu = device.type == "cpu"
    if kernels == "torch" or (kernels == "auto" and on_cpu and not interpreting()):
        return "torch"
    if on_cpu and not interpreting():
        raise ValueError(
            f"kernels='triton' needs tensors on a GPU, these are on the CPU: "
            f"set {SETTING}=interpret to interpret the kernels, or {SETTING}=torch."
        )
    require_triton()
    return "triton"


BUFFER_BYTES = (1 << 31) - 1  # AMD's buffer instructions address one storage of at most so many bytes


def pointer_traits(*tensors: torch.Tensor) -> tuple[int, ...]:
    """What Triton compiles differently for pointers: alignment to 16 bytes and, on AMD, a storage beyond 2 GB."""
    if _on_amd():
        return tuple(
            [x.data_ptr() & 15 | (x.untyped_storage().nbytes() > BUFFER_BYTES) << 4 for x in tensors]
        )
    return tuple([x.data_ptr() & 15 for x in tensors])


@cache
def _on_amd() -> bool:
    import torch

    return torch.version.hip is not None


class Launcher:
    """Launches one kernel in little CPU time: Triton analyses the arguments once per `key`, not at every call."""

    def __init__(self, kernel) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, tuple[Callable, Direct | None]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        arguments: tuple,
        constants: dict,
        options: dict | None = None,
    ) -> Direct | None:
        """Run the kernel on `arguments`, all that are no constants, and `constants`, in the order it declares them.

        options: Triton's own, such as num_warps. `key` must differ wherever Triton would compile something else: by
        device, the types, constants and options, the value of every integer (but those in do_not_specialize) and the
        `pointer_traits` of every pointer (the alignment of those in do_not_specialize_on_alignment aside).

        Returns what launches the same kernel in less time, None where nothing is compiled.
        """
        compiled, direct = self._compiled.get(key, (None, None))
        if compiled is None:
            compiled = self._kernel[grid](*arguments, **constants, **(options or {}))
            # an interpreted kernel returns nothing
            if compiled is not None:
                from numa_attention import direct_launch

                direct = direct_launch.direct(compiled)
                self._compiled[key] = compiled, direct
        elif direct is None:
            compiled[grid](*arguments, *constants.values())
        elif direct.has_descriptors:
            direct(grid, direct.flatten((*arguments, *constants.values())))
        else:
            direct(grid, (*arguments, *constants.values()))
        return direct

"""Paged attention that knows the NUMA domains of the device it runs on.

A kernel library on torch and Triton alone; it knows nothing of vLLM. Importing the package imports neither: each module
is imported by whoever needs it, ``from numa_attention.runner import attend``. The operation on plain tensors is
``numa_attention.attention(q, k, v, causal=...)``, see `operation.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numa_attention.operation import attention

__version__ = "0.1.0"
__all__ = ["attention"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from numa_attention import operation

    return getattr(operation, name)

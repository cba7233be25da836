"""What a refusal tells the user to do."""

from __future__ import annotations


def another_backend() -> str:
    """What to do where NUMA_SWIZZLE cannot serve a model: a backend given explicitly wins over the variable."""
    from vllm.platforms import current_platform

    name = "CPU_ATTN" if current_platform.is_cpu() else "TRITON_ATTN"
    return f"serve it with another backend, such as --attention-backend {name}"

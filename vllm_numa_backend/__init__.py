"""NUMA_SWIZZLE, an attention backend for vLLM. vLLM calls `register()` in each of its processes."""

VERSION = "0.1.0"
NAME = "NUMA_SWIZZLE"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: make NUMA_SWIZZLE selectable.

    May be called any number of times. Imports no kernel: those load when the backend is selected.

    Raises:
        RuntimeError: VLLM_ATTENTION_BACKEND asks for NUMA_SWIZZLE and this vLLM cannot provide it.
    """
    from vllm_numa_backend import selection

    selection.install()

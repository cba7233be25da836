"""What differs between vLLM releases, and nothing else.

Two KV cache layouts exist. In 0.25 the backend names the shape, with K and V on an axis of their own; by 0.32
vLLM fixes one logical shape, with K and V side by side in the last dimension. `BackendBase` and
`split_kv_cache` are those of the release at hand.
"""

from __future__ import annotations

import torch
from packaging.version import InvalidVersion, Version
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

TESTED_RELEASES = ("0.25.1", "0.32.0", "0.33.0")
PAGE_MULTIPLE = 16


def release() -> str:
    """The version of the vLLM at hand, as vLLM gives it."""
    import vllm

    return vllm.__version__


def untested_release(version: str) -> str | None:
    """A sentence naming the tested releases where `version` is none of them (patch level aside), or None."""
    tested = {Version(known).release[:2] for known in TESTED_RELEASES}
    try:
        if Version(version).release[:2] in tested:
            return None
    except InvalidVersion:
        pass
    adapter = "0.25.1" if backend_names_kv_shape() else "0.33.0"
    return (
        f"vLLM {version} is not among the releases that NUMA_SWIZZLE is tested with, "
        f"{', '.join(TESTED_RELEASES)}; it is treated like {adapter}."
    )


def backend_names_kv_shape() -> bool:
    """Whether a backend chooses the KV cache's shape (vLLM 0.25) or vLLM does (0.32 and later)."""
    return hasattr(AttentionBackend, "get_kv_cache_shape")


class _SeparateAxisBackend(AttentionBackend):
    """vLLM 0.25: pages are [pages, 2, tokens, KV heads, head_dim], K first."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list:
        return [MultipleOf(PAGE_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The axes of `get_kv_cache_shape` in memory order, for the layout in force (NHD or HND)."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        heads_first = {"NHD": False, "HND": True}[get_kv_cache_layout()]
        if not include_num_layers_dimension:
            return (0, 1, 3, 2, 4) if heads_first else (0, 1, 2, 3, 4)
        # axis 0 is now the layers; pages lead, so that all layers of a page lie together
        return (1, 4, 0, 2, 3, 5) if heads_first else (1, 0, 2, 3, 4, 5)


class _PackedBackend(AttentionBackend):
    """vLLM 0.32 and later: pages are [pages, KV heads, tokens, head_dim + head_dim_v], K then V in a row."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list:
        return [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls):
        """All, since kernels take strides; first those in which one KV head's page is one run of memory."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return tuple(sorted(KVCacheLayout, key=lambda layout: layout.name not in ("LBHNC", "BLHNC")))


def _split_separate_axis(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return kv_cache.unbind(1)


def _split_packed(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_dim], pages[..., head_dim:]


BackendBase = _SeparateAxisBackend if backend_names_kv_shape() else _PackedBackend
_split = _split_separate_axis if backend_names_kv_shape() else _split_packed


def split_kv_cache(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer's cache as strided views [page, token, KV head, head_dim (V: head_dim_v)]."""
    return _split(kv_cache, head_dim)

"""What a layer's attention looks like: the key of schedules and of kernel variants."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numa_attention.limits import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, fault_of_head_dim
from numa_attention.sharding import WHOLE, Shard

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
CONTIGUOUS = 0  # page size of keys and values that lie in a row, without pages


class UnsupportedShape(ValueError):
    """No kernel takes this layer shape; the message says which part of it and what would work."""


@dataclass(frozen=True)
class LayerShape:
    """Heads, sizes and types of one attention layer.

    dtype: of queries and output, where a call does not quantise them. kv_dtype: of the cache as kernels view it.
    page_size: tokens a page; CONTIGUOUS where keys and values are no cache but the step's own tokens in a row, as an
    encoder's. window: tokens to the left of a query position that it still sees, and to its right where attention is
    not causal, -1 for all (vLLM's sliding_window w is a window of w - 1). general: whether calls or steps ask for what
    only the general kernels take (see `runner.GENERAL`). shard: the part of every sequence that this cache holds.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    window: int = -1
    general: bool = False
    shard: Shard = WHOLE

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def check(self) -> None:
        """Raises UnsupportedShape where no kernel takes this shape."""
        if self.q_heads < 1 or self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise UnsupportedShape(
                f"{self.q_heads} query heads cannot be grouped over {self.kv_heads} KV heads: "
                "the number of query heads must be a multiple of the number of KV heads."
            )
        for name, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if fault_of_head_dim(size):
                raise UnsupportedShape(
                    f"{name} {size} is not supported: it must be a multiple of {HEAD_DIM_MULTIPLE} up to "
                    f"{MAX_HEAD_DIM}."
                )
        if self.page_size % 16 or self.page_size < 0:
            raise UnsupportedShape(
                f"page size {self.page_size} is not supported: it must be a multiple of 16 tokens."
            )
        if self.dtype not in QUERY_DTYPES:
            raise UnsupportedShape(f"dtype {self.dtype} is not supported: use float32, float16 or bfloat16.")
        if not self.shard.is_whole and (
            self.page_size == CONTIGUOUS or self.page_size % self.shard.interleave
        ):
            raise UnsupportedShape(
                f"a cache with pages of {self.page_size} tokens cannot be sharded in runs of "
                f"{self.shard.interleave} tokens: give pages of a multiple of the run."
            )
        if self.window < -1:
            raise UnsupportedShape(
                f"window {self.window} is not supported: give -1 for none, or 0 and more tokens."
            )


def has_plain_cache(shape: LayerShape) -> bool:
    """Whether the cache has pages and holds whole sequences, as kernels written for the usual layer expect."""
    return shape.page_size != CONTIGUOUS and shape.shard.is_whole


def chunk_of(page_size: int, block_n: int) -> int:
    """Tokens of one copy from a page: a power of two that divides the page and the tile, as large as can be."""
    return min(page_size & -page_size, block_n)

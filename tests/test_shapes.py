"""Which layer shapes are refused, and what the user reads."""

from dataclasses import replace

import pytest
import torch

from numa_attention.shapes import LayerShape, UnsupportedShape

LLAMA = LayerShape(
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    head_dim_v=128,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=16,
)


def test_shapes_are_equal_by_value_and_hashable():
    assert LLAMA.group == 4
    assert {LLAMA: 1}[replace(LLAMA)] == 1
    assert replace(LLAMA, window=4095) != LLAMA


@pytest.mark.parametrize("head_dim", [32, 56, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(
    "kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
)
def test_supported(head_dim, kv_dtype):
    replace(LLAMA, head_dim=head_dim, kv_dtype=kv_dtype, page_size=784, q_heads=40).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 512}, "head_dim 512 .* multiple of 8 up to 256"),
        ({"head_dim": 100}, "head_dim 100 .* multiple of 8"),
        ({"head_dim_v": 0}, "head_dim_v 0 .* multiple of 8"),
        ({"page_size": 8}, "page size 8 .* multiple of 16"),
        ({"page_size": 24}, "page size 24"),
        ({"q_heads": 30}, "30 query heads .* 8 KV heads"),
        ({"kv_heads": 0}, "0 KV heads"),
        ({"dtype": torch.float64}, "float64 is not supported: use float32, float16 or bfloat16"),
        ({"window": -2}, "window -2"),
    ],
)
def test_refused(change, message):
    with pytest.raises(UnsupportedShape, match=message):
        replace(LLAMA, **change).check()

"""Writing pages: every layout, quantised or not, against a loop over tokens; nothing else in the cache may change."""

import math

import pytest
import torch

from numa_attention.kv_cache import FLOAT8, write_pages
from support import LAYOUTS, empty_pages

KERNELS = ("triton", "torch")


def _nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full(x.shape, math.nan).to(x.device, x.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def _expected(x: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    if dtype not in FLOAT8:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    scaled = x.float() if scale is None else x.float() / torch.tensor(scale, device=x.device)
    return scaled.clamp(-largest, largest).to(dtype)


def _write_naively(x, pages, slots, scale):
    """One token after another into a copy of the pages, which is returned."""
    pages = pages.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pages[slot // pages.shape[1], slot % pages.shape[1]] = _expected(x[token], pages.dtype, scale)
    return pages


def _allocation(pages: torch.Tensor) -> torch.Tensor:
    """All the memory behind a view, as bytes."""
    storage = pages.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=pages.device).set_(storage).cpu().clone()


def _scattered_slots(count: int, pages: int, page_size: int, device) -> torch.Tensor:
    slots = torch.randperm(pages * page_size)[:count]
    slots[1::4] = -1
    return slots.to(device)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "head_dim_v"),
    [(1, 64, 64), (2, 80, 80), (3, 56, 24), (8, 128, 128), (2, 192, 128)],
)
@pytest.mark.parametrize("count", [1, 63])
def test_writes_its_slots_and_nothing_else(kernels, layout, kv_heads, head_dim, head_dim_v, count, device):
    k_pages, v_pages = empty_pages(7, 16, kv_heads, head_dim, head_dim_v, torch.bfloat16, layout, device)
    key = torch.randn(count + 5, kv_heads, head_dim, device=device).bfloat16()
    value = torch.randn(count + 5, kv_heads, head_dim_v, device=device).bfloat16()
    slots = _scattered_slots(count, 7, 16, device)
    # the layout's gaps and the other operand's pages are in the same allocation
    allocation = _allocation(k_pages)
    expected_k, expected_v = (
        _write_naively(key, k_pages, slots, None),
        _write_naively(value, v_pages, slots, None),
    )
    write_pages(key, value, k_pages, v_pages, slots, kernels=kernels)
    assert torch.equal(_bytes(k_pages), _bytes(expected_k))
    assert torch.equal(_bytes(v_pages), _bytes(expected_v))
    assert (slots >= 0).any() and not torch.equal(_allocation(k_pages), allocation)
    for pages in (k_pages, v_pages):
        pages.copy_(_nan_like(pages))
    assert torch.equal(_allocation(k_pages), allocation)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", sorted(FLOAT8, key=str), ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.03, 7.0])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantises(kernels, dtype, scale, source, device):
    if (
        device.type == "cuda"
        and kernels == "triton"
        and dtype not in (torch.float8_e4m3fn, torch.float8_e5m2)
    ):
        pytest.skip("NVIDIA GPUs do not have this type")
    k_pages, v_pages = empty_pages(4, 16, 2, 40, 40, dtype, "pages-2", device)
    key, value = (torch.randn(2, 33, 2, 40, device=device) * 3).to(source)
    # past the largest number on either side, and an infinity
    key[0, 0, :3] = torch.tensor([3e4, -3e4, math.inf])
    slots = _scattered_slots(33, 4, 16, device)
    slots[0] = 17
    slots[slots == 17] = torch.tensor([17] + [-1] * (int((slots == 17).sum()) - 1), device=device)
    v_scale = None if scale is None else scale * 2
    expected_k, expected_v = (
        _write_naively(key, k_pages, slots, scale),
        _write_naively(value, v_pages, slots, v_scale),
    )
    scales = [None if s is None else torch.tensor([s], device=device) for s in (scale, v_scale)]
    write_pages(key, value, k_pages, v_pages, slots, *scales, kernels=kernels)
    assert torch.equal(_bytes(k_pages), _bytes(expected_k))
    assert torch.equal(_bytes(v_pages), _bytes(expected_v))
    assert k_pages[1, 1, 0, :3].float().isfinite().all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("page_size", [16, 528, 784])
def test_page_sizes_and_strided_keys(kernels, page_size, device):
    k_pages, v_pages = empty_pages(3, page_size, 2, 32, 32, torch.float16, "kv-last", device)
    # keys and values as a fused projection leaves them
    qkv = torch.randn(50, 8, 32, device=device).half()
    key, value = qkv[:, 4:6], qkv[:, 6:8]
    slots = (torch.arange(50, device=device) + page_size - 20).long()
    expected_k, expected_v = (
        _write_naively(key, k_pages, slots, None),
        _write_naively(value, v_pages, slots, None),
    )
    write_pages(key, value, k_pages, v_pages, slots, kernels=kernels)
    assert torch.equal(_bytes(k_pages), _bytes(expected_k))
    assert torch.equal(_bytes(v_pages), _bytes(expected_v))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("offset", [0, 1])
def test_calls_of_one_layout_in_a_row(kernels, offset, device):
    # counts, contents and addresses change under an unchanged layout; an odd offset leaves pointers unaligned
    k_pages, v_pages = empty_pages(8, 16, 2, 32, 32, torch.bfloat16, "pages-2", device)
    scratch = torch.randn(2, 64 * 2 * 32 + 1, device=device).bfloat16()
    key, value = (x[offset : offset + 64 * 2 * 32].view(64, 2, 32) for x in scratch)
    for count in (1, 16, 17, 63):
        scratch.normal_()
        slots = torch.cat([torch.zeros(offset, dtype=torch.int64), torch.randperm(128)]).to(device)[offset:][
            :count
        ]
        expected_k, expected_v = (
            _write_naively(key, k_pages, slots, None),
            _write_naively(value, v_pages, slots, None),
        )
        write_pages(key, value, k_pages, v_pages, slots, kernels=kernels)
        assert torch.equal(_bytes(k_pages), _bytes(expected_k))
        assert torch.equal(_bytes(v_pages), _bytes(expected_v))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1]])
def test_nothing_to_write(kernels, slots, device):
    k_pages, v_pages = empty_pages(1, 16, 2, 32, 32, torch.float32, "pages-2", device)
    key = torch.randn(3, 2, 32, device=device)
    slots = torch.tensor(slots, dtype=torch.int64, device=device)
    write_pages(key, key, k_pages, v_pages, slots, kernels=kernels)
    assert k_pages.isnan().all() and v_pages.isnan().all()


PAGE_ELEMENTS = 2 * 16 * 8 * 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="the file-backed cache is on the CPU")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("page", [65_535, 65_536, 131_072, 262_144])
def test_addresses_beyond_32_bits(kernels, page, tmp_path):
    # a sparse file: 20 GiB of address space of which only the pages written to exist
    path = tmp_path / "cache"
    pages = 300_000
    cache = torch.from_file(str(path), shared=True, size=pages * PAGE_ELEMENTS, dtype=torch.bfloat16)
    try:
        k_pages, v_pages = cache.view(pages, 2, 16, 8, 128).unbind(1)
        key, value = torch.randn(2, 2, 8, 128).bfloat16()
        slots = torch.tensor([page * 16 + 3, 5])
        write_pages(key, value, k_pages, v_pages, slots, kernels=kernels)
        for pages_of, x in ((k_pages, key), (v_pages, value)):
            assert torch.equal(pages_of[page, 3], x[0])
            assert torch.equal(pages_of[0, 5], x[1])
        # a wrapped address would have touched another place
        assert path.stat().st_blocks * 512 < 1 << 20
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"key": torch.zeros(4, 3, 32)}, "do not fit pages of keys"),
        (lambda a: a | {"slot_mapping": torch.zeros(9, dtype=torch.int64)}, "9 slots do not fit"),
        (lambda a: a | {"value": torch.zeros(4, 2, 16)}, "pages of values .* do not fit values"),
        (lambda a: a | {"v_pages": a["v_pages"].half()}, "float16 do not fit"),
        (lambda a: a | {"key": torch.zeros(4, 32, 2).transpose(1, 2)}, "last dimension"),
        (lambda a: a | {"k_scale": torch.ones(1)}, "both k_scale and v_scale"),
        (lambda a: a | {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}, "for float8 pages.*float32"),
        (
            lambda a: a | {"slot_mapping": torch.arange(8)[::2]},
            "slot_mapping must be contiguous; its stride is 2",
        ),
        (lambda a: a | {"slot_mapping": torch.arange(4.0)}, "slot_mapping is torch.float32"),
        (lambda a: a | {"slot_mapping": torch.arange(4)[None]}, r"slot_mapping is torch.int64 \[1, 4\]"),
        (
            lambda a: a | {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
            r"one float32 number; got .* \[2\]",
        ),
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_refuses_what_does_not_fit(kernels, change, message):
    k_pages, v_pages = empty_pages(2, 16, 2, 32, 32, torch.float32, "pages-2")
    arguments = dict(
        key=torch.zeros(4, 2, 32), value=torch.zeros(4, 2, 32), k_pages=k_pages, v_pages=v_pages,
        slot_mapping=torch.arange(4),
    )  # fmt: skip
    write_pages(**arguments, kernels=kernels)
    with pytest.raises(ValueError, match=message):
        write_pages(**change(arguments), kernels=kernels)


def test_refuses_unknown_kernels():
    k_pages, v_pages = empty_pages(2, 16, 2, 32, 32, torch.float32, "pages-2")
    key = torch.zeros(4, 2, 32)
    with pytest.raises(ValueError, match="choose one of"):
        write_pages(key, key, k_pages, v_pages, torch.arange(4), kernels="fast")

"""Writing a step's keys and values into the pages of the KV cache, quantised where the cache is float8."""

from __future__ import annotations

import torch

from numa_attention.jit import interpreting, pointer_traits, resolve
from numa_attention.shapes import FLOAT8
from numa_attention.variants import next_power_of_2


def write_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    kernels: str = "auto",
) -> None:
    """Write key and value of token i to slot_mapping[i], for every slot that is not negative.

    key [tokens, kv_heads, head_dim], value [tokens, kv_heads, head_dim_v]: at least as many tokens as
    slots, any strides but a contiguous last dimension. k_pages, v_pages [page, token, kv_head, head_dim or
    head_dim_v]: views of the cache, likewise. slot_mapping int64 [n]: page * page_size + token in page, no
    slot twice, contiguous; -1 is a padding token. k_scale, v_scale float32 [1], on the same device, both or neither,
    for float8 pages alone: what is stored is the number divided by its scale, clamped to the range of the
    type and rounded to nearest even. kernels: "auto", "triton", "torch" or "interpret"; see `jit.resolve`.

    Does not synchronise with the GPU, and launches one kernel. Raises ValueError where the tensors do not
    fit.
    """
    # the short way round `resolve`, since this runs once per layer and step
    if (key.is_cuda and kernels in ("auto", "triton")) or resolve(kernels, key.device) == "triton":
        _write_with_triton(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale)
    else:
        _check(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale)
        _write_with_torch(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale)


def _write_with_torch(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale) -> None:
    count = slot_mapping.shape[0]
    kept = slot_mapping >= 0
    slots, key, value = slot_mapping[kept], key[:count][kept], value[:count][kept]
    place = slots // k_pages.shape[1], slots % k_pages.shape[1]
    _put(k_pages, place, _stored(key, k_pages.dtype, k_scale))
    _put(v_pages, place, _stored(value, v_pages.dtype, v_scale))


def _check(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale) -> None:
    tokens, heads, head_dim = key.shape
    page_size = k_pages.shape[1]
    if (
        value.shape[:2] != (tokens, heads)
        or k_pages.shape[2:] != (heads, head_dim)
        or tokens < slot_mapping.shape[0]
    ):
        raise ValueError(
            f"keys {tuple(key.shape)}, values {tuple(value.shape)} and {slot_mapping.shape[0]} slots do not fit "
            f"pages of keys {tuple(k_pages.shape)}."
        )
    if v_pages.shape[1:] != (page_size, heads, value.shape[2]) or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"pages of values {tuple(v_pages.shape)} {v_pages.dtype} do not fit values {tuple(value.shape)} and "
            f"pages of keys {tuple(k_pages.shape)} {k_pages.dtype}."
        )
    if not key.stride(2) == value.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1:
        raise ValueError("the last dimension of keys, values and pages must be contiguous.")
    if slot_mapping.dtype not in (torch.int64, torch.int32) or slot_mapping.ndim != 1:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}: it must be int64, one slot a token."
        )
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous; its stride is {slot_mapping.stride(0)}.")
    for scale in (k_scale, v_scale):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
            raise ValueError(f"a scale must be one float32 number; got {scale.dtype} {list(scale.shape)}.")
    if (k_scale is None) != (v_scale is None) or (k_scale is not None and k_pages.dtype not in FLOAT8):
        raise ValueError(
            f"give both k_scale and v_scale for float8 pages, or neither; the pages are {k_pages.dtype}."
        )


def _stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if dtype not in FLOAT8:
        return x.to(dtype)
    x = x.float() if scale is None else x.float() / scale
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _put(pages: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> None:
    if x.dtype in FLOAT8:
        # torch moves float8 numbers by index on no device, but bytes on all
        pages, x = pages.view(torch.uint8), x.view(torch.uint8)
    pages[place] = x


# layout of a call -> the kernel's strides and compile-time arguments, once checked
_plans: dict[tuple, tuple[tuple[int, ...], dict]] = {}


def _write_with_triton(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale) -> None:
    # imported here so that this file works where Triton is not installed
    from numa_attention.kv_cache_device import launch

    count = slot_mapping.shape[0]
    # all that the checks and the compiled kernel depend on, except the number of tokens
    layout = (
        key.get_device(), key.dtype, value.dtype, k_pages.dtype, v_pages.dtype, slot_mapping.dtype,
        key.shape[1:], value.shape[1:], k_pages.shape[1:], v_pages.shape[1:],
        key.stride(), value.stride(), k_pages.stride(), v_pages.stride(),
        pointer_traits(key, value, k_pages, v_pages),
        None if k_scale is None else (k_scale.dtype, k_scale.shape),
        None if v_scale is None else (v_scale.dtype, v_scale.shape),
        slot_mapping.is_contiguous(), slot_mapping.ndim,
    )  # fmt: skip
    plan = _plans.get(layout)
    if plan is None or not key.shape[0] == value.shape[0] >= count:
        _check(key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale)
        plan = _plans[layout] = _plan(key, value, k_pages, v_pages, k_scale)
    if count == 0:
        return
    strides, constants = plan
    grid = (-(-count // constants["BLOCK_T"]), 1, 1)
    launch(
        layout,
        grid,
        (key, value, k_pages, v_pages, slot_mapping, k_scale, v_scale, count, *strides),
        constants,
    )


def _plan(key, value, k_pages, v_pages, k_scale) -> tuple[tuple[int, ...], dict]:
    (_, heads, head_dim), head_dim_v, dtype = key.shape, value.shape[2], k_pages.dtype
    strides = (*key.stride()[:2], *value.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3])
    constants = dict(
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        PAGE_SIZE=k_pages.shape[1],
        LARGEST=torch.finfo(dtype).max if dtype in FLOAT8 else 0.0,
        SCALED=k_scale is not None,
        # a workgroup a token fills a GPU soonest; the interpreter wants few and large ones
        BLOCK_T=32 if interpreting() else 1,
        BLOCK_H=next_power_of_2(heads),
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_DV=next_power_of_2(head_dim_v),
    )
    return strides, constants

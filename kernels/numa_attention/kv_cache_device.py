"""The kernel that writes keys and values into pages; see `kv_cache` for the tensors it takes."""

from __future__ import annotations

import triton.language as tl

from numa_attention.jit import Launcher, kernel


@kernel(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots", "k_scale", "v_scale"])
def write_pages_kernel(
    key,
    value,
    k_pages,
    v_pages,
    slots,
    k_scale,
    v_scale,
    tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One workgroup writes BLOCK_T tokens, all their heads, keys and values."""
    o_token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    b_slot = tl.load(slots + o_token, mask=o_token < tokens, other=-1).to(tl.int64)  # [T]
    m_token = b_slot >= 0
    b_slot = tl.where(m_token, b_slot, 0)
    o_token = o_token.to(tl.int64)
    o_page, o_offset = b_slot // PAGE_SIZE, b_slot % PAGE_SIZE
    write_rows(
        key, o_token * key_token_stride, key_head_stride,
        k_pages, o_page * k_page_stride + o_offset * k_token_stride, k_head_stride,
        k_scale, m_token, HEADS, HEAD_DIM, LARGEST, SCALED, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    write_rows(
        value, o_token * value_token_stride, value_head_stride,
        v_pages, o_page * v_page_stride + o_offset * v_token_stride, v_head_stride,
        v_scale, m_token, HEADS, HEAD_DIM_V, LARGEST, SCALED, BLOCK_H, BLOCK_DV,
    )  # fmt: skip


@kernel
def write_rows(
    source,
    o_source,  # int64 [T], element offset of each token
    source_head_stride,
    target,
    o_target,  # int64 [T]
    target_head_stride,
    scale,
    m_token,  # [T]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy [T, HEADS, DIM] numbers; float8 targets (LARGEST > 0) take them divided by `scale` and clamped."""
    o_head, o_dim = tl.arange(0, BLOCK_H).to(tl.int64), tl.arange(0, BLOCK_D)
    m_head_dim = (o_head < HEADS)[:, None] & (o_dim < DIM)[None, :]
    m_tile = m_token[:, None, None] & m_head_dim[None, :, :]
    o_head_dim = (o_head * source_head_stride)[:, None] + o_dim[None, :]
    b_x = tl.load(source + o_source[:, None, None] + o_head_dim[None, :, :], mask=m_tile)  # [T, H, D]
    if LARGEST > 0:
        b_x = b_x.to(tl.float32)
        if SCALED:
            # the division of the specification, rounded to nearest
            b_x = tl.div_rn(b_x, tl.zeros_like(b_x) + tl.load(scale))
        # a NaN stays a NaN, an overflow must not become one
        b_x = tl.clamp(b_x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    o_head_dim = (o_head * target_head_stride)[:, None] + o_dim[None, :]
    tl.store(
        target + o_target[:, None, None] + o_head_dim[None, :, :],
        b_x.to(target.dtype.element_ty),
        mask=m_tile,
    )


launch = Launcher(write_pages_kernel)

"""The arithmetic of merging across ranks on a GPU: one launch before or after a collective instead of a dozen.

Rows are (token, head). The definition is `merge.merge_states`.
"""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.jit import Launcher, kernel, pointer_traits
from numa_attention.portable_launch import block_dim
from numa_attention.scores import LN_2, LOG2_E, normalise, safe_max

BLOCK_ROWS = 4
NUM_WARPS = 4


@kernel
def whole_lse(b_m, b_l):
    """log(sum of exponentials) [R] from the largest LSE and the sum under it; -inf where every part is empty."""
    return tl.where(b_l == 0.0, float("-inf"), b_m + tl.log2(tl.where(b_l == 0.0, 1.0, b_l)) * LN_2)


@kernel(do_not_specialize=["rows", "rank"])
def weigh_kernel(
    out,  # float32 [tokens, RANKS * HEADS, HEAD_DIM_V]
    lses,  # float32 [RANKS, tokens, RANKS * HEADS]
    weighted,  # float32 [RANKS, tokens, HEADS, HEAD_DIM_V]
    lse,  # float32 [tokens, HEADS]
    rows,
    rank,
    RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_row < rows
    m_part = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
    b_m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for source in tl.static_range(RANKS):
        b_m = tl.maximum(b_m, tl.load(lses + source * rows + o_row, mask=m_row, other=float("-inf")))
    b_m = safe_max(b_m)
    b_l = tl.zeros([BLOCK_ROWS], tl.float32)
    for source in tl.static_range(RANKS):
        b_from = tl.load(lses + source * rows + o_row, mask=m_row, other=float("-inf"))
        b_l += tl.exp2((b_from - b_m) * LOG2_E)
    b_own = tl.load(lses + rank * rows + o_row, mask=m_row, other=float("-inf"))
    b_part = tl.load(out + o_row[:, None] * HEAD_DIM_V + o_dv[None, :], mask=m_part, other=0.0)
    # what an empty part's output holds does not matter, a NaN of any other does
    b_part = tl.where(
        (b_own == float("-inf"))[:, None], 0.0, b_part * tl.exp2((b_own - b_m) * LOG2_E)[:, None]
    )
    o_token = o_row // (RANKS * HEADS)
    o_head = o_row % (RANKS * HEADS)
    o_slot = (o_head // HEADS * (rows // (RANKS * HEADS)) + o_token) * HEADS + o_head % HEADS
    p_weighted = weighted + o_slot[:, None] * HEAD_DIM_V + o_dv[None, :]
    tl.store(p_weighted, normalise(b_part, b_l), mask=m_part)
    p_lse = lse + o_token * HEADS + o_head % HEADS
    tl.store(p_lse, whole_lse(b_m, b_l), mask=m_row & (o_head // HEADS == rank))


@kernel(do_not_specialize=["rows"])
def merge_kernel(
    parts,  # float32 [RANKS, rows, HEAD_DIM_V + 1], the LSE after each output
    out,  # float32 [rows, HEAD_DIM_V]
    lse,  # float32 [rows]
    rows,
    RANKS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_row < rows
    m_part = m_row[:, None] & (o_dv < HEAD_DIM_V)[None, :]
    b_m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for source in tl.static_range(RANKS):
        p_part = parts + (source * rows + o_row) * (HEAD_DIM_V + 1)
        b_m = tl.maximum(b_m, tl.load(p_part + HEAD_DIM_V, mask=m_row, other=float("-inf")))
    b_m = safe_max(b_m)
    b_l = tl.zeros([BLOCK_ROWS], tl.float32)
    b_acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    for source in tl.static_range(RANKS):
        p_part = parts + (source * rows + o_row) * (HEAD_DIM_V + 1)
        b_from = tl.load(p_part + HEAD_DIM_V, mask=m_row, other=float("-inf"))
        b_part = tl.load(p_part[:, None] + o_dv[None, :], mask=m_part, other=0.0)
        b_weight = tl.exp2((b_from - b_m) * LOG2_E)
        b_acc += tl.where((b_from == float("-inf"))[:, None], 0.0, b_weight[:, None] * b_part)
        b_l += b_weight
    tl.store(out + o_row[:, None] * HEAD_DIM_V + o_dv[None, :], normalise(b_acc, b_l), mask=m_part)
    tl.store(lse + o_row, whole_lse(b_m, b_l), mask=m_row)


_weigh, _merge = Launcher(weigh_kernel), Launcher(merge_kernel)


def _launch(
    launcher: Launcher, tensors: tuple[torch.Tensor, ...], rows: int, more: tuple, constants: dict
) -> None:
    if rows == 0:
        return
    constants |= dict(BLOCK_DV=block_dim(constants["HEAD_DIM_V"]), BLOCK_ROWS=BLOCK_ROWS)
    key = (tensors[0].get_device(), tuple(constants.values()), pointer_traits(*tensors))
    grid = (-(-rows // BLOCK_ROWS), 1, 1)
    launcher(key, grid, (*tensors, rows, *more), constants, dict(num_warps=NUM_WARPS))


def weigh(out: torch.Tensor, lses: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `merge.weigh`."""
    ranks, (tokens, heads, head_dim_v) = len(lses), out.shape
    weighted = out.new_empty(ranks, tokens, heads // ranks, head_dim_v)
    lse = lses.new_empty(tokens, heads // ranks)
    constants = dict(RANKS=ranks, HEADS=heads // ranks, HEAD_DIM_V=head_dim_v)
    _launch(_weigh, (out, lses, weighted, lse), tokens * heads, (rank,), constants)
    return weighted, lse


def merge_packed(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `merge.merge_packed`."""
    ranks, tokens, heads, width = parts.shape
    out, lse = parts.new_empty(tokens, heads, width - 1), parts.new_empty(tokens, heads)
    _launch(_merge, (parts, out, lse), tokens * heads, (), dict(RANKS=ranks, HEAD_DIM_V=width - 1))
    return out, lse

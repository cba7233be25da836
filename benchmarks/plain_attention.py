"""A plain Triton FlashAttention-2 forward kernel on contiguous tensors: what the machine model describes, no more."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from numa_attention.jit import kernel
from numa_attention.machine.grid import Grid
from numa_attention.mapping_device import tile_of

# how often a workgroup looks whether the wave before is done: some 10 ms. The wait is for the cache's sake alone, and
# whoever goes on without it computes the same
MOST_LOOKS = 1 << 14
NUM_WARPS = 8
NUM_STAGES = 3


@kernel
def plain_attention_fwd_kernel(
    q,
    k,
    v,
    out,
    done,
    scale,
    domains,
    batch,
    length,
    blocks,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    MAPPING: tl.constexpr,
    UNITS: tl.constexpr,
    IN_WAVES: tl.constexpr,
    ALTERNATE: tl.constexpr,
    MOST_LOOKS: tl.constexpr,
):
    """q, out [batch, Q_HEADS, length, HEAD_DIM], k, v [batch, KV_HEADS, length, HEAD_DIM], all contiguous.

    scale: of the scores, for a softmax in base 2. One program per (request, query head, block of BLOCK_M rows).
    done: int32 [1], programs that are done. UNITS programs are a wave. IN_WAVES: the programs of a wave begin when all
    before them are done. ALTERNATE: every other wave walks its tiles from the last to the first.
    """
    wave = tl.program_id(0) // UNITS
    if IN_WAVES:
        looks = 0
        while (tl.load(done, volatile=True) < wave * UNITS) & (looks < MOST_LOOKS):
            looks += 1
    request, head, block = tile_of(
        tl.program_id(0), MAPPING, domains, batch, Q_HEADS, KV_HEADS, blocks, LONGEST_FIRST
    )
    kv_head = head // (Q_HEADS // KV_HEADS)
    o_m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    o_n = tl.arange(0, BLOCK_N)  # [BN]
    o_d = tl.arange(0, HEAD_DIM)  # [D]
    rows = (request.to(tl.int64) * Q_HEADS + head) * length
    kv_rows = (request.to(tl.int64) * KV_HEADS + kv_head) * length
    b_q = tl.load(q + (rows + o_m)[:, None] * HEAD_DIM + o_d[None, :])  # [BM, D]

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = length
    if CAUSAL:
        end = (block + 1) * BLOCK_M
    first = 0
    step = BLOCK_N
    if ALTERNATE:
        backward = wave % 2
        first = backward * (end - BLOCK_N)
        step = BLOCK_N - 2 * BLOCK_N * backward
    p_k = k + (kv_rows + first + o_n)[None, :] * HEAD_DIM + o_d[:, None]
    p_v = v + (kv_rows + first + o_n)[:, None] * HEAD_DIM + o_d[None, :]
    for number in tl.range(0, end // BLOCK_N):
        start = first + number * step
        b_k = tl.load(p_k)  # [D, BN]
        b_s = tl.dot(b_q, b_k) * scale  # [BM, BN]
        if CAUSAL:
            b_s = tl.where(start + o_n[None, :] <= o_m[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_alpha = tl.exp2(b_m - b_new)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_v = tl.load(p_v)  # [BN, D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None])
        b_m = b_new
        p_k += step * HEAD_DIM
        p_v += step * HEAD_DIM

    p_out = out + (rows + o_m)[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_out, (b_o / b_l[:, None]).to(out.dtype.element_ty))
    if IN_WAVES:
        tl.atomic_add(done, 1, sem="relaxed")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, grid: Grid, units: int = 0
) -> None:
    """Fills `out` with attention under the grid's mapping. Shapes as the kernel says; the grid's sizes must match.

    units: workgroups that run at a time, those of one wave; 0 for one on each SM of the device.

    Raises ValueError on a length that the blocks do not divide, on a head_dim that is no power of two (the kernel masks
    nothing but the future, so that the mapping alone decides what it reads), and for alternating directions under a
    causal mask, where the last tiles hide whole rows.
    """
    if grid.causal and grid.alternate:
        raise ValueError("alternating directions are for launches without a causal mask.")
    if grid.length % grid.block_m or grid.length % grid.block_n or grid.block_m % grid.block_n:
        raise ValueError(f"length {grid.length}: blocks of {grid.block_m} and {grid.block_n} must divide it.")
    if grid.head_dim & (grid.head_dim - 1):
        raise ValueError(f"head_dim {grid.head_dim}: it must be a power of two.")
    units = units or torch.cuda.get_device_properties(q.device).multi_processor_count
    plain_attention_fwd_kernel[(grid.workgroups,)](
        q,
        k,
        v,
        out,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        math.log2(math.e) / math.sqrt(grid.head_dim),
        grid.domains,
        grid.batch,
        grid.length,
        grid.blocks,
        Q_HEADS=grid.q_heads,
        KV_HEADS=grid.kv_heads,
        HEAD_DIM=grid.head_dim,
        BLOCK_M=grid.block_m,
        BLOCK_N=grid.block_n,
        CAUSAL=grid.causal,
        LONGEST_FIRST=grid.longest_first,
        MAPPING=grid.mapping,
        UNITS=units,
        IN_WAVES=grid.in_waves,
        ALTERNATE=grid.alternate,
        MOST_LOOKS=MOST_LOOKS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )

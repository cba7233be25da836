"""The tile list of a prefill step: which workgroup computes which (request, KV head, query block), in launch order.

Row w of the list, int32 [workgroups, 4], is workgroup w's tile: request (counted from the step's first prefilling
request), KV head, query block, 0; request -1 marks a padding row. The order is the variant's mapping, longest block
first inside an ACC where attention is causal. Packed GQA: a request of n query tokens has ceil(n * group / block_m)
query blocks.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from numa_attention.jit import kernel
from numa_attention.mapping_device import write_tiles
from numa_attention.variants import Variant, next_power_of_2


@kernel(do_not_specialize=["first_request", "requests"])
def block_prefix_kernel(
    query_start_loc,
    prefix,
    first_request,
    requests,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Query blocks before each request, int32 [requests + 1]."""
    o_r = tl.arange(0, BLOCK_R)
    m_r = o_r < requests
    b_start = tl.load(query_start_loc + first_request + o_r, mask=m_r, other=0)
    b_end = tl.load(query_start_loc + first_request + o_r + 1, mask=m_r, other=0)
    b_blocks = ((b_end - b_start) * GROUP + BLOCK_M - 1) // BLOCK_M
    tl.store(prefix + o_r + 1, tl.cumsum(b_blocks, 0), mask=m_r)
    tl.store(prefix, 0)


def build_on_device(
    query_start_loc: torch.Tensor,
    first_request: int,
    blocks: np.ndarray,
    prefix: torch.Tensor,
    tiles: torch.Tensor,
    variant: Variant,
    *,
    kv_heads: int,
    group: int,
    longest_first: bool,
) -> None:
    """Fill `tiles` int32 [workgroups, 4] from query_start_loc int32 [R + 1] on the device, in two launches.

    first_request: the first prefilling request, which the tiles call 0.
    blocks: the query blocks of each request as the host knows them; they decide only the shape of the launch.
    prefix: int32 scratch, one element more than the most requests of any step.
    """
    requests, most_requests = len(blocks), len(prefix) - 1
    prefix = prefix[: requests + 1]
    block_prefix_kernel[(1,)](
        query_start_loc,
        prefix,
        first_request,
        requests,
        GROUP=group,
        BLOCK_M=variant.block_m,
        BLOCK_R=next_power_of_2(most_requests),
    )
    write_tiles(
        tiles,
        variant.mapping,
        requests,
        kv_heads,
        kv_heads,
        prefix,
        variant.domains,
        uniform=bool((blocks == blocks[0]).all()),
        longest_first=longest_first,
        most_requests=most_requests,
    )

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

from numa_attention.direct_launch import Launched, Repeat
from numa_attention.jit import Launcher, kernel, pointer_traits
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


_launch = Launcher(block_prefix_kernel)


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
    repeats: dict[tuple, tuple[Repeat, Repeat]] | None = None,
) -> None:
    """Fill `tiles` int32 [workgroups, 4] from query_start_loc int32 [R + 1] on the device, in two launches.

    first_request: the first prefilling request, which the tiles call 0.
    blocks: the query blocks of each request as the host knows them; they decide only the shape of the launch.
    prefix: int32 scratch, one element more than the most requests of any step.
    repeats: what the caller keeps from call to call, of which nothing else differs but the starts and the step.
    """
    requests, most_requests = len(blocks), prefix.shape[0] - 1
    uniform = int(blocks.max()) * requests * kv_heads == tiles.shape[0]
    address = query_start_loc.data_ptr()
    kind = uniform, longest_first, address & 15
    if repeats and kind in repeats:
        starts, rows = repeats[kind]
        starts((address, first_request, requests))
        programs = -(-tiles.shape[0] // rows.constant("ROWS"))
        rows((tiles.shape[0], requests), grid=(programs, 1, 1))
        return
    prefix = prefix[: requests + 1]
    constants = dict(GROUP=group, BLOCK_M=variant.block_m, BLOCK_R=next_power_of_2(most_requests))
    key = (prefix.get_device(), pointer_traits(query_start_loc, prefix), *constants.values())
    arguments = (query_start_loc, prefix, first_request, requests)
    direct = _launch(key, (1, 1, 1), arguments, constants)
    starts = Launched("starts", direct, (1, 1, 1), (*arguments, *constants.values()))
    rows = write_tiles(
        tiles,
        variant.mapping,
        requests,
        kv_heads,
        kv_heads,
        prefix,
        variant.domains,
        uniform=uniform,
        longest_first=longest_first,
        most_requests=most_requests,
    )
    if repeats is not None and direct is not None:
        names = ("query_start_loc", "first_request", "requests"), ("rows", "batch")
        repeats[kind] = Repeat(starts, names[0]), Repeat(rows, names[1])

"""The mappings inside a kernel: `tile_of`, `tile_of_ragged`, and a kernel that writes the tiles of a whole grid.

The arithmetic is that of mapping.py, compiled from the same source; nothing here repeats it. All counts are int32:
a grid has fewer than 2**31 workgroups. No function here makes the host wait for the device.
"""

from types import FunctionType

import torch
import triton.language as tl

from . import mapping as host
from .direct_launch import Launched
from .jit import Launcher, kernel, pointer_traits

# one namespace for the device forms, in which they find one another instead of the host forms;
# `tl` is there because Triton's interpreter looks for it
_forms = {"__name__": host.__name__, "tl": tl}
for _function in host.DEFINITION:
    _forms[_function.__name__] = kernel(FunctionType(_function.__code__, _forms, _function.__name__))
flat_index = _forms["flat_index"]
head_and_block = _forms["head_and_block"]

# a program of tiles_kernel compares ROWS x REQUESTS numbers in registers
COMPARISONS_PER_PROGRAM = 8192
MAX_ROWS_PER_PROGRAM = 256


@kernel
def tile_of(
    workgroup,
    MAPPING: tl.constexpr,
    domains,
    batch,
    q_heads,
    kv_heads,
    blocks,
    LONGEST_FIRST: tl.constexpr = False,
):
    """(request, query head, query block) of a workgroup when every request has `blocks` query blocks.

    `workgroup`: a scalar or a block of any shape; the results have its shape. From workgroup
    batch * q_heads * blocks on the grid is padding: request -1, head and block 0.
    """
    exists = workgroup < batch * q_heads * blocks
    workgroup = tl.where(exists, workgroup, 0)
    blocks = tl.maximum(blocks, 1)  # an empty grid would divide by it
    total = batch * q_heads * blocks
    accs = batch * kv_heads

    flat = flat_index(workgroup, MAPPING, True, accs, total, domains)
    request = flat // (q_heads * blocks)
    head, block = head_and_block(
        workgroup,
        flat,
        MAPPING,
        True,
        LONGEST_FIRST,
        request,
        request * q_heads * blocks,
        blocks,
        accs,
        total,
        q_heads,
        kv_heads,
        domains,
    )
    return tl.where(exists, request, -1), tl.where(exists, head, 0), tl.where(exists, block, 0)


@kernel
def tile_of_ragged(
    workgroup,
    MAPPING: tl.constexpr,
    domains,
    batch,
    q_heads,
    kv_heads,
    prefix,
    REQUESTS: tl.constexpr,
    UNIFORM: tl.constexpr = False,
    LONGEST_FIRST: tl.constexpr = False,
):
    """(request, query head, query block) of a workgroup when the requests' numbers of query blocks differ.

    `workgroup`: a scalar or a block of one dimension; the results have its shape. `prefix`: pointer to int32
    [batch + 1], the query blocks before each request, from 0 to their sum. REQUESTS: a power of two, at least
    `batch`. UNIFORM: the host knows that all requests have the same number of blocks, if not which number.
    From workgroup q_heads * prefix[batch] on the grid is padding: request -1, head and block 0.
    """
    all_blocks = tl.load(prefix + batch)
    if UNIFORM:
        request, head, block = tile_of(
            workgroup, MAPPING, domains, batch, q_heads, kv_heads, all_blocks // batch, LONGEST_FIRST
        )
    else:
        total = q_heads * all_blocks
        exists = workgroup < total
        workgroup = tl.where(exists, workgroup, 0)
        accs = batch * kv_heads
        flat = flat_index(workgroup, MAPPING, False, accs, total, domains)

        # a request's number is the number of requests that end at or before the tile
        o_request = tl.arange(0, REQUESTS)  # [REQUESTS]
        b_end = tl.load(prefix + 1 + o_request, mask=o_request < batch, other=2147483647)  # [REQUESTS]
        b_past = b_end <= tl.expand_dims(flat // q_heads, -1)  # [..., REQUESTS]
        request = tl.sum(b_past.to(tl.int32), axis=-1)
        request = tl.minimum(request, batch - 1)  # in an empty grid all requests are past
        before = tl.load(prefix + request)
        blocks = tl.maximum(tl.load(prefix + request + 1) - before, 1)

        head, block = head_and_block(
            workgroup,
            flat,
            MAPPING,
            False,
            LONGEST_FIRST,
            request,
            q_heads * before,
            blocks,
            accs,
            total,
            q_heads,
            kv_heads,
            domains,
        )
        request = tl.where(exists, request, -1)
        head = tl.where(exists, head, 0)
        block = tl.where(exists, block, 0)
    return request, head, block


@kernel(do_not_specialize=["rows", "batch", "blocks"])
def tiles_kernel(
    out,
    rows,
    domains,
    batch,
    q_heads,
    kv_heads,
    blocks,
    prefix,
    MAPPING: tl.constexpr,
    UNIFORM: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes `out` int32 [rows, 4]: (request, query head, query block, 0) of workgroups 0..rows, ROWS per program.

    `prefix` None: every request has `blocks` query blocks.
    """
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    if prefix is None:
        request, head, block = tile_of(
            o_row, MAPPING, domains, batch, q_heads, kv_heads, blocks, LONGEST_FIRST
        )
    else:
        request, head, block = tile_of_ragged(
            o_row, MAPPING, domains, batch, q_heads, kv_heads, prefix, REQUESTS, UNIFORM, LONGEST_FIRST
        )
    p_row = out + o_row.to(tl.int64) * 4
    m_row = o_row < rows
    tl.store(p_row, request, mask=m_row)
    tl.store(p_row + 1, head, mask=m_row)
    tl.store(p_row + 2, block, mask=m_row)
    tl.store(p_row + 3, tl.zeros([ROWS], tl.int32), mask=m_row)


_launch = Launcher(tiles_kernel)


def write_tiles(
    out: torch.Tensor,
    mapping: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    blocks: int | torch.Tensor,
    domains: int,
    *,
    uniform: bool = False,
    longest_first: bool = False,
    most_requests: int = 0,
) -> Launched | None:
    """Fills `out` with the tiles of workgroups 0, 1, ... and never reads device memory on the host.

    out: int32 [rows, 4], contiguous; a row is (request, query head, query block, 0), or (-1, 0, 0, 0) past
        the last workgroup. With a prefix the host cannot know the number of workgroups: give enough rows.
    blocks: query blocks of every request, or int32 [batch + 1], contiguous, on the device of `out`: the query
        blocks before each request, from 0 to their sum.
    uniform: with a prefix, that all requests have the same number of blocks; see `mapping.tiles`.
    most_requests: the largest batch to come, for which one compiled kernel then serves; 0 for this batch.

    Returns the launch, None where there was nothing to write.

    Raises ValueError on an unknown mapping, on counts that `mapping.tiles` refuses, on too few rows where the
    host knows their number, and on tensors of another shape, dtype, layout or device.
    """
    host.check_mapping(mapping)
    host.check_grid(batch, q_heads, kv_heads, domains)
    if out.dtype != torch.int32 or out.ndim != 2 or out.shape[1] != 4 or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: it must be contiguous int32 [rows, 4].")
    rows = out.shape[0]
    prefix = None
    if isinstance(blocks, torch.Tensor):
        prefix, blocks = blocks, 0
        if prefix.dtype != torch.int32 or prefix.shape != (batch + 1,) or not prefix.is_contiguous():
            raise ValueError(
                f"blocks is {prefix.dtype} {list(prefix.shape)}: it must be contiguous int32 [batch + 1 = {batch + 1}]."
            )
        if prefix.device != out.device:
            raise ValueError(f"blocks is on {prefix.device} and out on {out.device}: put both on one device.")
    else:
        workgroups = q_heads * int(host.blocks_per_request(batch, blocks).sum())
        if rows < workgroups:
            raise ValueError(
                f"out has {rows} rows: the grid has {workgroups} workgroups, give at least as many rows."
            )
    if rows == 0:
        return None
    # Triton's own functions of host integers take longer than the launch
    requests = 1 << (max(batch, most_requests) - 1).bit_length()
    row_count = MAX_ROWS_PER_PROGRAM
    if prefix is not None and not uniform:
        row_count = max(1, min(row_count, COMPARISONS_PER_PROGRAM // requests))
    constants = dict(
        MAPPING=mapping,
        UNIFORM=uniform,
        LONGEST_FIRST=longest_first,
        REQUESTS=requests,
        ROWS=row_count,
    )
    traits = pointer_traits(out) if prefix is None else pointer_traits(out, prefix)
    key = (out.get_device(), traits, domains, q_heads, kv_heads, *constants.values())
    arguments = (out, rows, domains, batch, q_heads, kv_heads, blocks, prefix)
    grid = -(-rows // row_count), 1, 1
    return Launched(
        "tiles", _launch(key, grid, arguments, constants), grid, (*arguments, *constants.values())
    )

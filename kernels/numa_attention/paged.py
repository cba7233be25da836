"""Reading a tile of tokens of one KV head in place: from pages, or from keys and values that lie in a row."""

from __future__ import annotations

import triton.language as tl

from numa_attention.jit import kernel


@kernel
def page_rows(
    block_table_row,
    start,
    o_n,
    m_n,
    page_stride,
    token_stride,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Element offsets int64 [N] of tokens start + o_n in a paged tensor whose strides are given.

    block_table_row: pointer to the request's row. m_n [N]: tokens that exist; the row is read for no other.
    ONE_PAGE: the tile lies in a single page, so that one entry is read and the rows are evenly spaced.
    PAGE_SIZE 0: there are no pages; the request's one entry is the row of its first token.
    """
    if PAGE_SIZE == 0:
        return (tl.load(block_table_row).to(tl.int64) + start + o_n) * token_stride
    if ONE_PAGE:
        page = tl.load(block_table_row + start // PAGE_SIZE).to(tl.int64)
        return page * page_stride + (start % PAGE_SIZE + o_n).to(tl.int64) * token_stride
    o_token = start + o_n
    b_page = tl.load(block_table_row + o_token // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
    return b_page * page_stride + (o_token % PAGE_SIZE).to(tl.int64) * token_stride

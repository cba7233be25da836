"""What the tests share: random paged caches with poisoned holes, errors, and pass marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LAYOUTS = ("pages-2", "2-pages", "kv-last", "interleaved")
# ||out - ref|| / ||ref|| that a kernel may have
PASS_MARK = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = tuple(PASS_MARK)


@dataclass
class PagedCase:
    """Inputs of one attention step; see `numa_attention.reference.attention` for the meaning of each."""

    q: torch.Tensor  # [tokens, q_heads, head_dim]
    k_pages: torch.Tensor  # [pages, page_size, kv_heads, head_dim], a view of the layout asked for
    v_pages: torch.Tensor  # [pages, page_size, kv_heads, head_dim_v]
    query_start_loc: torch.Tensor  # int32 [requests + 1]
    seq_lens: torch.Tensor  # int32 [requests]
    block_table: torch.Tensor  # int32 [requests, most pages of a request]

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of `reference.attention`, for which keys in a row are pages of one token."""
        k_pages, v_pages, block_table = self.k_pages, self.v_pages, self.block_table
        if k_pages.ndim == 3:
            k_pages, v_pages = k_pages[:, None], v_pages[:, None]
            block_table = block_table + torch.arange(len(k_pages), device=block_table.device)
        return self.q, k_pages, v_pages, self.query_start_loc, self.seq_lens, block_table

    def poisoned_output(self) -> torch.Tensor:
        """An output full of NaN, [tokens, q_heads, head_dim_v]."""
        return _nan((*self.q.shape[:2], self.v_pages.shape[-1]), self.q.dtype, self.q.device)


def make_paged_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "pages-2",
    unused_pages: int = 3,
    columns: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """A random step over a paged cache.

    Pages of a request are scattered over the cache. Whatever no request owns is NaN: unused pages, the tail
    of each last page, page 0, and the gaps of the layout. Entries of the block table past a request's pages
    point to page 0. columns: the least that the block table has. The numbers of a seed are those of one kind
    of device: a GPU draws its own, since it would wait long for a CPU's.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    random = torch.Generator().manual_seed(seed)
    owned = [math.ceil(length / page_size) for length in seq_lens]
    pages = 1 + sum(owned) + unused_pages
    block_table = torch.zeros(len(owned), max([*owned, columns]), dtype=torch.int32)
    scattered = 1 + torch.randperm(pages - 1, generator=random)
    for row, own in zip(block_table, scattered[: sum(owned)].split(owned), strict=True):
        row[: len(own)] = own

    device = torch.device(device)
    numbers = random if device.type == "cpu" else torch.Generator(device).manual_seed(seed)
    block_table = block_table.to(device)
    k_pages, v_pages = empty_pages(pages, page_size, kv_heads, head_dim, head_dim_v, kv_dtype, layout, device)
    for row, length in zip(block_table, seq_lens, strict=True):
        token = torch.arange(length, device=device)
        for cache in (k_pages, v_pages):
            put_tokens(
                cache, row, token, torch.randn(length, *cache.shape[2:], generator=numbers, device=device)
            )

    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return PagedCase(
        q=torch.randn(int(starts[-1]), q_heads, head_dim, generator=numbers, device=device).to(dtype),
        k_pages=k_pages,
        v_pages=v_pages,
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
        block_table=block_table,
    )


def put_tokens(pages: torch.Tensor, row: torch.Tensor, token: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write numbers [n, kv_heads, dim] as the tokens [n] of the request that has this row of the block table."""
    _bytes(pages)[_places(pages, row, token)] = _bytes(numbers.to(pages.device, pages.dtype))


def take_tokens(pages: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The tokens [n] of the request that has this row of the block table: [n, kv_heads, dim]."""
    return _bytes(pages)[_places(pages, row, token)].view(pages.dtype)


def poison_tokens(case: PagedCase, request: int, token: torch.Tensor) -> None:
    """Make keys and values of these tokens of a request NaN."""
    for pages in (case.k_pages, case.v_pages):
        nothing = _nan((len(token), *pages.shape[2:]), pages.dtype, pages.device)
        put_tokens(pages, case.block_table[request], token, nothing)


def poison_left_of_windows(case: PagedCase, window: int) -> None:
    """Make the keys and values NaN that no query of their request sees through its window."""
    for request, (queries, length) in enumerate(
        zip(case.query_start_loc.diff().tolist(), case.seq_lens.tolist(), strict=True)
    ):
        poison_tokens(case, request, torch.arange(max(length - queries - window, 0)))


def _places(pages: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    token, page_size = token.to(pages.device), pages.shape[1]
    return row.to(pages.device).long()[token // page_size], token % page_size


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Numbers of one byte as integers, since torch does not move float8 by index everywhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def make_contiguous_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    gap: int = 3,
    device: torch.device | str = "cpu",
    **options,
) -> PagedCase:
    """A random step whose keys and values lie in a row, `gap` rows of NaN before, between and after the requests.

    k_pages, v_pages are [token, kv_head, head_dim], parts of one wider tensor; block_table [requests, 1] holds each
    request's first row. options: those of `make_paged_case`.
    """
    case = make_paged_case(query_lens, seq_lens, device=device, **options)
    starts, rows = [], gap
    for length in seq_lens:
        starts.append(rows)
        rows += length + gap
    kv_heads, head_dim, head_dim_v = case.k_pages.shape[2], case.k_pages.shape[3], case.v_pages.shape[3]
    both = _nan((rows, kv_heads, head_dim + head_dim_v + 8), case.k_pages.dtype, device)
    keys, values = both[..., :head_dim], both[..., head_dim : head_dim + head_dim_v]
    for row, start, length in zip(case.block_table, starts, seq_lens, strict=True):
        for pages, in_a_row in ((case.k_pages, keys), (case.v_pages, values)):
            in_a_row[start : start + length] = take_tokens(pages, row, torch.arange(length))
    case.k_pages, case.v_pages = keys, values
    case.block_table = torch.tensor(starts, dtype=torch.int32, device=device)[:, None]
    return case


def empty_pages(
    pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    layout: str,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V views [page, token, kv_head, dim] of one allocation full of NaN.

    "pages-2" is (pages, 2, tokens, heads, dim) and "2-pages" is (2, pages, tokens, heads, dim). "kv-last"
    is [pages, heads, tokens, head_dim + head_dim_v], keys beside values. "interleaved" is "pages-2" of a
    hybrid model, where each page lies inside a larger block that other layers fill.
    """
    dim = max(head_dim, head_dim_v)
    if layout == "kv-last":
        both = _nan((pages, kv_heads, page_size, head_dim + head_dim_v), dtype, device).transpose(1, 2)
        return both[..., :head_dim], both[..., head_dim:]
    if layout == "2-pages":
        keys, values = _nan((2, pages, page_size, kv_heads, dim), dtype, device)
    elif layout == "pages-2":
        keys, values = _nan((pages, 2, page_size, kv_heads, dim), dtype, device).unbind(1)
    elif layout == "interleaved":
        page_elements = 2 * page_size * kv_heads * dim
        blocks = _nan((pages, 3 * page_elements), dtype, device)[:, page_elements : 2 * page_elements]
        keys, values = blocks.unflatten(1, (2, page_size, kv_heads, dim)).unbind(1)
    else:
        raise ValueError(f"layout {layout!r} is unknown: choose one of {LAYOUTS}")
    return keys[..., :head_dim], values[..., :head_dim_v]


def _nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return torch.full(tuple(shape), math.nan, dtype=torch.float32, device=device).to(dtype)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float64; NaN or an infinity anywhere in `out` gives infinity."""
    expected = expected.detach().to(out.device).double()
    error = (out.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30)
    return float(error) if error.isfinite() else math.inf


def assert_close(out: torch.Tensor, expected: torch.Tensor, mark: torch.dtype | float | None = None) -> None:
    """`out` is within a pass mark, or that of a type, its own one if None."""
    mark = out.dtype if mark is None else mark
    allowed = mark if isinstance(mark, float) else PASS_MARK[mark]
    error = relative_error(out, expected)
    assert error <= allowed, f"relative error {error:.2e} exceeds {allowed:.0e} for {mark}"

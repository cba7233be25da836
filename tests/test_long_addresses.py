"""Attention over tensors whose addresses need more than 32 bits, in sparse files that take no memory."""

from __future__ import annotations

import pytest
import torch

from numa_attention import reference, runner
from tests.kernel_step import check, make_planner, step_of
from tests.support import PagedCase, assert_close, make_contiguous_case, make_paged_case

PAGES = 300_000  # of 16 tokens x 8 KV heads x 128 x K and V: 20 GiB in bfloat16
PAGE_ELEMENTS = 2 * 16 * 8 * 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="the file-backed cache is on the CPU")
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("num_decodes", [2, 0], ids=["decode", "prefill"])
def test_pages_beyond_32_bits(kernels, num_decodes, tmp_path):
    path = tmp_path / "cache"
    storage = torch.from_file(str(path), shared=True, size=PAGES * PAGE_ELEMENTS, dtype=torch.bfloat16)
    k_pages, v_pages = storage.view(PAGES, 2, 16, 8, 128).unbind(1)
    # ids on both sides of where page x stride passes 2**31 elements, and of 2**16
    block_table = torch.tensor([[65_535, 65_536, 7_768], [131_072, 262_144, 299_999]], dtype=torch.int32)
    random = torch.Generator().manual_seed(0)
    for page in block_table.flatten().tolist():
        for pages in (k_pages, v_pages):
            pages[page] = torch.randn(16, 8, 128, generator=random).bfloat16()
    query_lens = [1, 1] if num_decodes else [20, 3]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    case = PagedCase(
        q=torch.randn(int(starts[-1]), 8, 128, generator=random).bfloat16(),
        k_pages=k_pages,
        v_pages=v_pages,
        query_start_loc=starts,
        seq_lens=torch.tensor([40, 48], dtype=torch.int32),
        block_table=block_table,
    )
    check(case, kernels=kernels, num_decodes=num_decodes)
    # a wrapped address would have read another, empty place, and the comparison above would have failed
    assert path.stat().st_blocks * 512 < 4 << 20


STRIDE = 1 << 30  # elements between tokens: the third lies past 2**31


def spread_out(rows: torch.Tensor, path) -> torch.Tensor:
    """The same [tokens, heads, dim], each token STRIDE elements after the one before it."""
    size = (len(rows) - 1) * STRIDE + rows[0].numel()
    storage = torch.from_file(str(path), shared=True, size=size, dtype=rows.dtype)
    far = storage.as_strided(rows.shape, (STRIDE, *rows.stride()[1:]))
    far.copy_(rows)
    return far


@pytest.mark.skipif(torch.cuda.is_available(), reason="the file-backed tensors are on the CPU")
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("pages", [True, False], ids=["pages", "no-pages"])
@pytest.mark.parametrize("num_decodes", [1, 0], ids=["decode", "prefill"])
def test_tokens_beyond_32_bits(kernels, pages, num_decodes, tmp_path):
    """Queries, outputs, and keys and values without pages, by token number x stride."""
    make = make_paged_case if pages else make_contiguous_case
    case = make([4], [4], dtype=torch.bfloat16, **({} if pages else {"gap": 0}))
    expected, _ = reference.attention(*case.arguments(), scale=0.125)
    out = spread_out(case.poisoned_output(), tmp_path / "out")
    case.q = spread_out(case.q, tmp_path / "q")
    if not pages:
        case.k_pages = spread_out(case.k_pages.contiguous(), tmp_path / "k")
        case.v_pages = spread_out(case.v_pages.contiguous(), tmp_path / "v")
    schedule = make_planner(case, kernels=kernels, max_decode_query=4).plan(step_of(case, num_decodes))
    runner.attend(case.q, case.k_pages, case.v_pages, out, schedule, scale=0.125)
    assert_close(out.contiguous(), expected)

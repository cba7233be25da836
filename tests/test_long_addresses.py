"""Attention over pages whose addresses need more than 32 bits, in a sparse file of 20 GiB that takes no memory."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_step import check
from tests.support import PagedCase

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

"""Prefill, decode and mixed steps against the float64 reference: shapes, layouts, masks, scores."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernel_step import check, kernels
from tests.support import LAYOUTS, make_paged_case

MIXED = {"query_lens": [1, 1, 1, 63, 17], "seq_lens": [1, 17, 100, 63, 80]}


@kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_step_in_every_layout(kernels, layout, device):
    case = make_paged_case(**MIXED, layout=layout, device=device)
    check(case, kernels=kernels, num_decodes=3)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 32, 56, 64, 80, 96, 112, 128, 256])
def test_head_sizes_and_dtypes(kernels, head_dim, dtype, device):
    case = make_paged_case(
        [1, 1, 19], [33, 100, 40], head_dim=head_dim, dtype=dtype, device=device, seed=head_dim
    )
    check(case, kernels=kernels, num_decodes=2)


@kernels
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 24, 64])
def test_groups(kernels, group, device):
    # two KV heads, so that a group's last rows could bleed into the next head's
    case = make_paged_case([1, 1, 9], [63, 100, 20], q_heads=2 * group, kv_heads=2, device=device, seed=group)
    check(case, kernels=kernels, num_decodes=2)


@kernels
def test_value_heads_smaller_than_key_heads(kernels, device):
    case = make_paged_case([1, 1, 40], [33, 200, 77], head_dim=192, head_dim_v=128, device=device)
    check(case, kernels=kernels, num_decodes=2)


@kernels
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 528, 2048])
def test_page_sizes(kernels, page_size, device):
    case = make_paged_case([1, 1, 70], [65, 1000, 120], page_size=page_size, device=device, seed=page_size)
    check(case, kernels=kernels, num_decodes=2)


@kernels
@pytest.mark.parametrize("query_len", [2, 3, 4, 8])
def test_decode_of_several_tokens(kernels, query_len, device):
    case = make_paged_case(
        [query_len, 1, query_len], [100, 63, query_len], q_heads=6, kv_heads=2, device=device
    )
    schedule = check(case, kernels=kernels, num_decodes=3, planner_options={"max_decode_query": query_len})
    assert schedule.prefill is None


@kernels
def test_decode_in_several_row_blocks(kernels, device):
    # 8 tokens x 24 heads fill three row blocks; the shorter requests leave some of them empty
    case = make_paged_case([8, 1, 3], [300, 63, 100], q_heads=48, kv_heads=2, device=device)
    check(case, kernels=kernels, num_decodes=3, planner_options={"max_decode_query": 8})


@kernels
@pytest.mark.parametrize("window", [0, 1, 15, 33, 1000])
def test_window_reads_nothing_left_of_it(kernels, window, device):
    query_lens, seq_lens = [1, 1, 50, 17], [30, 300, 150, 17]
    case = make_paged_case(query_lens, seq_lens, device=device, seed=window)
    for request, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        token = torch.arange(max(length - queries - window, 0))
        page = case.block_table[request].cpu().long()[token // 16]
        for cache in (case.k_pages, case.v_pages):
            cache[page.to(device), (token % 16).to(device)] = math.nan
    check(case, kernels=kernels, num_decodes=2, window=window)


@kernels
def test_chunked_prefill_with_a_cached_prefix(kernels, device):
    case = make_paged_case([40, 1, 100], [300, 129, 101], device=device)
    check(case, kernels=kernels, num_decodes=0)


@kernels
def test_non_causal(kernels, device):
    case = make_paged_case([1, 40, 100], [70, 40, 130], device=device)
    check(case, kernels=kernels, num_decodes=1, causal=False)


@kernels
def test_non_causal_with_more_queries_than_keys(kernels, device):
    # as in cross attention, where the two lengths have nothing to do with one another
    case = make_paged_case([30, 2, 90], [7, 5, 40], device=device)
    check(case, kernels=kernels, num_decodes=0, causal=False)


@kernels
def test_causal_with_more_queries_than_keys(kernels, device):
    # vLLM's dummy runs plan such steps: the first queries stand left of every key
    case = make_paged_case([3, 30], [1, 7], device=device)
    check(case, kernels=kernels, num_decodes=1, planner_options={"max_decode_query": 4})


@kernels
def test_soft_cap_sinks_and_alibi(kernels, device):
    case = make_paged_case([1, 1, 40], [70, 300, 130], q_heads=6, kv_heads=2, device=device)
    random = torch.Generator().manual_seed(1)
    sinks, slopes = (torch.randn(6, generator=random).to(device) for _ in range(2))
    for options in (
        {"soft_cap": 2.0},
        {"sinks": sinks},
        {"alibi_slopes": slopes.abs() * 0.1},
        {"soft_cap": 3.0, "sinks": sinks, "alibi_slopes": slopes.abs() * 0.1, "window": 60},
    ):
        check(case, kernels=kernels, num_decodes=2, **options)


@kernels
@pytest.mark.parametrize("soft_cap", [1e-3, 1e3, 1e5])
def test_soft_caps_far_from_the_scores(kernels, soft_cap, device):
    case = make_paged_case([1, 4, 9], [70, 4, 80], device=device)
    check(case, kernels=kernels, num_decodes=1, soft_cap=soft_cap)


@kernels
def test_soft_cap_does_not_overflow(kernels, device):
    case = make_paged_case([1, 20], [70, 30], device=device)
    case.q.mul_(1e4)
    check(case, kernels=kernels, num_decodes=1, soft_cap=30.0)


@kernels
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_cache(kernels, kv_dtype, device):
    case = make_paged_case([1, 1, 40], [70, 300, 130], dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device)
    scales = {"k_scale": torch.tensor([0.7], device=device), "v_scale": torch.tensor([1.6], device=device)}
    check(case, kernels=kernels, num_decodes=2, **scales)


@kernels
def test_requests_without_keys_or_queries(kernels, device):
    # a padding request in the middle and at the end, and one whose query has no key at all
    case = make_paged_case([1, 0, 1, 0], [70, 0, 0, 0], device=device)
    check(case, kernels=kernels, num_decodes=4)
    for num_decodes in (0, 2):
        check(make_paged_case([1, 0], [0, 0], device=device), kernels=kernels, num_decodes=num_decodes)


@kernels
def test_only_padding(kernels, device):
    case = make_paged_case([0, 0], [0, 0], device=device)
    check_nothing = make_paged_case([1], [5], device=device)
    check(check_nothing, kernels=kernels, num_decodes=1)
    from tests.kernel_step import make_planner, run, step_of

    out, _ = run(case, make_planner(case, kernels=kernels).plan(step_of(case, 2)), scale=1.0)
    assert out.numel() == 0


@kernels
@pytest.mark.parametrize(
    "mapping", ["block-first", "swizzled-block-first", "head-first", "swizzled-head-first"]
)
def test_the_mapping_named_is_the_one_launched(kernels, mapping, device):
    from numa_attention.mapping import tiles

    case = make_paged_case([1, 100, 60, 130], [9, 100, 80, 130], q_heads=6, kv_heads=3, device=device)
    schedule = check(case, kernels=kernels, num_decodes=1, planner_options={"mapping": mapping})
    variant = schedule.prefill.variant
    assert variant.mapping == mapping and mapping in variant.describe()
    blocks = [-(-queries * 2 // variant.block_m) for queries in (100, 60, 130)]
    expected = tiles(mapping, 3, 3, 3, blocks, variant.domains, longest_first=True)
    assert schedule.prefill.tiles[:, :3].cpu().tolist() == expected.tolist()

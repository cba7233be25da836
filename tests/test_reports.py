"""Kinds of faults that attention backends were reported for, each under test.

| kind | test |
|---|---|
| tiles lost or done twice for some head counts | test_mapping.py::test_head_counts_that_lost_tiles_elsewhere |
| a head map right for few groups only | test_mapping.py::test_every_head_count |
| "swizzled" and yet spread over all domains | test_mapping.py::test_uniform_accs_stay_on_one_domain |
| a mapping silently not applied | test_attention.py::test_the_mapping_named_is_the_one_launched |
| head-first given up because of causal's longest first | test_mapping.py::test_longest_first_descends_within_a_head |
| page number x stride beyond 32 bits, reading | test_long_addresses.py::test_pages_beyond_32_bits |
| page number x stride beyond 32 bits, writing | test_kv_cache.py::test_addresses_beyond_32_bits |
| token number x stride beyond 32 bits | test_long_addresses.py::test_tokens_beyond_32_bits |
| faults after long use only | test_random_steps.py::test_ten_thousand_replays_are_bit_identical |
| a window that hides a whole tile | test_attention.py::test_window_reads_nothing_left_of_it |
| values outside the window multiplied by 0 | test_masks.py::test_a_window_without_causal_hides_both_sides |
| NaN in page 0, which padding points to | test_attention.py::test_mixed_step_in_every_layout |
| padding rows with no keys | test_attention.py::test_requests_without_keys_or_queries |
| padding rows that spoil a float8 scale | test_float8.py::test_a_row_without_keys_is_zero_in_float8_too |
| -inf less -inf in a merge | test_merge.py::test_all_parts_empty |
| +inf or a finite LSE for empty rows | test_attention.py::test_causal_with_more_queries_than_keys |
| LSE in another base | test_reference.py::test_cases_computed_by_hand |
| partial results rounded to 16 bits | test_merge.py::test_no_precision_is_lost_to_the_type_of_the_parts |
| empty chunks of shorter prefixes | test_attention.py::test_chunked_prefill_with_a_cached_prefix |
| another result with another number of splits | test_reports.py::test_any_number_of_splits_gives_one_result |
| drift at long context | test_reports.py::test_a_long_context |
| a bare assertion for context parallelism | plugin/test_context_parallel.py::test_layers_that_are_refused |
| local lengths of speculated tokens by subtraction | test_sharding.py::test_any_sharding_gives_the_unsharded_result |
| windows of a sharded cache in its own tokens | test_sharding.py::test_windows_are_of_positions |
| a dummy run longer than its pages | test_refusals.py::test_a_sequence_longer_than_its_block_table_row_is_cut |
| buffers of a graph that move | test_decode_schedule.py::test_schedule_outlives_other_lengths |
| tiles that cross pages of 528 or 784 tokens | test_attention.py::test_page_sizes |
| several decode tokens that read past the block table's row | plugin/test_step.py::test_speculative_decode_is_decode |
| groups that are no power of two, or bleed into the next head | test_attention.py::test_groups |
| head_dim 80, and float32 at 256 | test_attention.py::test_head_sizes_and_dtypes |
| head_dim 100 or 512 without a word | plugin/test_support.py::test_refused_with_the_reason |
| more LDS or shared memory than there is, spilled registers | test_offline.py::test_common_layers |
| a page of 2,048 tokens used as a tile | test_attention.py::test_page_sizes |
| interleaved caches of hybrid models taken for contiguous | test_attention.py::test_mixed_step_in_every_layout |
| pages below 16 tokens that fall to another backend | plugin/test_support.py::test_refused_with_the_reason |
| e4m3fn taken for e4m3fnuz | test_reports.py::test_each_float8_type_is_read_as_what_was_written |
| scales of the cache left out | plugin/test_step.py::test_fp8_cache_with_its_scales |
| a q_scale other than 1 | plugin/test_attention_types.py::test_float8_queries_as_vllm_quantises_them |
| a windowed prefill or decode that walks all pages | test_reports.py::test_only_tiles_inside_the_window_are_visited |
| sinks that no test runs | test_attention.py::test_soft_cap_sinks_and_alibi |
| prefix cache together with several tokens a step | test_reports.py::test_requests_that_share_the_pages_of_a_prefix |
| speculation sent down the prefill path | model/test_speculation.py::test_drafts_went_through_the_decode_kernels |
| splits capped, or given up at batches | test_decode_schedule.py::test_every_tile_is_listed_once_and_ranges_are_even |
| a backend's name that other names alias | plugin/test_selection.py::test_option |
| a backend class that lacks what a later release asks | plugin/test_other_releases.py::test_release |
| workers without the registration | plugin/test_selection.py::test_members_travel_to_processes_without_the_plugin |
| two plugins in one slot | plugin/test_selection.py::test_slot_of_another_plugin |
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from numa_attention.kv_cache import write_pages
from tests.kernel_step import check, kernels, make_planner, run, step_of, test_topology
from tests.support import empty_pages, make_paged_case

HERE = Path(__file__).parent


def test_the_table_names_tests_that_exist():
    rows = re.findall(r"^\| (.+) \| (\S+)::(\S+) \|$", __doc__, re.MULTILINE)
    assert len(rows) == __doc__.count("::")
    for _, file, test in rows:
        assert f"def {test}(" in (HERE / file).read_text(), f"{file} has no {test}"


@kernels
def test_any_number_of_splits_gives_one_result(kernels, device):
    case = make_paged_case([1, 3], [900, 333], q_heads=4, kv_heads=1, device=device)
    outputs = []
    for workgroups in (1, 3, 7, 40):
        schedule = check(
            case, kernels=kernels, num_decodes=2,
            planner_options={"topology": test_topology(device, workgroups, domains=1), "max_decode_query": 3},
        )  # fmt: skip
        outputs.append(run(case, schedule, scale=0.125)[0])
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], rtol=1e-5, atol=1e-6)


@kernels
def test_a_long_context(kernels, device):
    case = make_paged_case([1], [72_793], q_heads=2, kv_heads=1, head_dim=32, page_size=64, device=device)
    check(case, kernels=kernels, num_decodes=1)


@kernels
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_float8_type_is_read_as_what_was_written(kernels, kv_dtype, device):
    """Written by our kernel, read by our kernels: the numbers are those that went in, rounded."""
    round_trip(kernels, kv_dtype, device)


def test_fnuz_is_read_as_what_was_written():
    if torch.cuda.is_available():
        pytest.skip("NVIDIA GPUs do not convert e4m3fnuz")
    round_trip("torch", torch.float8_e4m3fnuz, torch.device("cpu"))


def round_trip(kernels: str, kv_dtype: torch.dtype, device: torch.device) -> None:
    case = make_paged_case([1, 20], [30, 20], dtype=torch.bfloat16, device=device)
    plain = case.k_pages.float(), case.v_pages.float()
    pages = empty_pages(len(case.k_pages), 16, 2, 64, 64, torch.float32, "pages-2", device)
    case.k_pages, case.v_pages = (x.to(kv_dtype) for x in pages)
    scales = {"k_scale": torch.tensor([0.05], device=device), "v_scale": torch.tensor([0.02], device=device)}
    for request, length in enumerate((30, 20)):
        token = torch.arange(length)
        slots = case.block_table[request].cpu().long()[token // 16] * 16 + token % 16
        rows = (x.flatten(0, 1)[slots.to(device)].bfloat16() for x in plain)
        write_pages(*rows, case.k_pages, case.v_pages, slots.to(device), **scales, kernels=kernels)
    schedule = make_planner(case, kernels=kernels).plan(step_of(case, 1))
    out, _ = run(case, schedule, scale=0.125, **scales)
    case.k_pages, case.v_pages = (x.bfloat16() for x in plain)
    exact, _ = run(case, make_planner(case, kernels=kernels).plan(step_of(case, 1)), scale=0.125)
    # e5m2 keeps two bits after the first
    error = (out.float() - exact.float()).norm() / exact.float().norm()
    assert error < (0.2 if kv_dtype == torch.float8_e5m2 else 0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts products under the interpreter")
@pytest.mark.parametrize("num_decodes", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("causal", [True, False])
def test_only_tiles_inside_the_window_are_visited(num_decodes, causal, device, monkeypatch):
    """A tile that is visited is two products."""
    from numa_attention.testing.interpreter import _Builder

    products = []
    dot = _Builder.create_dot
    monkeypatch.setattr(_Builder, "create_dot", lambda *arguments: products.append(1) or dot(*arguments))
    case = make_paged_case([1], [3000], q_heads=2, kv_heads=1, device=device)
    visited = {}
    for window in (-1, 100):
        planner = make_planner(case, kernels="triton", window=window)
        schedule = planner.plan(step_of(case, num_decodes, causal))
        variant = (schedule.decode or schedule.prefill).variant
        products.clear()
        run(case, schedule, scale=0.125)
        visited[window] = len(products) // 2
    assert visited[-1] == -(-3000 // variant.block_n)
    # 101 tokens may touch one tile more than they fill
    assert visited[100] <= -(-101 // variant.block_n) + 1


@kernels
def test_requests_that_share_the_pages_of_a_prefix(kernels, device):
    """Two decodes of several tokens and a chunk over one prefix, whose pages all three read."""
    case = make_paged_case([4, 2, 30], [70, 66, 94], device=device)
    for request, length in ((1, 66), (2, 94)):
        # 64 tokens of request 0 are the first of the others too
        case.block_table[request, :4] = case.block_table[0, :4]
        assert length > 64
    check(case, kernels=kernels, num_decodes=2, planner_options={"max_decode_query": 4})

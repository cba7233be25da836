"""The decode work list: coverage, balance, device form against host form, corruption, replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numa_attention.decode.work_list import (
    FIRST_FIELDS,
    FIRST_WORKGROUP,
    ITEM_FIELDS,
    KV_HEAD,
    QUERY_LEN,
    QUERY_START,
    REQUEST,
    ROW_BLOCK,
    ROW_FIELDS,
    SEQ_LEN,
    SPLIT,
    SPLITS,
    TILE_BEGIN,
    TILE_END,
    build_on_host,
    capacity,
    partial_slot,
)
from numa_attention.sharding import WHOLE, Shard
from tests.kernel_step import kernels, make_planner, run, step_of
from tests.support import make_paged_case

lists = {
    "requests": st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 8)), min_size=1, max_size=9),
    "kv_heads": st.integers(1, 9),
    "group": st.integers(1, 9),
    "block_m": st.sampled_from([1, 16, 32]),
    "block_n": st.sampled_from([16, 64, 128]),
    "window": st.sampled_from([-1, 0, 100]),
    "workgroups": st.integers(1, 40),
    "min_tiles": st.integers(1, 3),
    "domains": st.sampled_from([1, 2, 5, 8]),
}


def build(requests, **options):
    seq_lens = np.array([max(length, queries) for length, queries in requests])
    query_lens = np.array([queries for _, queries in requests])
    starts = np.concatenate(([3], 3 + query_lens.cumsum()))  # a list may begin in the middle of a step
    return seq_lens, query_lens, *build_on_host(seq_lens, starts, **options)


@given(**lists)
def test_every_tile_is_listed_once_and_ranges_are_even(
    requests, kv_heads, group, block_m, block_n, window, workgroups, min_tiles, domains
):
    workgroups = -(-workgroups // domains) * domains
    seq_lens, query_lens, ranges, items = build(
        requests, kv_heads=kv_heads, group=group, block_m=block_m, block_n=block_n, window=window,
        workgroups=workgroups, min_tiles=min_tiles, domains=domains,
    )  # fmt: skip
    # every domain has as many ranges as the others, give or take one, and neighbours share a domain
    of_domain = (ranges[:, 1] > 0).reshape(domains, -1)
    assert np.ptp(of_domain.sum(1)) <= 1
    assert not (np.diff(of_domain.astype(int)) > 0).any()
    rows = np.flatnonzero(of_domain)
    ranges = np.concatenate([ranges[rows], np.delete(ranges, rows, axis=0)])
    listed = {}
    loads = []
    slots = set()
    for workgroup, (first, count) in enumerate(ranges[:, :2]):
        own = items[first : first + count]
        if count:
            fields = ranges[workgroup, FIRST_FIELDS : FIRST_FIELDS + ITEM_FIELDS]
            assert (fields == own[0, :ITEM_FIELDS]).all()
        loads.append(int((own[:, TILE_END] - own[:, TILE_BEGIN]).sum()))
        for item in own:
            unit = (item[REQUEST], item[KV_HEAD], item[ROW_BLOCK])
            assert item[FIRST_WORKGROUP] + item[SPLIT] == workgroup
            request = item[REQUEST]
            assert item[QUERY_START] == 3 + query_lens[:request].sum()
            assert (item[QUERY_LEN], item[SEQ_LEN]) == (query_lens[request], seq_lens[request])
            if item[SPLITS] > 1:
                slot = partial_slot(item[SPLIT], item[FIRST_WORKGROUP])
                assert slot not in slots and slot < 2 * workgroups
                slots.add(slot)
            listed.setdefault(unit, []).append(item)
    blocks = -(-query_lens * group // block_m)
    assert set(listed) == {
        (r, h, b) for r in range(len(requests)) for h in range(kv_heads) for b in range(blocks[r])
    }
    for (request, _, _), parts in listed.items():
        assert [part[SPLIT] for part in parts] == list(range(len(parts)))
        assert all(part[SPLITS] == len(parts) for part in parts)
        low = max(seq_lens[request] - query_lens[request] - window, 0) // block_n if window >= 0 else 0
        edges = [parts[0][TILE_BEGIN], *(part[TILE_END] for part in parts)]
        assert edges[0] == low and edges[-1] == max(-(-seq_lens[request] // block_n), low + 1)
        assert edges[1:-1] == [part[TILE_BEGIN] for part in parts[1:]] and edges == sorted(edges)
    used = [load for load in loads if load]
    if used:
        average = -(-sum(used) // workgroups)
        assert max(used) <= max(average, min_tiles)
        if any(ranges[:, 1] > 1):
            assert max(used) - min(used) <= 1
            assert len(used) == workgroups or max(used) <= min_tiles
        else:  # each range is a part of one unit, which is cut evenly
            for parts in listed.values():
                tiles = [part[TILE_END] - part[TILE_BEGIN] for part in parts]
                assert max(tiles) - min(tiles) <= 1


@pytest.mark.parametrize("seed", range(12))
def test_device_form_equals_host_form(seed, device):
    from numa_attention.decode.work_list_device import build_on_device

    random = np.random.default_rng(seed)
    requests = int(random.integers(1, 9))
    query_lens = random.integers(0, 9, requests)
    seq_lens = np.maximum(random.integers(0, 3000, requests), query_lens)
    kv_heads, group, workgroups = (
        int(random.integers(1, 9)),
        int(random.integers(1, 9)),
        int(random.integers(1, 40)),
    )
    options = {
        "kv_heads": kv_heads,
        "group": group,
        "block_m": 16,
        "block_n": 64,
        "window": [-1, 100][seed % 2],
        "min_tiles": 1 + seed % 3,
        "domains": 1 + seed % 4,
        # half of the lists are of one rank's part of the sequences
        "shard": WHOLE if seed % 2 else Shard(1 + seed % 5, seed % 3 % (1 + seed % 5), 1 + seed),
    }
    workgroups = -(-workgroups // options["domains"]) * options["domains"]
    starts = np.concatenate(([0], query_lens.cumsum()))
    expected_ranges, expected_items = build_on_host(seq_lens, starts, workgroups=workgroups, **options)
    ranges = torch.full((workgroups, ROW_FIELDS), -7, dtype=torch.int32, device=device)
    items = torch.full(
        (capacity(16, kv_heads, 8 * group // 16 + 1, workgroups), ROW_FIELDS),
        -7,
        dtype=torch.int32,
        device=device,
    )
    # the list may be that of a step's later requests
    options["first_request"] = before = seed % 3
    expected_items[:, REQUEST] += before
    starts = torch.tensor([0] * before + [*starts], dtype=torch.int32, device=device)
    lengths = torch.tensor([77] * before + [*seq_lens], dtype=torch.int32, device=device)
    build_on_device(lengths, starts, ranges, items, num_requests=requests, max_requests=16, **options)
    ranges, items = ranges.cpu().numpy(), items.cpu().numpy()
    assert (ranges[:, 1] == expected_ranges[:, 1]).all()
    for row, expected_row in zip(ranges, expected_ranges, strict=True):
        (first, count), expected_first = row[:2], expected_row[0]
        expected = expected_items[expected_first : expected_first + count, :ITEM_FIELDS]
        assert (items[first : first + count, :ITEM_FIELDS] == expected).all()
        if count:
            assert (row[FIRST_FIELDS : FIRST_FIELDS + ITEM_FIELDS] == expected[0]).all()


def long_case(device):
    return make_paged_case([1, 1, 1], [40, 900, 333], q_heads=4, kv_heads=2, device=device)


@kernels
def test_units_are_split_merged_in_one_launch_and_leave_the_counters_at_zero(kernels, device):
    case = long_case(device)
    planner = make_planner(case, kernels=kernels)
    schedule = planner.plan(step_of(case, 3))
    items = schedule.decode.items.cpu().numpy()
    ranges = schedule.decode.ranges.cpu().numpy()
    splits = [items[i, SPLITS] for first, count in ranges[:, :2] for i in range(first, first + count)]
    assert max(splits) > 1
    first, _ = run(case, schedule, scale=0.125)
    assert not schedule.decode.arrivals.any()
    # the counters that a launch leaves behind serve the next one, and the merge order is fixed
    second, _ = run(case, schedule, scale=0.125)
    assert torch.equal(first, second)


def test_more_parts_than_one_merge_takes(device):
    """1 unit over 40 workgroups: 3 groups of up to 16 parts, then their results."""
    from tests.kernel_step import check, test_topology

    case = make_paged_case([1], [2600], q_heads=4, kv_heads=1, device=device)
    check(
        case,
        kernels="triton",
        num_decodes=1,
        planner_options={"topology": test_topology(device, workgroups=40)},
    )


@kernels
def test_schedule_outlives_other_lengths(kernels, device):
    """One planner, several steps, as a captured graph replays: the buffers stay where they are."""
    case = long_case(device)
    planner = make_planner(case, kernels=kernels)
    step = step_of(case, 3)
    before = planner.plan(step).decode.items.data_ptr()
    wide, _ = run(case, planner.plan(step), scale=0.125)
    short = make_paged_case([1], [5], q_heads=4, kv_heads=2, device=device, seed=3)
    run(short, planner.plan(step_of(short, 1)), scale=0.125)
    again, _ = run(case, planner.plan(step), scale=0.125)
    assert torch.equal(wide, again)
    assert planner.plan(step).decode.items.data_ptr() == before


@kernels
@pytest.mark.parametrize("field", [REQUEST, KV_HEAD, TILE_BEGIN, TILE_END])
def test_corrupting_one_entry_changes_the_output(kernels, field, device):
    case = long_case(device)
    schedule = make_planner(case, kernels=kernels).plan(step_of(case, 3))
    right, _ = run(case, schedule, scale=0.125)
    ranges, items = schedule.decode.ranges, schedule.decode.items
    first, count = ranges[2, :2].tolist()
    item = first + count - 1
    items[item, field] = {
        REQUEST: 1 - items[item, REQUEST].clamp(max=1),
        KV_HEAD: 1 - items[item, KV_HEAD],
    }.get(field, items[item, field] + (1 if field == TILE_BEGIN else -1))
    wrong, _ = run(case, schedule, scale=0.125)
    assert not torch.equal(right, wrong)


@kernels
def test_prefill_follows_its_tile_list(kernels, device):
    case = make_paged_case([300], [300], device=device)
    schedule = make_planner(case, kernels=kernels).plan(step_of(case, 0))
    right, _ = run(case, schedule, scale=0.125)
    schedule.prefill.tiles[0, 2] -= 1
    wrong, _ = run(case, schedule, scale=0.125)
    assert wrong.isnan().any() and not right.isnan().any()


def test_a_step_larger_than_planned_is_refused(device):
    case = make_paged_case([1] * 9, [5] * 9, device=device)
    planner = make_planner(long_case(device), kernels="auto")
    with pytest.raises(ValueError, match="9 requests exceeds max_requests=8"):
        planner.plan(step_of(case, 9))
    long = make_paged_case([2000], [2000], device=device)
    with pytest.raises(ValueError, match="max_tokens"):
        planner.plan(step_of(long, 0))

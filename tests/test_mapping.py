"""Every mapping is a bijection, every swizzled one keeps its promises about domains, for all head counts."""

import doctest
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numa_attention.mapping import MAPPINGS, domain_of, streams_per_domain, tiles

SWIZZLED = ("swizzled-block-first", "swizzled-head-first")
# head counts for which published swizzles lost tiles (ROCm/aiter#3936)
REPORTED_HEADS = [(20, 5), (24, 6), (40, 10), (48, 12), (36, 12), (12, 12), (20, 20), (28, 28), (36, 36)]

several = settings(max_examples=150, deadline=None)


@st.composite
def grids(draw, ragged: bool, max_batch: int = 8, max_q_heads: int = 128, max_blocks: int = 40):
    """(batch, q_heads, kv_heads, blocks of each request, domains); not ragged: blocks is one number."""
    batch = draw(st.integers(1, max_batch))
    q_heads = draw(st.integers(1, max_q_heads))
    kv_heads = draw(st.sampled_from([n for n in range(1, q_heads + 1) if q_heads % n == 0]))
    if ragged:
        blocks = draw(st.lists(st.integers(0, max_blocks), min_size=batch, max_size=batch))
    else:
        blocks = draw(st.integers(1, max_blocks))
    return batch, q_heads, kv_heads, blocks, draw(st.integers(1, 16))


def natural_order(batch, q_heads, blocks):
    """All tiles, sorted by request, query head, block: int64 [workgroups, 3]."""
    counts = np.broadcast_to(blocks, batch)
    parts = [
        np.indices((1, q_heads, count)).reshape(3, -1).T + [request, 0, 0]
        for request, count in enumerate(counts)
    ]
    return np.concatenate(parts)


def assert_bijection(rows, batch, q_heads, blocks):
    order = np.lexsort(rows.T[::-1])
    np.testing.assert_array_equal(rows[order], natural_order(batch, q_heads, blocks))


def accs_and_inner(rows, q_heads, kv_heads, blocks, batch):
    """The ACC of each tile, and the tile's place in the natural order of its ACC."""
    group = q_heads // kv_heads
    counts = np.broadcast_to(blocks, batch)
    request, head, block = rows.T
    return request * kv_heads + head // group, head % group * counts[request] + block


def workgroups_per_domain(rows, domains):
    return np.bincount(domain_of(np.arange(len(rows)), domains), minlength=domains)


def assert_contiguous(values):
    """The values are a range of integers, in any order, without repeats."""
    assert len(set(values)) == len(values)
    assert max(values) - min(values) + 1 == len(values)


def shares(rows, q_heads, kv_heads, blocks, batch, domains):
    """{(ACC, domain): the inner places of the tiles of that ACC on that domain}"""
    acc, inner = accs_and_inner(rows, q_heads, kv_heads, blocks, batch)
    domain = domain_of(np.arange(len(rows)), domains)
    order = np.lexsort((domain, acc))
    found = {}
    key = acc[order] * domains + domain[order]
    for part in np.split(order, np.flatnonzero(np.diff(key)) + 1):
        found[int(acc[part[0]]), int(domain[part[0]])] = inner[part].tolist()
    return found


@pytest.mark.parametrize("mapping", MAPPINGS)
@given(grid=grids(ragged=False), longest_first=st.booleans())
@several
def test_uniform_bijection_and_balance(mapping, grid, longest_first):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles(mapping, *grid, longest_first=longest_first)
    assert rows.dtype == np.int64 and rows.shape == (batch * q_heads * blocks, 3)
    assert_bijection(rows, batch, q_heads, blocks)
    assert np.ptp(workgroups_per_domain(rows, domains)) <= 1


@pytest.mark.parametrize("mapping", MAPPINGS)
@given(grid=grids(ragged=True), longest_first=st.booleans())
@several
def test_ragged_bijection_and_balance(mapping, grid, longest_first):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles(mapping, *grid, longest_first=longest_first)
    assert_bijection(rows, batch, q_heads, blocks)
    assert np.ptp(workgroups_per_domain(rows, domains)) <= 1


@pytest.mark.parametrize("mapping", SWIZZLED)
@given(grid=grids(ragged=False, max_blocks=12))
@several
def test_uniform_accs_stay_on_one_domain(mapping, grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles(mapping, *grid)
    acc_size = q_heads // kv_heads * blocks
    dealt = batch * kv_heads // domains * domains
    for (acc, domain), inner in shares(rows, q_heads, kv_heads, blocks, batch, domains).items():
        if acc < dealt:
            assert domain == acc % domains and len(inner) == acc_size
        assert_contiguous(inner)


@pytest.mark.parametrize("mapping", SWIZZLED)
@given(grid=grids(ragged=True, max_blocks=12))
@several
def test_ragged_cuts_at_most_one_acc_per_boundary(mapping, grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles(mapping, *grid, uniform=False)
    if len(rows) == 0:
        return
    found = shares(rows, q_heads, kv_heads, blocks, batch, domains)
    holders = np.bincount([acc for acc, _ in found])
    assert (holders > 1).sum() <= domains - 1
    for inner in found.values():
        assert_contiguous(inner)


@given(grid=st.booleans().flatmap(lambda ragged: grids(ragged=ragged, max_blocks=12)))
@several
def test_swizzled_head_first_runs_one_acc_at_a_time(grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles("swizzled-head-first", *grid)
    acc, inner = accs_and_inner(rows, q_heads, kv_heads, blocks, batch)
    for domain in range(min(domains, len(rows))):
        mine = acc[domain::domains]
        runs = np.count_nonzero(np.diff(mine)) + 1
        assert runs == len(set(mine.tolist())), "an ACC was left and taken up again"
        ascending = np.diff(inner[domain::domains])[np.diff(mine) == 0]
        assert (ascending == 1).all()


@given(grid=st.booleans().flatmap(lambda ragged: grids(ragged=ragged, max_blocks=12)))
@several
def test_both_swizzled_mappings_place_alike(grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    head_first = tiles("swizzled-head-first", *grid)
    block_first = tiles("swizzled-block-first", *grid)
    for domain in range(domains):
        assert set(map(tuple, head_first[domain::domains])) == set(map(tuple, block_first[domain::domains]))


def block_first_by_definition(batch, q_heads, kv_heads, blocks, domains):
    """swizzled-block-first from the sentence that defines it: each domain's tiles are sorted, ACC by ACC."""
    ragged = not isinstance(blocks, int)
    counts = list(blocks) if ragged else [blocks] * batch
    dealt = batch * kv_heads // domains * domains
    placed = tiles("swizzled-head-first", batch, q_heads, kv_heads, blocks, domains, uniform=not ragged)
    acc, _ = accs_and_inner(placed, q_heads, kv_heads, counts, batch)
    rows = np.full_like(placed, -1)
    for domain in range(min(domains, len(placed))):
        mine, mine_acc = placed[domain::domains].tolist(), acc[domain::domains].tolist()
        held = {a: mine_acc.count(a) for a in mine_acc}

        def whole(a, held=held):
            if not ragged:
                return a < dealt
            return held[a] == q_heads // kv_heads * counts[a // kv_heads]

        ordered = []
        for (_, is_whole), run in itertools.groupby(
            zip(mine, mine_acc, strict=True), key=lambda pair: (pair[0][0], whole(pair[1]))
        ):
            part = [tile for tile, _ in run]
            ordered += sorted(part, key=lambda tile: (tile[2], tile[1])) if is_whole else part
        rows[domain::domains] = ordered
    return rows


@given(
    grid=st.booleans().flatmap(
        lambda ragged: grids(ragged=ragged, max_batch=5, max_q_heads=24, max_blocks=5)
    ),
)
@settings(max_examples=300, deadline=None)
def test_swizzled_block_first_order(grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles("swizzled-block-first", *grid, uniform=isinstance(blocks, int))
    np.testing.assert_array_equal(rows, block_first_by_definition(*grid))


@given(grid=grids(ragged=True))
@several
def test_naive_orders(grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    natural = natural_order(batch, q_heads, blocks)
    np.testing.assert_array_equal(tiles("head-first", *grid), natural)
    by_block = natural[np.lexsort((natural[:, 1], natural[:, 2], natural[:, 0]))]
    np.testing.assert_array_equal(tiles("block-first", *grid), by_block)


@given(grid=st.booleans().flatmap(lambda ragged: grids(ragged=ragged)))
@several
def test_one_domain_needs_no_swizzle(grid):
    grid = (*grid[:-1], 1)
    np.testing.assert_array_equal(tiles("swizzled-head-first", *grid), tiles("head-first", *grid))
    np.testing.assert_array_equal(tiles("swizzled-block-first", *grid), tiles("block-first", *grid))


@pytest.mark.parametrize("mapping", MAPPINGS)
@given(grid=grids(ragged=True, max_q_heads=32, max_blocks=12))
@several
def test_longest_first_descends_within_a_head(mapping, grid):
    batch, q_heads, kv_heads, blocks, domains = grid
    rows = tiles(mapping, *grid, longest_first=True)
    ascending = tiles(mapping, *grid)
    np.testing.assert_array_equal(rows[:, :2], ascending[:, :2])
    np.testing.assert_array_equal(rows[:, 2], np.array(blocks)[rows[:, 0]] - 1 - ascending[:, 2])
    for domain in range(domains):
        mine = rows[domain::domains]
        by_head = mine[np.lexsort((np.arange(len(mine)), mine[:, 1], mine[:, 0]))]
        same_head = (np.diff(by_head[:, :2], axis=0) == 0).all(axis=1)
        assert (np.diff(by_head[:, 2])[same_head] < 0).all()


def check_all_promises(mapping, batch, q_heads, kv_heads, blocks, domains):
    rows = tiles(mapping, batch, q_heads, kv_heads, blocks, domains)
    assert_bijection(rows, batch, q_heads, blocks)
    assert np.ptp(workgroups_per_domain(rows, domains)) <= 1
    acc, _ = accs_and_inner(rows, q_heads, kv_heads, blocks, batch)
    domain = domain_of(np.arange(len(rows)), domains)
    pairs = np.unique(acc * domains + domain)
    holders = np.bincount(pairs // domains)
    if isinstance(blocks, int):
        assert (holders[: batch * kv_heads // domains * domains] == 1).all()
    else:
        assert (holders > 1).sum() <= domains - 1


@pytest.mark.parametrize("mapping", SWIZZLED)
@pytest.mark.parametrize("domains", range(1, 17))
def test_every_head_count(mapping, domains):
    for q_heads in range(1, 129):
        check_all_promises(mapping, 2, q_heads, q_heads, 3, domains)


@pytest.mark.parametrize("mapping", SWIZZLED)
@pytest.mark.parametrize(("q_heads", "kv_heads"), REPORTED_HEADS, ids=lambda heads: str(heads))
def test_head_counts_that_lost_tiles_elsewhere(mapping, q_heads, kv_heads):
    for domains in range(1, 17):
        for batch, blocks in ((1, 1), (1, 16), (3, 7), (3, [5, 0, 11]), (2, [1, 40])):
            check_all_promises(mapping, batch, q_heads, kv_heads, blocks, domains)
            check_all_promises(mapping, batch, kv_heads, kv_heads, blocks, domains)


def seed_formula(batch, q_heads, blocks, domains=8):
    """Tiles that the formula printed in the paper's Figure 11 reaches."""
    wid = np.arange(batch * q_heads * blocks)
    wid_per_batch = wid // batch
    head = wid_per_batch % domains * (q_heads // domains) + wid_per_batch // (domains * blocks)
    block = wid_per_batch % (domains * blocks) // domains
    request = wid // (blocks * q_heads) % batch
    return np.stack((request, head, block), axis=1)


@pytest.mark.parametrize(
    ("batch", "q_heads", "reached"),
    [(1, 64, 1024), (2, 64, 1024), (1, 12, 136)],
    ids=["B1-H64", "B2-H64", "B1-H12"],
)
def test_tiles_that_the_printed_formula_reaches(batch, q_heads, reached):
    blocks = 16
    assert len(np.unique(seed_formula(batch, q_heads, blocks), axis=0)) == reached
    ours = tiles("swizzled-head-first", batch, q_heads, q_heads, blocks, 8)
    assert_bijection(ours, batch, q_heads, blocks)


def test_equal_blocks_in_a_list_are_uniform():
    one_number = tiles("swizzled-head-first", 3, 10, 5, 4, 8)
    np.testing.assert_array_equal(tiles("swizzled-head-first", 3, 10, 5, [4, 4, 4], 8), one_number)
    cut = tiles("swizzled-head-first", 3, 10, 5, 4, 8, uniform=False)
    assert not np.array_equal(cut, one_number)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.uint32, np.uint64])
def test_any_type_of_integer(mapping, integer):
    # 4 * 100 overflows a byte, and numpy's uint64 beside int64 is a float
    grid = (4, 100, 50, 3, 7)
    rows = tiles(mapping, *map(integer, grid))
    expected = tiles(mapping, *grid)
    assert rows.dtype == np.int64 and np.array_equal(rows, expected)
    counts = map(integer, (100, 50, 7, 2))
    assert streams_per_domain(rows, *counts) == streams_per_domain(expected, 100, 50, 7, 2)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("blocks", [0, [0, 0]], ids=["number", "list"])
def test_empty_grid(mapping, blocks):
    rows = tiles(mapping, 2, 8, 4, blocks, 8)
    assert rows.shape == (0, 3) and rows.dtype == np.int64
    assert streams_per_domain(rows, 8, 4, 8, 38) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(mapping="head_first"),
            "unknown mapping 'head_first': choose one of block-first, swizzled-block-first,",
        ),
        (dict(kv_heads=3), "q_heads is 8: it must be a multiple of kv_heads, which is 3"),
        (dict(batch=0), "batch is 0: it must be at least 1"),
        (dict(q_heads=0), "q_heads is 0: it must be at least 1"),
        (dict(kv_heads=-4), "kv_heads is -4: it must be at least 1"),
        (dict(domains=0), "domains is 0: it must be at least 1"),
        (dict(blocks=-1), "blocks holds -1: a number of blocks must not be negative"),
        (dict(blocks=[3, -2]), "blocks holds -2: a number of blocks must not be negative"),
        (dict(blocks=[1, 2, 3]), r"blocks has shape \[3\]: give one number, or one per request \(2\)"),
        (dict(blocks=[]), r"blocks has shape \[0\]: give one number, or one per request \(2\)"),
        (dict(blocks=2.5), "blocks has dtype float64: it must hold whole numbers"),
        (dict(blocks=[1, 2], uniform=True), "uniform=True needs the same number of blocks in every request"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(change, message):
    good = dict(mapping="head-first", batch=2, q_heads=8, kv_heads=4, blocks=3, domains=8)
    with pytest.raises(ValueError, match=message):
        tiles(**{**good, **change})


@pytest.mark.parametrize(
    ("mapping", "kv_heads", "streams"),
    [
        ("block-first", 128, 16.0),
        ("head-first", 128, 4.0),
        ("swizzled-block-first", 128, 16.0),
        ("swizzled-head-first", 128, 1.0),
        ("block-first", 8, 8.0),
        ("swizzled-block-first", 8, 1.0),
        ("swizzled-head-first", 8, 1.0),
    ],
)
def test_streams_per_domain(mapping, kv_heads, streams):
    rows = tiles(mapping, 1, 128, kv_heads, 64, 8)
    assert streams_per_domain(rows, 128, kv_heads, 8, resident=32) == streams


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_packed_groups_on_as_many_domains_need_no_swizzle(mapping):
    """8 KV heads on 8 domains, a group per tile: round robin gives block-first the locality for nothing."""
    rows = tiles(mapping, 1, 8, 8, 64, 8)
    assert streams_per_domain(rows, 8, 8, 8, resident=32) == (4.0 if mapping == "head-first" else 1.0)


def test_streams_weigh_waves_by_their_workgroups():
    rows = tiles("head-first", 1, 3, 3, 1, 1)
    assert streams_per_domain(rows, 3, 3, 1, resident=2) == pytest.approx((2 * 2 + 1 * 1) / 3)
    with pytest.raises(ValueError, match="resident is 0"):
        streams_per_domain(rows, 3, 3, 1, resident=0)


def test_the_document_prints_what_the_code_does():
    document = Path(__file__).parents[1] / "docs" / "mapping.md"
    result = doctest.testfile(str(document), module_relative=False)
    assert result.attempted > 0 and result.failed == 0


def test_host_form_needs_neither_torch_nor_triton():
    check = "import sys, numa_attention.mapping; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    package_root = Path(sys.modules["numa_attention"].__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", check], cwd=package_root, check=False).returncode == 0

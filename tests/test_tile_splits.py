"""How tiles of a prefill step are split: every part is listed once, has a place of its own, and evens out the work."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import given, settings
from hypothesis import strategies as st

from numa_attention.jit import interpreting
from numa_attention.prefill.hopper_variant import LEAST_PART, LEAST_SPLIT, PLACES
from numa_attention.prefill.tile_splits import MOST_PARTS, build_on_device

DEVICE = "cpu" if interpreting() else "cuda"
BLOCK_M, BLOCK_N = 128, 128
UNITS = 132


def split(
    queries: list[int], cached: list[int], *, kv_heads: int = 8, group: int = 4, first: int = 0, causal=True
):
    """(table of the requests from `first` on, further rows) of a step."""
    requests = len(queries) - first
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    lengths = torch.tensor(
        [n + c for n, c in zip(queries, cached, strict=True)], dtype=torch.int32, device=DEVICE
    )
    table = torch.full((1 + requests + 3, 2), -7, dtype=torch.int32, device=DEVICE)
    rows = torch.full((PLACES + 1, 4), -7, dtype=torch.int32, device=DEVICE)
    build_on_device(
        starts, lengths, table, rows, first, requests, UNITS,
        kv_heads=kv_heads, group=group, block_m=BLOCK_M, block_n=BLOCK_N, causal=causal,
    )  # fmt: skip
    assert (table[1 + requests :] == -7).all() and (rows[-1] == -7).all(), "wrote past the end"
    further = int(table[0, 0])
    assert (rows[: PLACES - further] == -7).all()
    return table[1 : 1 + requests].tolist(), rows[PLACES - further : PLACES].tolist()


@settings(max_examples=60 if DEVICE == "cpu" else 400, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 700), st.one_of(st.integers(0, 5000), st.integers(0, 200_000))),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([(8, 4), (1, 64), (8, 1), (64, 1)]),
    st.booleans(),
    st.data(),
)  # fmt: skip
def test_every_part_is_listed_once_and_has_a_place(requests, heads, causal, data):
    first = data.draw(st.integers(0, len(requests) - 1))
    queries, cached = map(list, zip(*requests, strict=True))
    kv_heads, group = heads
    table, rows = split(queries, cached, kv_heads=kv_heads, group=group, first=first, causal=causal)
    expected, taken = [], set()
    for request, (parts, place) in enumerate(table):
        new, old = queries[first + request], cached[first + request]
        blocks = -(-new * group // BLOCK_M)
        assert 1 <= parts <= MOST_PARTS.value
        if parts > 1:
            assert parts <= (old if causal else old + new) // BLOCK_N, "a part without keys"
            assert old + new > LEAST_SPLIT
            places = set(range(place, place + kv_heads * blocks * parts))
            assert not places & taken and max(places) < PLACES
            taken |= places
        expected += [
            [request, head, block, part]
            for head in range(kv_heads) for block in range(blocks) for part in range(1, parts)
        ]  # fmt: skip
    assert sorted(rows) == sorted(expected)


def test_few_queries_on_a_long_prefix_are_split_among_many_short_requests():
    queries, cached = [20] * 30 + [27], [500] * 30 + [40_000]
    table, _ = split(queries, cached)
    assert [parts for parts, _ in table[:-1]] == [1] * 30
    work = 8 * sum(c + n // 2 for n, c in zip(queries, cached, strict=True)) / UNITS
    parts = table[-1][0]
    assert parts == MOST_PARTS.value or 40_027 / parts <= max(work / 2, LEAST_PART)
    assert parts >= 10


@pytest.mark.parametrize(
    ("queries", "cached"),
    [([4096], [0]), ([4096, 64], [30_000, 60_000]), ([64] * 200, [60_000] * 200), ([1, 2], [1000, 3000])],
    ids=["no prefix", "much work besides", "many alike", "short"],
)
def test_nothing_is_split_where_compute_units_are_busy_anyway(queries, cached):
    table, rows = split(queries, cached)
    assert [parts for parts, _ in table] == [1] * len(queries) and rows == []

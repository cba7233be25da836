"""Ranks and splits chosen together: what every choice must obey, and a few that a person can check."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numa_attention.machine import ModelError
from numa_attention.machine.machines import MACHINES
from numa_attention.machine.two_levels import (
    BLOCK_N,
    COLLECTIVE_SECONDS,
    EXCHANGE_SECONDS,
    explain,
    fastest,
    two_levels,
    ways_to_share,
)

GROUP = dict(q_heads=8, kv_heads=1, head_dim=128)
H200 = MACHINES["h200"]


@pytest.mark.parametrize(("element_bytes", "reading_us"), [(2, 55.9), (1, 28.0)])
def test_a_million_tokens_on_two_gpus(element_bytes, reading_us):
    ways = ways_to_share(H200, 2, **GROUP, element_bytes=element_bytes, context=1 << 20)
    best = fastest(ways)
    assert (best.ranks, best.splits) == (2, 264)
    # half of the keys and values, at 4.8 TB/s
    assert best.read_bytes == (1 << 20) * 256 * element_bytes / 2
    assert best.reading * 1e6 == pytest.approx(reading_us, abs=0.1)
    # four heads: queries of 128 numbers, partials of 128 and an LSE
    assert best.sent_bytes == 4 * (128 * 2 + 129 * 4)
    assert "2 ranks of 2 share each sequence, 264 splits inside each" in explain(ways, 2)


def test_a_short_context_stays_on_one_rank():
    ways = ways_to_share(H200, 2, **GROUP, element_bytes=2, context=4096)
    assert fastest(ways).ranks == 1
    assert "Each sequence stays on one rank: 2 would read for" in explain(ways, 2)


def test_heads_that_fill_the_gpus_are_not_shared():
    ways = ways_to_share(H200, 8, q_heads=64, kv_heads=8, head_dim=128, element_bytes=2, context=1 << 20)
    assert fastest(ways).ranks == 1
    assert {way.read_bytes for way in ways} == {(1 << 20) * 256 * 2}
    assert [way.copies for way in ways] == [1, 1, 1, 1]


def test_copies_are_what_sharing_saves():
    ways = ways_to_share(H200, 8, q_heads=64, kv_heads=2, head_dim=128, element_bytes=2, context=1 << 17)
    assert [(way.ranks, way.copies) for way in ways] == [(1, 4), (2, 2), (4, 1), (8, 1)]
    assert fastest(ways).ranks == 4


@given(
    machine=st.sampled_from(list(MACHINES.values())),
    log_gpus=st.integers(0, 3),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    context=st.integers(1, 1 << 21),
    requests=st.integers(1, 64),
)
def test_every_choice(machine, log_gpus, kv_heads, context, requests):
    gpus = 1 << log_gpus
    layer = dict(q_heads=64, kv_heads=kv_heads, head_dim=128, element_bytes=2, requests=requests)
    ways = ways_to_share(machine, gpus, **layer, context=context)
    assert [way.ranks for way in ways] == [1 << each for each in range(log_gpus + 1)]
    assert fastest(ways).seconds == min(way.seconds for way in ways)
    for way in ways:
        # splits of a rank cover its part of the context
        assert way.splits * way.split_tokens >= context / way.ranks
        assert way.busy <= 2 * machine.units
        assert way.split_tokens <= (context / way.ranks // BLOCK_N + 1) * BLOCK_N
        assert (way.exchanging > 0) == (way.ranks > 1) == (way.sent_bytes > 0)
        if way.ranks > 1:
            saved = way.by_collectives - way.exchanging
            assert saved == pytest.approx(3 * COLLECTIVE_SECONDS - 2 * EXCHANGE_SECONDS)
    for fewer, more in zip(ways, ways[1:], strict=False):
        assert more.read_bytes <= fewer.read_bytes + requests * 8 * 512 * more.ranks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(ranks=3), "3 ranks do not divide 2 GPUs"),
        (dict(ranks=0), "ranks is 0: it must be at least 1"),
        (dict(q_heads=7), "7 query heads do not divide over 2 GPUs"),
        (dict(context=0), "context is 0"),
    ],
)
def test_what_does_not_divide(changes, words):
    layer = dict(ranks=2, gpus=2, element_bytes=2, context=64) | GROUP | changes
    with pytest.raises(ModelError, match=words):
        two_levels(H200, **layer)

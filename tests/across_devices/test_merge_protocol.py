"""The protocol by which ranks merge, in all its executions: as built it is right, and each planted fault is found."""

import pytest

from numa_attention.across_devices import BUFFERS
from numa_attention.testing.merge_protocol import Protocol, Stuck, WrongResult, explore


@pytest.mark.parametrize(
    ("protocol", "states"),
    [
        (Protocol(ranks=2, launches=5, words=3), 1_000),
        (Protocol(ranks=2, launches=4, workgroups=2), 2_500),
        (Protocol(ranks=3, launches=4), 40_000),
    ],
    ids=["three words", "two workgroups", "three ranks"],
)
def test_every_execution_merges_what_was_sent(protocol, states):
    assert explore(protocol) > states, "the model has lost most of its executions"


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(ranks=2, launches=4, words=2, impatient=True, crash=1),
        Protocol(ranks=2, launches=2, workgroups=2, impatient=True, crash=0),
        Protocol(ranks=3, launches=2, impatient=True, crash=2),
    ],
    ids=["two words", "two workgroups", "three ranks"],
)
def test_whoever_crashes_or_gives_up_everybody_ends_and_no_result_is_wrong(protocol):
    assert explore(protocol) > 500


def test_two_buffers_are_the_fewest():
    assert BUFFERS == 2
    for ranks in (2, 3):
        with pytest.raises(WrongResult):
            explore(Protocol(ranks=ranks, launches=2, buffers=1))


def test_a_flag_that_does_not_wait_for_what_it_announces():
    with pytest.raises(WrongResult):
        explore(Protocol(launches=1, release=False))


def test_a_read_that_does_not_wait_for_the_flag():
    with pytest.raises(WrongResult):
        explore(Protocol(launches=1, acquire=False))


def test_a_flag_that_is_lowered_instead_of_counting():
    with pytest.raises(Stuck, match="rank 0 in launch"):
        explore(Protocol(launches=3, reset=True))


def test_a_flag_that_must_be_exact():
    with pytest.raises(Stuck):
        explore(Protocol(launches=2, exact=True))


def test_a_crash_among_ranks_with_endless_patience():
    with pytest.raises(Stuck, match="nobody can go on"):
        explore(Protocol(crash=1))


def test_giving_up_must_be_for_good():
    with pytest.raises(WrongResult):
        explore(Protocol(launches=4, impatient=True, carries_on=True))

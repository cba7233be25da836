"""Merging across ranks that are processes: every size and exchange, and what happens when one of them is lost."""

from __future__ import annotations

import pytest
import torch

from numa_attention.merge import EXCHANGES, merge_across_ranks
from tests.rank_processes import STALL_S, attend_and_merge, lose_rank, run_ranks


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_merge_to_attention_over_whole_sequences(size, tmp_path):
    interleaves = [1, 16, 256]
    for rank, errors in enumerate(run_ranks(attend_and_merge, size, tmp_path, interleaves)):
        assert isinstance(errors, list), (rank, errors)
        assert len(errors) == len(interleaves) * len(EXCHANGES)
        assert all(out < 1e-5 and lse < 1e-4 for out, lse in errors), (rank, errors)


@pytest.mark.parametrize(
    ("how", "exchange"), [("dies", "ag_rs"), ("dies", "a2a"), ("stalls", "ag_rs"), ("stalls", "a2a")]
)
def test_a_lost_rank_ends_in_an_error_in_time(how, exchange, tmp_path):
    results = run_ranks(lose_rank, 3, tmp_path, exchange, how, group_limit_s=2.0)
    assert results[1] == 9
    for rank in (0, 2):
        assert isinstance(results[rank], float), results[rank]
        assert results[rank] < STALL_S - 2.0  # at once, or after the group's two seconds


def test_what_cannot_be_merged():
    class TwoRanks:
        size, rank = 2, 0

    out, lse = torch.zeros(1, 3, 8), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="3 heads do not divide over 2 ranks"):
        merge_across_ranks(out, lse, TwoRanks())
    with pytest.raises(ValueError, match="exchange='pigeons' is unknown: choose one of ag_rs, a2a"):
        merge_across_ranks(out, lse, TwoRanks(), "pigeons")

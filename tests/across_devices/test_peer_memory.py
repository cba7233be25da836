"""How ranks come to share memory, with a stand-in for torch's symmetric memory that shares the host's."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from merging_ranks import interpreted
from test_long_context import on_two_ranks

from numa_attention import across_devices, peer_memory
from numa_attention.peer_memory import MULTICAST_OFF, Unreachable

pytestmark = interpreted
SIZE = dict(max_tokens=2, q_heads=4, head_dim_v=16)
BEGIN = (512, 256)  # where each rank's piece lies in its allocation
CPU = torch.device("cpu")


@pytest.fixture
def shared(monkeypatch):
    """Allocations of both ranks, full of what an earlier owner left there; only the handle knows where they begin."""
    allocations = [torch.full((1 << 16,), 255, dtype=torch.uint8).share_memory_() for _ in range(2)]
    monkeypatch.delenv(MULTICAST_OFF, raising=False)
    monkeypatch.setattr(peer_memory, "obstacle", lambda device: "")
    rank = torch.distributed.get_rank
    monkeypatch.setattr(
        symmetric, "empty", lambda size, **_: allocations[rank()][BEGIN[rank()] : BEGIN[rank()] + size]
    )
    beginnings = [each.data_ptr() for each in allocations]
    monkeypatch.setattr(symmetric, "rendezvous", lambda own, group: SimpleNamespace(buffer_ptrs=beginnings))
    return allocations


def allocate(group, _) -> tuple[str | None, list[int]]:
    workspace = across_devices.allocate(group, CPU, **SIZE, patience=60.0)
    return os.environ.get(MULTICAST_OFF), list(workspace.memory.addresses)


def test_pieces_lie_where_their_owners_have_them(shared, tmp_path):
    addresses = [each.data_ptr() + begin for each, begin in zip(shared, BEGIN, strict=True)]
    assert on_two_ranks(allocate, tmp_path / "store") == [(None, addresses)] * 2


def test_what_one_rank_cannot_do_all_are_told(shared, tmp_path, monkeypatch):
    def rendezvous(own, group):
        if group.rank() == 1:
            raise RuntimeError("no fabric\nand more lines")
        return SimpleNamespace(buffer_ptrs=[each.data_ptr() for each in shared])

    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    for error in on_two_ranks(allocate, tmp_path / "store"):
        assert isinstance(error, Unreachable), error
        assert str(error) == "rank 1: torch's symmetric memory failed: no fabric"


def test_ranks_on_several_hosts(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_memory.socket, "gethostname", lambda: f"host-{torch.distributed.get_rank()}")
    for error in on_two_ranks(allocate, tmp_path / "store"):
        assert isinstance(error, Unreachable), error
        assert "the ranks are on several hosts (host-0, host-1)" in str(error)


def test_memory_that_does_not_arrive_is_found_when_it_is_allocated(shared, tmp_path, monkeypatch):
    def rendezvous(own, group):
        # the other rank's piece is nobody's memory
        pieces = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
        pieces[group.rank()] = shared[group.rank()]
        return SimpleNamespace(buffer_ptrs=[each.data_ptr() for each in pieces], keep=pieces)

    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)

    def allocate_impatiently(group, _):
        across_devices.allocate(group, CPU, **SIZE, patience=0.02)

    for error in on_two_ranks(allocate_impatiently, tmp_path / "store"):
        assert isinstance(error, Unreachable), error
        assert "rank 0: the first merges failed" in str(error)

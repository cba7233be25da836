"""Memory of each rank that the other ranks' kernels read and write, through torch's symmetric memory."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Unreachable(RuntimeError):
    """The ranks cannot write into each other's memory; the message says why. Merge through collectives instead."""


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view of equal pieces of memory, one a rank.

    own: uint8 [bytes], this rank's piece. addresses: of every rank's piece as this rank's device sees it. keep:
    whatever must live as long as the addresses are in use.
    """

    own: torch.Tensor
    addresses: tuple[int, ...]
    rank: int
    keep: object = None

    @property
    def world(self) -> int:
        return len(self.addresses)


def allocate(group: dist.ProcessGroup, device: torch.device, size: int) -> PeerMemory:
    """A piece of `size` zeroed bytes for every rank of `group`, each of which calls this. Returns when all have.

    Raises Unreachable on every rank if on any of them something speaks against it.
    """
    obstacles: list[tuple[str, str]] = [("", "")] * group.size()
    dist.all_gather_object(obstacles, (socket.gethostname(), obstacle(device)), group)
    for rank, (_, reason) in enumerate(obstacles):
        if reason:
            raise Unreachable(f"rank {rank}: {reason}")
    hosts = sorted({host for host, _ in obstacles})
    if len(hosts) > 1:
        raise Unreachable(f"the ranks are on several hosts ({', '.join(hosts)}): one GPU writes to another's memory "
                          "on one host only")  # fmt: skip
    # multicast objects are a resource of the whole host, and nothing here uses them
    os.environ.setdefault(MULTICAST_OFF, "1")
    failure, memory = "", None
    try:
        memory = _rendezvous(group, device, size)
    except (RuntimeError, ImportError) as error:
        failure = f"torch's symmetric memory failed: {str(error).strip().splitlines()[0]}"
    failures = [""] * group.size()
    dist.all_gather_object(failures, failure, group)
    for rank, reason in enumerate(failures):
        if reason:
            raise Unreachable(f"rank {rank}: {reason}")
    assert memory is not None
    return memory


def obstacle(device: torch.device) -> str:
    """What speaks against sharing memory of `device` with other ranks before anything was tried; "" if nothing."""
    if device.type != "cuda":
        return f"the device is {device}: only GPUs write into each other's memory"
    this = device.index if device.index is not None else torch.cuda.current_device()
    others = [other for other in range(torch.cuda.device_count()) if other != this]
    # a process that sees its own GPU alone learns of the others when it tries
    deaf = [other for other in others if not torch.cuda.can_device_access_peer(this, other)]
    if others and len(deaf) == len(others):
        return f"GPU {this} has no peer access to any other GPU of this host"
    return ""


def _rendezvous(group: dist.ProcessGroup, device: torch.device, size: int) -> PeerMemory:
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    own.zero_()
    # nobody raises a flag in memory that its owner has yet to clear
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return PeerMemory(own, tuple(handle.buffer_ptrs), group.rank(), handle)

"""Memory of each rank that the other ranks' kernels read and write, through torch's symmetric memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
    hosts = sorted(set(agree(group, obstacle(device), socket.gethostname())))
    if len(hosts) > 1:
        raise Unreachable(
            f"the ranks are on several hosts ({', '.join(hosts)}), and one GPU writes to another's memory on one only"
        )
    failure, own, handle, offset = "", None, None, 0
    try:
        with without_multicast():
            own, handle = _rendezvous(group, device, size)
        # the tensor may lie inside a larger allocation, of which the handle knows the beginnings
        offset = own.data_ptr() - handle.buffer_ptrs[group.rank()]
    except (RuntimeError, ImportError) as error:
        failure = f"torch's symmetric memory failed: {(str(error).strip() or repr(error)).splitlines()[0]}"
    # this is also the barrier before which nobody may raise a flag in memory that its owner has yet to clear
    offsets = agree(group, failure, offset)
    addresses = tuple(begin + inside for begin, inside in zip(handle.buffer_ptrs, offsets, strict=True))
    return PeerMemory(own, addresses, group.rank(), handle)


@contextmanager
def without_multicast() -> Iterator[None]:
    """Torch makes no multicast objects inside: they are a resource of the whole host, and nothing here uses them."""
    before = os.environ.get(MULTICAST_OFF)
    os.environ[MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        # others in the process decide for themselves
        if before is None:
            del os.environ[MULTICAST_OFF]
        else:
            os.environ[MULTICAST_OFF] = before


def agree(group: dist.ProcessGroup, failure: str, value: object = None) -> list:
    """The value of every rank; raises Unreachable on all ranks if any has a failure to tell."""
    found: list = [None] * group.size()
    dist.all_gather_object(found, (failure, value), group)
    for rank, (reason, _) in enumerate(found):
        if reason:
            raise Unreachable(f"rank {rank}: {reason}")
    return [each for _, each in found]


def obstacle(device: torch.device) -> str:
    """What speaks against sharing memory of `device` with other ranks before anything was tried; "" if nothing."""
    if device.type != "cuda":
        return f"the device is {device}: only GPUs write into each other's memory"
    this = device.index if device.index is not None else torch.cuda.current_device()
    others = [other for other in range(torch.cuda.device_count()) if other != this]
    # a process that sees its own GPU alone learns of the others when it tries
    if others and not any(torch.cuda.can_device_access_peer(this, other) for other in others):
        return f"GPU {this} has no peer access to any other GPU of this host"
    return ""


def _rendezvous(group: dist.ProcessGroup, device: torch.device, size: int):
    """This rank's piece, cleared, and torch's handle to all of them."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    own.zero_()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return own, handle

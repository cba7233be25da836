"""What can be wrong with a kernel. Every message names the lines of the kernel that are involved."""

from __future__ import annotations


class GluonFault(Exception):
    """The kernel is wrong: it would not compile, or a GPU might compute something else from one run to the next."""


class Race(GluonFault):
    """Two accesses to shared memory, or the use of a result, that no wait or barrier puts in order."""


class Deadlock(GluonFault):
    """Every partition waits for something that nobody is going to do."""


class OutOfBounds(GluonFault):
    """An access outside of a tensor or of a shared-memory allocation."""


class Refused(GluonFault):
    """The compiler for this target would refuse the kernel."""


class NotModelled(NotImplementedError):
    """The kernel uses something that the interpreter does not know; this says nothing about the kernel."""

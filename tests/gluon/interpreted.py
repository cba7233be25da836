"""What the tests of Gluon kernels share: launches under the interpreter, and the splits of a work list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from numa_attention.schedule import Schedule
from numa_attention.testing import interpret


class Interpreted:
    """In place of a `jit.Launcher`: interprets under a seed, with some constants changed."""

    def __init__(self, kernel, target: str, seed: int = 0, debug: bool = False, **changes) -> None:
        self.kernel, self.target = kernel, target
        self.options, self.changes = dict(seed=seed, debug=debug), changes
        self.launches = 0

    def __call__(self, key, grid, arguments, constants, options) -> None:
        self.launches += 1
        options = {name: value for name, value in options.items() if name != "maxnreg"}  # it has no registers
        interpret(self.kernel, target=self.target)[grid](
            *arguments, **constants | self.changes, **options, **self.options
        )


@contextmanager
def interpreted(owner, kernel, target: str, **options) -> Iterator[Interpreted]:
    """Inside, the launcher `_launch` of a module or of another launcher runs `kernel` as `Interpreted` does."""
    with mock.patch.object(owner, "_launch", Interpreted(kernel, target, **options)) as stand_in:
        yield stand_in


def splits_of(schedule: Schedule) -> torch.Tensor:
    """The splits of each item of a work list."""
    ranges, items = schedule.decode.ranges, schedule.decode.items
    return torch.stack([items[f + n, 6] for f, count in ranges[:, :2].tolist() for n in range(count)])

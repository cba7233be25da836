"""An interpreter of Gluon kernels for machines without a GPU, which looks for missing waits and barriers.

    from numa_attention.testing import interpret

    interpret(kernel, target="gfx1250")[grid](*arguments, seed=0, **constants)

The kernel's results land in the tensors passed, or a GluonFault says which lines are wrong. What is checked and what
is not modelled: docs/gluon-interpreter.md. One module a concern: `launch` starts a kernel, `generator` walks its
source, `builder` and the modules it is made of compute, `scheduler` and `clocks` order what happens, `shared_memory`
finds races.
"""

from numa_attention.testing.gluon.arithmetic import register_asm
from numa_attention.testing.gluon.faults import Deadlock, GluonFault, NotModelled, OutOfBounds, Race, Refused
from numa_attention.testing.gluon.launch import interpret

__all__ = [
    "Deadlock",
    "GluonFault",
    "NotModelled",
    "OutOfBounds",
    "Race",
    "Refused",
    "interpret",
    "register_asm",
]

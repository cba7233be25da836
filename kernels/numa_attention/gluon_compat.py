"""What differs between Triton 3.6 and 3.9 for Gluon kernels and for the Gluon interpreter; nothing else may ask.

The first part is for kernels: names that moved, and layouts whose parameters changed. The second part is for
`numa_attention.testing.gluon`, which drives the compiler's front end.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import amd
from triton.experimental.gluon.language.nvidia import hopper

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# ---- names for kernels ----

cdna5 = getattr(amd, "cdna5", None) or amd.gfx1250
tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
tma_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if VERSION >= (3, 7):

    @gluon.jit
    def tma_load_shared(source, at, barrier, buffer, CTAS: gl.constexpr):
        """`tma_load` of a tile of which each of CTAS workgroups of a cluster gets a copy: one asks for all."""
        tma_load(source, at, barrier, buffer, multicast=CTAS > 1)

else:

    @gluon.jit
    def tma_load_shared(source, at, barrier, buffer, CTAS: gl.constexpr):
        """`tma_load` of a tile of which each of CTAS workgroups of a cluster gets a copy: here only of one."""
        gl.static_assert(CTAS == 1, "Triton 3.6 has no clusters")
        tma_load(source, at, barrier, buffer)


# what a release lacks
HAS_CLUSTERS = VERSION >= (3, 7)
HAS_TDM_GATHER = hasattr(cdna5.tdm, "async_gather")
# whether a workgroup of a cluster can read a part of a tile of which each has a whole copy
READS_PARTS_OF_COPIES = VERSION >= (3, 8)
# whether TDM can store a tile whose rows are padded
STORES_PADDED_TILES = VERSION >= (3, 7)

if hasattr(getattr(hopper, "cluster", None), "barrier"):

    @gluon.jit
    def cluster_barrier():
        """All workgroups of a cluster of sm_90 meet."""
        hopper.cluster.barrier()

elif hasattr(hopper, "cluster"):

    @gluon.jit
    def cluster_barrier():
        """All workgroups of a cluster of sm_90 meet."""
        hopper.cluster.arrive()
        hopper.cluster.wait()

else:

    @gluon.jit
    def cluster_barrier():
        """All workgroups of a cluster of sm_90 meet."""
        gl.static_assert(False, "Triton 3.6 has no clusters")


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The bytes of a buffer in shared memory as another type, shape and layout."""
        return buffer.reinterpret(DTYPE, SHAPE, LAYOUT)

else:

    @gluon.jit
    def reinterpret(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The bytes of a buffer in shared memory as another type, shape and layout."""
        return buffer._reinterpret(DTYPE, SHAPE, LAYOUT)


def wmma_layout(
    warps_m: int, warps_n: int, instr_shape: tuple[int, int, int], *, transposed: bool = True
) -> amd.AMDWMMALayout:
    """The WMMA layout of gfx1250 for warps in a `warps_m` x `warps_n` rectangle, neighbours along M first.

    `instr_shape` is (M, N, K) of the instruction, (16, 16, 32) for 16-bit operands. The counts are powers of two.
    """
    if VERSION < (3, 7):
        return amd.AMDWMMALayout(3, transposed, [warps_m, warps_n], list(instr_shape))
    bases = [[1 << bit, 0] for bit in range(warps_m.bit_length() - 1)]
    bases += [[0, 1 << bit] for bit in range(warps_n.bit_length() - 1)]
    return amd.AMDWMMALayout(3, transposed, bases, [], list(instr_shape))


# ---- the compiler's front end ----


def op_builder(context, options):
    """The compiler's Gluon builder for one target."""
    from triton._C.libtriton import gluon_ir

    if VERSION >= (3, 8):
        return gluon_ir.GluonOpBuilder(context, options.arch)
    return gluon_ir.GluonOpBuilder(context)


def first_line(function) -> int:
    """The line in its file of a kernel's `def`."""
    line = getattr(function, "def_file_line_number", None)
    if line is not None:
        return line
    from triton.runtime.jit import get_jit_fn_file_line

    return get_jit_fn_file_line(function)[1]


def normalize_value(value):
    """A Python value as the front end passes it to a function: constants become constexpr, also inside tuples."""
    from triton.compiler import code_generator

    if hasattr(code_generator, "normalize_value"):
        return code_generator.normalize_value(value)
    from triton.language import core

    if isinstance(value, tuple):
        return core.tuple([normalize_value(part) for part in value])
    if isinstance(value, core.base_value):
        return value
    if value is None or isinstance(value, (bool, int, float, str, core.dtype)):
        return core.constexpr(value)
    return value


def exchanges_between_ctas(generation: str) -> bool:
    """Whether the compiler moves register values between the CTAs of a cluster, through distributed shared memory."""
    return generation == "sm_90" and VERSION >= (3, 8)

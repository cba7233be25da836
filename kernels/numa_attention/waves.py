"""What a kernel needs to know of its waves that Triton's language does not say."""

from __future__ import annotations

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from numa_attention.jit import kernel

# architecture prefix -> what waits until the wave's stores have reached the L2 and its loads have returned
AMD_WAITS = (
    ("gfx9", "s_waitcnt vmcnt(0)"),
    ("gfx10", "s_waitcnt vmcnt(0)\ns_waitcnt_vscnt null, 0x0"),
    ("gfx11", "s_waitcnt vmcnt(0)\ns_waitcnt_vscnt null, 0x0"),
    ("gfx12", "s_wait_storecnt 0x0\ns_wait_loadcnt 0x0"),
)


@constexpr_function
def wait_for_memory():
    """The instructions of AMD_WAITS for the target, "" where a barrier orders global memory by itself (NVIDIA)."""
    target = current_target()
    if target is None or target.backend != "hip":
        return ""
    for prefix, text in AMD_WAITS:
        if str(target.arch).startswith(prefix):
            return text
    raise ValueError(f"no way is known to wait for global memory on {target.arch}")


@kernel
def global_barrier():
    """A barrier of the workgroup that also orders its accesses to global memory.

    Triton's barrier on AMD waits for the LDS alone: without the wait, another wave's stores could still be on their way
    when one thread announces them.
    """
    WAIT: tl.constexpr = wait_for_memory()
    if WAIT != "":
        tl.inline_asm_elementwise(
            WAIT + "\ns_mov_b32 $0, 0", "=s,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


# architecture prefix -> what brings all that its L2 holds of this device's stores to where other devices read it, and
# waits for that
AMD_WRITE_BACKS = (
    ("gfx94", "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)"),
    ("gfx95", "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)"),
    ("gfx12", "global_wb scope:SCOPE_SYS\ns_wait_storecnt 0x0"),
)


@constexpr_function
def write_back_for_system():
    """The instructions of AMD_WRITE_BACKS for the target, "" where a release orders memory by itself."""
    target = current_target()
    if target is None or target.backend != "hip":
        return ""
    return next((text for prefix, text in AMD_WRITE_BACKS if str(target.arch).startswith(prefix)), "")


@kernel
def system_barrier():
    """`global_barrier`, after which the workgroup's stores are also where other devices see them.

    A release at system scope writes back too, but Triton 3.6's compiler for gfx942 does not wait until that is done.
    """
    global_barrier()
    WRITE_BACK: tl.constexpr = write_back_for_system()
    if WRITE_BACK != "":
        tl.inline_asm_elementwise(
            WRITE_BACK + "\ns_mov_b32 $0, 0", "=s,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )

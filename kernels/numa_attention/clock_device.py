"""A clock that a kernel reads while it waits for another device."""

from __future__ import annotations

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from numa_attention.jit import kernel

NVIDIA_CLOCK = "mov.u64 $0, %globaltimer;"
# architecture prefix -> what reads the counter that runs at one speed whatever the clock of the cores
AMD_CLOCKS = (
    ("gfx9", "s_memrealtime $0\ns_waitcnt lgkmcnt(0)"),
    ("gfx10", "s_memrealtime $0\ns_waitcnt lgkmcnt(0)"),
    ("gfx11", "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\ns_waitcnt lgkmcnt(0)"),
    ("gfx12", "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\ns_wait_kmcnt 0x0"),
)


@constexpr_function
def read_clock():
    """The instructions that read the target's clock, "" where kernels are interpreted."""
    target = current_target()
    if target is None:
        return ""
    if target.backend == "cuda":
        return NVIDIA_CLOCK
    for prefix, text in AMD_CLOCKS:
        if str(target.arch).startswith(prefix):
            return text
    raise ValueError(f"no clock is known on {target.arch}")


@constexpr_function
def clock_register():
    """The kind of register that `read_clock` writes: of a thread on NVIDIA, of a wave on AMD."""
    target = current_target()
    return "=l" if target is not None and target.backend == "cuda" else "=s"


@kernel
def ticks(looks):
    """The time now, int64; interpreted, where there is no clock, the number of `looks` (int64) so far."""
    READ: tl.constexpr = read_clock()
    REGISTER: tl.constexpr = clock_register()
    if READ != "":
        now = tl.inline_asm_elementwise(READ, REGISTER, [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = looks
    return now

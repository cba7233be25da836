"""Hardware placement: a workgroup reads on which domain it runs, and takes the next work of that domain's queue.

Dispatch placement trusts that workgroup w runs on domain w mod D, which a driver may change. Here the order of the
mapping is kept as one queue a domain: whoever runs there takes its next piece, and steals from the next domain where
its own queue is empty. As many workgroups run as there are pieces, so each takes exactly one.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from numa_attention.jit import kernel

XCC_ID = "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)"
GENERATIONS = ("gfx942", "gfx950")  # whose register file has it


@constexpr_function
def read_domain():
    """The instruction that reads the XCD, "" where kernels are interpreted."""
    target = current_target()
    if target is None:
        return ""
    if target.arch not in GENERATIONS:
        raise ValueError(f"{target.arch} does not tell a workgroup on which domain it runs")
    return XCC_ID


@kernel
def own_domain(DOMAINS: tl.constexpr):
    """The domain on which this workgroup runs. Interpreted: some domain, unevenly chosen."""
    READ: tl.constexpr = read_domain()
    if READ != "":
        domain = tl.inline_asm_elementwise(READ, "=s", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        domain = tl.program_id(0) * tl.program_id(0) // 2
    return domain % DOMAINS


@kernel
def take(queues, DOMAINS: tl.constexpr, DEALT: tl.constexpr):
    """The row of the work that this workgroup does, of as many rows as there are workgroups.

    queues int32 [DOMAINS + 1]: rows taken of each domain, and workgroups that have taken one; zero between launches.
    DEALT: domain d has rows d, d + DOMAINS and on; otherwise the d-th of DOMAINS equal ranges.
    """
    workgroups = tl.num_programs(0)
    own = own_domain(DOMAINS)
    row = tl.program_id(0) * 0 - 1
    turn = row + 1
    while row < 0:
        domain = (own + turn) % DOMAINS
        held = (workgroups - domain + DOMAINS - 1) // DOMAINS
        # only the count matters: the list itself was written by an earlier launch
        place = tl.atomic_add(queues + domain, 1, sem="relaxed", scope="gpu")
        if DEALT:
            row = tl.where(place < held, place * DOMAINS + domain, -1)
        else:
            row = tl.where(place < held, domain * (workgroups // DOMAINS) + place, -1)
        turn += 1
    if tl.atomic_add(queues + DOMAINS, 1, sem="relaxed", scope="gpu") == workgroups - 1:
        # all have taken theirs: nobody counts here before the next launch
        for domain in range(DOMAINS + 1):
            tl.store(queues + domain, 0)
    return row

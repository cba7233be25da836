"""Hardware placement: a workgroup reads on which domain it runs, and takes the next work of that domain's queue.

Dispatch placement trusts that workgroup w runs on domain w mod D, which a driver may change. Here the order of the
mapping is kept as one queue a domain: whoever runs there takes its next piece, and steals from the next domain where
its own queue is empty. As many workgroups run as there are pieces, so each takes exactly one.

On AMD a workgroup reads its XCD, on NVIDIA its SM, whose domain `domain_map.py` has measured.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from numa_attention.jit import kernel

XCC_ID = "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)"
GENERATIONS = ("gfx942", "gfx950")  # whose register file has it
SM_ID = "mov.u32 $0, %smid;"
READS = {XCC_ID: "=s", SM_ID: "=r"}  # the register that takes what an instruction reads


@constexpr_function
def read_place():
    """The instruction that reads where a workgroup runs, and its register; "" where kernels are interpreted."""
    target = current_target()
    if target is None:
        return "", ""
    if target.backend != "cuda" and target.arch not in GENERATIONS:
        raise ValueError(f"{target.arch} does not tell a workgroup on which domain it runs")
    read = SM_ID if target.backend == "cuda" else XCC_ID
    return read, READS[read]


@kernel
def own_place():
    """The XCD or the SM on which this workgroup runs. Interpreted: some number."""
    READ: tl.constexpr = read_place()
    if READ[0] != "":
        place = tl.inline_asm_elementwise(READ[0], READ[1], [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        place = tl.program_id(0) * tl.program_id(0) // 2
    return place


@kernel
def own_domain(queues, DOMAINS: tl.constexpr):
    """The domain on which this workgroup runs. Interpreted: some domain, unevenly chosen. queues: see `take`."""
    domain = own_place()
    READ: tl.constexpr = read_place()
    if READ[1] == "=r":
        domain = tl.load(queues + (DOMAINS + 1) + domain)
    return domain % DOMAINS


@kernel
def take(queues, DOMAINS: tl.constexpr, DEALT: tl.constexpr):
    """The row of the work that this workgroup does, of as many rows as there are workgroups.

    queues int32 [DOMAINS + 1]: rows taken of each domain, and workgroups that have taken one; zero between launches. On
    NVIDIA the domain of each SM id follows.
    DEALT: domain d has rows d, d + DOMAINS and on; otherwise the d-th of DOMAINS equal ranges.
    """
    workgroups = tl.num_programs(0)
    own = own_domain(queues, DOMAINS)
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

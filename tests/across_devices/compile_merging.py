"""Compile the kernel that merges across devices for devices that are not there; prints a report of each as JSON.

A script of its own, because the tests' process interprets kernels.
"""

import json
import re
from dataclasses import asdict

import torch

from numa_attention.across_devices import Workspace, bytes_needed, gather, merge
from numa_attention.peer_memory import PeerMemory
from numa_attention.testing import capture, isa
from numa_attention.topology import pretend

GENERATIONS = ("sm_90", "sm_100", "gfx942", "gfx950", "gfx1250")
# how memory is ordered, by kind: what stores partials, orders them, raises flags and waits for flags
NVIDIA = {
    "store": r"st\.global",
    "barrier": r"bar(?:rier)?(?:\.cta)?\.sync",
    "release": r"atom\.global\.sys\.release\.exch",
    "clock": r"mov\.u64 \S+ %globaltimer",
    # an addition of nothing is a load
    "acquire": r"(?:ld|atom)\.global\.sys\.acquire",
    "cached load": r"ld\.global\.(?!cg|sys|volatile)",
    "load": r"ld\.global\.cg",
}
AMD = {
    "store": r"(?:global|buffer|flat)_store",
    "wait": r"s_waitcnt vmcnt\(0\)|s_wait_storecnt 0x0",
    "barrier": r"s_barrier(?:_wait)?\b",
    "write back": r"buffer_wbl2 sc0 sc1|global_wb scope:SCOPE_SYS",
    "release": r"global_atomic_swap",
    "clock": r"s_memrealtime|s_sendmsg_rtn_b64 \S+ sendmsg\(MSG_RTN_GET_REALTIME\)",
    "acquire": r"(?:buffer_inv sc0 sc1|global_inv scope:SCOPE_SYS)",
}
HEADS, COLUMNS, TOKENS = 8, 128, 64


def report(generation: str, dtype: torch.dtype, world: int, gathers: bool = False) -> dict:
    """What the kernel takes, and the text that says how it orders memory."""
    needed = bytes_needed(world, TOKENS, HEADS, COLUMNS, dtype)
    memory = PeerMemory(torch.empty(needed, dtype=torch.uint8, device="meta"), (1 << 20,) * world, 0)
    workspace = Workspace(memory, max_tokens=TOKENS, q_heads=HEADS, head_dim_v=COLUMNS, dtype=dtype)
    out = torch.empty(TOKENS, HEADS, COLUMNS, dtype=dtype, device="meta")
    lse = torch.empty(TOKENS, HEADS, device="meta")
    merged = torch.empty(TOKENS, HEADS // world, COLUMNS, dtype=torch.bfloat16, device="meta")
    merged_lse = torch.empty(TOKENS, HEADS // world, device="meta")
    with capture.compiling_for(generation) as captured:
        if gathers:
            gather(torch.empty_like(merged, dtype=dtype), workspace, out)
        else:
            merge(out, lse, workspace, merged, merged_lse)
    ((_, kernel),) = captured
    resources, code = isa.inspect(kernel, pretend(generation).shared_bytes)
    nvidia = "ptx" in kernel.asm
    text = kernel.asm["ptx" if nvidia else "amdgcn"]
    kinds = NVIDIA if nvidia else AMD
    found = re.finditer("|".join(f"({pattern})" for pattern in kinds.values()), re.sub(r",", "", text))
    return {
        "resources": asdict(resources),
        "whole": code.count(),
        "order": [list(kinds)[match.lastindex - 1] for match in found],
        "wide": len(re.findall(r"st\.global\.v[24]|(?:global|buffer)_store_(?:dwordx[24]|b128|b64)", text)),
    }


if __name__ == "__main__":
    for generation in GENERATIONS:
        print(json.dumps({"generation": generation} | report(generation, torch.float32, 2)), flush=True)
    print(json.dumps({"generation": "sm_90, 8 ranks, bf16"} | report("sm_90", torch.bfloat16, 8)), flush=True)
    for generation in ("sm_90", "gfx942"):
        name = f"{generation}, gathering"
        print(
            json.dumps({"generation": name} | report(generation, torch.bfloat16, 2, gathers=True)), flush=True
        )

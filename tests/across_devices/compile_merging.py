"""Compile the kernel that merges across devices for devices that are not there; prints a report of each as JSON.

A script of its own, because the tests' process interprets kernels.
"""

import json
import re
import sys
from dataclasses import asdict

import torch

from numa_attention.across_devices import Workspace, bytes_needed, merge
from numa_attention.peer_memory import PeerMemory
from numa_attention.testing import capture, isa
from numa_attention.topology import pretend

CASES = {
    "float32, 2 ranks": (torch.float32, 2),
    "bfloat16, 2 ranks": (torch.bfloat16, 2),
    "float32, 8 ranks": (torch.float32, 8),
}
HEADS, COLUMNS, TOKENS = 8, 128, 64


def report(generation: str, dtype: torch.dtype, world: int) -> dict:
    """What the kernel takes, and the text that says how it orders memory."""
    needed = bytes_needed(world, TOKENS, HEADS, COLUMNS, dtype)
    memory = PeerMemory(torch.empty(needed, dtype=torch.uint8, device="meta"), (1 << 20,) * world, 0)
    workspace = Workspace(memory, max_tokens=TOKENS, q_heads=HEADS, head_dim_v=COLUMNS, dtype=dtype)
    out = torch.empty(TOKENS, HEADS, COLUMNS, dtype=dtype, device="meta")
    lse = torch.empty(TOKENS, HEADS, device="meta")
    merged = torch.empty(TOKENS, HEADS // world, COLUMNS, dtype=torch.bfloat16, device="meta")
    merged_lse = torch.empty(TOKENS, HEADS // world, device="meta")
    with capture.compiling_for(generation) as captured:
        merge(out, lse, workspace, merged, merged_lse)
    ((_, kernel),) = captured
    resources, code = isa.inspect(kernel, pretend(generation).shared_bytes)
    ordering = r"\b(?:atom|ld|st|membar|fence|bar|barrier)\.[\w.:]+" if "ptx" in kernel.asm else (
        r"\b(?:s_wait\w+ .*|s_barrier\w*|buffer_wbl2.*|buffer_inv.*|global_wb.*|global_inv.*|\w+_(?:store|load|atomic)_\w+|"
        r"s_memrealtime|s_sendmsg_rtn\w+)"
    )  # fmt: skip
    text = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
    return {
        "resources": asdict(resources),
        "whole": code.count(),
        "ordering": re.findall(ordering, text),
    }


if __name__ == "__main__":
    for generation in sys.argv[1:]:
        for title, (dtype, world) in CASES.items():
            print(json.dumps({"generation": generation, "case": title} | report(generation, dtype, world)), flush=True)

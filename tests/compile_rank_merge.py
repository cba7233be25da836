"""Compile the launches around a collective for devices that are not there; prints what each takes as JSON, a line each.

A script of its own, because the tests' process interprets kernels.
"""

import json
from dataclasses import asdict

import torch

from numa_attention.merge import merge_packed, weigh
from numa_attention.testing import isa
from numa_attention.testing.capture import compiling_for
from numa_attention.topology import pretend

for generation in ("gfx942", "gfx1250", "sm_90"):
    with compiling_for(generation) as captured:
        empty = dict(dtype=torch.float32, device="meta")
        weigh(torch.empty(64, 64, 128, **empty), torch.empty(8, 64, 64, **empty), 3)
        merge_packed(torch.empty(8, 64, 8, 129, **empty))
    for name, compiled in captured:
        resources, _ = isa.inspect(compiled, pretend(generation).shared_bytes)
        print(json.dumps({"generation": generation, "kernel": name, **asdict(resources)}))

"""Prints the instructions of the probe of NUMA domains, one JSON object a generation and method; not interpreted."""

import json
import sys

from numa_attention import domains_probe
from numa_attention.testing import isa
from numa_attention.testing.capture import compiling_for
from numa_attention.topology import pretend

ADDRESSES, REPEATS = 768, 12

for generation in sys.argv[1:]:
    with compiling_for(generation) as captured:
        if generation.startswith("gfx"):
            domains_probe.xcc_kernel[(8,)](domains_probe.probe_arguments(8, "meta")[3], num_warps=1)
        else:
            for method in domains_probe.METHODS:
                constants = domains_probe.probe_constants(method, REPEATS, ADDRESSES)
                domains_probe.latency_kernel[(8,)](
                    *domains_probe.probe_arguments(ADDRESSES, "meta"), **constants
                )
    for _, kernel in captured:
        resources, code = isa.inspect(kernel, pretend(generation).shared_bytes)
        print(
            json.dumps(
                {"generation": generation, "spills": resources.spills, "instructions": code.instructions}
            )
        )

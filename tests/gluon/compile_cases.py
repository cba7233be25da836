"""Compile the kernels that the interpreter's tests run, for the devices that they are written for; prints JSON.

A script of its own, because the tests' process interprets Triton's library. Each line: a case, and what became of it.
"""

import contextlib
import json
import re
from collections import Counter

import gluon_cases as cases
import test_gluon_language as language
import torch

from numa_attention import gluon_compat
from numa_attention.testing.capture import compiling_for


class CompileOnly:
    """In place of `interpret`."""

    def __init__(self, kernel, target: str = "gfx1250") -> None:
        self.kernel, self.target = kernel, target

    def __getitem__(self, grid):
        def launch(*arguments, seed=0, debug=False, **options):
            with compiling_for(self.target) as captured:
                self.kernel[grid](*arguments, **options)
            compiled.extend(result for _, result in captured)

        return launch


def language_case(test, *parameters):
    """What a test of the language launches; its outputs stay as they were, so that what it asserts fails."""

    def run() -> None:
        with contextlib.suppress(AssertionError):
            test(*parameters)

    return run


cases.interpret = language.interpret = CompileOnly
runs = {
    "tdm gemm": cases.tdm_gemm,
    "tdm attention": lambda: cases.tdm_attention(True),
    "tma gemm": cases.tma_gemm,
    "tma attention": cases.tma_attention,
    "warp specialisation": cases.specialised_sum,
}
if gluon_compat.HAS_CLUSTERS:
    runs["tdm multicast"] = cases.tdm_multicast
    runs["tma multicast"] = cases.tma_multicast
    runs["tma shared barrier"] = cases.tma_shared_barrier
if gluon_compat.exchanges_between_ctas("sm_90"):
    runs["sum over a cluster"] = lambda: cases.tma_multicast(split=(0, 1))

for name, test, *parameters in (
    ("control flow", language.test_control_flow),
    ("reductions", language.test_reductions_and_scan),
    ("shapes", language.test_join_split_permute_reshape),
    ("views", language.test_views_of_shared_memory),
    ("float8", language.test_conversions_round_as_torch_does, torch.float8_e4m3fn),
    ("unsigned", language.test_unsigned_arithmetic),
    ("tdm edge", language.test_tdm_pads_with_zeros),
    ("tdm store", language.test_tdm_store_stays_inside_the_tensor),
    ("tdm barrier", language.test_tdm_that_signals_a_barrier, "", 0),
    ("wmma float8", language.test_wmma, torch.float8_e4m3fn, 128, False),
    ("wmma scaled", language.test_wmma, torch.float8_e4m3fn, 128, True),
    ("gfx950 gemm", language.test_gfx950_gemm, ""),
    ("commit groups", language.test_commit_groups, ""),
):
    runs[name] = language_case(test, *parameters)
if gluon_compat.VERSION >= (3, 8):
    runs["tdm gather"] = language_case(language.test_tdm_gather)
    runs["tdm scatter"] = language_case(language.test_tdm_scatter)
    runs["tdm moving descriptor"] = language_case(language.test_tdm_with_a_moving_descriptor)

for name, run in runs.items():
    compiled = []
    run()
    result = compiled[0]
    report = {"case": name, "shared": result.metadata.shared}
    if "amdgcn" in result.asm:
        assembly = result.asm["amdgcn"]
        report["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly).group(1))
        report["scratch"] = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly).group(1))
    else:
        assembly = result.asm["ptx"]
    report["opcodes"] = Counter(line.split()[0] for line in assembly.splitlines() if line.strip())
    print(json.dumps(report), flush=True)

"""Compile the sm_90 decode kernel in its forms and types; prints a report of each as JSON.

A script of its own, because the tests' process interprets kernels.
"""

import json
from dataclasses import asdict, replace

from numa_attention.decode.hopper_variant import FORMS, SHARED_BYTES
from numa_attention.schedule import Planner, Schedule
from numa_attention.testing import capture, isa
from numa_attention.testing.offline_calls import E4M3, E5M2, make_call
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode

EVERYTHING = dict(window=127, sinks=True, soft_cap=True, alibi=True, lse=True)


def layers() -> dict[str, tuple[dict, dict]]:
    """By name: a layer, and fields of its variant to be replaced."""
    found = {}
    for form in FORMS:
        found[f"bf16 {form}"] = {}, dict(form=form)
        found[f"fp8 {form}"] = dict(float8=E4M3), dict(form=form)
    found["bf16 64 rows"] = dict(group=64, page_size=64), {}
    found["fp8 64 rows"] = dict(group=64, page_size=64, float8=E5M2), {}
    found["bf16 head_dim 64"] = dict(head_dims=(64, 64)), {}
    found["fp8 head_dim 64"] = dict(head_dims=(64, 64), float8=E4M3), {}
    found["bf16 head_dim 256"] = dict(head_dims=(256, 256), page_size=64), {}
    found["fp8 head_dim 256"] = dict(head_dims=(256, 256), page_size=64, float8=E4M3), {}
    found["fp8 head_dim 256, 64 rows"] = dict(head_dims=(256, 256), group=64, page_size=64, float8=E4M3), {}
    found["everything"] = EVERYTHING, {}
    return found


def report(layer: dict, fields: dict) -> dict:
    """What one kernel takes, and the instructions of its two loops: of the warps that compute, and of the one that
    copies."""
    call = make_call("sm_90", **layer)
    topology = pretend("sm_90")
    variant = replace(choose_decode(call.shape, topology, "triton", 1, kernel="hopper-decode"), **fields)
    if variant.form == "single":
        variant = replace(variant, num_stages=1)
    planner = Planner(
        call.shape, "meta", max_requests=capture.REQUESTS, max_tokens=capture.TOKENS, kernels="triton",
        topology=topology, decode_variant=variant,
    )  # fmt: skip
    with capture.compiling_for("sm_90") as captured:
        schedule = Schedule(
            capture.batch_of(capture.REQUESTS),
            call.shape,
            "triton",
            decode=planner.decode_buffers,
            prefill=None,
        )
        capture.attend_once(call, schedule)
    ((name, kernel),) = captured
    resources, code = isa.inspect(kernel, SHARED_BYTES)
    counts = {loop: code.count(loop) for loop in code.loops}
    # keys and values: a loop with fewer copies waits for one of them
    copying = [loop for loop in counts if counts[loop]["async copy"] >= 2 and not counts[loop]["wgmma"]]
    return {
        "kernel": name,
        "variant": variant.describe(),
        "stages": variant.num_stages,
        "resources": asdict(resources),
        "unwritten": code.unwritten,
        "main_loop": code.count(code.main_loop()),
        "copy_loop": counts[min(copying, key=lambda loop: loop[1] - loop[0])],
    }


if __name__ == "__main__":
    for title, (layer, fields) in layers().items():
        print(json.dumps({"name": title} | report(layer, fields)), flush=True)

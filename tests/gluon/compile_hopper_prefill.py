"""Compile the sm_90 prefill kernel for a few layers; prints a report of each as JSON.

A script of its own, because the tests' process interprets kernels. With an argument, only layers whose name has it.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, replace

import torch

from numa_attention.domain_map import SM_IDS
from numa_attention.jit import triton_release
from numa_attention.prefill.hopper_variant import OLDEST_TRITON_WITH_CLUSTERS, SHARED_BYTES
from numa_attention.schedule import PrefillSchedule, Schedule, make_splits
from numa_attention.testing import capture, isa
from numa_attention.testing.offline_calls import E4M3, make_call
from numa_attention.topology import pretend
from numa_attention.variants import choose_prefill, place

LAYERS = {
    "head_dim 64": dict(head_dims=(64, 64), page_size=64, sinks=True, window=127),
    "head_dim 128": dict(head_dims=(128, 128)),
    "head_dim 128, a group of 5": dict(head_dims=(128, 128), group=5, page_size=64, window=1023, lse=True),
    "head_dim 128, placed by hardware": dict(head_dims=(128, 128), placement="hardware"),
    "head_dim 192": dict(head_dims=(192, 128), group=16, page_size=64),
    "head_dim 256": dict(head_dims=(256, 256), group=4, page_size=64),
}
CLUSTER_LAYERS = {
    f"{title}, cluster": layer | {"cluster": True}
    for title, layer in LAYERS.items()
    if "placement" not in layer and triton_release() >= OLDEST_TRITON_WITH_CLUSTERS
}
FLOAT8_LAYERS = {
    "float8, head_dim 64": dict(head_dims=(64, 64), page_size=64, sinks=True, window=127),
    "float8, head_dim 128": dict(head_dims=(128, 128)),
    "float8, head_dim 192": dict(head_dims=(192, 128), group=16, page_size=64),
}


def report(layer: dict) -> dict:
    """What one kernel takes, and its instructions: all, those of the main loop, and some of these in their order."""
    layer = dict(layer)
    form, cluster = layer.pop("form", None), layer.pop("cluster", False)
    call = make_call("sm_90", **layer)
    topology = pretend("sm_90")
    variant = choose_prefill(call.shape, topology, "triton", kernel="hopper-prefill")
    variant = place(variant, call.placement, topology)
    variant = replace(variant, form=form or variant.form)
    if cluster:
        variant = replace(variant, form=f"{variant.form} cluster", block_m=2 * variant.block_m)
    tiles = torch.empty(capture.TOKENS, 4, dtype=torch.int32, device="meta")
    queues = torch.empty(topology.domains + 1 + SM_IDS, dtype=torch.int32, device="meta")
    with capture.compiling_for("sm_90") as captured:
        schedule = Schedule(
            capture.batch_of(0),
            call.shape,
            "triton",
            decode=None,
            prefill=PrefillSchedule(
                variant,
                tiles,
                queues=queues,
                splits=make_splits(call.shape, variant, "meta", capture.REQUESTS, capture.TOKENS),
            ),
        )
        capture.attend_once(call, schedule)
    ((_, kernel),) = captured
    resources, code = isa.inspect(kernel, SHARED_BYTES)
    begin, end = code.main_loop()
    loop = [text.split()[0] for text in code.instructions[begin:end]]
    return {
        "resources": asdict(resources),
        "unwritten": code.unwritten,
        "opcodes": Counter(text.split()[0] for text in code.instructions),
        "loop": Counter(loop),
        "whole": code.count(),
        "order": [
            opcode for opcode in loop if opcode.startswith(("MUFU.EX2", "HGMMA", "QGMMA", "WARPGROUP.DEPBAR"))
        ],
    }


if __name__ == "__main__":
    float8 = {title: layer | {"float8": E4M3} for title, layer in FLOAT8_LAYERS.items()}
    for title, layer in (LAYERS | CLUSTER_LAYERS | float8).items():
        if not sys.argv[1:] or sys.argv[1] in title:
            print(json.dumps({"name": title} | report(layer)), flush=True)

"""Compile the kernels for gfx1250 in the forms and types that they have; prints a report of each as JSON.

A script of its own, because the tests' process interprets kernels. Arguments: "decode" or "prefill".
"""

import json
import sys
from dataclasses import asdict

from numa_attention.decode.cdna5_variant import FORMS
from numa_attention.testing.offline import reports
from numa_attention.testing.offline_calls import E4M3, E5M2, make_call

EVERYTHING = dict(window=127, sinks=True, soft_cap=True, alibi=True, lse=True)


def decode_layers() -> dict[str, tuple[dict, dict]]:
    """By name: a layer, and fields of its variant to be replaced."""
    layers = {}
    for form in FORMS:
        layers[f"bf16 {form}"] = dict(page_size=64), dict(form=form)
        layers[f"fp8 {form}"] = dict(page_size=128, group=64, float8=E4M3), dict(form=form)
    layers["fp8 pairs"] = dict(page_size=128, group=16, float8=E4M3, side_by_side=True), {}
    layers["fp8 pairs, small pages"] = dict(float8=E4M3, side_by_side=True), {}
    layers["fp8 pairs of head_dim 64"] = (
        dict(page_size=128, head_dims=(64, 64), float8=E4M3, side_by_side=True),
        {},
    )
    layers["bf16 pairs of head_dim 64"] = dict(page_size=64, head_dims=(64, 64), side_by_side=True), {}
    layers["fp8 rows of a head"] = dict(page_size=128, group=16, float8=E4M3), {}
    layers["fp8 head_dim 64"] = dict(page_size=64, head_dims=(64, 64), float8=E5M2), {}
    layers["fp8 head_dim 256"] = dict(page_size=64, head_dims=(256, 256), float8=E4M3), {}
    layers["fp8 small pages"] = dict(float8=E4M3), {}
    layers["everything"] = dict(page_size=64, **EVERYTHING), {}
    for name, layer, block_n in (("bf16", {}, 64), ("fp8", {"float8": E4M3}, 128)):
        cluster = dict(name="cdna5-cluster-decode", cluster=4, block_n=block_n, form="")
        layers[f"{name} cluster"] = dict(page_size=1024, group=64, **layer), cluster
        if layer:
            layers["fp8 pairs, cluster"] = dict(page_size=1024, group=64, side_by_side=True, **layer), cluster
    return layers


def prefill_layers() -> dict[str, tuple[dict, dict]]:
    return {
        "bf16": (dict(page_size=64), {}),
        "bf16 head_dim 256": (dict(page_size=64, head_dims=(256, 256)), {}),
        "fp8": (dict(page_size=64, float8=E4M3), {}),
        "everything": (dict(page_size=64, **EVERYTHING), {}),
    }


LAYERS = {"decode": decode_layers, "prefill": prefill_layers}
for name, (layer, tile) in LAYERS[sys.argv[1]]().items():
    for report in reports("gfx1250", [(make_call("gfx1250", **layer), sys.argv[1])], **tile):
        print(json.dumps({"name": name, **asdict(report), "faults": report.faults()}), flush=True)

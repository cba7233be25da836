"""The sm_90 prefill kernel with two workgroups a tile: interpreted, on a GPU, and what its launch refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from numa_attention.jit import triton_release
from numa_attention.prefill import hopper, hopper_consumer, hopper_float8, hopper_producer, hopper_variant
from numa_attention.prefill.hopper_launch import constants_of
from numa_attention.prefill.hopper_variant import FORM, check_cluster
from numa_attention.shapes import LayerShape
from numa_attention.testing import hopper_assembly
from numa_attention.topology import pretend
from numa_attention.variants import choose_prefill
from tests.gluon.test_hopper_prefill import HAS_CLUSTERS, check, check_mistake, on_sm_90
from tests.hopper_prefill_cases import bf16_case, check_all, check_prefill, float8_case, windowed_case
from tests.support import LAYOUTS

hopper_assembly.register()
CLUSTER = f"{FORM} cluster"
needs_clusters = pytest.mark.skipif(not HAS_CLUSTERS, reason="this Triton copies no pages to two workgroups")


# ---- results ----


@needs_clusters
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_more_tiles_than_buffers(consumers, seed):
    case = bf16_case([100, 3], [300, 70], q_heads=4, kv_heads=1)
    check(case, CLUSTER, seed=seed, stages=2, consumers=consumers)


@needs_clusters
@pytest.mark.parametrize("group", [1, 3, 5, 8, 64, 128])
def test_groups(group):
    check(bf16_case([7], [90], q_heads=group, kv_heads=1), CLUSTER, seed=group)


@needs_clusters
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 128), (192, 128), (256, 256)])
def test_head_sizes(head_dim, head_dim_v, copied):
    case = bf16_case(
        [40], [150], q_heads=4, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, page_size=64
    )
    check(case, CLUSTER if copied else CLUSTER.replace(" copied", ""), stages=2)


@needs_clusters
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_layouts_and_page_sizes(layout, page_size):
    check(bf16_case([70], [140], layout=layout, page_size=page_size, q_heads=2), CLUSTER)


@needs_clusters
@pytest.mark.parametrize("window", [0, 63, 200])
def test_nothing_left_of_a_window_counts(window):
    check(
        windowed_case([200, 1], [260, 30], window, q_heads=1, kv_heads=1), CLUSTER, window=window, seed=window
    )


@needs_clusters
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("words", ["", "summed"])
def test_a_float8_cache(words, seed):
    case = float8_case([100, 3], [300, 70], q_heads=2, kv_heads=1)
    check(case, f"{CLUSTER} turns {words}", seed=seed, stages=2)


@needs_clusters
def test_the_longest_tiles_of_twice_the_rows_come_first():
    lengths = [300, 40, 700]
    case = bf16_case(lengths, lengths, q_heads=8, kv_heads=2)
    tiles = _planned(case)
    for request, length in enumerate(lengths):
        for head in range(2):
            blocks = [b for r, h, b, _ in tiles.tolist() if (r, h) == (request, head)]
            assert blocks == sorted(range(-(-4 * length // 256)), reverse=True)


def _planned(case) -> torch.Tensor:
    """The tile list of a step, in which no kernel runs."""
    from tests.kernel_step import make_planner, shape_of, step_of

    variant = choose_prefill(shape_of(case), pretend("sm_90"), "triton", kernel="hopper-prefill")
    variant = dataclasses.replace(variant, form=CLUSTER, block_m=2 * variant.block_m, mapping="head-first")
    planner = make_planner(case, kernels="triton", topology=pretend("sm_90"), prefill_variant=variant)
    return planner.plan(step_of(case, 0)).prefill.tiles


@pytest.mark.gpu
@on_sm_90
@needs_clusters
@pytest.mark.parametrize("form", [CLUSTER, f"{CLUSTER} turns staged", "ahead copied cluster"])
def test_on_a_gpu(form):
    # outputs in shared memory leave room for two buffers
    check_all(form, "cuda", **({"stages": 2} if "staged" in form else {}))


@pytest.mark.gpu
@on_sm_90
@needs_clusters
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_float8_cache_on_a_gpu(page_size):
    case = float8_case([300, 1, 77], [300, 3000, 400], head_dim=128, page_size=page_size, device="cuda")
    check_prefill(case, f"{CLUSTER} turns", device="cuda")


# ---- mistakes ----

COPY = "cache, [first, column], full.index(slot), to"
FAULTS = {
    "keys copied over before the other workgroup is done": (
        "empty_k = gl.allocate_shared_memory(gl.int64, [C.stages, 1], COMMON)",
        "empty_k = gl.allocate_shared_memory(gl.int64, [C.stages, C.ctas], BAR)",
    ),
    "bytes expected for the copy before": ("hopper.mbarrier.wait(full.index(slot), phase)", "pass"),
    "each copies for itself": (f"tma_load_shared({COPY}, C.ctas)", f"tma_load({COPY})"),
    "the first ends before the other": ("        cluster_barrier()", "        pass"),
}
FLOAT8_FAULTS = {
    "raw values copied over before the other workgroup is done": (
        "empty_raw = gl.allocate_shared_memory(gl.int64, [C.stages, 1], COMMON)",
        "empty_raw = gl.allocate_shared_memory(gl.int64, [C.stages, C.ctas], BAR)",
    ),
    "the other converter does not wait": (
        "gl.allocate_shared_memory(gl.int64, [C.value_stages, C.ctas], BAR)\n        if C.float8",
        "gl.allocate_shared_memory(gl.int64, [C.value_stages, 1], COMMON)\n        if C.float8",
    ),
}


@needs_clusters
@pytest.mark.parametrize(("right", "wrong"), list(FAULTS.values()), ids=list(FAULTS))
def test_mistakes_are_found(right, wrong, tmp_path, monkeypatch):
    case = bf16_case([70, 40], [260, 40], q_heads=1, kv_heads=1)
    modules = (hopper_producer, hopper_consumer, hopper)
    check_mistake(right, wrong, modules, case, tmp_path, monkeypatch, "cluster")


@needs_clusters
@pytest.mark.parametrize(("right", "wrong"), list(FLOAT8_FAULTS.values()), ids=list(FLOAT8_FAULTS))
def test_mistakes_with_a_float8_cache_are_found(right, wrong, tmp_path, monkeypatch):
    case = float8_case([70, 40], [260, 40], q_heads=1, kv_heads=1)
    modules = (hopper_float8, hopper_producer, hopper_consumer, hopper)
    check_mistake(right, wrong, modules, case, tmp_path, monkeypatch, "cluster")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("form", "queues", "triton", "reason"),
    [
        (FORM, 2, (3, 6), None),
        (CLUSTER, 0, (3, 8), None),
        (CLUSTER, 0, (3, 7), "needs Triton 3.8 or later, found 3.7"),
        (CLUSTER, 0, None, "found none"),
        (CLUSTER, 2, (3, 9), "takes no tiles by hardware placement"),
    ],
)
def test_where_clusters_can_run(form, queues, triton, reason):
    if reason is None:
        check_cluster(form, queues, triton)
    else:
        with pytest.raises(ValueError, match=reason):
            check_cluster(form, queues, triton)


def test_a_launch_says_why_it_cannot_be_in_clusters():
    shape = LayerShape(8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    variant = choose_prefill(shape, pretend("sm_90"), "triton", kernel="hopper-prefill")
    variant = dataclasses.replace(
        variant, form=CLUSTER, mapping="swizzled-head-first", domains=2, placement="hardware"
    )
    reason = "hardware placement" if HAS_CLUSTERS else f"found {triton_release()[0]}.{triton_release()[1]}"
    with pytest.raises(ValueError, match=reason):
        constants_of(shape, variant, True, False, False, False, False, False)


def test_a_workgroup_has_as_much_shared_memory_as_without_clusters():
    shape = LayerShape(8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    sizes = [hopper_variant.shared_bytes(shape, 2, 128, 3, form) for form in (FORM, CLUSTER)]
    assert sizes[0] == sizes[1] <= hopper_variant.SHARED_BYTES

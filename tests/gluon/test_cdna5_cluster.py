"""Decode in clusters of workgroups on gfx1250, under the Gluon interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import math
from unittest import mock

import pytest
import torch

from numa_attention import gluon_compat, runner
from numa_attention.decode import cdna5_cluster, cdna5_variant
from numa_attention.portable_launch import LayerLauncher
from numa_attention.schedule import Planner
from numa_attention.shapes import LayerShape
from numa_attention.testing.gluon import GluonFault
from numa_attention.topology import pretend
from tests.gluon.cdna5_step import bf16_case, interpreted, mark_of, small_mi450
from tests.kernel_step import check_planned, make_planner, run, step_of

pytestmark = pytest.mark.skipif(
    gluon_compat.VERSION < cdna5_variant.OLDEST_TRITON_WITH_CLUSTERS,
    reason="this Triton has no such clusters",
)


def check(case, *, cluster: int, window: int = -1, general: bool = False, seed: int = 0, **options) -> None:
    """Decode all requests of a case in clusters of `cluster` workgroups."""
    max_query = max(int(case.query_start_loc.diff().max()), 1)
    shape = LayerShape(
        case.q.shape[1], case.k_pages.shape[2], case.q.shape[2], case.v_pages.shape[3], torch.bfloat16,
        case.k_pages.dtype, case.k_pages.shape[1],
    )  # fmt: skip
    row_blocks = -(-shape.group * max_query // 64)
    units = len(case.seq_lens) * shape.kv_heads * row_blocks
    planner = make_planner(
        case,
        window=window,
        general=general,
        kernels="triton",
        topology=small_mi450(units * cluster // 2),
        max_decode_query=max_query,
        clusters=True,
    )
    with interpreted(cdna5_cluster._launch, cdna5_cluster.decode_kernel, seed=seed, debug=True):
        schedule = check_planned(case, planner, num_decodes=len(case.seq_lens), mark=mark_of(case), **options)
    variant = schedule.decode.variant
    assert runner.ran["cdna5-cluster-decode"] == 1
    assert variant.cluster == cluster and f"clusters of {cluster}" in variant.describe()
    assert not schedule.decode.arrivals.any()


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_uneven_lengths(cluster, kv_dtype):
    case = bf16_case([1, 1], [300, 31], q_heads=4, kv_heads=1, page_size=64 * cluster, kv_dtype=kv_dtype)
    scales = {}
    if kv_dtype != torch.bfloat16:
        scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    check(case, cluster=cluster, **scales)


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(128, torch.float8_e4m3fn), (64, torch.bfloat16)], ids=["fp8", "bf16-d64"]
)
def test_keys_beside_values(head_dim, kv_dtype):
    """Several rounds, of which the last ends in the midst of a tile and the first begins left of the window."""
    case = bf16_case(
        [1, 2], [700, 333], q_heads=4, kv_heads=1, head_dim=head_dim, page_size=128, kv_dtype=kv_dtype, layout="kv-last"
    )  # fmt: skip
    assert cdna5_variant.rows_of(case.k_pages, case.v_pages).paired
    check(case, cluster=2)
    check(case, cluster=2, window=200)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("async_wait(2 * COPIES)", "async_wait(2 * COPIES + 1)"),
        ("buffers_k.index((step + 3) % BUFFERS)", "buffers_k.index((step + 1) % BUFFERS)"),
        ("BUFFERS=4 if rows.paired else 3", "BUFFERS=3"),
    ],
)
def test_mistakes_are_found(right, wrong, tmp_path):
    """The kernel with one wrong number."""
    with open(cdna5_cluster.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, "the kernel changed: change this test"
    (tmp_path / "wrong_cluster.py").write_text(source.replace(right, wrong))
    specification = importlib.util.spec_from_file_location("wrong_cluster", tmp_path / "wrong_cluster.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    case = bf16_case([1], [700], q_heads=4, kv_heads=1, page_size=128, layout="kv-last")
    schedule = make_planner(case, kernels="triton", topology=small_mi450(1), clusters=True).plan(
        step_of(case, 1)
    )
    launcher = LayerLauncher(module.decode_kernel, module.constants, cdna5_variant.rows_of)
    with (
        mock.patch.object(cdna5_cluster, "_launch", launcher),
        interpreted(launcher, module.decode_kernel),
        pytest.raises(GluonFault, match=r"wrong_cluster\.py:\d+"),
    ):
        run(case, schedule, scale=1.0)


def test_wide_groups_and_row_blocks():
    check(bf16_case([2], [90], q_heads=64, kv_heads=1, page_size=128), cluster=2)


def test_options():
    case = bf16_case([3, 0, 2], [150, 0, 2], q_heads=6, kv_heads=2, head_dim=80, page_size=128)
    for cache in (case.k_pages, case.v_pages):
        cache[case.block_table[0, 0].long(), : 150 - 3 - 40] = math.nan
    sinks, slopes = torch.randn(6), 0.1 * torch.rand(6)
    check(case, cluster=2, window=40, soft_cap=4.0, sinks=sinks, alibi_slopes=slopes)


def test_masks_by_request():
    case = bf16_case([3, 3], [70, 40], q_heads=2, kv_heads=1, page_size=64)
    check(
        case,
        cluster=2,
        general=True,
        window=25,
        causal=torch.tensor([1, 0], dtype=torch.int32),
        spans=torch.tensor([[[10, 68]], [[38, 39]]], dtype=torch.int32),
        alibi_slopes=torch.tensor([0.1, 0.2]),
        alibi_sqrt=True,
    )


def shape(page_size: int, kv_dtype: torch.dtype = torch.bfloat16) -> LayerShape:
    return LayerShape(64, 1, 128, 128, torch.bfloat16, kv_dtype, page_size)


@pytest.mark.parametrize(
    ("page_size", "kv_dtype", "units", "expected"),
    [
        (1024, torch.bfloat16, 64, (8, 64)),
        (512, torch.bfloat16, 64, (8, 64)),
        (256, torch.bfloat16, 64, (8, 32)),
        (1024, torch.float8_e4m3fn, 64, (8, 128)),
        (1024, torch.bfloat16, 40, None),  # 320 of 512 workgroups
        (128, torch.bfloat16, 64, None),  # 256 of 512 workgroups
        (64, torch.bfloat16, 256, (2, 32)),
        (16, torch.bfloat16, 64, None),
        (1024, torch.bfloat16, 300, None),
        (1024, torch.bfloat16, 1, None),
    ],
)
def test_steps_that_fit_clusters(page_size, kv_dtype, units, expected):
    assert cdna5_variant.cluster_of(shape(page_size, kv_dtype), units, 512) == expected


def test_older_releases_have_no_clusters(monkeypatch):
    monkeypatch.setattr("numa_attention.variants.triton_release", lambda: (3, 7))
    with pytest.raises(
        ValueError, match="clusters need Triton 3.8 or later, found 3.7: leave NUMA_SWIZZLE_CLUSTERS at off"
    ):
        make_planner(
            bf16_case([1], [4], page_size=256), kernels="triton", topology=small_mi450(4), clusters=True
        )


def test_other_kernels_have_no_clusters():
    with pytest.raises(ValueError, match="clusters are for the kernel cdna5-decode; this layer has variant"):
        Planner(
            shape(256),
            "meta",
            max_requests=4,
            max_tokens=4,
            topology=pretend("gfx950"),
            kernels="triton",
            clusters=True,
        )

"""The gfx1250 prefill kernel under the Gluon interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from numa_attention import runner
from numa_attention.prefill import cdna5
from numa_attention.shapes import LayerShape
from numa_attention.testing.gluon import Race
from numa_attention.topology import pretend
from numa_attention.variants import choose_prefill
from tests.gluon.cdna5_step import (
    bf16_case,
    check_prefill,
    interpreted,
    prefill_planner,
    small_mi450,
)
from tests.kernel_step import check, run, step_of
from tests.support import LAYOUTS, make_paged_case


def test_the_dispatcher_runs_both_kernels():
    """The whole way, as the plugin goes it, without a stand-in for anything but the device."""
    case = bf16_case([1, 30, 17], [70, 40, 17], q_heads=2, kv_heads=1, page_size=64)
    check(case, kernels="triton", num_decodes=1, planner_options={"topology": small_mi450(4, domains=4)})
    assert runner.ran == {"cdna5-decode": 1, "cdna5-prefill": 1}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_cached_prefixes_and_uneven_lengths(kv_dtype):
    case = bf16_case([70, 1, 33], [70, 140, 97], q_heads=6, kv_heads=2, page_size=64, kv_dtype=kv_dtype)
    scales = {}
    if kv_dtype != torch.bfloat16:
        scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    check_prefill(case, domains=2, debug=True, **scales)


@pytest.mark.parametrize("page_size", [16, 48])
def test_page_sizes(page_size):
    check_prefill(bf16_case([40], [90], q_heads=2, kv_heads=1, page_size=page_size))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts(layout):
    check_prefill(bf16_case([20], [50], q_heads=2, kv_heads=1, layout=layout, page_size=64))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(80, 80), (128, 128), (192, 128), (256, 256)])
def test_head_sizes(head_dim, head_dim_v):
    check_prefill(
        bf16_case([20], [70], q_heads=2, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, page_size=64)
    )


def test_float16_without_causality():
    check_prefill(make_paged_case([30], [70], dtype=torch.float16, page_size=64), causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_window_reads_nothing_outside_of_it(causal):
    case = bf16_case([5], [200], q_heads=2, kv_heads=1, page_size=32)
    for cache in (case.k_pages, case.v_pages):
        token = torch.arange(200 - 5 - 40)
        cache[case.block_table[0].long()[token // 32], token % 32] = math.nan
    check_prefill(case, window=40, causal=causal)


def test_options_and_a_group_of_64():
    case = bf16_case([3], [70], q_heads=64, kv_heads=1, page_size=64)
    sinks, slopes = torch.randn(64), 0.1 * torch.rand(64)
    check_prefill(case, soft_cap=4.0, sinks=sinks, alibi_slopes=slopes, block_m=64)


def test_masks_by_request():
    case = bf16_case([60, 30], [70, 40], q_heads=2, kv_heads=1, page_size=64)
    check_prefill(
        case,
        general=True,
        window=25,
        causal=torch.tensor([1, 0], dtype=torch.int32),
        spans=torch.tensor([[[15, 68]], [[12, 39]]], dtype=torch.int32),
        alibi_slopes=torch.tensor([0.1, 0.2]),
        alibi_sqrt=True,
    )


def shape(page_size: int = 64, head_dim: int = 128) -> LayerShape:
    return LayerShape(8, 1, head_dim, head_dim, torch.bfloat16, torch.bfloat16, page_size)


def test_what_the_dispatcher_chooses():
    chosen = choose_prefill(shape(), pretend("gfx1250"), "triton")
    assert chosen.name == "cdna5-prefill" and chosen.domains == 8
    other = choose_prefill(shape(page_size=0), pretend("gfx1250"), "triton")
    assert other.name == "portable-prefill"
    assert other.describe().endswith("; cdna5-prefill takes paged caches, not keys and values in a row")
    assert choose_prefill(shape(), pretend("gfx950"), "triton").name == "portable-prefill"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("async_wait(4 * COPIES)", "async_wait(4 * COPIES + 1)"),
        ("buffers_k.index(step % 3), HEAD", "buffers_k.index((step + 1) % 3), HEAD"),
        ("buffers_v.index((step + 2) % 3), HEAD", "buffers_v.index((step + 1) % 3), HEAD"),
        ("        cdna5.tdm.async_wait(0)\n", "        pass\n"),
    ],
)
def test_mistakes_in_the_pipeline_are_found(right, wrong, tmp_path):
    """The kernel with one wrong number."""
    with open(cdna5.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, "the kernel changed: change this test"
    (tmp_path / "wrong_prefill.py").write_text(source.replace(right, wrong))
    specification = importlib.util.spec_from_file_location("wrong_prefill", tmp_path / "wrong_prefill.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    case = bf16_case([10], [300], q_heads=2, kv_heads=1, page_size=64)
    schedule = prefill_planner(case, block_n=64).plan(step_of(case, 0))
    with (
        interpreted(cdna5._launch, module.prefill_kernel),
        pytest.raises(Race, match=r"wrong_prefill\.py:\d+"),
    ):
        run(case, schedule, scale=1.0)

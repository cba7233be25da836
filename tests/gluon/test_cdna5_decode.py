"""The gfx1250 decode kernel under the Gluon interpreter, against the float64 reference."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from numa_attention import gluon_compat, runner
from numa_attention.decode import cdna5, cdna5_variant
from numa_attention.decode.cdna5_variant import Rows
from numa_attention.shapes import LayerShape, chunk_of
from numa_attention.testing.gluon import OutOfBounds, Race, Refused
from numa_attention.topology import pretend
from numa_attention.variants import choose_decode
from tests.gluon.cdna5_step import (
    bf16_case,
    check_decode,
    decode_planner,
    interpreted,
    small_mi450,
)
from tests.gluon.interpreted import splits_of
from tests.kernel_step import check, run, step_of
from tests.support import LAYOUTS, empty_pages, make_paged_case

forms = pytest.mark.parametrize("form", cdna5.FORMS)


@forms
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_split_and_whole_units(form, kv_dtype):
    case = bf16_case([1, 1], [1, 500], q_heads=2, kv_heads=1, kv_dtype=kv_dtype, page_size=64)
    scales = {}
    if kv_dtype != torch.bfloat16:
        scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    schedule = check_decode(case, form=form, debug=form == "four-stage", **scales)
    assert splits_of(schedule).max() > 1 and splits_of(schedule).min() == 1


def test_the_dispatcher_runs_it():
    """The whole way, as the plugin goes it, without a stand-in for anything but the device."""
    case = bf16_case([1, 1], [70, 300], page_size=64)
    options = {"topology": small_mi450(4, domains=4)}
    check(case, kernels="triton", num_decodes=2, planner_options=options)
    assert runner.ran["cdna5-decode"] == 1


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_page_sizes(page_size, kv_dtype):
    case = bf16_case([1], [150], page_size=page_size, q_heads=2, kv_heads=1, kv_dtype=kv_dtype)
    check_decode(case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_at_head_dim_128(layout):
    check_decode(bf16_case([1], [90], layout=layout, head_dim=128, page_size=64), units=1)


@forms
@pytest.mark.parametrize(
    ("layout", "kv_heads", "head_dim", "kv_dtype", "rows"),
    [
        ("pages-2", 1, 128, torch.float8_e4m3fn, Rows(flat_k=True, flat_v=True)),
        ("kv-last", 2, 64, torch.bfloat16, Rows(paired=True)),
        ("kv-last", 2, 64, torch.float8_e4m3fn, Rows(paired=True, flat_k=True)),
    ],
    ids=["tokens", "pairs", "tokens-of-pairs"],
)
def test_rows_of_more_than_a_head(form, layout, kv_heads, head_dim, kv_dtype, rows):
    """Lengths that end in a row's midst, pages of more than a tile and of less, and NaN behind each end."""
    for page_size in (48, 128):
        case = bf16_case(
            [1, 2], [33, 147], q_heads=2 * kv_heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype,
            page_size=page_size, layout=layout,
        )  # fmt: skip
        assert cdna5_variant.rows_of(case.k_pages, case.v_pages) == rows
        check_decode(case, form=form, units=1, block_n=64)


def cache_rows(layout: str, kv_dtype: torch.dtype, heads: int, *head_dims: int) -> Rows:
    return cdna5_variant.rows_of(*empty_pages(3, 16, heads, *head_dims, kv_dtype, layout))


def test_which_rows_a_cache_has():
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    flat, pairs, plain = Rows(flat_k=True, flat_v=True), Rows(paired=True), Rows()
    assert cache_rows("pages-2", fp8, 1, 128, 128) == flat
    assert cache_rows("interleaved", fp8, 1, 64, 64) == flat
    assert cache_rows("kv-last", fp8, 8, 128, 128) == pairs
    assert cache_rows("kv-last", bf16, 8, 64, 64) == pairs
    # other heads lie between the tokens
    assert cache_rows("pages-2", fp8, 2, 128, 128) == plain
    # long enough as they are
    assert cache_rows("kv-last", bf16, 1, 128, 128) == cache_rows("pages-2", fp8, 1, 256, 256) == plain
    # padded in LDS, or of two sizes
    assert cache_rows("pages-2", fp8, 1, 80, 80) == cache_rows("kv-last", fp8, 1, 80, 80) == plain
    assert cache_rows("kv-last", fp8, 1, 128, 64) == plain
    assert cache_rows("pages-2", fp8, 1, 128, 256) == plain
    k_pages, v_pages = empty_pages(3, 16, 1, 128, 128, fp8, "kv-last")
    # a cache of values alone, and one in another order
    assert cdna5_variant.rows_of(k_pages, v_pages.clone()) == Rows(flat_v=True)
    assert cdna5_variant.rows_of(v_pages, k_pages) == plain


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(40, 40), (112, 112), (192, 128), (256, 256)])
def test_head_sizes(head_dim, head_dim_v):
    case = bf16_case([1], [70], q_heads=2, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, page_size=64)
    check_decode(case, units=1)


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [(64, torch.float8_e4m3fn), (128, torch.float8_e5m2), (256, torch.float8_e4m3fn)],
    ids=["d64-e4m3", "d128-e5m2", "d256-e4m3"],
)
def test_float8_keeps_the_accuracy_of_bfloat16(head_dim, kv_dtype):
    """Queries whose rows and elements differ by orders of magnitude, as a cut into few bits would show."""
    case = bf16_case([2], [140], q_heads=6, kv_heads=2, head_dim=head_dim, kv_dtype=kv_dtype, page_size=64)
    size = torch.exp2(torch.randint(-12, 1, (2, 6, 1)).float()) * torch.exp2(
        torch.randint(-4, 1, (head_dim,))
    )
    case.q *= size.to(torch.bfloat16)
    check_decode(case, units=1, scale=1.0 if head_dim == 64 else 0.3)


def test_float8_keeps_many_small_probabilities():
    """One key takes most of the weight, and its value is small: what the others add up to is the result."""
    case = bf16_case([1], [2000], q_heads=1, kv_heads=1, kv_dtype=torch.float8_e4m3fn, page_size=128)
    case.q.fill_(0.125)
    pages = case.block_table[0].long()
    keys, values = (cache[pages].flatten(0, 1)[:2000].float() for cache in (case.k_pages, case.v_pages))
    keys *= 0.5
    keys[100] = 1.625  # its score is 64 * 0.125 * 1.625 = 13: the others weigh about e^-13, less than 2^-18
    values = values.abs()
    values[100] = 0.0
    token = torch.arange(2000)
    for cache, rows in ((case.k_pages, keys), (case.v_pages, values)):
        cache[pages[token // 128], token % 128] = rows.to(cache.dtype)
    check_decode(case, units=1, scale=1.0)


def test_float16():
    case = make_paged_case([1, 1], [70, 190], dtype=torch.float16, page_size=64)
    check_decode(case)


def test_splits_are_merged_in_two_levels_by_whoever_is_last():
    case = bf16_case([1], [1150], q_heads=2, kv_heads=1, page_size=32)
    schedule = check_decode(case, form="two-stage", units=9, block_n=32)
    assert splits_of(schedule).max() > cdna5.FAN_IN


@pytest.mark.parametrize(("form", "window"), [("two-stage", 33), ("four-stage", 33), ("four-stage", 0)])
def test_window_reads_nothing_left_of_it(form, window):
    case = bf16_case([1, 1], [30, 150], q_heads=2, kv_heads=1)
    for request, length in enumerate([30, 150]):
        token = torch.arange(max(length - 1 - window, 0))
        for cache in (case.k_pages, case.v_pages):
            cache[case.block_table[request].long()[token // 16], token % 16] = math.nan
    check_decode(case, form=form, window=window)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_several_query_tokens_and_a_wide_group(kv_dtype):
    case = bf16_case([3, 3], [90, 3], q_heads=12, kv_heads=1, kv_dtype=kv_dtype, page_size=64)
    schedule = check_decode(case)
    assert schedule.decode.variant.block_m == 64 and schedule.decode.variant.num_warps == 4


def test_group_of_64_in_two_row_blocks():
    check_decode(bf16_case([2], [90], q_heads=64, kv_heads=1, page_size=64))


def test_soft_cap_sinks_and_alibi():
    case = bf16_case([1, 1], [30, 90], q_heads=3, kv_heads=1, page_size=64)
    random = torch.Generator().manual_seed(1)
    sinks, slopes = (torch.randn(3, generator=random) for _ in range(2))
    check_decode(case, soft_cap=3.0, sinks=sinks, alibi_slopes=slopes.abs() * 0.1)


def test_requests_without_keys_or_queries():
    check_decode(bf16_case([1, 0, 1, 0], [70, 0, 0, 0], q_heads=2, kv_heads=1, page_size=64))


@pytest.mark.parametrize("window", [-1, 20])
def test_bidirectional(window):
    check_decode(bf16_case([3], [70], q_heads=2, kv_heads=1, page_size=64), causal=False, window=window)


def test_masks_by_request_and_square_roots():
    case = bf16_case([3, 3], [70, 40], q_heads=2, kv_heads=1, page_size=64)
    check_decode(
        case,
        general=True,
        window=25,
        causal=torch.tensor([1, 0], dtype=torch.int32),
        spans=torch.tensor([[[10, 68]], [[38, 39]]], dtype=torch.int32),
        alibi_slopes=torch.tensor([0.1, 0.2]),
        alibi_sqrt=True,
    )


def test_float8_queries_and_output():
    case = bf16_case([2], [70], q_heads=2, kv_heads=1, kv_dtype=torch.float8_e4m3fn, page_size=64)
    case.q = case.q.to(torch.float8_e4m3fn)
    scales = {name: torch.tensor([0.7]) for name in ("q_scale", "k_scale", "v_scale")}
    check_decode(case, general=True, **scales)
    check_decode(case, general=True, **scales, out_scale=torch.tensor([0.02]))


def test_scores_stay_in_their_lanes():
    """The layouts make the move of probabilities from the first product to the second one free."""
    # convert_layout(assert_trivial=True) in the kernel is the check: another layout of the result must fail it
    case = bf16_case([1], [20], q_heads=2, kv_heads=1)
    schedule = decode_planner(case).plan(step_of(case, 1))
    untransposed = gluon_compat.wmma_layout(1, 1, (16, 16, 32), transposed=False)
    with (
        interpreted(cdna5._launch, cdna5.decode_kernel, ACC=untransposed),
        pytest.raises(Refused, match="is not trivial"),
    ):
        run(case, schedule, scale=1.0)


def test_pairs_of_keys_and_values_need_one_buffer_more():
    case = bf16_case([1], [300], q_heads=2, kv_heads=1, layout="kv-last")
    schedule = decode_planner(case, form="four-stage", units=1).plan(step_of(case, 1))
    with (
        interpreted(cdna5._launch, cdna5.decode_kernel, BUFFERS=3),
        pytest.raises(Race, match=r"cdna5\.py:\d+ in decode_kernel"),
    ):
        run(case, schedule, scale=1.0)


def test_too_few_buffers_are_found():
    case = bf16_case([1], [200], q_heads=2, kv_heads=1)
    schedule = decode_planner(case).plan(step_of(case, 1))
    with (
        interpreted(cdna5._launch, cdna5.decode_kernel, BUFFERS=2),
        pytest.raises(OutOfBounds, match=r"of 2 buffers, at cdna5\.py:\d+ in decode_kernel"),
    ):
        run(case, schedule, scale=1.0)


def shape(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=128, page_size=64) -> LayerShape:
    return LayerShape(8, 1, head_dim, head_dim, dtype, kv_dtype, page_size)


@pytest.mark.parametrize(
    ("layer", "because"),
    [
        (shape(torch.float32, torch.float32), "float16 and bfloat16, not float32"),
        (shape(kv_dtype=torch.float16), "not float16"),
        (shape(kv_dtype=torch.float8_e4m3fnuz), "not float8_e4m3fnuz"),
        (shape(page_size=0), "paged caches"),
        (shape(head_dim=16), "head sizes from 17"),
        (shape(kv_dtype=torch.float8_e4m3fn, head_dim=32), "head sizes from 33"),
    ],
)
def test_other_layers_go_to_the_portable_kernel_and_the_log_says_why(layer, because):
    variant = choose_decode(layer, pretend("gfx1250"), "triton", 1)
    assert variant.name == "portable-decode"
    assert f"; cdna5-decode takes {because}" in variant.describe() or because in variant.describe()


@pytest.mark.parametrize(("release", "found"), [((3, 6), "found 3.6"), (None, "found none")])
def test_older_releases_of_triton(release, found, monkeypatch):
    monkeypatch.setattr("numa_attention.variants.triton_release", lambda: release)
    variant = choose_decode(shape(), pretend("gfx1250"), "triton", 1)
    assert variant.name == "portable-decode"
    assert f"; cdna5-decode needs Triton 3.7 or later, {found}" in variant.describe()


def test_other_devices_are_not_told_of_it():
    for device in ("gfx942", "gfx950", "sm_90", "sm_100"):
        variant = choose_decode(shape(), pretend(device), "triton", 1)
        assert "cdna5" not in variant.describe()
    assert choose_decode(shape(), pretend("gfx1250"), "torch", 1).name == "torch-decode"


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 528])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_requests_ahead_stay_below_what_the_compiler_lets_be_under_way(page_size, kv_dtype):
    for head_dim in (64, 80, 128, 256):
        tile = cdna5_variant.tile_of(shape(kv_dtype=kv_dtype, head_dim=head_dim, page_size=page_size))
        copies = cdna5_variant.copies_of(page_size, tile.block_n)
        assert tile.form == ("four-stage" if 5 * copies <= 11 else "two-stage")
        assert tile.block_n % chunk_of(page_size, tile.block_n) == 0


FAULTS = (
    ("four-stage", "async_wait(2 * COPIES)", "async_wait(2 * COPIES + 1)"),
    ("four-stage", "buffers_k.index((step + 3) % BUFFERS)", "buffers_k.index((step + 1) % BUFFERS)"),
    ("four-stage", "buffers_v.index((step + 2) % BUFFERS)", "buffers_v.index((step + 1) % BUFFERS)"),
    ("two-stage", "async_wait(AHEAD * COPIES)", "async_wait(AHEAD * COPIES + 1)"),
    ("two-stage", "AHEAD) % BUFFERS", "AHEAD + 1) % BUFFERS"),
    ("single", "async_wait(AHEAD * COPIES)", "async_wait(1)"),
    ("two-stage", "        cdna5.tdm.async_wait(0)\n", "        pass\n"),
)


@pytest.mark.parametrize(
    ("form", "right", "wrong", "layout"),
    [(*fault, "pages-2") for fault in FAULTS]
    + [(*fault, "kv-last") for fault in FAULTS if "buffers_v" not in fault[1]],
)
def test_mistakes_in_the_pipeline_are_found(form, right, wrong, layout, tmp_path):
    """The kernel with one wrong number."""
    with open(cdna5.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, "the kernel changed: change this test"
    (tmp_path / "wrong_decode.py").write_text(source.replace(right, wrong))
    specification = importlib.util.spec_from_file_location("wrong_decode", tmp_path / "wrong_decode.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    case = bf16_case([1], [300], q_heads=2, kv_heads=1, page_size=128, layout=layout)
    schedule = decode_planner(case, form=form, units=1, block_n=64).plan(step_of(case, 1))
    with (
        interpreted(cdna5._launch, module.decode_kernel),
        pytest.raises(Race, match=r"wrong_decode\.py:\d+"),
    ):
        run(case, schedule, scale=1.0)

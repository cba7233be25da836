"""Float8 caches, queries and outputs: each type, scales far from 1, saturation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from numa_attention.topology import pretend
from numa_attention.variants import choose_decode
from tests.kernel_step import check, kernels, make_planner, run, shape_of, step_of
from tests.support import make_paged_case

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
types = pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
QUERY_LENS, SEQ_LENS = [1, 1, 40], [70, 300, 130]


def scale(value: float, device) -> torch.Tensor:
    return torch.tensor([value], device=device)


def skip_unless_computed_here(kv_dtype: torch.dtype, kernels: str, device) -> None:
    """fnuz is gfx942's; Triton's interpreter knows it from 3.9 on."""
    if kv_dtype != torch.float8_e4m3fnuz or kernels == "torch":
        return
    import triton

    if device.type == "cuda" and torch.version.hip is None:
        pytest.skip("NVIDIA GPUs do not convert e4m3fnuz")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("the interpreter of this Triton does not know e4m3fnuz")


@kernels
@types
def test_cache(kernels, kv_dtype, device):
    skip_unless_computed_here(kv_dtype, kernels, device)
    case = make_paged_case(QUERY_LENS, SEQ_LENS, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device)
    check(case, kernels=kernels, num_decodes=2, k_scale=scale(0.7, device), v_scale=scale(1.6, device))


@kernels
@types
def test_queries(kernels, kv_dtype, device):
    skip_unless_computed_here(kv_dtype, kernels, device)
    case = make_paged_case(
        QUERY_LENS, SEQ_LENS, q_heads=6, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device
    )
    case.q = (case.q.float() / 0.37).to(kv_dtype)
    check(
        case, kernels=kernels, num_decodes=2, q_scale=scale(0.37, device), k_scale=scale(0.7, device),
        v_scale=scale(1.6, device),
    )  # fmt: skip


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_scale", [0.013, 1.0, 300.0])
def test_output(kernels, dtype, out_scale, device):
    """0.013 drives some numbers past the largest one, 300 all of them near the smallest."""
    case = make_paged_case(QUERY_LENS, SEQ_LENS, dtype=dtype, device=device)
    case.v_pages.mul_(10)
    check(case, kernels=kernels, num_decodes=2, out_scale=scale(out_scale, device))


@kernels
@types
def test_output_over_a_float8_cache(kernels, kv_dtype, device):
    skip_unless_computed_here(kv_dtype, kernels, device)
    case = make_paged_case(QUERY_LENS, SEQ_LENS, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device)
    check(
        case, kernels=kernels, num_decodes=2, k_scale=scale(0.7, device), v_scale=scale(1.6, device),
        out_scale=scale(0.02, device),
    )  # fmt: skip


@kernels
def test_a_row_without_keys_is_zero_in_float8_too(kernels, device):
    case = make_paged_case([1, 3], [0, 3], device=device)
    for num_decodes in (0, 1):
        schedule = make_planner(case, kernels=kernels, general=True).plan(step_of(case, num_decodes))
        out, lse = run(case, schedule, scale=1.0, out_scale=scale(0.5, device))
        assert (out[0].float() == 0.0).all() and (lse[0] == -math.inf).all()
        assert out.float().isfinite().all()


def test_a_kernel_that_lacks_options(device, monkeypatch):
    """What it gives is quantised after it; other options are refused."""
    from numa_attention import runner

    case = make_paged_case(QUERY_LENS, SEQ_LENS, dtype=torch.bfloat16, device=device)
    schedule = make_planner(case, kernels="auto").plan(step_of(case, 2))
    expected, _ = run(case, schedule, scale=0.1)
    monkeypatch.setattr(runner, "GENERAL", frozenset())
    out_scale = scale(0.02, device)
    out, _ = run(case, schedule, scale=0.1, out_scale=out_scale)
    assert torch.equal(out.float(), (expected.float() / out_scale).clamp(-448, 448).to(out.dtype).float())
    with pytest.raises(
        ValueError, match="-decode takes no alibi_sqrt: plan the layer with a shape that is `general`"
    ):
        run(case, schedule, scale=0.1, alibi_slopes=torch.ones(4, device=device), alibi_sqrt=True)
    causal = torch.ones(3, dtype=torch.bool, device=device)
    schedule = make_planner(case, kernels="auto").plan(step_of(case, 2, causal))
    with pytest.raises(ValueError, match="-decode takes no causal by request"):
        run(case, schedule, scale=0.1)


REFUSED = {
    "give out_scale for a float8 output": {"out": torch.float8_e4m3fn},
    "out is torch.bfloat16": {"out_scale": 1.0},
    "q_scale is for float8 queries over a float8 cache; got torch.bfloat16": {"q_scale": 1.0},
    "planned for q torch.bfloat16": {"q": torch.float8_e4m3fn},
}


@kernels
@pytest.mark.parametrize("sentence", REFUSED)
def test_scales_and_types_that_do_not_fit_are_refused(kernels, sentence, device):
    from numa_attention.runner import attend

    case = make_paged_case([1], [20], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, device=device)
    schedule = make_planner(case, kernels=kernels, general=True).plan(step_of(case, 1))
    one = scale(1.0, device)
    call = {"q": case.q, "out": case.poisoned_output(), "k_scale": one, "v_scale": one, "scale": 1.0}
    for name, value in REFUSED[sentence].items():
        call[name] = call[name].to(value) if isinstance(value, torch.dtype) else one
    with pytest.raises(ValueError, match=sentence):
        attend(k_pages=case.k_pages, v_pages=case.v_pages, schedule=schedule, **call)


@pytest.mark.parametrize("generation", ["sm_100", "gfx950"])
def test_products_in_float16_and_in_bfloat16(generation, device):
    """Which of the two runs is a question of the device: both are right, for queries of any size."""
    if device.type == "cuda":
        pytest.skip("a GPU runs its own kind of products in the other tests")
    topology = dataclasses.replace(pretend(generation), compute_units=8)
    case = make_paged_case(
        QUERY_LENS, SEQ_LENS, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, head_dim=64
    )
    case.q *= torch.tensor([1e-6, 1.0, 1e6, 1e4])[:, None]
    schedule = check(
        case, kernels="triton", num_decodes=2, planner_options={"topology": topology}, scale=1e-6,
        k_scale=scale(0.7, device), v_scale=scale(1.6, device),
    )  # fmt: skip
    for plan in (schedule.decode, schedule.prefill):
        assert plan.variant.in_float16 == (generation == "sm_100")


def portable_on_sm_90(case, window: int = -1) -> dict:
    """Options of a planner that takes the portable kernel's tiles for sm_90."""
    topology = dataclasses.replace(pretend("sm_90"), compute_units=4)
    queries = int(case.query_start_loc.diff().max())
    variant = choose_decode(shape_of(case, window), topology, "triton", queries, kernel="portable-decode")
    return dict(topology=topology, max_decode_query=queries, decode_variant=variant)


@pytest.mark.parametrize("kv_dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize(("group", "rows"), [(1, 16), (5, 16), (24, 64), (64, 64)])
@pytest.mark.parametrize("sign", [1, -1], ids=["", "negative-scale"])
def test_tiles_of_sm_90(group, rows, kv_dtype, sign, device):
    """Keys that stay float8 in their product, and values that are converted before it; queries of any size."""
    skip_off_sm_90(device)
    case = make_paged_case(
        [1, 1, 1], [1, 150, 301], q_heads=group, kv_heads=1, head_dim=128, dtype=torch.bfloat16, kv_dtype=kv_dtype,
        device=device,
    )  # fmt: skip
    case.q *= torch.logspace(-6, 6, group, device=device)[:, None]
    schedule = check(
        case, kernels="triton", num_decodes=3, planner_options=portable_on_sm_90(case), mark=torch.bfloat16,
        scale=sign * 1e-6, k_scale=scale(0.7, device), v_scale=scale(1.6, device),
    )  # fmt: skip
    variant = schedule.decode.variant
    assert (variant.name, variant.block_m) == ("portable-decode", rows)
    assert (variant.two_terms, variant.staged_values) == (rows == 64, rows == 16)


@pytest.mark.parametrize("group", [4, 40])
@pytest.mark.parametrize("option", ["soft_cap", "alibi", "window", "queries"])
def test_options_with_the_tiles_of_sm_90(group, option, device):
    skip_off_sm_90(device)
    case = make_paged_case(
        [3, 1] if option == "queries" else [1, 1], [150, 301], q_heads=group, kv_heads=1, head_dim=64,
        dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, device=device,
    )  # fmt: skip
    window = 40 if option == "window" else -1
    options = {
        "soft_cap": {"soft_cap": 3.0},
        "alibi": {"alibi_slopes": torch.linspace(0.01, 0.3, group, device=device)},
    }.get(option, {})
    check(
        case, kernels="triton", num_decodes=2, window=window, planner_options=portable_on_sm_90(case, window),
        mark=torch.bfloat16, k_scale=scale(0.7, device), v_scale=scale(1.6, device), **options,
    )  # fmt: skip


def skip_off_sm_90(device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the tiles are those of sm_90")

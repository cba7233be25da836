"""The sm_90 prefill kernel over an e4m3 cache, interpreted and on a GPU, against the float64 reference.

Queries of two e4m3 numbers each have to pass at bfloat16's mark, rounded ones at that of float8.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from numa_attention.prefill import (
    hopper,
    hopper_consumer,
    hopper_float8,
    hopper_producer,
    hopper_variant,
)
from numa_attention.prefill.hopper_variant import FLOAT8_WORDS, FORM
from numa_attention.testing import hopper_assembly
from tests.gluon.test_hopper_prefill import WORDS, check, check_mistake, on_sm_90
from tests.hopper_prefill_cases import E4M3, check_prefill, float8_case, windowed_case
from tests.random_draws import SEED
from tests.support import LAYOUTS, make_paged_case

hopper_assembly.register()
CASES = int(os.environ.get("NUMA_TEST_GLUON_CASES", "75")) // 5
FLOAT8_MARK = 4e-2  # where queries are rounded to float8
ROUNDED = "rounded-queries"


def mark_of(form: str) -> float | None:
    return FLOAT8_MARK if ROUNDED in form else None


FORMS = (FORM, f"{FORM} {ROUNDED}", "copied turns staged", "turns", f"ahead persistent {ROUNDED}")


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    check(float8_case([40, 3], [140, 70], q_heads=2, kv_heads=1), form, mark=mark_of(form))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "block_n"), [(64, 64, 128), (128, 128, 128), (192, 128, 64)]
)
@pytest.mark.parametrize("copied", [True, False])
def test_head_sizes(head_dim, head_dim_v, block_n, copied):
    case = float8_case(
        [20], [150], q_heads=2, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, page_size=64
    )
    check(case, FORM if copied else FORM.replace(" copied", ""), block_n=block_n)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(float8_case([20], [140], layout=layout, page_size=48, q_heads=2))


@pytest.mark.parametrize("group", [1, 5, 64])
def test_groups(group):
    check(float8_case([3], [90], q_heads=group, kv_heads=1), seed=group)


@pytest.mark.parametrize("window", [0, 63, 200])
def test_nothing_left_of_a_window_counts(window):
    case = windowed_case([70, 1], [260, 30], window, q_heads=1, kv_heads=1, kv_dtype=E4M3)
    check(case, window=window)


def test_soft_cap_sinks_alibi_scales_and_float16():
    numbers = torch.Generator().manual_seed(1)
    sinks, slopes = (torch.randn(6, generator=numbers) for _ in range(2))
    scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    case = float8_case([40], [100], q_heads=6, kv_heads=2)
    check(case, soft_cap=3.0, sinks=sinks, alibi_slopes=slopes.abs() * 0.1, **scales)
    check(case, sinks=sinks, **scales)
    # float16 has three bits more than two numbers of e4m3
    case = make_paged_case([40], [100], q_heads=6, dtype=torch.float16, kv_dtype=E4M3)
    check(case, causal=False, mark=torch.bfloat16)


def test_requests_without_keys_or_with_fewer_keys_than_queries():
    check(float8_case([9, 5, 70], [5, 0, 66]), workgroups=1, stages=3)


@pytest.mark.parametrize("power", [-40, 40])
def test_queries_of_any_size(power):
    """A row is scaled into e4m3's range, each by itself."""
    case = float8_case([20], [90], q_heads=1, kv_heads=1)
    case.q[::2] *= 2.0**power
    case.q[1::4] = 0.0
    check(case, scale=2.0 ** -max(power, 0) / 8)


def test_random_steps():
    print(f"NUMA_TEST_SEED={SEED}, {CASES} draws")
    generator = random.Random(SEED + 8)
    for _ in range(CASES):
        group = generator.choice((1, 2, 3, 8))
        window = generator.choice((-1, -1, 5, 100))
        lengths = [generator.randint(1, 100 // group), generator.randint(0, 20)]
        totals = [n + generator.choice((0, 1, 15, 64, generator.randint(0, 120))) for n in lengths]
        options = dict(page_size=generator.choice((16, 48, 64, 528)), layout=generator.choice(LAYOUTS))
        case = windowed_case(
            lengths, totals, window if window >= 0 else 1 << 20, q_heads=group, kv_heads=1, kv_dtype=E4M3,
            seed=generator.randrange(1 << 30), **options,
        )  # fmt: skip
        form = " ".join(word for word in (*WORDS, *FLOAT8_WORDS) if generator.random() < 0.5)
        tile = dict(
            consumers=generator.randint(1, hopper_variant.MAX_FLOAT8_CONSUMERS),
            block_n=generator.choice((64, 128)), stages=generator.randint(2, 4),
        )  # fmt: skip
        order = generator.randrange(1 << 30)
        print(f"lengths {lengths}, {totals}, window {window}, {options}, {form}, {tile}, seed {order}")
        check(
            case, form, window=window, seed=order, mark=mark_of(form), splitting=generator, **tile
        )  # fmt: skip


ARRIVE, WAIT = "hopper.mbarrier.arrive", "hopper.mbarrier.wait"
FAULTS = {
    "no wait for values": (f"{WAIT}(full_raw.index(slot), (v_count // C.stages) & 1)", "pass"),
    "no wait for room": (f"{WAIT}(empty_v.index(to), ((v_count // C.value_stages) & 1) ^ 1)", "pass"),
    "never released": (f"{ARRIVE}(empty_raw.index(slot), count=1)", "pass"),
    "released early": (
        f"{WAIT}(full_raw.index(slot), (v_count // C.stages) & 1)",
        f"{WAIT}(full_raw.index(slot), (v_count // C.stages) & 1); {ARRIVE}(empty_raw.index(slot), count=1)",
    ),
    "written without a fence": (
        f"hopper.fence_async_shared()\n            {ARRIVE}(full_v",
        f"{ARRIVE}(full_v",
    ),
    "queries written without a fence": ("    hopper.fence_async_shared()\n    return", "    return"),
}


@pytest.mark.parametrize(("right", "wrong"), list(FAULTS.values()), ids=list(FAULTS))
def test_mistakes_are_found(right, wrong, tmp_path, monkeypatch):
    modules = (hopper_float8, hopper_producer, hopper_consumer, hopper)
    case = float8_case([70, 40], [260, 40], q_heads=1, kv_heads=1)
    check_mistake(right, wrong, modules, case, tmp_path, monkeypatch)


@pytest.mark.gpu
@on_sm_90
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_on_a_gpu(form, page_size):
    sizes = {"stages": 2, "block_n": 64} if "staged" in form else {}  # outputs need room too
    for head_dim in (64, 128):
        case = float8_case(
            [300, 1, 77], [300, 3000, 400], q_heads=8, head_dim=head_dim, page_size=page_size, device="cuda"
        )
        check_prefill(case, form, device="cuda", mark=mark_of(form), **sizes)
        case = windowed_case(
            [170, 1, 700], [400, 500, 700], 300, head_dim=head_dim, kv_dtype=E4M3, device="cuda"
        )
        check_prefill(case, form, device="cuda", window=300, mark=mark_of(form), **sizes)


@pytest.mark.gpu
@on_sm_90
def test_long_sums_of_one_sign_on_a_gpu():
    """Where wgmma sums products of float8, it keeps about 14 bits: it would be 2.3e-1 away."""
    case = float8_case([64], [16384], q_heads=1, kv_heads=1, head_dim=128, page_size=64, device="cuda")
    case.v_pages.copy_(case.v_pages.float().abs().to(E4M3))
    check_prefill(case, device="cuda")

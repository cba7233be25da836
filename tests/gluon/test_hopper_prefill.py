"""The sm_90 prefill kernel under the Gluon interpreter, against the float64 reference, and what its launch refuses.

`NUMA_TEST_SEED` draws other random steps, `NUMA_TEST_GLUON_CASES` more of them (75). docs/prefill-hopper.md has the
command for a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import logging
import os
import random
import sys
import types
from unittest import mock

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from numa_attention import tensor_maps
from numa_attention.jit import triton_release
from numa_attention.placement_device import SM_ID
from numa_attention.prefill import (
    hopper,
    hopper_consumer,
    hopper_launch,
    hopper_producer,
    hopper_tiles,
    hopper_variant,
)
from numa_attention.prefill.hopper_variant import FORM
from numa_attention.shapes import LayerShape, UnsupportedShape
from numa_attention.testing import hopper_assembly, interpret
from numa_attention.testing.gluon import Deadlock, GluonFault, Race, Refused, register_asm
from numa_attention.topology import pretend
from numa_attention.variants import choose_prefill
from tests import batched_reference
from tests.gluon.interpreted import interpreted
from tests.hopper_prefill_cases import (
    RANDOM_LAYERS,
    bf16_case,
    check_all,
    check_prefill,
    check_random_step,
    windowed_case,
)
from tests.kernel_step import check_planned, make_planner, shape_of
from tests.random_draws import SEED, share_of_draws
from tests.support import LAYOUTS, make_paged_case

CASES = int(os.environ.get("NUMA_TEST_GLUON_CASES", "75"))


def check(
    case, form: str = FORM, *, seed: int = 0, workgroups: int = 2, block_n: int = 64, kernel=hopper.prefill_kernel,
    **options,
) -> None:  # fmt: skip
    """Prefill all requests of a case on so many workgroups, in the order that a seed chooses."""
    with (
        interpreted(hopper_launch, kernel, "sm_90", seed=seed) as stand_in,
        mock.patch.object(hopper_launch, "size_of", lambda device: (workgroups, 1 << 40)),
    ):
        check_prefill(case, form, block_n=block_n, **options)
    assert stand_in.launches == 1


# ---- results ----


HAS_CLUSTERS = triton_release() >= hopper_variant.OLDEST_TRITON_WITH_CLUSTERS
WORDS = [word for word in hopper_variant.WORDS if HAS_CLUSTERS or word != "cluster"]
FORMS = [
    WORDS,
    *([other for other in WORDS if other != word] for word in WORDS),
    *([word] for word in WORDS),
    [],
]


@pytest.mark.parametrize("words", FORMS, ids="-".join)
def test_forms(words):
    check(bf16_case([40, 3], [140, 70], q_heads=2, kv_heads=1), " ".join(words))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "block_n"), [(64, 64, 128), (128, 128, 128), (192, 128, 64), (256, 256, 64)]
)
@pytest.mark.parametrize("copied", [True, False])
def test_head_sizes(head_dim, head_dim_v, block_n, copied):
    case = bf16_case(
        [20], [150], q_heads=2, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, page_size=64
    )
    check(case, FORM if copied else FORM.replace(" copied", ""), block_n=block_n)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_layouts_and_page_sizes(layout, page_size):
    check(bf16_case([20], [140], layout=layout, page_size=page_size, q_heads=2))


@pytest.mark.parametrize("group", [1, 3, 5, 8, 64, 128])
def test_groups(group):
    check(bf16_case([3], [90], q_heads=group, kv_heads=1), seed=group)


@pytest.mark.parametrize("window", [0, 7, 63, 200])
def test_nothing_left_of_a_window_counts(window):
    check(windowed_case([70, 1], [260, 30], window, q_heads=1, kv_heads=1), window=window)


def test_soft_cap_sinks_alibi_and_scales():
    case = bf16_case([40], [100], q_heads=6, kv_heads=2)
    numbers = torch.Generator().manual_seed(1)
    sinks, slopes = (torch.randn(6, generator=numbers) for _ in range(2))
    scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.6])}
    check(case, soft_cap=3.0, sinks=sinks, alibi_slopes=slopes.abs() * 0.1, **scales)
    check(case, sinks=sinks, **scales)


def test_requests_without_keys_or_with_fewer_keys_than_queries():
    check(bf16_case([9, 5, 70], [5, 0, 66]))


@pytest.mark.parametrize(("form", "workgroups"), [(FORM, 1), (FORM, 4), ("turns", 132)])
def test_placed_by_hardware(form, workgroups):
    case = bf16_case([200, 90], [200, 140], q_heads=3, kv_heads=3)
    hopper_assembly.register()
    schedules, prefill = [], check_prefill
    with mock.patch(f"{__name__}.check_prefill", lambda *args, **kw: schedules.append(prefill(*args, **kw))):
        check(case, form, seed=workgroups, workgroups=workgroups, planner_options={"placement": "hardware"})
    (schedule,) = schedules
    plan = schedule.prefill
    assert plan.variant.queues == 2 and "placed by hardware" in plan.variant.describe()
    assert not plan.queues[:3].any() and plan.queues[3:].unique().tolist() == [0, 1]


Queues = dataclasses.make_dataclass("Queues", ["queues"], frozen=True, eq=False)


@gluon.jit
def taking_kernel(taken, sms, order, clock, queues, count, C: gl.constexpr):
    """Take tiles until none is left: how often each is taken, where, and when."""
    sm = gl.inline_asm_elementwise(hopper_tiles.READ_SM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    own = hopper_tiles.own_domain(queues, C)
    index = hopper_tiles.next_tile(queues, own, -1, count, C)
    while index < count:
        gl.atomic_add(taken + index, 1, sem="relaxed", scope="gpu")
        gl.store(sms + index, sm)
        gl.store(order + index, gl.atomic_add(clock, 1, sem="relaxed", scope="gpu"))
        index = hopper_tiles.next_tile(queues, own, index, count, C)
    hopper_tiles.leave(queues, C)


@pytest.mark.parametrize("domains", [0, 1, 2, 3])
@pytest.mark.parametrize(("workgroups", "count"), [(1, 1), (1, 7), (6, 6), (6, 23), (11, 4)])
def test_every_tile_is_taken_once_and_stolen_only_where_none_is_left_at_home(workgroups, count, domains):
    asked = itertools.count()
    used_sms = 4
    # each workgroup asks twice
    register_asm(SM_ID, lambda: torch.tensor(next(asked) // 2 % used_sms, dtype=torch.int32))
    places = max(domains, 1)
    queues = torch.cat(
        [torch.zeros(places + 1, dtype=torch.int32), torch.arange(8, dtype=torch.int32) % places]
    )
    for seed in range(2):  # the second launch finds what the first one left
        taken, sms, order = torch.zeros(3, count, dtype=torch.int32)
        clock = torch.zeros(1, dtype=torch.int32)
        interpret(taking_kernel, target="sm_90")[(workgroups,)](
            taken, sms, order, clock, queues, count, C=Queues(gl.constexpr(domains)), seed=seed
        )
        assert taken.tolist() == [1] * count
        assert not queues[: places + 1].any()
        tile_domains, own_domains = torch.arange(count) % places, sms % places
        for tile in range(count if domains > 1 else 0):
            if own_domains[tile] != tile_domains[tile]:  # stolen, as nothing was left at home
                assert (order[tile_domains == own_domains[tile]] < order[tile]).all()


@pytest.mark.parametrize("form", [FORM, "turns", f"{FORM} staged"])
@pytest.mark.parametrize("workgroups", [1, 3])
def test_split_tiles(form, workgroups):
    """Parts of tiles, some with the diagonal and some without, merged by whoever comes last."""
    case = bf16_case([70, 3, 40], [330, 400, 45], q_heads=2, kv_heads=2)
    sinks = torch.randn(2, generator=torch.Generator().manual_seed(1))
    for seed in range(2):
        splitting = random.Random(seed)
        check(case, form, seed=seed, workgroups=workgroups, splitting=splitting, sinks=sinks)
    check(case, form, workgroups=workgroups, splitting=random.Random(4), causal=False)


def test_not_causal():
    check(bf16_case([30], [150]), causal=False)


def test_one_workgroup_takes_all_tiles():
    check(bf16_case([100, 0, 33], [128, 0, 40]), workgroups=1, seed=5, stages=4)


def draw(generator: random.Random) -> None:
    """Draw one step, form and order, run it and compare."""
    head_dim, head_dim_v = generator.choice(6 * [(64, 64)] + [(128, 128), (192, 128), (256, 256)])
    group = generator.choice((1, 1, 2, 3, 4, 5, 7, 8, 16))
    kv_heads = generator.randint(1, 2) if group < 8 else 1
    lengths = [generator.randint(1, max(150 // group, 1))]
    if generator.random() < 0.5:
        lengths.append(generator.choice((0, 1, generator.randint(1, 20))))
    contexts = [generator.choice((0, 1, 15, 64, generator.randint(0, 120))) for _ in lengths]
    window = generator.choice((-1, -1, 0, 5, 40, 100))
    make_case = make_paged_case if window < 0 else functools.partial(windowed_case, window=window)
    case = make_case(
        lengths,
        [n + context for n, context in zip(lengths, contexts, strict=True)],
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=generator.choice((16, 32, 48, 64, 128, 528)),
        dtype=generator.choice((torch.bfloat16, torch.float16)),
        layout=generator.choice(LAYOUTS),
        seed=generator.randrange(1 << 30),
    )
    form = " ".join(word for word in WORDS if generator.random() < 0.5)
    tile = dict(
        consumers=generator.randint(1, 3),
        block_n=generator.choice((64, 128)) if head_dim < 256 else 64,
        stages=generator.randint(2, 4),
    )
    numbers = torch.Generator().manual_seed(generator.randrange(1 << 30))
    options = {}
    if generator.random() < 0.2:
        options["sinks"] = torch.randn(case.q.shape[1], generator=numbers)
    if generator.random() < 0.2:
        options["alibi_slopes"] = 0.1 * torch.rand(case.q.shape[1], generator=numbers)
    if generator.random() < 0.2:
        options["soft_cap"] = 5.0
    splitting = random.Random(generator.randrange(1 << 30)) if generator.random() < 0.5 else None
    order = generator.randrange(1 << 30)
    print(
        f"lengths {lengths}, contexts {contexts}, window {window}, {form}, {tile}, {list(options)}, seed {order}"
    )
    check(
        case, form, window=window, workgroups=generator.randint(1, 3), seed=order, splitting=splitting, **tile,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("part", range(5))
def test_random_steps(part):
    print(f"NUMA_TEST_SEED={SEED}, {CASES // 5} draws")
    generator = random.Random(SEED * 1000 + part)
    for _ in range(CASES // 5):
        draw(generator)


on_sm_90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the GPU is not sm_90"
)


@pytest.mark.gpu
@on_sm_90
@pytest.mark.parametrize("form", [FORM, f"{FORM} staged", "persistent", "ahead copied"])
def test_on_a_gpu(form):
    # outputs in shared memory leave room for two buffers
    check_all(form, "cuda", **({"stages": 2} if "staged" in form else {}))


@pytest.mark.gpu
@on_sm_90
@pytest.mark.parametrize("index", range(len(RANDOM_LAYERS)))
def test_random_steps_on_a_gpu(index):
    """NUMA_TEST_CASES (2,000) steps of few compiled kernels over all layouts."""
    generator = random.Random(SEED * 1000 + index)
    for _ in range(share_of_draws(2000, len(RANDOM_LAYERS))):
        check_random_step(generator, RANDOM_LAYERS[index], "cuda")
    kernels = len(set(hopper_launch._launch._compiled.values()))
    print(f"{kernels} compiled kernels in this process")


@pytest.mark.parametrize("index", range(len(RANDOM_LAYERS)))
def test_random_steps_for_gpus(index):
    """A small one of each, against the reference that a GPU's are compared with; their buffers fit into an SM."""
    hopper_assembly.register()
    layer = RANDOM_LAYERS[index]
    with (
        interpreted(hopper_launch, hopper.prefill_kernel, "sm_90", seed=index) as stand_in,
        mock.patch.object(hopper_launch, "size_of", lambda device: (3, 1 << 40)),
        mock.patch.object(hopper_launch, "constants_of", wraps=hopper_launch.constants_of) as constants_of,
    ):
        check_random_step(
            random.Random(index), layer, "cpu", most_queries=max(24 // layer.group, 2), longest=150,
            attention=batched_reference.attention,
        )  # fmt: skip
    assert stand_in.launches == 1
    shape, variant = constants_of.call_args.args[:2]
    shared = hopper_variant.shared_bytes(shape, 2, variant.block_n, variant.num_stages, variant.form)
    assert shared <= hopper_variant.SHARED_BYTES


def test_random_steps_for_gpus_have_everything():
    """Every head size, in each of the types that the kernel takes for it."""
    float8 = [
        (layer.head_dim, layer.head_dim_v or layer.head_dim) for layer in RANDOM_LAYERS if layer.kv_dtype
    ]
    assert set(float8) == set(hopper_variant.FLOAT8_TILES)
    for dtype in (torch.float16, torch.bfloat16):
        plain = [layer for layer in RANDOM_LAYERS if layer.dtype == dtype and layer.kv_dtype is None]
        assert {(layer.head_dim, layer.head_dim_v or layer.head_dim) for layer in plain} == set(
            hopper_variant.TILES
        )


# ---- mistakes ----

ARRIVE, WAIT = "hopper.mbarrier.arrive", "hopper.mbarrier.wait"
FAULTS = {
    "no wait for keys": (f"{WAIT}(full_k.index(k_slot), (k_count // C.stages) & 1)", "pass"),
    "no wait for free buffers": (f"{WAIT}(empty.index(slot), phase)", "pass"),
    "values of the wrong buffer": ("buffer_v.index(v_slot), b_acc", "buffer_v.index(k_slot), b_acc"),
    "scores before their product": (
        "warpgroup_mma_wait(1, deps=(b_s,))",
        "warpgroup_mma_wait(2, deps=(b_s,))",
    ),
    "released by one for all": (
        "init(empty_k.index(i), count=C.consumers)",
        "init(empty_k.index(i), count=1)",
    ),
    "never released": (f"{ARRIVE}(empty_v.index(v_slot), count=1)", "pass"),
    "bytes forgotten": ("C.block_n * (DIM + SECOND) * C.cache_bytes", "C.block_n * DIM"),
    "queries released early": (
        f"{WAIT}(full_q.index(CONSUMER), number & 1)",
        f"{WAIT}(full_q.index(CONSUMER), number & 1); {ARRIVE}(empty_q.index(CONSUMER), count=1)",
    ),
    "queries used early": (f"{WAIT}(full_q.index(CONSUMER), number & 1)", "pass"),
    "cleared without a fence": (
        f"    hopper.fence_async_shared()\n    {ARRIVE}(cleared",
        f"    {ARRIVE}(cleared",
    ),
    "cleared without waiting": (f"    {WAIT}(cleared, phase)\n", ""),
    "cleared before the copy": (f"            {WAIT}(full_v.index(slot), phase)\n", ""),
    "nobody begins": (f"        {ARRIVE}(turn.index(0), count=1)\n", "        pass\n"),
}


def check_mistake(right: str, wrong: str, modules, case, tmp_path, monkeypatch, words: str = "") -> None:
    """The kernel of these modules with one mistake is found out in some order that the interpreter tries."""
    wrong_modules, changed = {}, 0
    for module in modules:
        with open(module.__file__, encoding="utf-8") as file:
            source = file.read()
        changed += right in source
        for name in wrong_modules:
            source = source.replace(f"numa_attention.prefill.{name}", f"wrong_{name}")
        name = module.__name__.rsplit(".", 1)[-1]
        path = tmp_path / f"wrong_{name}.py"
        path.write_text(source.replace(right, wrong))
        specification = importlib.util.spec_from_file_location(f"wrong_{name}", path)
        wrong_modules[name] = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, f"wrong_{name}", wrong_modules[name])
        specification.loader.exec_module(wrong_modules[name])
    assert changed == 1, "the kernel changed: change this test"
    with pytest.raises((Race, Deadlock, GluonFault)) as found:
        for seed in range(8):
            check(
                case,
                f"ahead turns copied persistent {words}",
                kernel=wrong_modules["hopper"].prefill_kernel,
                seed=seed,
                workgroups=1,
            )
    assert not isinstance(found.value, Refused)


@pytest.mark.parametrize(("right", "wrong"), list(FAULTS.values()), ids=list(FAULTS))
def test_mistakes_are_found(right, wrong, tmp_path, monkeypatch):
    case = bf16_case([70, 40], [260, 40], q_heads=1, kv_heads=1)
    check_mistake(right, wrong, (hopper_producer, hopper_consumer, hopper), case, tmp_path, monkeypatch)


RECORD_FAULTS = {
    "a record read early": (f"    {WAIT}(full.index(number % RECORDS), (number // RECORDS) & 1)\n", ""),
    "a record not given back": (f"{ARRIVE}(empty_records.index(number % RECORDS), count=1)", "pass"),
    "a record overwritten early": (f"    {WAIT}(empty.index(slot), ((number // RECORDS) & 1) ^ 1)\n", ""),
}


@pytest.mark.parametrize(("right", "wrong"), list(RECORD_FAULTS.values()), ids=list(RECORD_FAULTS))
def test_mistakes_with_records_are_found(right, wrong, tmp_path, monkeypatch):
    """Tiles so short that the producer waits for nothing else."""
    case = bf16_case([3] * 4, [9] * 4, q_heads=1, kv_heads=1)
    modules = (hopper_tiles, hopper_producer, hopper_consumer, hopper)
    check_mistake(right, wrong, modules, case, tmp_path, monkeypatch)


# ---- the launch ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_cache_is_a_matrix(layout, kv_heads):
    case = bf16_case([1], [40], layout=layout, q_heads=kv_heads, kv_heads=kv_heads)
    for pages in (case.k_pages, case.v_pages):
        matrix = tensor_maps.matrix_of(pages.shape, pages.stride(), pages.itemsize)
        rows = pages.as_strided((matrix.rows, matrix.columns), (matrix.row_stride, 1))
        for page, head in itertools.product(range(pages.shape[0]), range(kv_heads)):
            row = page * matrix.page_rows + head * matrix.head_rows
            column = head * matrix.head_columns
            found = rows[row : row + pages.shape[1], column : column + pages.shape[3]]
            assert found.data_ptr() == pages[page, :, head].data_ptr()
            assert found.shape == pages[page, :, head].shape


@pytest.mark.parametrize(
    ("stride", "why"),
    [
        ((1000, 24, 8, 1), "pages begin inside a row"),
        ((16 * 36, 36, 8, 1), "rows begin at no multiple of 16 bytes"),
        ((16 * 64, 64, 20, 1), "heads begin at no multiple of 16 bytes"),
        ((16 * 24, 24, 16, 1), "heads overlap rows"),
    ],
)
def test_caches_that_are_none(stride, why):
    assert tensor_maps.matrix_of(torch.Size((4, 16, 3, 8)), stride, 2) is None


def hopper_planner(case, window: int = -1):
    variant = choose_prefill(shape_of(case, window), pretend("sm_90"), "triton", kernel="hopper-prefill")
    return make_planner(case, window=window, kernels="triton", prefill_variant=variant)


@pytest.mark.parametrize(
    ("window", "causal", "scale", "reason"),
    [
        (-1, True, -0.1, "takes positive scales, not -0.1"),
        (5, False, 0.1, "takes no window that is not causal"),
    ],
)
def test_calls_for_the_portable_kernel(window, causal, scale, reason, caplog):
    case = bf16_case([20], [30])
    planner = hopper_planner(case, window)
    hopper_launch._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check_planned(
                case, planner, num_decodes=0, causal=causal, scale=scale, handed_to="portable-prefill"
            )
    assert [record.message for record in caplog.records] == [
        f"portable-prefill instead of hopper-prefill, which {reason}"
    ]


def test_caches_for_the_portable_kernel(caplog):
    case = bf16_case([20], [30])
    pages = torch.cat([case.k_pages, case.k_pages], 3)[..., 4:68]
    case = dataclasses.replace(case, k_pages=pages, v_pages=pages)
    with caplog.at_level(logging.WARNING):
        check_planned(case, hopper_planner(case), num_decodes=0, handed_to="portable-prefill")
    assert "begin at multiples of 16 bytes" in caplog.text


@pytest.mark.parametrize(
    ("change", "triton", "reason"),
    [
        ({}, (3, 6), None),
        ({}, (3, 5), "needs Triton 3.6 or later, found 3.5"),
        ({}, None, "found none"),
        ({"head_dim": 80}, (3, 9), "not 80/128"),
        ({"kv_dtype": torch.float8_e4m3fn}, (3, 9), None),
        ({"kv_dtype": torch.float8_e5m2}, (3, 9), "not in torch.float8_e5m2"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, (3, 9), "takes queries in float16"),
        ({"general": True}, (3, 9), "takes none of the options"),
    ],
)
def test_layers_for_this_kernel(change, triton, reason):
    shape = dataclasses.replace(LayerShape(8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 16), **change)
    found = hopper_variant.why_not(shape, triton)
    assert found is None if reason is None else reason in found


def test_the_dispatcher_chooses_it_where_it_takes_the_layer():
    shape = LayerShape(8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    sm_90 = pretend("sm_90")
    variant = choose_prefill(shape, sm_90, "triton")
    assert variant.describe().startswith(f"variant hopper-prefill ({FORM}), tile 128 x 128, mapping ")
    assert variant == choose_prefill(shape, sm_90, "triton", kernel="hopper-prefill")
    assert choose_prefill(shape, sm_90, "triton", kernel="portable-prefill").name == "portable-prefill"
    assert choose_prefill(shape, pretend("sm_100"), "triton").name == "portable-prefill"
    cached = dataclasses.replace(shape, kv_dtype=torch.float8_e4m3fn)
    assert choose_prefill(cached, sm_90, "triton").name == "hopper-prefill"
    cached = dataclasses.replace(shape, kv_dtype=torch.float8_e5m2)
    assert choose_prefill(cached, sm_90, "triton").name == "portable-prefill"
    other = dataclasses.replace(shape, head_dim=80, head_dim_v=80)
    variant = choose_prefill(other, sm_90, "triton")
    assert variant.name == "portable-prefill" and "hopper-prefill takes head sizes" in variant.instead_of
    with pytest.raises(UnsupportedShape, match="hopper-prefill takes head sizes"):
        choose_prefill(other, sm_90, "triton", kernel="hopper-prefill")
    with pytest.raises(UnsupportedShape, match="runs on sm_90 with Triton, not on gfx942 with triton"):
        choose_prefill(shape, pretend("gfx942"), "triton", kernel="hopper-prefill")
    with pytest.raises(ValueError, match="hopper-prefill and portable-prefill are the ones to ask for"):
        choose_prefill(shape, sm_90, "triton", kernel="hopper-decode")


@pytest.mark.parametrize(
    ("tiles", "kv_dtype"),
    [
        (hopper_variant.TILES, torch.bfloat16),
        (hopper_variant.FLOAT8_TILES, torch.float8_e4m3fn),
    ],
)
def test_tiles_fit_into_shared_memory(tiles, kv_dtype):
    for dims, tile in tiles.items():
        shape = LayerShape(8, 2, *dims, torch.bfloat16, kv_dtype, 16)
        used = hopper_variant.shared_bytes(shape, 2, tile.block_n, tile.stages, FORM)
        assert used <= hopper_variant.SHARED_BYTES


@pytest.mark.parametrize(
    ("consumers", "form", "float8"),
    [
        (2, FORM, False),
        (2, f"{FORM} roomy", False),
        (3, FORM, False),
        (1, FORM, True),
        (2, FORM, True),
    ],
)
def test_registers_are_those_of_a_multiprocessor(consumers, form, float8):
    warps, registers = hopper_variant.partitions_of(consumers, form, float8)
    assert len(warps) == len(registers) == consumers + float8
    first = registers[0] if consumers > 1 else 0
    assert all(count % 8 == 0 for count in registers) and 128 * (first + sum(registers)) <= 65536


def test_a_float8_cache_has_no_third_consumer():
    with pytest.raises(ValueError, match="two consumers at most"):
        hopper_variant.partitions_of(3, FORM, True)


def test_tensor_maps_keep_no_memory():
    address = tensor_maps.Address(1 << 20, torch.bfloat16)
    box = ((64, 64), (64, 1), (16, 64))
    first = tensor_maps._descriptor_of(address, *box)
    assert tensor_maps._descriptor_of(tensor_maps.Address(1 << 20, torch.bfloat16), *box) is first
    assert first.base.data_ptr() == 1 << 20


@pytest.mark.parametrize(
    ("form", "tiles", "expected"),
    [("persistent", 9999, 132), ("persistent", 40, 40), ("", 9999, 9999), ("cluster persistent", 40, 40)],
)
def test_how_many_workgroups_a_launch_has(form, tiles, expected):
    shape = LayerShape(64, 8, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    variant = dataclasses.replace(choose_prefill(shape, pretend("sm_90"), "triton"), form=form)
    batch = types.SimpleNamespace(max_query_len=16384, max_seq_len=16384)
    assert hopper_launch.workgroups_of(shape, variant, batch, tiles, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("queries", "length", "heads", "expected"),
    [(16384, 16384, (64, 8), 66), (16384, 16384, (128, 128), 9999)],
)
def test_clusters_are_persistent_where_they_keep_together(queries, length, heads, expected):
    shape = LayerShape(*heads, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    variant = choose_prefill(shape, pretend("sm_90"), "triton")
    variant = dataclasses.replace(variant, form=f"{FORM} cluster", block_m=2 * variant.block_m)
    batch = types.SimpleNamespace(max_query_len=queries, max_seq_len=length)
    assert hopper_launch.workgroups_of(shape, variant, batch, 9999, torch.device("cpu")) == expected

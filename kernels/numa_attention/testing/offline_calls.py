"""The layers that offline compilation covers: every entry of the tables of variants, every option of a kernel."""

from __future__ import annotations

from itertools import product

import torch

from numa_attention.decode.cdna5_variant import OLDEST_TRITON_WITH_CLUSTERS
from numa_attention.jit import triton_release
from numa_attention.shapes import CONTIGUOUS, LayerShape
from numa_attention.sharding import WHOLE, Shard
from numa_attention.testing.capture import Call
from numa_attention.topology import pretend
from numa_attention.variants import PLACED_BY_HARDWARE, PLACED_BY_SM, choose_decode, choose_prefill

E4M3, E5M2 = "e4m3", "e5m2"
FLOAT8 = {
    (E4M3, False): torch.float8_e4m3fn,
    (E5M2, False): torch.float8_e5m2,
    (E4M3, True): torch.float8_e4m3fnuz,
    (E5M2, True): torch.float8_e5m2fnuz,
}
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
HEAD_DIMS = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
GENERAL_OPTIONS = ("alibi_sqrt", "spans", "causal_by_request", "float8_query", "float8_output")
KV_HEADS = {1: 8, 64: 1}  # by group; 4 for the others


def make_call(
    generation: str,
    head_dims: tuple[int, int] = (128, 128),
    group: int = 8,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    float8: str | None = None,
    window: int = -1,
    shard: Shard = WHOLE,
    **options,
) -> Call:
    """A call of one layer. float8: E4M3 or E5M2 for a cache of the float8 type that the generation computes with."""
    kv_dtype = dtype if float8 is None else FLOAT8[float8, generation == "gfx942"]
    kv_heads = KV_HEADS.get(group, 4)
    general = not options.keys().isdisjoint(GENERAL_OPTIONS)
    shape = LayerShape(
        group * kv_heads, kv_heads, *head_dims, dtype, kv_dtype, page_size, window, general, shard
    )
    return Call(shape, **options)


def describe(call: Call) -> str:
    """A short name, such as "bf16 d128 g8 p16 window"."""
    shape = call.shape
    dims = f"d{shape.head_dim}" + (f"/{shape.head_dim_v}" if shape.head_dim_v != shape.head_dim else "")
    words = [SHORT[shape.dtype], dims, f"g{shape.group}"]
    words.append("encoder" if shape.page_size == CONTIGUOUS else f"p{shape.page_size}")
    if shape.kv_dtype != shape.dtype:
        words.append("kv-" + str(shape.kv_dtype).removeprefix("torch.float8_"))
    if shape.window >= 0:
        words.append("window")
    if not shape.shard.is_whole:
        words.append(f"{shape.shard.ranks}-ranks")
    words += [name for name in ("sinks", "soft_cap", "alibi", *GENERAL_OPTIONS, "lse") if getattr(call, name)]
    if call.max_decode_query > 1:
        words.append(f"q{call.max_decode_query}")
    if call.side_by_side:
        words.append("side-by-side")
    if call.placement != "dispatch":
        words.append(f"by-{call.placement}")
    if call.portable:
        words.append("portable")
    if call.clusters:
        words.append("in-clusters")
    return " ".join(words)


def common_calls(generation: str) -> list[tuple[Call, str]]:
    """(call, step) of a few layers that cover the tables' rows for 16-bit queries, wide tiles and a float8 cache."""
    base, wide, gemma, cached, split = (
        make_call(generation),
        make_call(generation, group=64, page_size=64, lse=True),
        make_call(generation, (256, 256), group=4, page_size=64, window=1023, soft_cap=True),
        make_call(generation, (64, 64), page_size=64, float8=E4M3, sinks=True, window=127),
        make_call(generation, (192, 128), group=16),
    )
    return [
        (base, "decode"),
        (base, "prefill"),
        (wide, "decode"),
        (gemma, "decode"),
        (gemma, "prefill"),
        (cached, "decode"),
        (cached, "prefill"),
        (split, "decode"),
        *placed_calls(generation),
        *side_by_side_calls(generation)[:1],
        *cluster_calls(generation)[:1],
        *portable_calls(generation)[:2],
    ]


def placed_calls(generation: str) -> list[tuple[Call, str]]:
    """The usual layer with hardware placement, where a workgroup can tell where it runs."""
    if generation not in PLACED_BY_HARDWARE:
        return []
    placed = make_call(generation, placement="hardware")
    return [
        (placed, step)
        for step in ("decode", "prefill")
        if step == "prefill" or generation not in PLACED_BY_SM
    ]


def side_by_side_calls(generation: str) -> list[tuple[Call, str]]:
    """Decode over a cache whose keys lie beside its values, where a kernel copies both in one request."""
    if generation != "gfx1250":
        return []
    layers = (
        dict(float8=E4M3, page_size=128),
        dict(float8=E5M2, page_size=128, group=64),
        dict(float8=E4M3, page_size=16),
        dict(float8=E4M3, page_size=64, head_dims=(64, 64), window=127, sinks=True, soft_cap=True, lse=True),
        dict(page_size=64, head_dims=(64, 64)),
    )
    return [(make_call(generation, **layer, side_by_side=True), "decode") for layer in layers]


def cluster_calls(generation: str) -> list[tuple[Call, str]]:
    """Decode in clusters of workgroups, where a device and the Triton at hand have them."""
    release = triton_release()
    if generation != "gfx1250" or release is None or release < OLDEST_TRITON_WITH_CLUSTERS:
        return []
    everything = dict(window=127, sinks=True, soft_cap=True, alibi=True, lse=True)
    layers = (
        {},
        everything,
        dict(float8=E4M3),
        dict(float8=E4M3, side_by_side=True),
        dict(head_dims=(64, 64)),
    )
    # one KV head: as many units as requests, two workgroups for each
    return [
        (make_call(generation, group=64, page_size=128, **layer, clusters=True), "decode") for layer in layers
    ]


def portable_calls(generation: str) -> list[tuple[Call, str]]:
    """Layers that the dispatcher sends to kernels for sm_90, for caches that only the portable ones can read."""
    if generation != "sm_90":
        return []
    calls = []
    for options in (
        {},
        {"page_size": 64},
        {"float8": E4M3},
        {"head_dims": (64, 64)},
        {"head_dims": (256, 256)},
    ):
        call = make_call(generation, **options, portable=True)
        calls += [(call, "decode"), (call, "prefill")]
    wide = [{}, {"float8": E4M3}, {"float8": E5M2}]
    return [
        *calls,
        *((make_call(generation, group=64, **options, portable=True), "decode") for options in wide),
    ]


def all_calls(generation: str) -> list[tuple[Call, str]]:
    """(call, step) that cover head sizes, groups, types, page sizes and options, each beside the usual others."""
    calls: list[tuple[Call, str]] = []

    def add(*steps: str, **options) -> None:
        calls.extend((make_call(generation, **options), step) for step in steps)

    for group in (1, 4, 8, 16):
        add("decode", group=group)
    for head_dims, group in product(HEAD_DIMS, (32, 64)):
        add("decode", head_dims=head_dims, group=group)
    for head_dims in HEAD_DIMS:
        add("decode", "prefill", head_dims=head_dims)
        add("decode", "prefill", head_dims=head_dims, page_size=64)
        add("decode", "prefill", head_dims=head_dims, dtype=torch.float32)
        add("decode", "prefill", head_dims=head_dims, float8=E4M3)
    for group in (1, 64):
        add("prefill", group=group)
        add("decode", group=group, page_size=64)
        add("decode", group=group, dtype=torch.float32)
        add("decode", group=group, float8=E4M3, page_size=64)
    add("decode", "prefill", dtype=torch.float16)
    add("decode", "prefill", float8=E5M2)
    add("decode", "prefill", float8=E4M3, page_size=64)
    for option in ({"window": 127}, {"sinks": True}, {"soft_cap": True}, {"alibi": True}, {"lse": True}):
        add("decode", "prefill", **option)
    add("decode", "prefill", window=127, sinks=True, soft_cap=True, alibi=True, lse=True)
    add("decode", "prefill", head_dims=(64, 64), page_size=64, window=127, sinks=True)
    add("decode", "prefill", head_dims=(256, 256), group=4, page_size=64, window=1023, soft_cap=True)
    add("decode", "prefill", spans=True, window=127)
    add("decode", "prefill", causal_by_request=True)
    add("decode", "prefill", alibi_sqrt=True)
    add("decode", "prefill", float8=E4M3, float8_query=True, float8_output=True)
    for head_dims in ((64, 64), (128, 128)):
        add("prefill", head_dims=head_dims, group=1, page_size=CONTIGUOUS)
    add("prefill", head_dims=(64, 64), group=1, page_size=CONTIGUOUS, window=64)
    for shard in (Shard(8, 3, 16), Shard(3, 2, 1)):
        add("decode", "prefill", shard=shard, page_size=64, lse=True)
    add("decode", shard=Shard(2, 1, 1), page_size=64, window=127, alibi=True, lse=True)
    for queries in (4, 8):
        add("decode", max_decode_query=queries)
    add("plan", "write")
    calls.extend(placed_calls(generation))
    calls.extend(side_by_side_calls(generation))
    calls.extend(cluster_calls(generation))
    calls.extend(portable_calls(generation))
    calls.extend(missing_calls(generation, {variant_key(call, step, generation) for call, step in calls}))
    return calls


def variant_key(call: Call, step: str, generation: str) -> tuple | None:
    """What tells one compiled form of a kernel from another, None for steps that have no variant."""
    topology = pretend(generation)
    if step == "decode":
        variant = choose_decode(
            call.shape, topology, "triton", call.max_decode_query, kernel=call.kernel(step)
        )
    elif step == "prefill":
        variant = choose_prefill(
            call.shape, topology, "triton", features=call.features, kernel=call.kernel(step)
        )
    else:
        return None
    return (
        variant.name, variant.block_m, variant.block_n, variant.num_warps, variant.num_stages, variant.form,
        variant.matrix_rows, variant.kpack, variant.in_float16, variant.two_terms, variant.staged_values,
    )  # fmt: skip


def missing_calls(generation: str, covered: set) -> list[tuple[Call, str]]:
    """A call for each variant that the dispatcher can choose and that is not among `covered`, which grows."""
    calls = []
    # a generation's own kernel may want head sizes above some, which one of keys and values then has
    small = ((16, 16), (16, 128), (16, 256), (32, 32), (32, 128), (32, 256), (64, 256))
    shapes = product(
        (*HEAD_DIMS, *small),
        (1, 16, 32, 64),
        (16, 32, 64, 128),
        (torch.bfloat16, torch.float16, torch.float32),
        (None, E4M3),
    )
    for head_dims, group, page_size, dtype, float8 in shapes:
        call = make_call(generation, head_dims, group, page_size, dtype, float8)
        for step in ("decode", "prefill"):
            key = variant_key(call, step, generation)
            if key not in covered:
                covered.add(key)
                calls.append((call, step))
    return calls

"""numa_attention.attention: the operation on plain tensors, against float64."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import numa_attention
from numa_attention import attention, operation, runner
from numa_attention.shapes import UnsupportedShape
from numa_attention.topology import pretend
from tests.support import assert_close

KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton"], indirect=True)


@pytest.fixture(autouse=True)
def own_plans_and_poisoned_outputs(monkeypatch):
    def poisoned(x, *size, dtype=None):
        return torch.full(size, math.nan, dtype=dtype or x.dtype, device=x.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    operation.plan.cache_clear()
    yield
    operation.plan.cache_clear()


@pytest.fixture
def kernels(request, device):
    if request.param == "torch" and device.type != "cpu":
        pytest.skip("the torch kernels run on the CPU only")
    return request.param


def made(batch, q_heads, kv_heads, queries, keys, dim, dim_v, *, device, dtype=torch.float32, layout="heads"):
    """q, k, v [batch, heads, tokens, dim] whose storage is [batch, heads, tokens], [batch, tokens, heads] or padded."""
    random = torch.Generator().manual_seed(batch + 10 * queries + keys)
    tensors = []
    for heads, tokens, size in ((q_heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v)):
        x = torch.randn(batch, heads, tokens, size, generator=random).to(device, dtype)
        if layout == "tokens":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "padded":  # neither heads nor tokens follow; what lies between is NaN
            room = torch.full((batch, heads + 1, tokens + 2, size), math.nan, device=device, dtype=dtype)
            room[:, :heads, :tokens] = x
            x = room[:, :heads, :tokens]
        tensors.append(x)
    return tensors


def expected(q, k, v, *, causal, scale, window=-1, soft_cap=0.0, sinks=None, alibi_slopes=None):
    """Output and LSE in float64."""
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(keys) - (keys - queries + torch.arange(queries))[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.cpu().double()[:, None, None] * distance
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if window >= 0:
        hidden |= distance < -window
        hidden |= (distance > window) & (not causal)
    scores = scores.masked_fill(hidden, -math.inf)
    everything = scores
    if sinks is not None:
        column = sinks.cpu().double()[None, :, None, None].expand(*scores.shape[:3], 1)
        everything = torch.cat([scores, column], -1)
    lse = everything.logsumexp(-1)
    weights = (scores - lse[..., None].nan_to_num(neginf=0.0)).exp()
    return weights @ v, lse


def check(q, k, v, *, causal=False, scale=None, **options):
    out, lse = attention(q, k, v, causal, scale, return_lse=True, **options)
    masks = {name: value for name, value in options.items() if name in expected.__kwdefaults__}
    right, right_lse = expected(
        q, k, v, causal=causal, scale=q.shape[3] ** -0.5 if scale is None else scale, **masks
    )
    assert out.shape == right.shape and out.dtype == q.dtype
    assert lse.shape == right_lse.shape and lse.dtype == torch.float32
    assert_close(out, right)
    seen = right_lse.isfinite()
    assert torch.equal(lse.cpu() == -math.inf, ~seen)
    assert (lse.cpu() - right_lse)[seen].abs().max() < (1e-4 if q.dtype == torch.float32 else 2e-2)
    return out


@KERNELS
@pytest.mark.parametrize("layout", ["heads", "tokens", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("batch", "q_heads", "kv_heads"), [(1, 4, 4), (3, 6, 2), (2, 5, 1)], ids=str)
def test_layouts_and_groups(kernels, layout, causal, batch, q_heads, kv_heads, device):
    q, k, v = made(batch, q_heads, kv_heads, 37, 37, 32, 32, device=device, layout=layout)
    out = check(q, k, v, causal=causal, kernels=kernels)
    # contiguous in the layout of q
    assert (out.transpose(1, 2) if layout == "tokens" else out).is_contiguous()


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "dim_v"), [(56, 56), (64, 64), (192, 128)])
def test_types_and_head_sizes(kernels, dtype, dim, dim_v, device):
    q, k, v = made(1, 4, 2, 33, 33, dim, dim_v, device=device, dtype=dtype)
    check(q, k, v, causal=True, kernels=kernels)


@KERNELS
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        (1, 100, True),
        (3, 70, True),
        (8, 63, False),
        (9, 48, True),
        (20, 50, True),
        (50, 7, False),
        (5, 3, False),
    ],
)
def test_queries_and_keys_of_unlike_lengths(kernels, layout, queries, keys, causal, device):
    q, k, v = made(2, 4, 2, queries, keys, 32, 32, device=device, layout=layout)
    runner.ran.clear()
    check(q, k, v, causal=causal, kernels=kernels)
    phase = "decode" if queries <= operation.MOST_DECODE_QUERIES else "prefill"
    assert all(name.endswith(phase) for name in runner.ran) and runner.ran


@KERNELS
@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_nothing_to_see_or_to_do(kernels, layout, device):
    for queries in (3, 20):
        q, k, v = made(2, 4, 2, queries, 0, 32, 32, device=device, layout=layout)
        out, lse = attention(q, k, v, return_lse=True, kernels=kernels)
        assert not out.any() and (lse == -math.inf).all()
    q, k, v = made(2, 4, 2, 0, 5, 32, 32, device=device)
    assert attention(q, k, v, kernels=kernels).shape == (2, 4, 0, 32)
    assert attention(q[:0], k[:0], v[:0], kernels=kernels).shape == (0, 4, 0, 32)


@KERNELS
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("queries", [4, 40])
def test_options(kernels, layout, causal, queries, device):
    q, k, v = made(2, 4, 2, queries, 40, 32, 32, device=device, layout=layout)
    check(
        q, k, v, causal=causal, scale=0.3, window=9, soft_cap=2.0, kernels=kernels,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=device),
        alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1], device=device),
    )  # fmt: skip


def test_agrees_with_torch(device):
    q, k, v = made(2, 6, 2, 45, 45, 32, 32, device=device)
    for causal in (False, True):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        assert_close(attention(q, k, v, causal=causal), theirs)


def test_planned_once_a_shape(device):
    q, k, v = made(2, 4, 2, 20, 20, 32, 32, device=device)
    for _ in range(3):
        attention(q, k, v)
    attention(q.clone(), k.clone(), v.clone())
    assert operation.plan.cache_info().misses == 1
    attention(q, k, v, causal=True)
    attention(q[:, :2], k[:, :1], v[:, :1])
    assert operation.plan.cache_info().misses == 3


def test_the_mapping_asked_for_is_planned(device):
    q, k, v = made(2, 4, 2, 20, 20, 32, 32, device=device)
    for mapping in ("block-first", "swizzled-head-first"):
        check(q, k, v, mapping=mapping)
    planned = operation.plan(
        operation.Call(
            q.device, operation.LayerShape(8, 4, 32, 32, q.dtype, q.dtype, 0), 1, 20, 20, False, "auto", None,
            "block-first", "dispatch",
        )
    )  # fmt: skip
    assert operation.plan.cache_info().hits == 1 and planned.prefill.variant.mapping == "block-first"


def hopper_call(keys: int, *, queries: int = 64, kernel: str | None = "hopper-prefill", requests: int = 2):
    shape = operation.LayerShape(8, 2, 128, 128, torch.bfloat16, torch.bfloat16, 0)
    return operation.Call(
        torch.device("meta"), shape, requests, queries, keys, True, "triton", kernel, None, "dispatch"
    )


@pytest.mark.parametrize(("keys", "page"), [(64, 64), (96, 32), (48, 16), (4096, 128)])
def test_kernels_that_want_pages_get_pages(keys, page):
    shape, variant = operation.shape_and_variant(hopper_call(keys), pretend("H200"), "triton")
    assert (shape.page_size, variant.name) == (page, "hopper-prefill")
    shape, variant = operation.shape_and_variant(hopper_call(keys, kernel=None), pretend("MI300X"), "triton")
    assert (shape.page_size, variant.name) == (0, "portable-prefill")


def test_pages_are_keys_in_a_row(device, monkeypatch):
    """What a kernel that wants pages is given, here to the portable kernel."""
    monkeypatch.setattr(operation, "WITHOUT_PAGES", ("none",))
    for layout in ("heads", "tokens"):
        for queries in (4, 40):
            operation.plan.cache_clear()
            q, k, v = made(3, 4, 2, queries, 96, 32, 32, device=device, layout=layout)
            check(q, k, v, causal=True)


def test_refusals(device):
    q, k, v = made(2, 4, 2, 20, 20, 32, 32, device=device)
    for arguments, options, says in (
        ((q[0], k, v), {}, "q must be .batch, heads, tokens, head_dim"),
        ((q, k.half(), v), {}, "k is torch.float16"),
        ((q, k[:, :, :5], v), {}, "must agree"),
        ((q, k[:1], v[:1]), {}, "must agree"),
        ((q, k[:, :, :5], v[:, :, :5]), {"causal": True}, "20 queries over 5 keys cannot be causal"),
        ((q[:, :3], k, v), {}, "multiple of the number of KV heads"),
        ((q, k, v), {"mapping": "sideways"}, "sideways"),
        ((q, k, v), {"sinks": torch.zeros(3, device=device)}, "sinks must be"),
        ((q[..., :20], k[..., :20], v), {}, "head_dim 20 is not supported"),
    ):
        with pytest.raises(ValueError, match=says):
            attention(*arguments, **options)
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        attention(q, k, v)
    with pytest.raises(UnsupportedShape, match="must be a multiple of 16, not 20"):
        operation.shape_and_variant(hopper_call(20), pretend("H200"), "triton")


def test_importing_the_package_imports_neither_torch_nor_triton():
    script = (
        "import sys, numa_attention; assert not {'torch', 'triton'} & set(sys.modules);"
        "from numa_attention import attention; assert 'torch' in sys.modules and callable(attention)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        numa_attention.atention  # noqa: B018

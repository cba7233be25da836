"""The interpreter computes in bfloat16 and float8 as torch does, and leaves Triton as it found it."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl

from numa_attention.testing import interpreter

interpreter.enable()
BLOCK = 64
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
TIES_AND_EXTREMES = [
    1.0, 1.00390625, 1.01171875, -1.00390625, 3.3895e38, 3.4028e38, -3.4028e38, 1e-40, -1e-40, 0.0, -0.0,
    float("inf"), float("-inf"), float("nan"), 65504.0, 1e-8,
]  # fmt: skip


@interpreter.interpret
def _binary_kernel(x, y, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    if OP == "add":
        result = a + b
    elif OP == "subtract":
        result = a - b
    elif OP == "multiply":
        result = a * b
    elif OP == "divide":
        result = a / b
    elif OP == "maximum":
        result = tl.maximum(a, b)
    elif OP == "minimum":
        result = tl.minimum(a, b)
    elif OP == "less":
        result = tl.where(a < b, a, b)
    elif OP == "clamp":
        result = tl.clamp(a, tl.full([BLOCK], -0.5, a.dtype), tl.full([BLOCK], 0.3, a.dtype))
    else:
        result = tl.fma(a, b, a)
    tl.store(out + offsets, result)


BINARY = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "less": torch.minimum,
    "clamp": lambda a, b: a.clamp(-0.5, torch.tensor(0.3).bfloat16().item()),
    "fma": lambda a, b: (a.double() * b.double() + a.double()).bfloat16(),
}


@pytest.mark.parametrize("op", BINARY)
def test_binary_operations(op):
    x, y = torch.randn(2, BLOCK).bfloat16()
    out = torch.full_like(x, float("nan"))
    _binary_kernel[(1,)](x, y, out, OP=op, BLOCK=BLOCK)
    assert torch.equal(out, BINARY[op](x, y))


@interpreter.interpret
def _unary_kernel(x, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    a = tl.load(x + offsets)
    if OP == "negate":
        result = -a
    elif OP == "abs":
        result = tl.abs(a)
    elif OP == "zeros":
        result = a + tl.zeros([BLOCK], a.dtype)
    else:
        # as on a GPU, transcendental functions take float32
        b = a.to(tl.float32)
        if OP == "exp":
            result = tl.exp(b)
        elif OP == "exp2":
            result = tl.exp2(b)
        elif OP == "log":
            result = tl.log(tl.abs(b))
        elif OP == "rsqrt":
            result = tl.rsqrt(tl.abs(b))
        else:
            result = tl.sigmoid(b)
    tl.store(out + offsets, result.to(tl.bfloat16))


UNARY = {
    "negate": torch.neg,
    "abs": torch.abs,
    "zeros": lambda x: x,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": lambda x: x.abs().log(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("op", UNARY)
def test_unary_operations(op):
    x = torch.randn(BLOCK).bfloat16()
    out = torch.full_like(x, float("nan"))
    _unary_kernel[(1,)](x, out, OP=op, BLOCK=BLOCK)
    torch.testing.assert_close(out, UNARY[op](x), rtol=2**-8, atol=0.0)


@interpreter.interpret
def _copy_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offsets, mask=offsets < n)
    tl.store(out + offsets, a.to(out.dtype.element_ty), mask=offsets < n)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _copy_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.int32, torch.float64], ids=str)
def test_cast_to_bfloat16_rounds_to_nearest_even(source):
    x = (torch.randn(1000) * 1000).to(source)
    if source.is_floating_point:
        x = torch.cat([x, torch.tensor(TIES_AND_EXTREMES).to(source)])
    torch.testing.assert_close(_cast(x, torch.bfloat16), x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.int32], ids=str)
def test_cast_from_bfloat16(target):
    x = (torch.randn(1000) * 100).bfloat16()
    assert torch.equal(_cast(x, target), x.to(target))


@pytest.mark.parametrize("float8", FLOAT8, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_float8_pattern_widens_exactly(float8, wide):
    x = torch.arange(256, dtype=torch.uint8).view(float8)
    torch.testing.assert_close(_cast(x, wide), x.to(wide), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("float8", FLOAT8, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cast_to_float8_rounds_to_nearest_even(float8, wide):
    largest = torch.finfo(float8).max
    x = torch.cat([torch.linspace(-largest, largest, 999), torch.randn(1000) * 0.02, torch.zeros(1)]).to(wide)
    assert torch.equal(_cast(x, float8).view(torch.uint8), x.to(float8).view(torch.uint8))


@interpreter.interpret
def _dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    accumulated = tl.dot(left, right, tl.full([M, N], 1.0, tl.float32), input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], accumulated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *FLOAT8], ids=str)
def test_dot_is_exact_to_float32(dtype):
    a, b = torch.randn(16, 128).to(dtype), torch.randn(128, 32).to(dtype)
    out = torch.full((16, 32), float("nan"))
    _dot_kernel[(1,)](a, b, out, M=16, N=32, K=128)
    torch.testing.assert_close(out.double(), a.double() @ b.double() + 1, rtol=1e-5, atol=1e-5)


@interpreter.interpret
def _add(a, b):
    return a + b


@interpreter.interpret
def _reduce_kernel(x, out, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(x + m[:, None] * N + n[None, :])
    if OP == "sum":
        result = tl.sum(a, 1)
    elif OP == "method":
        result = a.sum(1)
    elif OP == "max":
        result = tl.max(a, 1)
    elif OP == "min":
        result = tl.min(a, 1)
    elif OP == "argmax":
        result = tl.argmax(a, 1)
    elif OP == "last of cumsum":
        result = tl.sum(tl.where(n[None, :] == N - 1, tl.cumsum(a, 1), 0.0), 1)
    else:
        result = tl.reduce(a, 1, _add)
    tl.store(out + m, result)


REDUCTIONS = {
    "sum": lambda x: x.sum(1),
    "method": lambda x: x.sum(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "argmax": lambda x: x.argmax(1).to(x.dtype),
    "last of cumsum": lambda x: x.sum(1),
    "custom": lambda x: x.sum(1),
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op):
    # small integers: every order of additions is exact
    x = torch.randint(-8, 9, (8, 16)).bfloat16()
    x[:, 5] = 9.0
    out = torch.full((8,), float("nan"), dtype=torch.bfloat16)
    _reduce_kernel[(1,)](x, out, OP=op, M=8, N=16)
    assert torch.equal(out, REDUCTIONS[op](x))


@interpreter.interpret
def _atomic_add_kernel(x, total, before, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n)
    old = tl.atomic_add(total + offsets % 2, values, mask=offsets < n)
    tl.store(before + offsets, old, mask=offsets < n)


def test_atomic_add_when_lanes_share_an_address():
    x = torch.arange(10).bfloat16()
    total, before = torch.zeros(2).bfloat16(), torch.full((10,), float("nan")).bfloat16()
    _atomic_add_kernel[(1,)](x, total, before, 10, BLOCK=16)
    assert total.tolist() == [20.0, 25.0]
    assert before[:4].tolist() == [0.0, 0.0, 0.0, 1.0]


@interpreter.interpret
def _failing_kernel(x, BLOCK: tl.constexpr):
    tl.store(x, tl.cdiv(tl.load(x), 2).no_such_attribute)


def test_a_launch_leaves_triton_as_it_was():
    before = dict(vars(tl)), dict(vars(tl.core)), dict(vars(tl.standard)), dict(vars(tl.tensor))
    setting = os.environ.get("TRITON_INTERPRET")
    test_reductions("sum")
    with pytest.raises(Exception, match="no_such_attribute"):
        _failing_kernel[(1,)](torch.ones(1, dtype=torch.int32), BLOCK=1)
    after = dict(vars(tl)), dict(vars(tl.core)), dict(vars(tl.standard)), dict(vars(tl.tensor))
    for old, new in zip(before, after, strict=True):
        assert {name for name in old if new.get(name) is not old[name]} == set()
    assert os.environ.get("TRITON_INTERPRET") == setting


def test_enable_twice_is_harmless():
    interpreter.enable()
    interpreter.enable()
    test_binary_operations("multiply")


MULTIPLY = """
    import torch, triton, triton.language as tl
    {decorator_import}

    @{decorator}
    def square_kernel(x, out, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        a = tl.load(x + offsets)
        tl.store(out + offsets, a * a + tl.zeros([BLOCK], a.dtype))

    x = torch.tensor([1.5, -3.0]).bfloat16()
    out = torch.full_like(x, float("nan"))
    square_kernel[(1,)](x, out, BLOCK=2)
    print(out.tolist() == [2.25, 9.0])
"""


def _run(program: str, directory, **environment: str) -> str:
    # from a file, because the interpreter reads a kernel's source
    path = directory / "program.py"
    path.write_text(textwrap.dedent(program))
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NUMA_SWIZZLE_KERNELS")}
    done = subprocess.run(
        [sys.executable, str(path)], env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


OURS = MULTIPLY.format(decorator_import="from numa_attention.jit import kernel", decorator="kernel")


def test_triton_imported_before_without_the_interpreter(tmp_path):
    assert _run(OURS, tmp_path, NUMA_SWIZZLE_KERNELS="interpret") == "True"


def test_vllm_imported_before(tmp_path):
    pytest.importorskip("vllm")
    program = "    import vllm, vllm.triton_utils\n" + OURS
    assert _run(program, tmp_path, NUMA_SWIZZLE_KERNELS="interpret") == "True"


def test_the_uncorrected_interpreter_is_wrong(tmp_path):
    # the day this fails, Triton has learnt bfloat16 and our builder may go
    upstream = MULTIPLY.format(decorator_import="", decorator="triton.jit")
    assert _run(upstream, tmp_path, TRITON_INTERPRET="1") == "False"

"""Which way a kernel runs, and what the user reads when it cannot."""

import sys

import pytest
import torch

from numa_attention import jit

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def environment(monkeypatch):
    """Sets NUMA_SWIZZLE_KERNELS and TRITON_INTERPRET; None leaves one unset."""

    def set_to(kernels=None, interpret=None):
        for name, value in ((jit.SETTING, kernels), ("TRITON_INTERPRET", interpret)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(
    ("kernels", "interpret", "expected"),
    [
        (None, None, False),
        ("auto", "0", False),
        ("interpret", None, True),
        ("torch", "1", True),
        (None, "ON", True),
    ],
)
def test_interpreting(environment, kernels, interpret, expected):
    environment(kernels, interpret)
    assert jit.interpreting() is expected


@pytest.mark.parametrize(
    ("kernels", "device", "interpret", "expected"),
    [
        ("auto", CPU, None, "torch"),
        ("auto", CPU, "1", "triton"),
        ("auto", GPU, None, "triton"),
        ("torch", GPU, None, "torch"),
        ("torch", CPU, "1", "torch"),
        ("triton", GPU, None, "triton"),
        ("triton", CPU, "1", "triton"),
        ("interpret", CPU, "1", "triton"),
    ],
)
def test_resolve(environment, kernels, device, interpret, expected):
    environment(interpret=interpret)
    assert jit.resolve(kernels, device) == expected


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("cuda", "choose one of auto, triton, torch, interpret"),
        ("triton", "needs tensors on a GPU.*NUMA_SWIZZLE_KERNELS=interpret"),
        ("interpret", "needs NUMA_SWIZZLE_KERNELS=interpret"),
    ],
)
def test_resolve_refuses(environment, kernels, message):
    environment()
    with pytest.raises(ValueError, match=message):
        jit.resolve(kernels, CPU)


def test_missing_triton_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(jit.MissingTriton, match="pip install.*or set NUMA_SWIZZLE_KERNELS=torch"):
        jit.resolve("auto", GPU)
    with pytest.raises(jit.MissingTriton):
        jit.kernel(lambda: None)


def test_a_kernel_takes_the_options_of_triton_jit(environment):
    environment()

    @jit.kernel(do_not_specialize=["n"])
    def some_kernel(n):
        pass

    assert some_kernel.arg_names == ["n"]
    assert some_kernel.params[0].do_not_specialize


def test_a_launcher_asks_triton_once_per_key():
    calls = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: calls.append(("again", grid, arguments))

    class Kernel:
        def __getitem__(self, grid):
            def first(*arguments, **constants):
                calls.append(("first", grid, arguments, constants))
                return Compiled()

            return first

    launch = jit.Launcher(Kernel())
    launch("small", (1, 1, 1), (10, 20), {"BLOCK": 16})
    launch("small", (2, 1, 1), (11, 21), {"BLOCK": 16})
    launch("large", (3, 1, 1), (12, 22), {"BLOCK": 32})
    assert calls == [
        ("first", (1, 1, 1), (10, 20), {"BLOCK": 16}),
        ("again", (2, 1, 1), (11, 21, 16)),
        ("first", (3, 1, 1), (12, 22), {"BLOCK": 32}),
    ]

"""NUMA_SWIZZLE_* variables: every mistake is one clear sentence."""

from __future__ import annotations

import pytest

from numa_attention import aiter_adapter, jit, mapping, merge, variants
from vllm_numa_backend import peers, settings


def test_defaults():
    assert settings.read({}) == settings.Settings(kernels="auto", mapping=None)
    assert settings.read({"NUMA_SWIZZLE_KERNELS": "", "HOME": "/"}) == settings.Settings()


def test_values_in_any_case():
    chosen = settings.read({"NUMA_SWIZZLE_KERNELS": " Torch", "NUMA_SWIZZLE_MAPPING": "HEAD-FIRST"})
    assert chosen == settings.Settings(kernels="torch", mapping="head-first")


@pytest.mark.parametrize("row", settings.TABLE, ids=lambda row: row.variable)
def test_unknown_value_names_the_allowed_ones(row):
    with pytest.raises(settings.SettingsError) as caught:
        settings.read({row.variable: "fastest"})
    assert f"{row.variable}=fastest" in str(caught.value)
    assert all(value in str(caught.value) for value in row.allowed)


def test_unknown_variable_names_the_known_ones():
    with pytest.raises(settings.SettingsError, match="NUMA_SWIZZLE_KERNEL is not a setting") as caught:
        settings.read({"NUMA_SWIZZLE_KERNEL": "torch"})
    assert all(row.variable in str(caught.value) for row in settings.TABLE)


def test_table_agrees_with_the_kernel_library():
    kernels, mappings, aiter, placements, exchanges, clusters = (row.allowed for row in settings.TABLE)
    assert set(kernels) == set(jit.CHOICES)
    assert mappings == ("auto", *mapping.MAPPINGS)
    assert aiter == aiter_adapter.CHOICES
    assert placements == variants.PLACEMENTS
    assert [settings.read({"NUMA_SWIZZLE_CLUSTERS": value}).clusters for value in clusters] == [False, True]
    assert exchanges == ("auto", *merge.EXCHANGES, peers.EXCHANGE)


@pytest.mark.parametrize(
    ("kernels", "device", "triton_there", "complaint"),
    [
        ("auto", "cpu", False, None),
        ("auto", "cuda", True, None),
        ("torch", "cpu", False, None),
        ("torch", "cuda", True, "on the CPU only"),
        ("interpret", "cpu", True, None),
        ("triton", "cpu", True, "needs a GPU"),
        ("triton", "cuda", False, "pip install"),
        ("auto", "cuda", False, "pip install"),
        ("interpret", "cpu", False, "pip install"),
    ],
)
def test_what_cannot_run_here(monkeypatch, kernels, device, triton_there, complaint):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: object() if triton_there else None)
    reason = settings.why_unusable(settings.Settings(kernels=kernels), device)
    if complaint is None:
        assert reason is None
    else:
        assert complaint in reason and f"NUMA_SWIZZLE_KERNELS={kernels}" in reason

"""The plugin's tests run vLLM on its CPU platform, with the torch kernels unless a test says otherwise."""

import os

import pytest

# vLLM decides on its platform when it is first imported: CPU also for the wheels that were built for GPUs
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch):
    from vllm_numa_backend import settings

    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", "torch")
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def expected_release():
    """test_other_releases.py says which vLLM these tests are to run on."""
    import vllm

    expected = os.environ.get("NUMA_TEST_VLLM", vllm.__version__)
    assert vllm.__version__ == expected, f"vLLM {vllm.__version__} was imported, from {vllm.__file__}"

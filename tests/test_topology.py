"""What a device is, by its name or by what its driver says of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from numa_attention import topology
from numa_attention.topology import GENERATIONS, PRODUCTS, detect, pretend
from numa_attention.variants import machine_of


@pytest.fixture
def device_with(monkeypatch):
    """A GPU whose driver says what it is told to."""

    def pretended(hip: str | None, **properties) -> topology.Topology:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
        return detect("cuda")

    return pretended


@pytest.mark.parametrize(
    ("architecture", "units", "generation", "domains", "shared_kib"),
    [
        ("gfx942:sramecc+:xnack-", 304, "gfx942", 8, 64),  # MI300X, MI325X
        ("gfx942:sramecc+:xnack-", 228, "gfx942", 6, 64),  # MI300A
        ("gfx942:sramecc+:xnack-", 152, "gfx942", 4, 64),  # MI300X, two partitions
        ("gfx942:sramecc+:xnack-", 38, "gfx942", 1, 64),  # one for each XCD
        ("gfx950:sramecc+:xnack-", 256, "gfx950", 8, 160),  # MI350X, MI355X
        ("gfx950:sramecc+:xnack-", 32, "gfx950", 1, 160),
        ("gfx1250", 256, "gfx1250", 8, 320),
        ("gfx1250", 512, "gfx1250", 8, 320),  # a driver that counts the halves of its units
        ("gfx90a:sramecc+:xnack-", 104, "gpu", 1, 64),
        ("gfx942:sramecc+:xnack-", 80, "gfx942", 4, 64),  # MI308X
        ("gfx942:sramecc+:xnack-", 20, "gfx942", 1, 64),  # one of its XCDs
    ],
)
def test_an_amd_device(device_with, architecture, units, generation, domains, shared_kib):
    found = device_with(
        "7.0",
        name="AMD Instinct MI308X" if units in (80, 20) else "AMD Instinct",
        gcnArchName=architecture,
        multi_processor_count=units,
        L2_cache_size=4 << 20,
    )
    assert (found.generation, found.compute_units, found.domains) == (generation, units, domains)
    # workgroups are dealt to the XCDs in turn
    assert found.dispatch_domains == domains and found.shared_bytes == shared_kib << 10
    assert found.l2_bytes == domains * (4 << 20)
    machine = machine_of(found)
    assert (machine is None) == (generation == "gpu")
    if machine is not None:
        assert (machine.units, machine.domains) == (units, domains)


@pytest.mark.parametrize(
    ("capability", "generation", "domains"),
    [((9, 0), "sm_90", 2), ((10, 0), "sm_100", 2), ((8, 0), "gpu", 1)],
)
def test_an_nvidia_device(device_with, capability, generation, domains):
    major, minor = capability
    found = device_with(
        None, name="NVIDIA", major=major, minor=minor, multi_processor_count=132, L2_cache_size=50 << 20,
        shared_memory_per_block_optin=227 << 10,
    )  # fmt: skip
    # workgroups are dealt to SMs as these become free: there is one domain to place by dispatch on
    assert (found.generation, found.domains, found.dispatch_domains) == (generation, domains, 1)
    assert (found.l2_bytes, found.shared_bytes) == (50 << 20, 227 << 10)


def test_names():
    for generation, product in GENERATIONS.items():
        assert pretend(generation) == pretend(product.lower()) == PRODUCTS[product]
        assert PRODUCTS[product].generation == generation
    with pytest.raises(ValueError, match="unknown device 'MI100': name one of gfx942, .* MI450"):
        pretend("MI100")
    for product, known in PRODUCTS.items():
        assert pretend(product.lower()) == known and known.name == product
    assert pretend("MI325X").domains == 8 and pretend("MI308X").domains == 4
    assert detect("cpu") == PRODUCTS["cpu"]

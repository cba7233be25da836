"""The map of NUMA domains from latencies, and the cache of maps."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numa_attention import domain_map, domains_probe
from numa_attention.domain_map import DomainMap, NoDomainMap, cluster

MAP = DomainMap("GPU", "1234", "read", (0, 1, -1, 1, 0), 266.0, 297.0, 0.9)


def made_latencies(
    domains: list[int], *, gap: float = 31.0, noise: float = 6.0, addresses: int = 256, seed: int = 0
):
    """Latencies of SMs of these domains (-1: no such id), and the home of each address.

    Beside the gap: each SM and each slice has a distance of its own, some reads are disturbed.
    """
    random = torch.Generator().manual_seed(seed)
    own = torch.tensor(domains)
    home = torch.randint(0, 2, (addresses,), generator=random)
    latencies = 266 + noise * torch.randn(len(domains), addresses, generator=random)
    latencies += 12 * torch.randn(len(domains), 1, generator=random)
    slices = torch.randint(0, 40, (addresses,), generator=random)
    latencies += (8 * torch.randn(40, generator=random))[slices]
    latencies += gap * (own[:, None] != home)
    latencies[torch.rand(latencies.shape, generator=random) < 0.01] += 900
    latencies[own < 0] = float("nan")
    return latencies, home


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(66, 66), (60, 72), (16, 98), (7, 5)], ids=str)
def test_domains_from_noisy_latencies(sizes, seed):
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    domains = torch.tensor([0] * sizes[0] + [1] * sizes[1])[order].tolist()
    domains[3:3] = [-1, -1]  # ids that no SM has
    latencies, home = made_latencies(domains, seed=seed)
    found = cluster(latencies)
    first = domains[0]
    assert found.domain_of_sm == tuple(-1 if each < 0 else int(each != first) for each in domains)
    assert (found.home == (home != first)).float().mean() > 0.99
    assert 20 < found.far_cycles - found.near_cycles < 40
    assert 0.3 < found.certainty < 1.2


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_no_map(seed):
    with pytest.raises(NoDomainMap, match="do not fall into two kinds"):
        cluster(made_latencies([0, 1] * 66, gap=0.0, seed=seed)[0])


def test_distances_along_a_line_are_no_map():
    """Latencies that grow with the distance of SM and slice separate SMs, but in no two kinds."""
    places = torch.linspace(-1, 1, 132)[:, None], torch.linspace(-1, 1, 256)
    noise = torch.randn(132, 256, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NoDomainMap, match="addresses 0.7"):
        cluster(270 + 30 * (places[0] * places[1]) + noise)


def test_one_sm_is_no_map():
    with pytest.raises(NoDomainMap, match="of 1 SMs"):
        cluster(made_latencies([0, -1, -1])[0])


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A GPU of four SMs that answers `probe_latencies` with `answers`, by method; counts how often it is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    properties = SimpleNamespace(name="GPU", uuid="1234", multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    pretended = SimpleNamespace(
        asked=[], answers={"read": made_latencies([0, 1, -1, 1, 0])[0], "add": None}, properties=properties
    )

    def probe(device, method):
        pretended.asked.append(method)
        return pretended.answers[method]

    monkeypatch.setattr(domains_probe, "probe_latencies", probe)
    return pretended


def test_measured_once(device, tmp_path):
    found = domain_map.of_device("cuda:0")
    assert found.domain_of_sm == (0, 1, -1, 1, 0) and found.method == "read" and found.count() == [2, 2]
    assert domain_map.of_device("cuda:0") == found and device.asked == ["read"]
    assert domain_map.of_device("cuda:0", fresh=True) == found and device.asked == ["read", "read"]
    device.properties.uuid = "5678"  # another device of the same name
    assert replace(domain_map.of_device("cuda:0"), uuid="1234") == found and len(device.asked) == 3
    assert sorted(path.name for path in (tmp_path / "numa-swizzle").iterdir()) == [
        "domains-1234.json",
        "domains-5678.json",
    ]


def test_additions_tell_where_reads_do_not(device):
    device.answers = {"read": made_latencies([0, 1, -1, 1, 0], gap=0.0)[0], "add": device.answers["read"]}
    assert domain_map.of_device("cuda:0").method == "add"
    device.answers["add"] = device.answers["read"]
    latencies = {}
    with pytest.raises(
        NoDomainMap, match=r"domains of GPU cannot be told; read: .*; add: .* runs on the device\.$"
    ):
        domain_map.measure("cuda:0", latencies)
    assert latencies.keys() == {"read", "add"}


def test_sms_that_do_not_answer(device):
    device.properties.multi_processor_count = 5
    device.answers["add"] = device.answers["read"]
    with pytest.raises(NoDomainMap, match="4 of 5 SMs answered"):
        domain_map.of_device("cuda:0")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"format": domain_map.FORMAT, "domain_of_sm": [0, 2]})],
)
def test_a_file_that_is_no_map_is_measured_anew(device, caplog, text):
    domain_map.write(MAP)
    assert domain_map.read("1234") == MAP
    domain_map.file_of("1234").write_text(text)
    assert domain_map.of_device("cuda:0").domain_of_sm == MAP.domain_of_sm and device.asked == ["read"]
    assert "cannot be used" in caplog.text
    assert domain_map.read("1234") is not None


def test_a_file_of_another_device_or_format(device, caplog):
    domain_map.write(MAP)
    domain_map.file_of("1234").rename(domain_map.file_of("5678"))
    assert domain_map.read("5678") is None and "of another device" in caplog.text
    caplog.clear()
    domain_map.write(MAP)
    file = domain_map.file_of("1234")
    file.write_text(file.read_text().replace('"format": 1', '"format": 0'))
    assert domain_map.read("1234") is None and not caplog.text


def test_a_folder_that_cannot_be_written(device, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert domain_map.of_device("cuda:0").domain_of_sm == MAP.domain_of_sm
    assert "cannot be written" in caplog.text


def test_table_of_a_kernel(device):
    domain_map._table.cache_clear()
    table = domain_map.table(torch.device("cpu"))
    assert table.dtype == torch.int32 and table.tolist() == [0, 1, 0, 1, 0] + [0] * (domain_map.SM_IDS - 5)
    domain_map._table.cache_clear()

"""What the compiler makes of the probe of NUMA domains: between two clocks there is one access, come to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from numa_attention import domains_probe
from numa_attention.domain_map import SM_IDS, NoDomainMap, cluster
from numa_attention.jit import SETTING, interpreting


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """The reports of compile_domains_probe.py."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", SETTING)
    }
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("compile_domains_probe.py")
    done = subprocess.run(
        [sys.executable, script, "sm_90", "sm_100", "gfx942", "gfx950"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def timed_stretches(instructions: list[str]) -> list[list[str]]:
    """What lies between a clock and the next one, where that is an access."""
    clocks = [place for place, text in enumerate(instructions) if "SR_CLOCK" in text]
    stretches = [instructions[a + 1 : b] for a, b in zip(clocks, clocks[1:], strict=False)]
    return [stretch for stretch in stretches if any(re.match(r"LDG|ATOMG", text) for text in stretch)]


@pytest.mark.parametrize("generation", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("method", "access"), [("read", "LDG"), ("add", "ATOMG")])
def test_one_access_is_timed_to_its_end(compiled, generation, method, access):
    mine = [report for report in compiled if report["generation"] == generation]
    report = mine[domains_probe.METHODS.index(method)]
    assert report["spills"] == 0
    stretches = timed_stretches(report["instructions"])
    assert stretches
    for stretch in stretches:
        places = [place for place, text in enumerate(stretch) if re.match(r"(LDG|ATOMG|LD|STG)\b", text)]
        assert len(places) == 1, stretch
        text = stretch[places[0]]
        # through the L1, or weak enough for it to answer, it would say nothing of the L2
        assert text.startswith(access) and ".STRONG.GPU" in text, text
        register = re.search(r"\b(R\d+), desc", text)[1]
        used = [later for later in stretch[places[0] + 1 :] if re.search(rf", {register}\b", later)]
        assert used, f"the second clock does not wait for {register}: {stretch}"


def test_a_workgroup_reads_its_xcd(compiled):
    for report in compiled:
        if report["generation"].startswith("gfx"):
            assert any("HW_REG_XCC_ID" in text for text in report["instructions"])


def test_addresses_are_lines_of_their_own():
    _, offsets, latencies, claimed = domains_probe.probe_arguments(768, "cpu")
    lines = offsets * 4 // domains_probe.LINE
    assert len(lines.unique()) == 768 and int(lines.max()) < domains_probe.SPREAD // domains_probe.LINE
    assert not (offsets * 4 % domains_probe.LINE).any()
    assert latencies.shape == (SM_IDS, 768) and not claimed.any()


def test_refusals():
    with pytest.raises(ValueError, match="method='guess' is unknown: choose one of read, add"):
        domains_probe.probe_latencies("cuda", "guess")
    if interpreting():
        with pytest.raises(NoDomainMap, match="interpreted"):
            domains_probe.probe_latencies("cuda")


@pytest.mark.gpu
def test_the_domains_of_this_gpu(device):
    if torch.version.hip:
        domains = domains_probe.probe_xccs(device, 64)
        assert ((domains >= 0) & (domains < 8)).all()
        return
    units = torch.cuda.get_device_properties(device).multi_processor_count
    latencies = domains_probe.probe_latencies(device)
    rows = latencies[~latencies.isnan().any(1)]
    assert len(rows) == units and rows.min() > 100 and rows.median() < 1000
    if torch.cuda.get_device_capability() == (9, 0):
        again = cluster(domains_probe.probe_latencies(device)).domain_of_sm
        assert cluster(latencies).domain_of_sm == again

"""What a report measures on an MI450 alone, on a small pretended one: clusters, and the forms of the pipeline."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from numa_attention import gluon_compat, schedule
from numa_attention.decode import cdna5_variant
from tests.gluon.cdna5_step import small_mi450
from vllm_numa_backend.bench import checks, report, report_parts
from vllm_numa_backend.bench.cases import Case

pytestmark = pytest.mark.skipif(
    gluon_compat.VERSION < cdna5_variant.OLDEST_TRITON_WITH_CLUSTERS,
    reason="this Triton has no such clusters",
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def mi450(monkeypatch):
    """Two units of 2 workgroups each, so that two requests fill it with clusters of two."""
    for module in (report_parts, schedule):
        monkeypatch.setattr(module, "detect", lambda device=None: small_mi450(2))


@pytest.mark.parametrize("number", [0, 2], ids=["bf16", "fp8 pairs"])
def test_a_step_in_clusters(number):
    step = checks.cluster_steps(torch.float8_e4m3fn)[number]
    few = dict(
        query_lens=(1, 1), seq_lens=(150, 33), decodes=2, q_heads=4, kv_heads=1, head_dim=64, page_size=128
    )
    check = checks.run_check(dataclasses.replace(step, **few), CPU, "triton")
    assert check.passed and check.variants == "cdna5-cluster-decode", check


def test_clusters_and_forms_are_timed():
    found = report.Report({}, {}, True)
    case = Case(2, 150, 4, 1, 128, 1, torch.float8_e4m3fn, head_dim=64, packed=True)
    report_parts.measure_case(found, "decode", case, CPU, "triton")
    ran = {timing.contestant: timing.variant for timing in found.timings}
    assert ran == {
        report.OURS: "cdna5-decode",
        f"{report.OURS}, in clusters where they fit": "cdna5-cluster-decode",
        f"{report.OURS}, single": "cdna5-decode",
        f"{report.OURS}, two-stage": "cdna5-decode",
    }
    assert report.failures(found) == []

"""Kernels that are right run to the end, with torch's results, under every schedule."""

import gluon_cases as cases
import pytest
import torch

from numa_attention import gluon_compat
from numa_attention.testing.gluon import Refused

SEEDS = range(5)
needs_clusters = pytest.mark.skipif(
    not gluon_compat.HAS_CLUSTERS, reason="this Triton has no cluster barrier"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_tdm_gemm(buffers, dtype):
    assert cases.tdm_gemm(buffers=buffers, dtype=dtype) < 1e-6


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_attention_on_gfx1250(causal):
    assert cases.tdm_attention(causal) < 1e-2


@pytest.mark.parametrize("seed", SEEDS)
def test_tma_gemm(seed):
    assert cases.tma_gemm(seed=seed) < 1e-3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("slots", [2, 3])
def test_warp_specialisation(slots, seed):
    assert cases.specialised_sum(slots=slots, seed=seed) < 1e-6


def test_attention_on_sm90():
    assert cases.tma_attention() < 1e-3


@needs_clusters
@pytest.mark.parametrize("seed", SEEDS)
def test_multicast(seed):
    assert cases.tdm_multicast(seed=seed) < 1e-6
    assert cases.tma_multicast(seed=seed) < 1e-6
    assert cases.tma_shared_barrier(seed=seed) < 1e-6


@needs_clusters
def test_reduction_over_the_workgroups_of_a_cluster():
    if gluon_compat.exchanges_between_ctas("sm_90"):
        assert cases.tma_multicast(split=(0, 1)) < 1e-6
    else:
        with pytest.raises(Refused, match="this release of Triton cannot"):
            cases.tma_multicast(split=(0, 1))


def test_the_same_seed_gives_the_same_schedule():
    def message(seed: int) -> str:
        torch.manual_seed(0)
        with pytest.raises(Exception) as found:
            cases.specialised_sum("missing empty wait", seed=seed)
        return str(found.value)

    assert [message(seed) for seed in range(4)] == [message(seed) for seed in range(4)]

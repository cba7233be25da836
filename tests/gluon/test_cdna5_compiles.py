"""What the compiler makes of the gfx1250 kernels: registers, LDS, and what is in the loop over KV tiles."""

from pathlib import Path

import pytest

from numa_attention import gluon_compat
from numa_attention.decode.cdna5_variant import OLDEST_TRITON
from tests.compiled import reports_of

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        gluon_compat.VERSION < OLDEST_TRITON, reason="this Triton cannot assemble the kernels"
    ),
]


def compiled(phase: str, cache: Path) -> dict[str, dict]:
    """The reports of compile_cdna5.py, by name."""
    return reports_of(Path(__file__).with_name("compile_cdna5.py"), cache, phase, timeout=800)


@pytest.fixture(scope="module")
def decode(tmp_path_factory) -> dict[str, dict]:
    return compiled("decode", tmp_path_factory.mktemp("cache"))


def check_resources(name: str, report: dict) -> None:
    assert report["faults"] == [], name
    assert report["resources"]["spills"] == 0 and report["resources"]["scratch"] == 0, name
    assert report["resources"]["shared"] <= 320 << 10, name


def check_loop(name: str, report: dict) -> None:
    """TDM fetches ahead, both products are WMMA, and what passes from one to the other stays in registers."""
    loop, whole = report["main_loop"], report["whole"]
    # keys and values apart are a request each, or more where a tile has several pages
    requests = 1 if "pairs" in name else 2
    assert loop["tensor copy"] >= requests, f"{name}: TDM copies keys and values, {loop}"
    assert loop["tensor copy"] == loop["async copy"], f"{name}: and nothing else does"
    assert loop["tensor wait"] >= 1, name
    if "single" not in name:
        assert loop["tensor wait for less than all"] == loop["tensor wait"], (
            f"{name}: later tiles stay under way"
        )
    assert loop["wmma"] >= 16, name
    assert loop.get("float8 wmma", 0) == (loop["wmma"] if name.startswith("fp8") else 0), name
    assert loop["transposed read"] >= 8, f"{name}: values are transposed on their way out of LDS"
    assert loop["exponential"] >= 16, f"{name}: the softmax"
    assert "LDS store" not in loop, f"{name}: probabilities never go through LDS"
    assert "move between lanes through LDS" not in whole, f"{name}: nor from lane to lane"


# bytes of the rows that TDM copies, by a part of the layer's name; the rest have those of a head of 128 in their type
ROWS = {
    "fp8 single": [128 * 128],  # one KV head: a page's tokens lie one after the other
    "fp8 two-stage": [128 * 128],
    "fp8 four-stage": [128 * 128],
    "fp8 pairs": [256],
    "fp8 pairs, cluster": [256],
    "fp8 pairs, small pages": [256],
    "fp8 pairs of head_dim 64": [128 * 128],  # and are flat too
    "bf16 pairs of head_dim 64": [256],
    "fp8 rows of a head": [128],  # four KV heads between the tokens
    "fp8 small pages": [128],
    "fp8 head_dim 64": [64],
    "fp8 head_dim 256": [256],
    "fp8 cluster": [128],
}


def check_rows(decode: dict[str, dict]) -> None:
    """Rows of TDM's requests have 256 bytes at least, wherever the cache's layout lets them."""
    for name, report in decode.items():
        assert report["tensor_rows"] == ROWS.get(name, [256]), name


def test_decode(decode):
    for name, report in decode.items():
        assert report["kernel"] == "decode_kernel"
        check_resources(name, report)
        check_loop(name, report)
        # the last arriver of a group, then of the groups; the release and the acquire around a cluster's barrier
        whole, in_clusters = report["whole"], "cluster" in name
        assert whole["atomic"] == 2, name
        assert whole["write-back of caches"] >= 1 and whole["invalidation of caches"] >= 1, name
        # a signal and a wait each
        assert (whole.get("cluster barrier", 0) >= 2) == in_clusters, name
        assert whole.get("cluster barrier", 0) % 2 == 0 and "cluster barrier" not in report["main_loop"], name
    check_rows(decode)
    # two float8 products replace four of half the depth each: as many instructions for twice the tokens
    assert decode["fp8 four-stage"]["main_loop"]["wmma"] == decode["bf16 four-stage"]["main_loop"]["wmma"]
    lds = [decode[f"bf16 {form}"]["resources"]["shared"] for form in ("single", "two-stage", "four-stage")]
    assert lds[1] == pytest.approx(2 * lds[0], rel=0.05) and lds[2] == pytest.approx(3 * lds[0], rel=0.05)


def test_prefill(tmp_path):
    for name, report in compiled("prefill", tmp_path).items():
        assert report["kernel"] == "prefill_kernel"
        check_resources(name, report)
        check_loop(name, report)
        assert "atomic" not in report["whole"], name

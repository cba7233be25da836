"""What the compiler makes of the sm_90 decode kernel: registers, shared memory, and what is in its loops."""

import re
from pathlib import Path

import pytest

from numa_attention.decode.hopper_variant import SHARED_BYTES
from tests.compiled import reports_of

pytestmark = pytest.mark.slow
# unpacked float8 tiles beside 64 rows of accumulators: registers spill around the loop, two of them inside
SPILLS = {"fp8 64 rows": 50, "fp8 head_dim 256, 64 rows": 50}
ALONE = ("bf16 head_dim 256", "fp8 head_dim 256, 64 rows")  # on a multiprocessor


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """The reports of compile_hopper.py, by name."""
    script = Path(__file__).with_name("compile_hopper.py")
    return reports_of(script, tmp_path_factory.mktemp("cache"))


def test_nothing_spills_and_two_workgroups_share_a_multiprocessor(reports):
    for name, report in reports.items():
        resources = report["resources"]
        spills = SPILLS.get(name, 0)
        assert resources["spills"] <= spills, (name, resources)
        assert report["unwritten"] == [], (name, "computes with what nothing has written")
        in_loop = report["main_loop"].get("scratch access", 0)
        assert in_loop <= (2 if spills else 0) and "scratch access" not in report["copy_loop"], (name, report)
        workgroups = 1 if name in ALONE else 2
        assert workgroups * (resources["shared"] + 1024) <= SHARED_BYTES, (name, resources)
        assert resources["registers"] * 256 * workgroups <= 65536, (name, resources)


def test_tiles_come_by_tma_and_products_are_wgmma(reports):
    for name, report in reports.items():
        products, copies = report["main_loop"], report["copy_loop"]
        # a product of 64 keys, rows or dimensions takes one instruction for 16 of its depth; keys in float8 are
        # multiplied by two terms, 32 deep
        width = 256 if "256" in name else 64 if "head_dim 64" in name else 128
        rows, block_n = map(int, re.search(r"tile (\d+) x (\d+)", report["variant"]).groups())
        keys = width // 16 * (1 if rows == 64 else block_n // 64)
        assert products["wgmma"] == keys + width // 64 * (block_n // 16), (name, products)
        assert "mma.sync" not in products, (name, products)
        assert "async copy" not in products, f"{name}: copies are another warp's work"
        # float8 tiles are transposed on their way into registers, 16-bit tiles by wgmma
        assert bool(products.get("transposed read")) == name.startswith("fp8"), (name, products)
        assert copies["async copy"] >= 2, (name, copies)
        assert "wide load" not in products, (name, products)


def test_forms_differ_in_their_rings(reports):
    for kind in ("bf16", "fp8"):
        shared = [
            reports[f"{kind} {form}"]["resources"]["shared"] for form in ("single", "two-stage", "four-stage")
        ]
        assert shared[0] < shared[1] == pytest.approx(shared[2], rel=0.05), shared
        assert reports[f"{kind} four-stage"]["stages"] >= 3, "copies run at least two tiles ahead"

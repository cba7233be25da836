"""What the compiler makes of the sm_90 prefill kernel: registers, shared memory, and what is in its main loop."""

from pathlib import Path

import pytest

from numa_attention.prefill.hopper_variant import SHARED_BYTES
from tests.compiled import reports_of
from tests.gluon.compile_hopper_prefill import CLUSTER_LAYERS, FLOAT8_LAYERS
from tests.gluon.compile_hopper_prefill import LAYERS as SINGLE_LAYERS

pytestmark = pytest.mark.slow
LAYERS = SINGLE_LAYERS | CLUSTER_LAYERS
THREADS = 384  # two consumers and the producer, each in a warpgroup
# accesses to spilled registers, between loops and in the producer: once or twice a tile of the list
SPILLS = 700
# of the main loop at head_dim 128 over a float8 cache, whose consumers give eight registers to the converter
FLOAT8_LOOP_SPILLS = 40


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """The reports of compile_hopper_prefill.py, by name."""
    script = Path(__file__).with_name("compile_hopper_prefill.py")
    return reports_of(script, tmp_path_factory.mktemp("cache"))


def count(opcodes: dict[str, int], *prefixes: str) -> int:
    return sum(n for opcode, n in opcodes.items() if opcode.startswith(prefixes))


@pytest.mark.parametrize("name", [*LAYERS, *FLOAT8_LAYERS])
def test_no_register_is_read_before_it_is_written(reports, name):
    assert reports[name]["unwritten"] == []


@pytest.mark.parametrize("name", LAYERS)
def test_resources(reports, name):
    resources, loop = reports[name]["resources"], reports[name]["loop"]
    assert resources["shared"] <= SHARED_BYTES
    assert resources["registers"] * THREADS <= 65536
    assert not count(loop, "STL", "LDL"), "nothing spills in the main loop"
    assert resources["spills"] <= SPILLS


@pytest.mark.parametrize("name", LAYERS)
def test_who_asks_where_it_runs_and_counts_tiles(reports, name):
    placed = "placement" in LAYERS[name]
    assert reports[name]["whole"].get("domain read", 0) == placed
    cluster, split = "cluster" in LAYERS[name], "window" not in LAYERS[name]
    # the next tile (with hardware placement also the first one), the end of the list, and a consumer's parts of tiles
    expected = 0 if cluster else 2 + placed + 2 * split
    assert reports[name]["whole"].get("atomic", 0) == expected


@pytest.mark.parametrize("name", LAYERS)
def test_what_copies_and_what_multiplies(reports, name):
    opcodes, loop, layer = (*(reports[name][part] for part in ("opcodes", "loop")), LAYERS[name])
    head_dim, head_dim_v = layer["head_dims"]
    block_n = 64 if head_dim == 256 else 128
    assert count(loop, "HGMMA") == head_dim // 16 + block_n // 16, "both products of one tile"
    assert not count(opcodes, "HMMA", "LDGSTS"), "wgmma alone multiplies, and TMA alone copies"
    assert not count(loop, "UTMALDG"), "copies are another warp's work"
    assert count(opcodes, "UTMALDG.2D") >= 2, "keys and values come from their pages"
    assert bool(count(opcodes, "UTMALDG.3D")) == (layer.get("group", 8) != 5), (
        "queries by TMA, where they can"
    )
    assert count(opcodes, "USETMAXREG") >= 3
    # row maxima and sums, the sum's shrinking, no instruction that moves values between threads but those
    assert count(loop, "SHFL") == 8 and not count(loop, "STS", "LDS")


@pytest.mark.parametrize("name", LAYERS)
def test_the_softmax_runs_under_the_product_with_values(reports, name):
    order = reports[name]["order"]
    products = [place for place, opcode in enumerate(order) if opcode.startswith("HGMMA")]
    exponentials = [place for place, opcode in enumerate(order) if opcode == "MUFU.EX2"]
    waits = [place for place, opcode in enumerate(order) if opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 2
    assert products[-1] < waits[0] < exponentials[0], "all products are on their way before the first wait"
    assert exponentials[-1] < waits[1], "the product with values is waited for after the exponentials"


@pytest.mark.parametrize("name", CLUSTER_LAYERS)
def test_two_workgroups_a_tile(reports, name):
    alone, pair = reports[name.removesuffix(", cluster")], reports[name]
    opcodes = pair["opcodes"]
    assert count(opcodes, "UTMALDG.2D.MULTICAST") == count(opcodes, "UTMALDG.2D"), "pages go to both"
    assert count(opcodes, "UTMALDG.2D") == count(alone["opcodes"], "UTMALDG.2D")
    assert not count(alone["opcodes"], "UCGABAR", "UTMALDG.2D.MULTICAST")
    # once before the barriers are used, once at the end; other warps than the first ones have code of their own
    assert count(opcodes, "UCGABAR_ARV") == count(opcodes, "UCGABAR_WAIT") >= 4
    assert count(pair["loop"], "SYNCS.ARRIVE.TRANS64.RED") == 2, "buffers are released to the first workgroup"
    assert not count(pair["loop"], "UCGABAR"), "workgroups meet at mbarriers in the main loop"
    assert sum(pair["loop"].values()) <= sum(alone["loop"].values()) + 8
    assert pair["resources"]["shared"] <= alone["resources"]["shared"]


@pytest.mark.parametrize("name", FLOAT8_LAYERS)
def test_a_float8_cache(reports, name):
    resources, opcodes, loop = (reports[name][part] for part in ("resources", "opcodes", "loop"))
    head_dim, _ = FLOAT8_LAYERS[name]["head_dims"]
    assert resources["shared"] <= SHARED_BYTES
    assert resources["registers"] * (THREADS + 128) <= 65536, "a warpgroup more prepares values"
    assert count(loop, "STL", "LDL") <= (FLOAT8_LOOP_SPILLS if head_dim == 128 else 0)
    assert resources["spills"] <= SPILLS
    assert count(loop, "SHFL") == 8 and not count(loop, "STS", "LDS"), "no value changes its thread"
    assert not count(opcodes, "HMMA")


@pytest.mark.parametrize("name", FLOAT8_LAYERS)
def test_values_become_float16(reports, name):
    opcodes, loop = reports[name]["opcodes"], reports[name]["loop"]
    head_dim, head_dim_v = FLOAT8_LAYERS[name]["head_dims"]
    block_n = 64 if head_dim == 192 else 128
    assert count(loop, "QGMMA") == 2 * head_dim // 32, "queries are the sum of two float8 numbers"
    assert count(loop, "HGMMA") == block_n // 16
    pairs = head_dim_v * block_n // (128 * 2)
    # for a tile in the sequence, and for one at its edge
    assert count(opcodes, "F2FP.F16.E4M3.UNPACK_B") in (pairs, 2 * pairs), (
        "a pair an instruction, by the converter"
    )
    assert not count(loop, "F2FP.F16.E4M3.UNPACK_B")

"""Every device generation's kernels, compiled without it: no spills, LDS within limits, the instructions that count."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import triton

from numa_attention import jit
from numa_attention.machine import dispatch
from numa_attention.testing import isa, offline
from numa_attention.testing.capture import compiling_for
from numa_attention.testing.offline_calls import (
    E4M3,
    E5M2,
    all_calls,
    common_calls,
    describe,
    make_call,
    variant_key,
)
from numa_attention.topology import pretend
from numa_attention.variants import choose_prefill

DOCUMENT = Path(__file__).parents[1] / "docs" / "offline-compilation.md"
GENERATIONS = ("gfx942", "gfx950", "gfx1250", "sm_90", "sm_100")
OLD_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)


def compile_offline(cache, *arguments: str) -> tuple[int, list[dict]]:
    """Exit code and reports of the command, in a process whose kernels are not interpreted."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", jit.SETTING)
    }
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "numa_attention.testing.offline", "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def row_of(report: dict) -> str:
    """The documentation's row of a report."""
    fields = {name: value for name, value in report.items() if name not in ("faults", "notes")}
    return offline.markdown(offline.Report(**fields | {"resources": isa.Resources(**report["resources"])}))


def own_of_sm_90(report: dict) -> bool:
    """Whether it is one of the kernels for sm_90, where copies are the work of a warp with a loop of its own."""
    names = {
        variant_key(call, step, "sm_90")[0]
        for call, step in common_calls("sm_90")
        if (describe(call), f"{step}_kernel") == (report["call"], report["kernel"])
    }
    return report["generation"] == "sm_90" and any(name.startswith("hopper-") for name in names)


def matrix_kind(report: dict) -> str:
    """The matrix instruction that a kernel with 16-bit queries has to use."""
    if report["generation"].startswith("gfx"):
        return "wmma" if report["generation"] == "gfx1250" else "mfma"
    few_rows = int(report["tile"].split("x")[0]) < 64 and not own_of_sm_90(report)
    return "mma.sync" if few_rows else "wgmma" if report["generation"] == "sm_90" else "tcgen05"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_variant_is_compiled(generation, monkeypatch):
    """Whatever the dispatcher takes for some layer is among the layers that the command compiles."""
    monkeypatch.setattr(dispatch, "prefill_mapping", lambda *key: dispatch.DEFAULT_MAPPING)
    covered = {variant_key(call, step, generation) for call, step in all_calls(generation)}
    random = Random(0)
    for _ in range(600):
        head_dim = 8 * random.randint(1, 32)
        shape = dict(
            head_dims=(head_dim, random.choice((head_dim, 8 * random.randint(1, 32)))),
            group=random.randint(1, 64),
            page_size=16 * random.randint(1, 16),
            dtype=random.choice((torch.bfloat16, torch.float16, torch.float32)),
            float8=random.choice((None, E4M3, E5M2)),
        )
        call = make_call(generation, **shape, max_decode_query=random.choice((1, 4, 8)))
        for step in ("decode", "prefill"):
            assert variant_key(call, step, generation) in covered, (shape, step)


@pytest.mark.parametrize("release", [(3, 6), (3, 8), (3, 9)])
def test_where_older_releases_spill_the_prefill_tile_is_narrower(release, monkeypatch):
    monkeypatch.setattr("numa_attention.variants.triton_release", lambda: release)

    def block_n(generation="gfx942", features=frozenset(), **layer) -> int:
        shape = make_call(generation, **layer).shape
        return choose_prefill(shape, pretend(generation), "triton", features=features).block_n

    narrow = 64 if release == (3, 9) else 32
    assert block_n(float8=E4M3) == block_n(float8=E5M2) == block_n(features=frozenset({"alibi"})) == narrow
    assert block_n() == block_n(features=frozenset({"sinks"})) == block_n("gfx950", float8=E4M3) == 64
    assert block_n(head_dims=(64, 64), float8=E4M3) == 64


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_common_layers(generation, tmp_path):
    if generation == "gfx1250" and OLD_TRITON:
        pytest.skip("Triton before 3.7 spills thousands of registers there")
    code, reports = compile_offline(tmp_path, "--subset", "--device", generation)
    assert {report["kernel"] for report in reports} == {"decode_kernel", "prefill_kernel"}
    for report in reports:
        name = f"{report['kernel']} {report['call']} {report['tile']}"
        assert report["faults"] == report["unwritten"] == [], name
        assert 0 < report["resources"]["shared"] <= report["shared_limit"], name
        assert report["resources"]["occupancy"] > 0, name
        loop = report["main_loop"]
        assert loop.get(matrix_kind(report), 0) >= 2, f"{name}: both products use the matrix unit, not {loop}"
        assert loop["exponential"] >= 1, f"{name}: this is the loop of the softmax"
        assert loop.get("scratch access", 0) == 0 or report["notes"], name
        if generation.startswith("sm_"):
            copying = report["whole"] if own_of_sm_90(report) else loop
            assert copying.get("async copy", 0) >= 2, f"{name}: keys and values are copied asynchronously"
        else:
            # keys and values that lie side by side come in one copy
            least = 1 if "side-by-side" in report["call"] else 2
            assert loop.get("wide load", 0) + loop.get("async copy", 0) >= least, f"{name}: 16 bytes a load"
        # the last arriver of a group, then of the groups, in one loop or one after the other
        arrivals = (1 if own_of_sm_90(report) else 2) if report["kernel"] == "decode_kernel" else 0
        # with hardware placement, one takes work from a queue and one counts who has
        placed = "by-hardware" in report["call"]
        taking = 2 * placed
        if own_of_sm_90(report) and report["kernel"] == "prefill_kernel":
            # also without placement, and one of each consumer where tiles are split
            taking = (3 if placed else 2) + (0 if "window" in report["call"] else 2)
        assert report["whole"].get("atomic", 0) == arrivals + taking, name
        assert report["whole"].get("domain read", 0) == placed, name
        assert len(report["announcements"]) == (arrivals if generation.startswith("gfx") else 0), name
        assert bool(report["whole"].get("cluster barrier")) == ("in-clusters" in report["call"]), name
    # its figures move with the compiler; its layers and tiles are those of today
    for row in map(row_of, reports):
        named = row[: [bar.start() for bar in re.finditer(r"\|", row)][4]]
        assert named in DOCUMENT.read_text(encoding="utf-8"), f"{DOCUMENT.name} lacks {row}"
    placed = [report for report in reports if "by-hardware" in report["call"]]
    assert len(placed) == {"gfx942": 2, "gfx950": 2, "sm_90": 1}.get(generation, 0)
    assert code == 0


@pytest.mark.slow
def test_float8_tiles_of_the_portable_decode_kernel(tmp_path):
    """On sm_90 keys of wide tiles stay float8; values of narrow ones are read transposed, not byte by byte."""
    arguments = ("--device", "sm_90", "--step", "decode", "--only")
    _, wide = compile_offline(tmp_path, *arguments, "d128 g64 p16 kv-")
    _, narrow = compile_offline(tmp_path, *arguments, "d128 g8 p16 kv-e4m3fn portable")
    wide = [report for report in wide if report["call"].endswith("portable")]
    assert (len(wide), len(narrow)) == (2, 1)
    for report in wide + narrow:
        assert report["faults"] == report["notes"] == [], report["call"]
    for report in wide:
        assert report["main_loop"]["float8 wgmma"] == 8 and report["main_loop"]["wgmma"] == 12
        assert report["loop_length"] < 520, "of 578 where keys are converted"
    (report,) = narrow
    assert report["main_loop"]["transposed read"] >= 16
    assert report["loop_length"] < 800, "of 1022 where values are read byte by byte"


@pytest.mark.slow
def test_parts_of_a_sharded_sequence(tmp_path):
    """16-bit queries with a float32 output, which the compiler breaks if nothing holds it back."""
    code, reports = compile_offline(
        tmp_path, "--device", "gfx942", "--step", "decode", "--only", "p64 8-ranks"
    )
    assert code == 0, [report["faults"] for report in reports]
    (report,) = reports
    assert report["kernel"] == "decode_kernel" and not report["notes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "tile", "fault"),
    [
        ("gfx942", "block_m=256,block_n=128,num_warps=4", "spills"),
        ("gfx942", "block_n=128,num_stages=4", "bytes of LDS"),
    ],
)
def test_a_tile_that_does_not_fit_is_reported(generation, tile, fault, tmp_path):
    options = ("--subset", "--step", "prefill", "--only", "bf16 d128 g8 p16", "--tile", tile)
    code, reports = compile_offline(tmp_path, "--device", generation, *options)
    assert code == 1
    assert reports and all(any(fault in found for found in report["faults"]) for report in reports)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tile", "foo=1"], "block_n, num_warps"),
        (["--tile", "block_n"], "block_n= must be a power of two"),
        (["--tile", ""], "write NAME=VALUE"),
        (["--tile", "block_n=7"], "block_n=7 must be a power of two of at least 16"),
        (["--tile", "num_warps=x"], "num_warps=x must be a power of two"),
        (["--tile", "num_stages=0"], "at least 1"),
        (["--tile", "form=round"], "choose one of single"),
        (["--only", "nosuchlayer"], "\n  bf16 d128 g8 p16 q8\n"),
        (["--only", "nosuchlayer", "--subset"], "\n  bf16 d128 g8 p16\n"),
        (["--step", "plan", "--subset"], "leave out --subset"),
    ],
)
def test_what_cannot_be_asked_for(arguments, words, capsys):
    with pytest.raises(SystemExit) as ending:
        offline.main(["--device", "gfx942", *arguments])
    assert ending.value.code == 2
    shown = capsys.readouterr()
    assert words in shown.err and not shown.out


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch, capsys):
    def fail(*_, **__):
        raise AssertionError("at 3:4\n  where\nK must be larger\n")

    monkeypatch.setattr(offline, "compile_call", fail)
    line = ["--device", "gfx942", "--subset", "--step", "prefill", "--only", "bf16 d128 g8 p16"]
    assert offline.main(line) == 1
    assert (
        "prefill bf16 d128 g8 p16: does not compile: AssertionError: K must be larger"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("generation", "call", "tile", "in_loop", "registers", "scratch", "accepted"),
    [
        ("sm_90", "fp32 d64 g32 p16", "32x64 4w 2s", 48, 255, 88, True),
        ("sm_90", "bf16 d64 g32 p16", "32x64 4w 2s", 48, 255, 88, False),
        ("sm_100", "bf16 d64 g32 p16", "32x64 4w 2s", 0, 255, 160, True),  # outside the loop
        ("sm_90", "bf16 d64 g32 p16", "32x64 4w 2s", 0, 128, 168, False),
        ("sm_90", "bf16 d64 g32 p16", "32x64 4w 2s", 2, 128, 32, True),  # of 100 instructions
        ("sm_90", "bf16 d64 g32 p16", "32x64 4w 2s", 3, 128, 32, False),
        ("sm_90", "bf16 d80 g8 p16", "128x64 4w 3s", 48, 255, 888, True),
        ("sm_100", "bf16 d80 g8 p16", "128x64 4w 3s", 48, 255, 888, False),
        ("gfx950", "fp32 d64 g32 p16", "32x64 4w 2s", 0, 255, 8, False),
        ("gfx942", "bf16 d128 g8 p16", "128x64 8w 1s", 0, 256, 8, False),  # nothing spills on AMD
        ("gfx1250", "bf16 d128 g8 p16", "16x32 1w 3s", 1, 256, 8, False),
    ],
)
def test_spills_that_are_known(generation, call, tile, in_loop, registers, scratch, accepted):
    resources = isa.Resources(registers, spills=48, scratch=scratch, shared=1, occupancy=8)
    report = offline.Report(
        generation, "prefill_kernel", call, tile, resources, 2, {}, {"scratch access": in_loop}, 100, [], 1.0
    )
    assert bool(report.notes()) == accepted
    assert bool(report.faults()) == (not accepted)


def test_what_computes_with_an_unwritten_register_is_a_fault():
    resources = isa.Resources(128, spills=0, scratch=0, shared=1, occupancy=8)
    read = "F2FP.F16.E4M3.UNPACK_B R6, R0 at 0x50 reads R0"
    report = offline.Report(
        "sm_90", "prefill_kernel", "bf16 d64 g8 p64", "128x128 12w 3s", resources, 2, {}, {}, 100, [], 1.0,
        unwritten=(read, read),
    )  # fmt: skip
    assert report.faults() == [f"computes with what nothing has written: {read}, and 1 more"]


AMD = """
\ts_load_dword s0, s[0:1], 0x0
.LBB0_1:
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
\tv_exp_f32_e32 v0, v0
\tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
\tbuffer_load_dword v4, s[0:3], 0 offen lds
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB0_2
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc0 .LBB0_1
\ts_cbranch_execz .LBB0_4
\tglobal_atomic_add_u32 v0, v1, v2, s[0:1] sc0
.LBB0_4:
\ts_endpgm
.Lfunc_end0:
\ts_nop 0
"""
NVIDIA = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   MUFU.EX2 R5, R5 ;
        /*0050*/              @P1  BRA.U `(.L_x_1) ;
.L_x_2:
        /*0060*/                   LDL R5, [R1] ;
        /*0070*/                   STL.64 [R1], R6 ;
        /*0080*/                   ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R2.64], R5 ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_the_innermost_loop_of_amd_code():
    code = isa.parse(AMD, isa.AMD_KINDS)
    assert len(code.instructions) == 11
    assert sorted(code.loops) == [(1, 6), (1, 8)]
    assert code.main_loop() == (1, 6)
    assert code.count((1, 6)) == {"exponential": 1, "wide load": 1, "async copy": 1, "mfma": 1}
    assert code.count() == {"exponential": 1, "wide load": 1, "async copy": 1, "mfma": 2, "atomic": 1}


def test_the_loop_of_nvidia_code():
    code = isa.parse(NVIDIA, isa.NVIDIA_KINDS)
    assert code.main_loop() == (2, 6)
    assert code.count((2, 6)) == {"async copy": 1, "wgmma": 1, "exponential": 1}
    assert code.count()["scratch access"] == 2 and code.count()["atomic"] == 1
    assert len(code.instructions) == 10


ANNOUNCING = """
\tbuffer_store_dwordx4 v[0:3], v4, s[0:3], 0 offen
\tbuffer_store_dword v5, v4, s[0:3], 0 offen
\ts_waitcnt vmcnt(0)
\ts_mov_b32 s0, 0
\ts_waitcnt lgkmcnt(0)
\ts_barrier
\tbuffer_wbl2 sc1
\ts_waitcnt vmcnt(0)
\tglobal_atomic_add v3, v42, v3, s[18:19] sc0
\ts_waitcnt vmcnt(0)
\tbuffer_inv sc1
\tglobal_store_dword v42, v42, s[18:19]
"""


def test_how_a_part_is_announced():
    def order(text):
        return isa.announcements(isa.parse(text, isa.AMD_KINDS))

    assert order(ANNOUNCING) == [isa.ANNOUNCED]
    # other waves' stores may be on their way: what Triton's barrier alone makes
    first_wait = "\ts_waitcnt vmcnt(0)\n\ts_mov"
    assert order(ANNOUNCING.replace(first_wait, "\ts_mov")) == [
        "store barrier write back wait atomic invalidate"
    ]
    assert order(ANNOUNCING.replace("\tbuffer_wbl2 sc1\n", "")) == [
        "store wait barrier wait atomic invalidate"
    ]
    assert order(ANNOUNCING.replace("\tbuffer_inv sc1\n", "")) == [
        isa.ANNOUNCED.replace("invalidate", "store")
    ]
    # an atomic that orders nothing announces nothing
    assert order(ANNOUNCING.replace("sc1", "sc0")) == []


def test_code_without_a_product_has_no_main_loop():
    assert isa.parse(".LBB0_1:\n\ts_nop 0\n\ts_branch .LBB0_1\n", isa.AMD_KINDS).main_loop() is None


def test_interpreted_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), compiling_for("gfx942"):
        pass

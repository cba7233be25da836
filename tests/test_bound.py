"""The computed bound on the gfx1250 decode kernel: reading a loop, Little's law, the ten shapes, the command."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from numa_attention.jit import SETTING, triton_release
from numa_attention.testing import bound
from numa_attention.testing.bound import Assumptions, Form, Loop, read_loop

LOOP = Loop(matrix=258.0, vector=786.0, lds_bytes=32768, instructions=1086)
FOUR = Form(
    "four-stage", rows=64, block_n=128, requests=2, tensor_row=256, workgroups=512, shared=110592, loop=LOOP
)
DOCUMENT = Path(__file__).parents[1] / "docs" / "decode-gfx1250.md"


def test_instructions_of_a_loop():
    assumed = Assumptions(clock=2.0e9, transcendental=4)
    loop = read_loop(
        [
            "v_wmma_f32_16x16x32_bf16 v[0:7], v[8:15], v[16:23], v[0:7]",
            "v_wmma_f32_16x16x128_fp8_fp8 v[0:7], v[8:23], v[24:39], v[0:7]",
            "v_exp_f32_e32 v0, v0",
            "v_add_f32_e32 v0, v1, v2",
            "ds_load_b128 v[0:3], v4",
            "ds_load_2addr_b64 v[0:3], v4 offset1:1",
            "ds_load_tr8_b64 v[0:1], v4",
            "s_wait_tensorcnt 0x4",
        ],
        assumed,
    )
    # 10 PFLOP/s over 1,024 SIMDs of 2 GHz are 4,883 a cycle in 16 bits, and twice that in float8
    assert loop.matrix == pytest.approx(16384 / 4882.8 + 65536 / 9765.6, rel=1e-4)
    assert loop.vector == 4 + 1
    assert loop.lds_bytes == 32 * (16 + 16 + 8)
    assert loop.instructions == 8


def test_forms_expose_less_and_less():
    forms = [dataclasses.replace(FOUR, name=name) for name in ("single", "two-stage", "four-stage")]
    single, two, four = (form.exposed(2400) for form in forms)
    assert single > two > four
    # hidden copies leave the softmax, of which four stages hide the products' length
    assert forms[1].exposed() == LOOP.vector
    assert forms[2].exposed() == pytest.approx(LOOP.vector - LOOP.matrix)


def test_requests_under_way_cover_latency_times_bandwidth():
    """Little's law: with half of the bytes under way, at most half of the rate as soon as that binds."""
    assumed = Assumptions(latency=2e-6)
    whole = bound.bound(FOUR, 2, 65536, assumed)
    half = bound.bound(dataclasses.replace(FOUR, requests=12), 2, 65536, assumed)
    assert whole.binds == half.binds == "requests"
    assert FOUR.bytes_in_flight() == 4 * 128 * 128
    assert whole.seconds["requests"] == pytest.approx(2e-6 * 64 * 2 * 65536 * 256 / (512 * 65536))
    assert half.rate < 0.5 * whole.rate


def test_no_shape_is_faster_than_the_memory_and_long_ones_come_near():
    for kv_heads in (1, 2):
        bounds = [bound.bound(FOUR, kv_heads, context) for context in bound.CONTEXTS]
        shares = [each.of_peak for each in bounds]
        assert shares == sorted(shares) and shares[-1] < 1 and shares[-1] > 0.9
        for each, context in zip(bounds, bound.CONTEXTS, strict=True):
            assert each.bytes == 64 * kv_heads * 2 * context * 128
            assert (
                each.rate
                == pytest.approx(20e12 * each.of_article_peak)
                == pytest.approx(19.6e12 * each.of_peak)
            )
            assert each.time > each.bytes / 19.6e12


def test_lds_binds_where_every_wave_reads_a_wide_tile():
    slow = dataclasses.replace(Assumptions(), lds_bytes=64)
    assert bound.bound(FOUR, 1, 65536, slow).binds == "LDS"
    assert bound.bound(dataclasses.replace(FOUR, rows=16), 1, 65536, slow).binds != "LDS"


@pytest.mark.slow
@pytest.mark.skipif((triton_release() or (0, 0)) < (3, 7), reason="this Triton cannot assemble the kernel")
def test_the_command(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", SETTING)
    }
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "numa_attention.testing.bound",
        "--form",
        "four-stage",
        "--kv-heads",
        "1",
        "--json",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (form,) = answer["forms"]
    # one request a round, its rows the key and the value of a token
    assert form["requests"] == 1 and form["tensor_row"] == 256
    assert form["rows"] == 64 and form["loop"]["lds_bytes"] == 2 * 128 * 128
    assert form["loop"]["matrix"] > 200 and form["loop"]["vector"] > form["loop"]["matrix"]
    assert len(answer["bounds"]) == 5
    if triton.__version__.startswith("3.9."):
        row = f"| four-stage | {form['loop']['matrix']:.0f} | {form['loop']['vector']:.0f} | "
        row += f"{form['exposed_by_softmax']:.0f} | 360 |"
        assert row in DOCUMENT.read_text(encoding="utf-8"), row

"""The device form of the mappings gives the tiles of the host form, and compiles for every generation."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from numa_attention.jit import interpreting, kernel
from numa_attention.mapping import MAPPINGS, tiles
from numa_attention.mapping_device import tile_of, tile_of_ragged, write_tiles

DEVICE = "cpu" if interpreting() else "cuda"
UNWRITTEN = -77
PADDING = [-1, 0, 0, 0]

# a launch takes the interpreter about a tenth of a second, a GPU next to nothing
some = settings(max_examples=25 if DEVICE == "cpu" else 400, deadline=None)


@st.composite
def grids(draw, ragged: bool):
    """(batch, q_heads, kv_heads, blocks, domains) of at most a few thousand workgroups."""
    batch = draw(st.integers(1, 8))
    q_heads = draw(st.integers(1, 128))
    kv_heads = draw(st.sampled_from([n for n in range(1, q_heads + 1) if q_heads % n == 0]))
    block = st.integers(0, max(1, min(40, 2000 // (batch * q_heads))))
    blocks = draw(st.lists(block, min_size=batch, max_size=batch)) if ragged else draw(block)
    return batch, q_heads, kv_heads, blocks, draw(st.integers(1, 16))


def prefix_of(blocks) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(blocks)], dtype=torch.int32, device=DEVICE)


def rows_from_device(rows, mapping, batch, q_heads, kv_heads, blocks, domains, **options) -> np.ndarray:
    """What write_tiles leaves in `rows` rows; on a GPU it must not wait for the device."""
    out = torch.full((rows + 1, 4), UNWRITTEN, dtype=torch.int32, device=DEVICE)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        write_tiles(out[:rows], mapping, batch, q_heads, kv_heads, blocks, domains, **options)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert (out[rows] == UNWRITTEN).all(), "wrote past the end"
    return out[:rows].cpu().numpy()


def assert_rows(actual, expected):
    """`actual` [rows, 4] holds the tiles [workgroups, 3], then padding."""
    workgroups = len(expected)
    np.testing.assert_array_equal(actual[:workgroups, :3], expected)
    assert (actual[:workgroups, 3] == 0).all()
    assert (actual[workgroups:] == PADDING).all()


@pytest.mark.parametrize("mapping", MAPPINGS)
@given(
    grid=grids(ragged=False), longest_first=st.booleans(), padding=st.integers(0, 70), by_prefix=st.booleans()
)
@some
def test_uniform(mapping, grid, longest_first, padding, by_prefix):
    batch, q_heads, kv_heads, blocks, domains = grid
    expected = tiles(mapping, *grid, longest_first=longest_first)
    given_blocks = prefix_of([blocks] * batch) if by_prefix else blocks
    actual = rows_from_device(
        len(expected) + padding,
        mapping,
        batch,
        q_heads,
        kv_heads,
        given_blocks,
        domains,
        uniform=by_prefix,
        longest_first=longest_first,
    )
    assert_rows(actual, expected)


@pytest.mark.parametrize("mapping", MAPPINGS)
@given(grid=grids(ragged=True), longest_first=st.booleans(), padding=st.integers(0, 70))
@some
def test_ragged(mapping, grid, longest_first, padding):
    batch, q_heads, kv_heads, blocks, domains = grid
    expected = tiles(mapping, *grid, longest_first=longest_first, uniform=False)
    actual = rows_from_device(
        len(expected) + padding,
        mapping,
        batch,
        q_heads,
        kv_heads,
        prefix_of(blocks),
        domains,
        longest_first=longest_first,
    )
    assert_rows(actual, expected)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("batch", [255, 256, 257])
def test_many_requests(mapping, batch):
    """Around a power of two, with requests that have no block at either end and in the middle."""
    blocks = np.random.default_rng(batch).integers(0, 3, batch)
    blocks[[0, 1, batch // 2, batch - 1]] = 0
    expected = tiles(mapping, batch, 2, 1, blocks, 8, uniform=False)
    assert_rows(rows_from_device(len(expected) + 5, mapping, batch, 2, 1, prefix_of(blocks), 8), expected)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_grid_without_work_is_all_padding(mapping, uniform):
    actual = rows_from_device(9, mapping, 3, 8, 2, prefix_of([0, 0, 0]), 8, uniform=uniform)
    assert (actual == PADDING).all()


@kernel
def one_tile_kernel(
    out, domains, batch, q_heads, kv_heads, blocks, prefix, MAPPING: tl.constexpr, REQUESTS: tl.constexpr
):
    """A tile per program, as an attention kernel asks for it: the workgroup is a scalar."""
    workgroup = tl.program_id(0)
    if prefix is None:
        request, head, block = tile_of(workgroup, MAPPING, domains, batch, q_heads, kv_heads, blocks)
    else:
        request, head, block = tile_of_ragged(
            workgroup, MAPPING, domains, batch, q_heads, kv_heads, prefix, REQUESTS
        )
    tl.store(out + workgroup * 4, request)
    tl.store(out + workgroup * 4 + 1, head)
    tl.store(out + workgroup * 4 + 2, block)
    tl.store(out + workgroup * 4 + 3, 0)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("batch", [1, 3], ids=lambda batch: f"B{batch}")
def test_scalar_workgroup(mapping, ragged, batch):
    blocks = [2, 0, 1][:batch]
    prefix = prefix_of(blocks) if ragged else None
    expected = tiles(mapping, batch, 6, 3, blocks if ragged else 2, 4, uniform=not ragged)
    out = torch.full((len(expected) + 2, 4), UNWRITTEN, dtype=torch.int32, device=DEVICE)
    requests = triton.next_power_of_2(batch)
    one_tile_kernel[(len(out),)](out, 4, batch, 6, 3, 2, prefix, MAPPING=mapping, REQUESTS=requests)
    assert_rows(out.cpu().numpy(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mapping="swizzled"), "unknown mapping 'swizzled'"),
        (dict(kv_heads=3), "must be a multiple of kv_heads"),
        (dict(out=torch.empty(48, 4)), r"out is torch.float32 \[48, 4\]: it must be contiguous int32"),
        (dict(out=torch.empty(48, 3, dtype=torch.int32)), r"out is torch.int32 \[48, 3\]"),
        (dict(out=torch.empty(48, 8, dtype=torch.int32)[:, :4]), "it must be contiguous"),
        (dict(out=torch.empty(47, 4, dtype=torch.int32)), "out has 47 rows: the grid has 48 workgroups"),
        (dict(blocks=-1), "blocks holds -1"),
        (dict(blocks=torch.zeros(3, dtype=torch.int64)), r"blocks is torch.int64 \[3\]"),
        (dict(blocks=torch.zeros(2, dtype=torch.int32)), r"contiguous int32 \[batch \+ 1 = 3\]"),
        (dict(blocks=torch.zeros(3, dtype=torch.int32, device="meta")), "blocks is on meta and out on cpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(change, message):
    good = dict(
        out=torch.empty(48, 4, dtype=torch.int32), mapping="head-first", batch=2, q_heads=8, kv_heads=4
    )
    with pytest.raises(ValueError, match=message):
        write_tiles(**{**good, "blocks": 3, "domains": 8, **change})


COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from numa_attention.mapping_device import tiles_kernel

counts = ("rows", "domains", "batch", "q_heads", "kv_heads", "blocks")
targets = [GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx1250", 32), GPUTarget("cuda", 90, 32)]
for target, ragged in itertools.product(targets, (False, True)):
    constants = dict(MAPPING="swizzled-block-first", UNIFORM=False, LONGEST_FIRST=True, REQUESTS=256, ROWS=32)
    signature = dict(out="*i32", prefix="*i32") | dict.fromkeys(counts, "i32")
    if not ragged:
        constants["prefix"] = None
    signature = {name: "constexpr" if name in constants else signature[name] for name in tiles_kernel.arg_names}
    binary = triton.compile(ASTSource(tiles_kernel, signature, constants), target=target)
    print(target.arch, "ragged" if ragged else "uniform", len(binary.kernel))
"""


def test_compiles_for_amd_and_nvidia(tmp_path):
    """The interpreter accepts more than the compiler does; no GPU is needed to compile."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NUMA_SWIZZLE_KERNELS")
    }
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        cwd=Path(sys.modules["numa_attention"].__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 6

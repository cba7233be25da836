"""numa-swizzle bench prefill --mixed and --contiguous: their cases, and that results are compared before times are."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from numa_attention import operation, reference, runner
from tests.support import assert_close
from vllm_numa_backend import cli
from vllm_numa_backend.bench import contestants, contiguous, rows
from vllm_numa_backend.bench.contiguous import ContiguousCase, contiguous_cases, measure_contiguous
from vllm_numa_backend.bench.mixed import make_mixed_tensors, mixed_cases
from vllm_numa_backend.bench.rows import WrongResult
from vllm_numa_backend.commands import bench

TINY = dict(draws=2, requests=6, most_new=40, most_cached=120, q_heads=4, kv_heads=2, head_dim=32)


def test_draws_are_of_all_orders_of_magnitude():
    cases = mixed_cases(torch.bfloat16)
    assert len(cases) == 20 and len({case.name for case in cases}) == 20
    new = [length for case in cases for length in case.query_lens]
    cached = [total - n for case in cases for total, n in zip(case.seq_lens, case.query_lens, strict=True)]
    assert min(new) == 1 and 3000 < max(new) <= 4096 and min(cached) == 0 and 50000 < max(cached) <= 65536
    for below in (10, 100, 1000):
        assert 0.2 < sum(length < below for length in new) / len(new) < 0.9
    for case in cases:
        assert case.batch == len(case.query_lens) == len(case.seq_lens) == 32
        assert list(case.query_lens) == sorted(case.query_lens)
        assert case.query_len == max(case.query_lens) and case.length == max(case.seq_lens)
        assert case.decodes == case.query_lens.count(1)
    assert mixed_cases(torch.bfloat16) == cases


def test_flops_and_bytes_are_those_of_the_requests():
    case = mixed_cases(torch.bfloat16, **TINY)[0]
    pairs = sum(
        seq - new + 1 + i for new, seq in zip(case.query_lens, case.seq_lens, strict=True) for i in range(new)
    )
    assert case.flops == 4 * 32 * 4 * pairs
    assert case.kv_bytes == 2 * sum(case.seq_lens) * 2 * 32 * 2


def test_a_mixed_step_agrees_with_the_reference():
    for case in mixed_cases(torch.bfloat16, dtype=torch.bfloat16, **TINY):
        tensors = make_mixed_tensors(case, device="cpu")
        call, schedule = contestants.ours(tensors, kernels="torch")
        tensors.out.fill_(math.nan)
        runner.ran.clear()
        call(0)
        assert case.decodes > 0 and set(runner.ran) == {"torch-decode", "torch-prefill"}
        step, kv = tensors.step, tensors.kv[0]
        expected, _ = reference.attention(
            tensors.q[0], kv[:, 0], kv[:, 1], step.query_start_loc, step.seq_lens, step.block_table, scale=32**-0.5
        )  # fmt: skip
        assert_close(tensors.out, expected)


def theirs(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_contiguous_tensors_beside_a_peer(causal, device):
    operation.plan.cache_clear()
    timed = []

    def timer(calls):
        for call in calls:
            call()
        timed.extend(calls)
        return [1.0, 2.0]

    case = ContiguousCase(1, 64, 4, 2, causal, head_dim=32)
    row = measure_contiguous(case, device=device, peer=theirs, timer=timer)
    assert (row.ours, row.cudnn) == (1.0, 2.0) and row.variant == "portable-prefill"
    assert row.rate(2.0) == case.flops / 2e12
    assert case.flops == 4 * 32 * (64 * 65 / 2 if causal else 64 * 64) * 4
    with pytest.raises(WrongResult, match="away from cuDNN's"):
        measure_contiguous(case, device=device, peer=lambda *x: 1.05 * theirs(*x), timer=timer)
    assert len(timed) == 2


def test_the_cases_of_contiguous_tensors():
    cases = contiguous_cases(False)
    assert {case.length for case in cases} == {8192, 16384, 32768, 65536}
    assert {(case.q_heads, case.kv_heads) for case in cases} == {(128, 128), (64, 8)}
    assert all(case.name.endswith(", causal") for case in contiguous_cases(True))


@pytest.fixture
def run(monkeypatch, capsys):
    def call(line):
        monkeypatch.setattr(sys, "argv", ["numa-swizzle", "bench", "prefill", *line.split()])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        shown = capsys.readouterr()
        return ending.value.code, shown.out, shown.err

    return call


def test_refusals(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for line, says in (
        ("--contiguous", "needs an NVIDIA GPU"),
        ("--contiguous --mixed", "goes with --causal, --kernel and --rows only"),
        ("--contiguous --window 5", "there is no cache"),
        ("--causal", "goes with --contiguous"),
        ("--mixed", "needs an H100 or H200"),
    ):
        code, _, said = run(line)
        assert code == 2 and says in said and len(said.splitlines()) == 1


def test_contiguous_rows_are_printed(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def measure(case, kernel):
        if case.length == 65536:
            raise RuntimeError("cuDNN takes no such tensor\nat all")
        return contiguous.ContiguousRow(case, kernel, 1e-3, 2e-3)

    monkeypatch.setattr(contiguous, "measure_contiguous", measure)
    code, out, _ = run("--contiguous --rows 0,5 --kernel hopper-prefill")
    assert code == 0 and "2.00" in out and "64/8" in out and "hopper-prefill" in out
    answer = json.loads(run("--contiguous --rows 1 --json")[1])
    assert [(row["row"], row["ms"], row["cudnn_ms"]) for row in answer] == [(1, 1.0, 2.0)]
    code, _, said = run("--contiguous --rows 3")
    assert code == 2 and "cuDNN takes no such tensor" in said and "at all" not in said


def test_mixed_measures_twenty_rows(run, monkeypatch):
    seen = []

    def measure(case, kernel):
        seen.append(case)
        return rows.Row(case, "portable-decode, portable-prefill", 1e-3, 2e-3, 3e-3)

    monkeypatch.setattr(bench, "require_gpu_and_vllm", lambda: None)
    monkeypatch.setattr(bench, "measure_or_say_why_not", measure)
    code, out, _ = run("--mixed")
    assert code == 0 and len(seen) == 20 and "draw 19" in out and "portable-decode, portable-prefill" in out
    assert "2.00" in out

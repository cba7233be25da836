"""Contiguous and transposed tensors, as `numa_attention.attention` hands them to the sm_90 prefill kernel."""

from __future__ import annotations

import math

import pytest
import torch

from numa_attention import operation, runner
from numa_attention.prefill import hopper, hopper_launch
from numa_attention.shapes import CONTIGUOUS, LayerShape
from numa_attention.topology import pretend
from tests.gluon.interpreted import interpreted
from tests.support import assert_close

BATCH, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 64
H200 = pretend("H200")


@pytest.mark.parametrize("by_tokens", [False, True], ids=["heads follow", "tokens follow"])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(48, 48, True), (20, 80, True), (70, 32, False)])
def test_keys_in_a_row_are_pages(by_tokens, queries, keys, causal):
    random = torch.Generator().manual_seed(queries)
    repeats = 1 if by_tokens else BATCH

    def made(heads: int, tokens: int) -> torch.Tensor:
        sizes = (BATCH, tokens, heads, DIM) if by_tokens else (BATCH, heads, tokens, DIM)
        x = torch.randn(sizes, generator=random).bfloat16()
        return x.transpose(1, 2) if by_tokens else x

    q, k, v = made(Q_HEADS, queries), made(KV_HEADS, keys), made(KV_HEADS, keys)
    out = torch.full_like(q, math.nan)
    shape = LayerShape(
        Q_HEADS * repeats, KV_HEADS * repeats, DIM, DIM, torch.bfloat16, torch.bfloat16, CONTIGUOUS
    )
    call = operation.Call(
        device=q.device,
        shape=shape,
        requests=BATCH if by_tokens else 1,
        queries=queries,
        keys=keys,
        causal=causal,
        kernels="auto",
        kernel="hopper-prefill",
        mapping=None,
        placement="dispatch",
    )
    shape, variant = operation.shape_and_variant(call, H200, "triton")
    assert variant.name == "hopper-prefill" and shape.page_size == keys & -keys
    schedule = operation.plan_with(call, H200, shape, variant)
    runner.ran.clear()
    with interpreted(hopper_launch, hopper.prefill_kernel, "sm_90"):
        runner.attend(*operation.rows_of((q, k, v, out), shape, by_tokens), schedule, scale=DIM**-0.5)
    assert dict(runner.ran) == {"hopper-prefill": 1}
    k, v = (x.double().repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q.double() @ k.mT * DIM**-0.5
    if causal:
        position = torch.arange(queries)[:, None] + keys - queries
        scores.masked_fill_(torch.arange(keys) > position, -math.inf)
    assert_close(out, scores.softmax(-1) @ v)

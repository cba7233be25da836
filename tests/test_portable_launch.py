"""The short way round Triton's argument analysis hands every argument to the place where the kernel declares it."""

from __future__ import annotations

import pytest
import torch

from numa_attention.decode import portable as decode
from numa_attention.prefill import portable as prefill
from tests.kernel_step import make_planner, run, step_of
from tests.support import make_paged_case


@pytest.mark.parametrize(
    ("module", "kernel", "num_decodes"),
    [(decode, decode.decode_kernel, 1), (prefill, prefill.prefill_kernel, 0)],
    ids=["decode", "prefill"],
)
def test_arguments_and_constants_come_in_the_order_of_the_kernel(
    module, kernel, num_decodes, device, monkeypatch
):
    launches = []
    monkeypatch.setattr(module._launch, "_launch", lambda *call: launches.append(call))
    # every stride and length is another number, so that a swap shows
    case = make_paged_case(
        [1 if num_decodes else 5], [37], q_heads=6, kv_heads=3, layout="kv-last", device=device
    )
    schedule = make_planner(case, kernels="triton").plan(step_of(case, num_decodes))
    sinks, slopes = torch.zeros(6, device=device), torch.ones(6, device=device)
    run(case, schedule, scale=0.25, soft_cap=7.0, sinks=sinks, alibi_slopes=slopes)

    ((_, _, arguments, constants, _),) = launches
    names = list(kernel.arg_names)
    assert names == [*names[: len(arguments)], *constants], "constants come last, in the order declared"
    given = dict(zip(names, arguments, strict=False))
    tensors = {
        "q": case.q, "k_pages": case.k_pages, "v_pages": case.v_pages, "block_table": case.block_table,
        "query_start_loc": case.query_start_loc, "seq_lens": case.seq_lens, "sinks": sinks, "alibi_slopes": slopes,
    }  # fmt: skip
    for name, tensor in tensors.items():
        assert given[name].data_ptr() == tensor.data_ptr(), name
    assert (given["scale"], given["soft_cap"]) == (0.25, 7.0)
    strides = {
        "q": case.q, "out": given["out"], "lse": given["lse"], "k": case.k_pages, "v": case.v_pages
    }  # fmt: skip
    for prefix, tensor in strides.items():
        first = {"k": "page", "v": "page"}.get(prefix, "token")
        expected = [f"{prefix}_{first}_stride", f"{prefix}_{'token' if first == 'page' else 'head'}_stride"]
        assert [given[name] for name in expected] == list(tensor.stride()[:2])
    assert given["k_head_stride"] == case.k_pages.stride(2) and given["v_head_stride"] == case.v_pages.stride(
        2
    )
    assert given["block_table_stride"] == case.block_table.stride(0)

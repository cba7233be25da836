"""AMD's own attention kernels, of the distribution amd-aiter, as two variants: aiter-decode and aiter-prefill.

Both read our paged cache in place: `paged_attention_v1` takes strided [page, token, KV head, head_dim] views and a
block table, `flash_attn_varlen_func` the same where a page is a multiple of 128 tokens. What they cannot do is said by
`why_not`, before anything is planned. PyPI's `aiter`, of the same import name, is an unrelated package.

`CALLS` names the parameters used; they are those of amd-aiter 0.1.7.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache

import torch

from numa_attention.shapes import LayerShape, has_plain_cache
from numa_attention.topology import Topology

DISTRIBUTION = "amd-aiter"
CHOICES = ("auto", "never", "always")
GENERATIONS = ("gfx942", "gfx950")
DECODE, PREFILL = "aiter-decode", "aiter-prefill"
PARTITION = 256  # tokens of a split of aiter's decode
PREFILL_PAGE_MULTIPLE = 128
DECODE_PAGES = (16, 32)
DECODE_HEAD_DIMS = (64, 128, 256)
MOST_PREFILL_HEAD_DIM = 256
MOST_GROUP = 16
CALLS = {
    "paged_attention_v1": (
        "out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "block_tables", "cu_query_lens",
        "context_lens", "max_context_len", "alibi_slopes", "kv_cache_dtype", "kv_cache_layout", "logits_soft_cap",
        "k_scale", "v_scale", "fp8_out_scale", "partition_size", "mtp", "sliding_window",
    ),
    "flash_attn_varlen_func": (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
        "logits_soft_cap", "causal", "window_size", "alibi_slopes", "block_table", "out",
    ),
}  # fmt: skip


@cache
def installed() -> str | None:
    """The version of amd-aiter here, or None."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(
    phase: str,
    shape: LayerShape,
    topology: Topology,
    features: frozenset[str],
    *,
    max_decode_query: int = 1,
) -> str | None:
    """Why aiter's kernel cannot run a phase of a layer, in a few words, or None.

    features: what the layer's calls have, of "sinks", "alibi", "soft_cap", "lse".
    """
    if topology.generation not in GENERATIONS:
        return f"amd-aiter is for {' and '.join(GENERATIONS)}"
    if installed() is None:
        return "amd-aiter is not installed"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    for feature in ("sinks", "lse"):
        if feature in features:
            return f"it has no {feature}"
    if shape.general or not has_plain_cache(shape):
        return "it lacks options of this layer"
    float8 = shape.kv_dtype != shape.dtype
    if phase == "prefill":
        if float8:
            return "its prefill reads no float8 cache"
        if shape.page_size % PREFILL_PAGE_MULTIPLE:
            return f"its prefill takes pages of a multiple of {PREFILL_PAGE_MULTIPLE} tokens"
        if max(shape.head_dim, shape.head_dim_v) > MOST_PREFILL_HEAD_DIM:
            return f"its prefill takes head_dim up to {MOST_PREFILL_HEAD_DIM}"
        return None
    if shape.window >= 0:
        return "its decode is not used with a window"
    if max_decode_query > 1:
        return "its decode takes one query token a request"
    if shape.head_dim != shape.head_dim_v or shape.head_dim not in DECODE_HEAD_DIMS:
        return f"its decode takes head_dim {', '.join(map(str, DECODE_HEAD_DIMS))}"
    if shape.page_size not in DECODE_PAGES:
        return f"its decode takes pages of {' or '.join(map(str, DECODE_PAGES))} tokens"
    if shape.group > MOST_GROUP:
        return f"its decode takes up to {MOST_GROUP} query heads a KV head"
    if float8 and shape.kv_dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        return "its decode reads e4m3 caches only"
    return None


def chosen(
    phase: str,
    shape: LayerShape,
    topology: Topology,
    setting: str,
    features: frozenset[str],
    *,
    max_decode_query: int = 1,
) -> bool:
    """Whether aiter's kernel takes a phase of a layer. setting: one of CHOICES.

    "auto" takes the one whose speed is published: prefill in bfloat16 with head_dim 128, full attention without extras
    (542 TFLOP/s causal on an MI300X, 64/8 heads, 16k tokens), where aiter runs its assembly kernel. "always" takes
    whatever it can run.
    """
    if setting not in CHOICES:
        raise ValueError(f"aiter={setting!r} is unknown: choose one of {', '.join(CHOICES)}.")
    if setting == "never" or why_not(phase, shape, topology, features, max_decode_query=max_decode_query):
        return False
    if setting == "always":
        return True
    heads = (shape.head_dim, shape.head_dim_v)
    return (
        phase == "prefill"
        and shape.dtype == torch.bfloat16
        and heads == (128, 128)
        and shape.window < 0
        and not features
    )


@cache
def entry_point(name: str):
    """aiter's function of that name, imported when it is first needed.

    Raises ImportError where the package of that import name is not AMD's.
    """
    module = importlib.import_module("aiter")
    function = getattr(module, name, None)
    if function is None:
        raise ImportError(
            f"the installed package aiter has no {name}: it is not AMD's; "
            "run: pip uninstall aiter && pip install --pre amd-aiter"
        )
    return function


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of the decoding requests of a `schedule.Schedule`; see `runner.attend` for the rest.

    Raises ValueError where the strides of K and V differ (aiter reads both with K's), and for sinks and lse.
    """
    _refuse(sinks=sinks, lse=lse)
    shape, batch = schedule.shape, schedule.batch
    requests = batch.num_decodes
    if k_pages.stride() != v_pages.stride():
        raise ValueError(
            f"aiter reads K and V with the same strides; these have {k_pages.stride()} and {v_pages.stride()}: "
            "set NUMA_SWIZZLE_AITER=never"
        )
    held = batch.block_table.shape[1] * shape.page_size
    # a graph is replayed at lengths that nobody knows yet
    longest = held if _capturing(q) else min(batch.max_seq_len, held)
    parts = -(-longest // PARTITION)
    rows = requests * shape.q_heads * parts
    workspace = torch.empty(
        rows * (shape.head_dim * q.element_size() + 2 * 4), dtype=torch.uint8, device=q.device
    )
    float8 = shape.kv_dtype != shape.dtype
    one = schedule.decode.one
    entry_point("paged_attention_v1")(
        out[:requests],
        workspace,
        q[:requests],
        k_pages.view(torch.uint8) if float8 else k_pages,
        v_pages.view(torch.uint8) if float8 else v_pages,
        float(scale),
        batch.block_table[:requests],
        None,  # request r's query is row r: one query token each
        batch.seq_lens[:requests],
        longest,
        alibi_slopes,
        "fp8" if float8 else "auto",
        "NHD",
        float(soft_cap),
        one if k_scale is None else k_scale,
        one if v_scale is None else v_scale,
        None,
        PARTITION,
        1,
        0,
    )


def prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    schedule,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of the prefilling requests of a `schedule.Schedule`; see `runner.attend` for the rest.

    Raises ValueError for sinks, scales and lse, which it does not have.
    """
    _refuse(sinks=sinks, lse=lse, k_scale=k_scale, v_scale=v_scale)
    shape, batch, plan = schedule.shape, schedule.batch, schedule.prefill
    rows = slice(batch.num_decode_tokens, schedule.tokens)
    entry_point("flash_attn_varlen_func")(
        q[rows],
        k_pages,
        v_pages,
        plan.query_starts,
        plan.key_starts,
        batch.max_query_len,
        batch.max_seq_len,
        softmax_scale=float(scale),
        logits_soft_cap=float(soft_cap),
        causal=batch.causal,
        window_size=(shape.window, 0 if batch.causal else -1) if shape.window >= 0 else (-1, -1),
        alibi_slopes=alibi_slopes,
        block_table=batch.block_table[batch.num_decodes :],
        out=out[rows],
    )


def _refuse(**options: torch.Tensor | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"aiter's kernel has no {name}: plan with it among the features, or aiter='never'"
            )


def _capturing(q: torch.Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()

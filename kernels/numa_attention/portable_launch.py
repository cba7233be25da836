"""What the launches of the two portable kernels share: a layer's arguments, the constants, and the launch key.

Both kernels take first what their schedule made, then the arguments of a layer's call, then the constants, in the order
in which this file hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from numa_attention.direct_launch import Launched
from numa_attention.jit import Launcher, pointer_traits
from numa_attention.shapes import FLOAT8, LayerShape
from numa_attention.variants import Variant, next_power_of_2

# arguments that are read one number at a time: their alignment would only multiply the compiled kernels
ANY_ALIGNMENT = [
    "block_table", "query_start_loc", "seq_lens", "sinks", "alibi_slopes", "causal_flags", "spans",
    "q_scale", "k_scale", "v_scale", "out_scale",
]  # fmt: skip
BY_REQUEST = 2  # value of CAUSAL where each request has its own flag


def block_dim(head_dim: int) -> int:
    """Columns of a tile that holds head_dim: a power of two that a matrix instruction takes."""
    return next_power_of_2(max(head_dim, 16))


def constants(
    shape: LayerShape,
    variant: Variant,
    *,
    causal: int,
    has_spans: bool,
    clamp_spans: bool,
    has_cap: bool,
    has_alibi: int,
    has_sink: bool,
    has_lse: bool,
    has_q_scale: bool,
    has_scales: bool,
    has_out_scale: bool,
    out_largest: float,
) -> dict[str, int | bool | float]:
    """The compile-time constants that both kernels declare, in their order."""
    return dict(
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_V=shape.head_dim_v,
        BLOCK_M=variant.block_m,
        BLOCK_N=variant.block_n,
        BLOCK_D=block_dim(shape.head_dim),
        BLOCK_DV=block_dim(shape.head_dim_v),
        PAGE_SIZE=shape.page_size,
        WINDOW=shape.window,
        CAUSAL=causal,
        HAS_SPANS=has_spans,
        CLAMP_SPANS=clamp_spans,
        HAS_CAP=has_cap,
        HAS_ALIBI=has_alibi,
        HAS_SINK=has_sink,
        HAS_LSE=has_lse,
        HAS_Q_SCALE=has_q_scale,
        HAS_SCALES=has_scales,
        HAS_OUT_SCALE=has_out_scale,
        OUT_LARGEST=out_largest,
    )


def shard_constants(shape: LayerShape) -> dict[str, int]:
    """The compile-time constants of kernels that read a cache sharded over ranks."""
    return dict(RANKS=shape.shard.ranks, RANK=shape.shard.rank, INTERLEAVE=shape.shard.interleave)


def _row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of page, token and KV head; without pages the first is not used."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])


class LayerLauncher:
    """Launches one of the two kernels, for the first layer of a step; `direct_launch.Repeat` serves the others."""

    def __init__(
        self,
        kernel,
        own_constants: Callable[..., dict] | None = None,
        traits: Callable[[torch.Tensor, torch.Tensor], Hashable] | None = None,
    ) -> None:
        """own_constants: the constants that the kernel declares after the shared ones, in its order, made from the
        shape, the variant and, where there are `traits`, what these say of the keys and values of a call.
        """
        self._launch = Launcher(kernel)
        self._own_constants = own_constants or (lambda shape, variant: {})
        self._traits = traits
        self._constants: dict[Hashable, tuple[dict, dict]] = {}

    def __call__(
        self,
        workgroups: int,
        own_arguments: tuple,
        variant: Variant,
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
        alibi_sqrt: bool = False,
        spans: torch.Tensor | None = None,
        clamp_spans: bool = False,
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out_scale: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Launched:
        """own_arguments: what the kernel takes before the layer's arguments; see `runner.attend` for those.

        The schedule's buffers are allocated whole, hence aligned and small: the key need not tell them apart.
        """
        shape, batch = schedule.shape, schedule.batch
        p_lse = out if lse is None else lse
        causal, flags = batch.causal, q
        if not isinstance(causal, bool):
            causal, flags = BY_REQUEST, batch.causal
        strides = (
            *q.stride()[:2], *out.stride()[:2], *p_lse.stride()[:2],
            *_row_strides(k_pages), *_row_strides(v_pages), batch.block_table.stride(0),
        )  # fmt: skip
        traits = () if self._traits is None else (self._traits(k_pages, v_pages),)
        key = (
            q.get_device(), shape, variant, traits, strides, pointer_traits(q, k_pages, v_pages, out, p_lse),
            q.dtype, v_pages.dtype, out.dtype, lse is None, causal, soft_cap > 0.0, q_scale is None,
            k_scale is None, out_scale is None, None if sinks is None else sinks.dtype,
            None if alibi_slopes is None else alibi_slopes.dtype, alibi_sqrt, spans is None, clamp_spans,
        )  # fmt: skip
        compile_time = self._constants.get(key)
        if compile_time is None:
            shared = constants(
                shape,
                variant,
                causal=int(causal),
                has_spans=spans is not None,
                clamp_spans=clamp_spans,
                has_cap=soft_cap > 0.0,
                has_alibi=0 if alibi_slopes is None else 2 if alibi_sqrt else 1,
                has_sink=sinks is not None,
                has_lse=lse is not None,
                has_q_scale=q_scale is not None,
                has_scales=k_scale is not None,
                has_out_scale=out_scale is not None,
                out_largest=torch.finfo(out.dtype).max if out.dtype in FLOAT8 else 0.0,
            )
            options = dict(num_warps=variant.num_warps, num_stages=variant.num_stages)
            if variant.matrix_rows:
                options |= {"matrix_instr_nonkdim": variant.matrix_rows, "kpack": variant.kpack}
            if variant.cluster > 1:
                options["num_ctas"] = variant.cluster
            compile_time = {**shared, **self._own_constants(shape, variant, *traits)}, options
            self._constants[key] = compile_time
        arguments = (
            *own_arguments, q, k_pages, v_pages, out, p_lse,
            batch.block_table, batch.query_start_loc, batch.seq_lens,
            q if sinks is None else sinks, q if alibi_slopes is None else alibi_slopes,
            flags, q if spans is None else spans, q if q_scale is None else q_scale,
            q if k_scale is None else k_scale, q if v_scale is None else v_scale,
            q if out_scale is None else out_scale, float(scale), float(soft_cap),
            0 if spans is None else spans.shape[1], *strides,
        )  # fmt: skip
        grid = workgroups, 1, 1
        direct = self._launch(key, grid, arguments, *compile_time)
        return Launched(variant.name, direct, grid, (*arguments, *compile_time[0].values()))

"""What NUMA_SWIZZLE supports, as vLLM asks it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType

from numa_attention.limits import fault_of_head_dim
from vllm_numa_backend import NAME, settings
from vllm_numa_backend.compat import PAGE_MULTIPLE, BackendBase
from vllm_numa_backend.remedy import another_backend

FP8_CAPABILITY = 89


class NumaSwizzleBackend(BackendBase):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
    ]  # fmt: skip
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        from vllm_numa_backend.impl import NumaSwizzleImpl

        return NumaSwizzleImpl

    @staticmethod
    def get_builder_cls() -> type:
        from vllm_numa_backend.metadata import NumaSwizzleMetadataBuilder

        return NumaSwizzleMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return fault_of_head_dim(head_size) is None

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % PAGE_MULTIPLE == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Prefill is planned from the query lengths on the CPU, so they must be the true ones."""
        return False

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> list[str]:
        """Every reason why this model cannot run, in words; an empty list where it can.

        vLLM's own list decides, so that what a later release asks about is refused until we say otherwise.
        """
        found = super().validate_configuration(head_size, dtype, kv_cache_dtype, block_size, *args, **kwargs)
        dtypes = ", ".join(map(_short, cls.supported_dtypes))
        kv_dtypes = ", ".join(cls.supported_kv_cache_dtypes)
        elsewhere = another_backend()
        words = {
            "head_size not supported": f"head_dim {head_size} (vLLM's head_size) {fault_of_head_dim(head_size)}: "
            f"{elsewhere}",
            "dtype not supported": f"dtype {_short(dtype)} is not one of {dtypes}: give --dtype bfloat16",
            "kv_cache_dtype not supported": f"kv_cache_dtype {kv_cache_dtype} is not one of {kv_dtypes}: "
            "give --kv-cache-dtype auto",
            "block_size not supported": f"block_size {block_size} is not a multiple of {PAGE_MULTIPLE}: "
            f"give --block-size {PAGE_MULTIPLE}",
            "MLA not supported": f"multi-head latent attention (MLA) is not supported: {elsewhere}",
            "sparse not supported": f"sparse attention is not supported: {elsewhere}",
            "per-head quant scales not supported": "KV cache scales per head are not supported: "
            f"give --kv-cache-dtype auto, or {elsewhere}",
            "R-SWA not supported": f"reference sliding window attention (R-SWA) is not supported: {elsewhere}",
            "PCP not supported": "prefill context parallelism is not supported: "
            "give --prefill-context-parallel-size 1",
            "batch invariance not supported": f"VLLM_BATCH_INVARIANT is not supported: unset it, or {elsewhere}",
        }
        fp8 = _fault_of_fp8(kv_cache_dtype, kwargs.get("device_capability"))
        told = [words.get(reason, f"{reason}: {elsewhere}") for reason in found]
        return told + fp8 + _faults_of_settings()


def _fault_of_fp8(kv_cache_dtype: str | None, device_capability: Any) -> list[str]:
    """Why an FP8 cache cannot be read on this device: Triton converts e4m3 from compute capability 8.9 on."""
    from vllm.platforms import current_platform

    if (
        kv_cache_dtype not in ("fp8", "fp8_e4m3")
        or not current_platform.is_cuda()
        or device_capability is None
    ):
        return []
    if device_capability.to_int() >= FP8_CAPABILITY:
        return []
    has = device_capability.as_version_str()
    return [
        f"kv_cache_dtype {kv_cache_dtype} needs compute capability 8.9, this GPU has {has}: "
        "give --kv-cache-dtype fp8_e5m2 or auto"
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _faults_of_settings() -> list[str]:
    from vllm.platforms import current_platform

    try:
        reason = settings.why_unusable(settings.current(), current_platform.device_type)
    except settings.SettingsError as error:
        reason = str(error)
    return [] if reason is None else [reason.rstrip(".")]

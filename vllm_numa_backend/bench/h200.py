"""What FlashAttention-3 of vLLM 0.25.1 reached on one H200, to tell a sound run from a disturbed one.

Microseconds a call in the order of `cases.decode_cases` and `cases.prefill_cases`, torch 2.11, Triton 3.6. A run in
which it is more than TOLERANCE slower says nothing about anybody.
"""

from __future__ import annotations

TOLERANCE = 0.03
FA3_DECODE_US = {
    "bf16": (265, 980, 55, 511, 984, 144, 43, 150, 272, 495),
    "fp8": (209, 730, 62, 362, 683, 111, 42, 111, 223, 400),
}
FA3_PREFILL_TFLOPS = {"bf16": (599, 615, 540, 577)}


def is_disturbed(phase: str, kv_dtype: str, row: int, seconds: float, tflops: float) -> bool:
    """Whether FlashAttention-3 was more than TOLERANCE slower in this row than on an undisturbed H200."""
    if phase == "decode":
        return seconds * 1e6 > FA3_DECODE_US[kv_dtype][row] * (1 + TOLERANCE)
    known = FA3_PREFILL_TFLOPS.get(kv_dtype)
    return known is not None and tflops < known[row] * (1 - TOLERANCE)

"""The sm_90 prefill kernel over an e4m3 cache, under the Gluon interpreter and on a GPU, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from numa_attention.prefill.hopper_variant import FLOAT8_FORM
from numa_attention.testing import hopper_assembly
from tests.gluon.test_hopper_prefill import check
from tests.hopper_prefill_cases import float8_case

hopper_assembly.register()


def test_one():
    check(float8_case([40, 3], [140, 70], q_heads=2, kv_heads=1), FLOAT8_FORM)

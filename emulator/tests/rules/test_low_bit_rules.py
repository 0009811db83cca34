"""R80: floats of eight bits or fewer."""

from __future__ import annotations

import torch
from ascend_emulator.ops import OPS

from emulator.tests.contracts import Broken, broken_calls, check_refusal

BROKEN: Broken = {
    80: {
        "float8_e4m3fn": (
            lambda: OPS["npu::npu_dynamic_quant"](torch.ones(2, 32), dst_type=torch.float8_e4m3fn),
            "float8_e4m3fn",
        ),
        "float8_e5m2": (
            lambda: OPS["npu::npu_quantize"](torch.zeros(2, 32), torch.ones(1), None, torch.float8_e5m2),
            "float8_e5m2",
        ),
    }
}


@broken_calls(BROKEN)
def test_broken_call_is_refused_with_its_rule(rule, run, words):
    check_refusal(rule, run, words)

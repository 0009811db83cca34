"""Structured output on CPU in bfloat16.

vLLM applies a grammar's bit mask to the logits with xgrammar, whose CPU kernel (0.1.25) takes float32 only and raises
for anything else, in the engine's process. The mask only sets logits to minus infinity, so that a float32 copy and
back changes no other value.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING

from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, replace

if TYPE_CHECKING:
    import torch


def install_bitmask(module: ModuleType) -> None:
    import torch as torch_

    original = module.apply_grammar_bitmask
    expect_parameters(original, "scheduler_output", "input_batch", "logits", "device")
    expect_source(original, "xgr.apply_token_bitmask_inplace(")

    @functools.wraps(original)
    def apply_grammar_bitmask(scheduler_output, input_batch, logits: torch.Tensor, device: torch.device) -> None:
        if logits.device.type != "cpu" or logits.dtype == torch_.float32:
            return original(scheduler_output, input_batch, logits, device)
        wide = logits.float()
        original(scheduler_output, input_batch, wide, device)
        logits.copy_(wide)

    replace(module, "apply_grammar_bitmask", apply_grammar_bitmask, copies=("vllm.v1.worker.gpu_model_runner",))

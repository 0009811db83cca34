"""All checks, by the name of the operation or of the function."""

from __future__ import annotations

from npu_gptoss.verify import attention_checks, dense_checks, function_checks, graphs_checks, moe_checks
from npu_gptoss.verify.calls import Check

CHECKS: dict[str, Check] = {
    check.name: check
    for module in (attention_checks, moe_checks, dense_checks, graphs_checks, function_checks)
    for check in module.CHECKS
}

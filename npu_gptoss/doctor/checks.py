"""All checks of the doctor, in the order of the report. docs/doctor.md describes each."""

from __future__ import annotations

SELF_TESTS = (
    *("self-test-sink", "self-test-window", "self-test-attention", "self-test-bias", "self-test-activation"),
    *("self-test-moe", "self-test-dense", "self-test-nz", "self-test-graph"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "Versions": ("machine", "python", "torch", "torch-npu", "vllm", "vllm-ascend"),
    "CANN and driver": ("cann", "nnal", "driver", "device-files"),
    "Plugin": ("plugin", "plugin-order", "platform-plugin", "registration"),
    "Servers": ("variables", "exposure"),
    "Device and kernels": ("torch-works", "device", "attention-operator", "graph-updates", "kernels"),
    "Model": ("vocabulary", "checkpoint", "memory", "expert-buffer", "graphs"),
    "Self-test": (*SELF_TESTS, "bandwidth", "self-test-record"),
}
CHECKS = tuple(check for checks in GROUPS.values() for check in checks)

"""All checks of the doctor, in the order of the report. docs/doctor.md describes each."""

from __future__ import annotations

from npu_gptoss.doctor import cann, plugins, stack

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
# The checks that open no device and import no torch: a container's server starts after them.
QUICK = {
    "python": stack.python,
    "torch": stack.torch,
    "torch-npu": stack.torch_npu,
    "vllm": stack.vllm,
    "vllm-ascend": stack.vllm_ascend,
    "cann": cann.toolkit,
    "nnal": cann.nnal,
    "driver": cann.driver,
    "device-files": cann.device_files,
    "plugin": plugins.discovered,
    "platform-plugin": plugins.platforms,
}

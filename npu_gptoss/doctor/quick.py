"""The checks that open no device and import no torch: the doctor's first, and those before a container's server."""

from __future__ import annotations

from npu_gptoss.doctor import cann, plugins, stack

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

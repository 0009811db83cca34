"""gpt-oss under stock `vllm serve` on Huawei Ascend 910B, and the same code on CUDA and CPU.

A tier imports those below it and none above it:

    serving      plugin, serving                        everything that knows vLLM
    engine       engine, frontend, harmony              the offline engine, the chat APIs, harmony's tokens
    operations   model, dense, attention, moe, graphs   gpt-oss itself: operations, their definitions, their kernels
    kernels      kernels                                registry, selection, platform
    tools        verify, doctor, bench, tiny            checks, measurements and test checkpoints

Importing this package imports nothing else: no torch, no vLLM, no device.
"""

__version__ = "0.1.0"

"""gpt-oss under stock `vllm serve` on Huawei Ascend 910B, and the same code on CUDA and CPU.

Importing this package imports nothing else: no torch, no vLLM, no device.
"""

__version__ = "0.1.0"

"""gpt-oss under `vllm serve` on NVIDIA GPUs, from vLLM 0.33 on: the offline engine's model inside vLLM.

`model.py` is the class that vLLM builds; `cache.py` describes each layer's KV cache to vLLM.
"""

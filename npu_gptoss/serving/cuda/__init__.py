"""gpt-oss under `vllm serve` on NVIDIA GPUs, from vLLM 0.33 on: the offline engine's model as vLLM's.

`model.py` is the class that vLLM builds, `cache.py` what vLLM asks of a layer whose keys and values it keeps.
"""

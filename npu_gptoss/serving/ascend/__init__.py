"""gpt-oss under vllm-ascend: all code that depends on vllm-ascend's interfaces.

vllm-ascend keeps its platform, worker, model runner, layers, rope, dispatchers and collectives of the experts, graph
capture, and the operator that splits compiled graphs at attention. Ours are the attention backend (sinks and windows),
the experts' arithmetic between dispatch and combine, the refusals, and the repairs of `compat/start/ascend.py`. Other
platforms import nothing from here; an import opens no device.
"""

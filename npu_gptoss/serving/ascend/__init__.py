"""gpt-oss under vllm-ascend 0.11.0: everything in this package that knows it.

What is vllm-ascend's stays vllm-ascend's: platform, worker, model runner, layers, rope, dispatchers and collectives of
the experts, graph capture, the operator that splits compiled graphs at attention. Ours are the attention backend (sinks
and windows), the arithmetic between dispatch and combine of the experts, what is refused, and the few repairs of
`compat/start/ascend.py`. Nothing here is imported on another platform; importing it opens no device.
"""

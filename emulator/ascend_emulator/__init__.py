"""An emulated Ascend 910B: the real torch-npu and vllm-ascend wheels on stub libraries, with contracts that bite."""

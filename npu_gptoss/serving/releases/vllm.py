"""vLLM's names and shapes in the release of this process: `from npu_gptoss.serving.releases.vllm import …`."""

import functools

from npu_gptoss.serving.releases import name_here

__getattr__ = functools.partial(name_here, "vllm")

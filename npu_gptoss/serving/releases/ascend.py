"""vllm-ascend's names and shapes in the release of this process; `releases.vllm` has vLLM's."""

import functools

from npu_gptoss.serving.releases import name_here

__getattr__ = functools.partial(name_here, "ascend")

"""gpt-oss inside vLLM: everything in this package that knows vLLM.

`plugin.register` is the only way in. Importing this package imports neither vLLM nor torch.
"""

import logging

logger = logging.getLogger("vllm.npu_gptoss")  # below "vllm", so that vLLM's own handlers and --log-config apply

"""The offline engine: paged cache, continuous batching and sampling on the same public ops that serving uses.

In the order in which a request travels: `request` (the parameters), `text` (words to tokens), `scheduler` and
`kv_cache` (the steps and blocks of a request), `batch` (the tensors of one step), the model, `sampling` (logits
to a token), `engine` (the loop). `command` is `npu-gptoss generate`.
"""

from npu_gptoss.engine.engine import Engine
from npu_gptoss.engine.request import Request, Result, SamplingParams, TokenLogprobs

__all__ = ["Engine", "Request", "Result", "SamplingParams", "TokenLogprobs"]

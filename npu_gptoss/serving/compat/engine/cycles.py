"""A request that is done leaves memory at once.

The engine freezes what it has after its start, so Python's search for cycles looks at what came later only when that is
a quarter of it, after thousands of requests. Until then a cycle holds each request, its tokens and its grammar.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import SCHEDULER


@repair("request-cycle", f"{SCHEDULER}:Scheduler._free_blocks", upstream="vllm issue 31200", until="0.23")
def install(module: ModuleType) -> None:
    """With the prefix cache a request holds itself, and the engine's memory grows by it and its grammar."""
    from vllm.v1.request import Request

    expect_source(Request.__init__, "self.get_hash_new_full_blocks = partial(block_hasher, self)")
    expect_source(Request.append_output_token_ids, "if self.get_hash_new_full_blocks is not None:")

    @around(module.Scheduler, "_free_blocks")
    def _free_blocks(original: Original, self: Any, request: Any) -> None:
        original(self, request)
        request.get_hash_new_full_blocks = None

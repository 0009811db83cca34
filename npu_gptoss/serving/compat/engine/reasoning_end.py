"""Structured output: bfloat16 logits on a CPU, and the position in a conversation where the answer begins.

vLLM applies a grammar's bit mask to the logits with xgrammar, whose CPU kernel (0.1.25) takes float32 only and raises
for other types, in the engine's process. The mask only sets logits to minus infinity, so a float32 copy and back
changes no other value.

The grammar restricts the answer, not the reasoning. 0.11.0 looks for `<|start|>assistant<|channel|>final<|message|>`
anywhere in the conversation. If earlier answers are rendered with their channel (as the format requires), it finds one
of these and restricts the first token of the turn, so that the model cannot even write its header. It does not
recognise the header that the model writes for JSON, `final <|constrain|>json`. A plain text on /v1/completions has no
header: there 0.11.0 accepts a grammar and never applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import COMPLETION_SERVING, REASONING, RUNNER

if TYPE_CHECKING:
    import torch


@repair(
    "cpu-grammar-bitmask",
    f"{RUNNER}:apply_grammar_bitmask",
    releases=("0.11",),
    upstream="vllm PR 32384",
    until="0.23",
)
def install_bitmask(module: ModuleType) -> None:
    """xgrammar's CPU kernel takes only float32 logits, so the first structured output in bfloat16 ends the engine."""
    import torch as torch_

    expect_parameters(module.apply_grammar_bitmask, "scheduler_output", "input_batch", "logits", "device")
    expect_source(module.apply_grammar_bitmask, "xgr.apply_token_bitmask_inplace(")

    @around(module, "apply_grammar_bitmask")
    def apply_grammar_bitmask(
        original: Callable[..., None], scheduler_output, input_batch, logits: torch.Tensor, device: torch.device
    ) -> None:
        if logits.device.type != "cpu" or logits.dtype == torch_.float32:
            original(scheduler_output, input_batch, logits, device)
            return
        wide = logits.float()
        original(scheduler_output, input_batch, wide, device)
        logits.copy_(wide)


def answer_has_begun(token_ids: Sequence[int], header: Sequence[int]) -> bool:
    """Returns whether the last message in these tokens is an answer with a complete header.

    `header` holds the five tokens of `<|start|>assistant<|channel|>final<|message|>`.
    """
    start, assistant, channel, final, message = header
    header_end = None
    for i in range(len(token_ids) - 1, -1, -1):
        if token_ids[i] == message:
            header_end = i
        elif token_ids[i] == start:
            if header_end is None or token_ids[i + 1] != assistant:
                return False
            spelled = list(token_ids[i + 1 : header_end])
            return (channel, final) in pairwise(spelled)
    return True  # a plain text of /v1/completions, no conversation: all of it is the answer


@repair(
    "completion-structures", f"{COMPLETION_SERVING}:OpenAIServingCompletion.__init__", releases=("0.23",), until="0.33"
)
def install_completions(serving: ModuleType) -> None:
    """A structure on /v1/completions is never applied: the engine waits for the end of a reasoning, and a completion
    has none."""
    completion = serving.OpenAIServingCompletion
    expect_parameters(completion.__init__, "self", "engine_client")
    expect_source(completion._create_completion, "generator = self.engine_client.generate(")

    @around(completion, "__init__")
    def __init__(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.engine_client = WithoutReasoning(self.engine_client)


class WithoutReasoning:
    """An engine client for plain texts: the output is no harmony turn."""

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine_client.generate(*args, **{"reasoning_ended": True, **kwargs})


@repair(
    "reasoning-end",
    f"{REASONING}:GptOssReasoningParser.is_reasoning_end",
    releases=("0.11",),
    upstream="vllm PR 34454",
    until="0.23",
)
def install_reasoning_end(module: ModuleType) -> None:
    """vLLM takes an earlier answer in the conversation for the end of the reasoning and applies the structure from the
    first token on; it does not know the header `final <|constrain|>json`."""
    parser = module.GptOssReasoningParser
    original = parser.is_reasoning_end
    expect_parameters(original, "self", "input_ids")
    expect_source(original, "end_token_ids = self.reasoning_end_token_ids")
    expect_source(parser.__init__, 'self.model_tokenizer.encode("<|start|>assistant<|channel|>final<|message|>")')

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return answer_has_begun(input_ids, self.reasoning_end_token_ids)

    replace(parser, "is_reasoning_end", is_reasoning_end)

"""Structured answers of vLLM's `LLM.chat`, for programs without a server."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import Original, around, expect_parameters, repair
from npu_gptoss.serving.compat.server.structures import structure_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


@repair(
    "offline-structures",
    "vllm.entrypoints.llm:LLM.chat .enqueue_chat",
    releases="0.33",
    upstream="vllm issue 37359",
    until="vLLM frames the structures of LLM.chat",
)
def install_offline(module: ModuleType) -> None:
    """A structure of `LLM.chat` applies from the first token on, so the answer has neither a channel nor reasoning."""

    def chat(
        original: Original, self: Any, messages: Any, sampling_params: Any = None, *more: Any, **named: Any
    ) -> Any:
        from npu_gptoss.serving.openai.intake import is_gpt_oss

        if is_gpt_oss(self.model_config):
            each = isinstance(sampling_params, Sequence)
            sampling_params = (
                [_of_a_turn(self, one) for one in sampling_params] if each else _of_a_turn(self, sampling_params)
            )
        return original(self, messages, sampling_params, *more, **named)

    for name in ("chat", "enqueue_chat"):
        expect_parameters(getattr(module.LLM, name), "messages", "sampling_params")
        around(module.LLM, name)(chat)


def _of_a_turn(llm: Any, params: SamplingParams | None) -> SamplingParams | None:
    from npu_gptoss.serving.openai.release import A_CHAT, framed

    fields = structure_of(params and params.structured_outputs)
    if not fields or "structural_tag" in fields:
        return params
    own = params.clone()
    own.structured_outputs = framed({**A_CHAT, "structured_outputs": fields}, llm.get_tokenizer(), llm.model_config)
    return own

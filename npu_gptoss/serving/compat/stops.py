"""Stop strings of a chat end its answer: the generation stops at one that the answer holds, and at no other.

vLLM looks for them in all that the model writes, its reasoning and the names of its channels included, so that
`"stop": ["\\n\\n"]` ends most chats before they have an answer, and `["final"]` every one. The engine client of a
repaired server marks the request (`mark`); its detokenizer then reads the turn as the answer's own code does (`turn`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.turn import assistant_turn, stops_of

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

MARK = "npu_gptoss_stops_end_the_answer"


def mark(parameters: SamplingParams) -> None:
    if parameters.stop:
        parameters.extra_args = {**(parameters.extra_args or {}), MARK: True}


class _StopsOfAnswer:
    """`update` of the detokenizer of one marked request."""

    def __init__(self, detokenizer: Any, parameters: SamplingParams) -> None:
        self._update = detokenizer.update
        self._turn = assistant_turn(stops_of(parameters))
        detokenizer.stop, detokenizer.stop_buffer_length = [], 0

    def __call__(self, new_token_ids: Sequence[int], stop_terminated: bool) -> str | None:
        """The stop string that ends the request, or None."""
        self._update(new_token_ids, stop_terminated)
        for token in new_token_ids:
            self._turn.feed(token)
        return self._turn.stopped


@repair("answer-stops", "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request", lines=("0.11", "0.23"))
def install(detokenizer: ModuleType) -> None:
    """A stop string ends a chat in its reasoning, or at the name of a channel, before there is an answer."""
    owner = detokenizer.IncrementalDetokenizer
    expect_parameters(owner.from_new_request, "tokenizer", "request")
    base = detokenizer.BaseIncrementalDetokenizer
    expect_parameters(base.update, "self", "new_token_ids", "stop_terminated")
    expect_source(
        base.update, "if self.stop and", "> self.min_tokens: stop = check_stop_strings(", "return stop_string"
    )
    expect_source(base.__init__, "self.stop_buffer_length = 0")

    @around(owner, "from_new_request")
    def from_new_request(original: Callable[..., Any], cls: type, tokenizer: Any, request: Any) -> Any:
        made = original(cls, tokenizer, request)
        parameters = request.sampling_params
        if parameters.stop and MARK in (parameters.extra_args or {}):
            made.update = _StopsOfAnswer(made, parameters)
        return made

"""A request for the model in a form that no API determines; `chat`, `responses` and `messages` make it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from openai_harmony import Message, Role
from pydantic import TypeAdapter, ValidationError

from npu_gptoss.frontend.structure import Structure, forced_structure, shape
from npu_gptoss.frontend.tools import Tools
from npu_gptoss.frontend.turn import Reading, Turn
from npu_gptoss.harmony.conversation import (
    ConversationError,
    conversation,
    expected,
    mapping,
    reasoning_effort,
    steps,
    without_old_reasoning,
)
from npu_gptoss.harmony.encoding import ContextError, Encoder, check_length

Json = dict[str, Any]
# Fields of any API, and members of its objects, that are true or false, and whole numbers. Each may be a text, as in
# vLLM: "false", "2".
FLAGS = {
    *("stream", "background", "store", "parallel_tool_calls", "include_reasoning", "include_stop_str_in_output"),
    *("echo", "continue_final_message", "add_generation_prompt", "return_token_ids", "enable_response_messages"),
    *("include_usage", "continuous_usage_stats", "exclude", "disable_parallel_tool_use"),
}
COUNTS = {"n", "min_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"}
_TYPES = ((FLAGS, TypeAdapter(bool), "true or false"), (COUNTS, TypeAdapter(int), "a whole number"))


@dataclass(frozen=True)
class Defaults:
    """The server's values for fields that a request leaves out.

    effort: of the reasoning. efforts: other words for it, by word. instructions_in_system, identity: see
    `harmony.conversation`. with_usage: streams end with their usage. date: YYYY-MM-DD; None is today.
    """

    effort: str | None = None
    efforts: Mapping[str, str] = field(default_factory=dict)
    instructions_in_system: bool = False
    identity: str | None = None
    with_usage: bool = False
    date: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request. `sampling` has the fields that an engine samples by, named as in chat completions.

    turns: the conversation without its system turn. continued: channel and text of the message after them that the
    model continues.
    """

    turns: Sequence[Message]
    tools: Tools
    reading: Reading
    structure: Structure
    effort: str | None
    sampling: Json
    effort_param: str = "reasoning_effort"
    identity: str | None = None
    continued: tuple[str, str] | None = None
    instructions_in_system: bool = False
    date: str | None = None
    warnings: tuple[str, ...] = ()
    whole: bool = False  # refuse max_tokens that the context has no room for; else the answer gets what is left
    truncates: bool = False  # drop the oldest turns of a conversation that the context cannot hold

    @property
    def conversation(self) -> list[Message]:
        """Returns the harmony messages that the model reads, without the message that it continues."""
        effort = reasoning_effort(self.effort, self.effort_param)
        return conversation(
            self.turns, self.tools.functions, effort, self.date, self.identity, self.instructions_in_system
        )

    def prompt(self, encoder: Encoder, limit: int | None = None) -> list[int]:
        """Returns token ids up to the point where the model writes. limit: the model's context; raises ContextError."""
        ids = encoder.encode(self.conversation, limit)
        if self.continued is not None:
            channel, text = self.continued
            ids += encoder.header(channel) + encoder.text(text)
        if limit is not None:
            check_length(limit, len(ids), self.sampling.get("max_tokens") if self.whole else None)
        return ids

    def fitted(self, encoder: Encoder, limit: int | None) -> tuple[Asked, list[int]]:
        """Returns the request as the model reads it, and its prompt. Raises ContextError if it cannot fit."""
        try:
            return self, self.prompt(encoder, limit)
        except ContextError:
            if not self.truncates:
                raise
        shorter = self._truncated(encoder, limit)
        return shorter, shorter.prompt(encoder, limit)

    def _truncated(self, encoder: Encoder, limit: int) -> Asked:
        """Drops the oldest steps. Keeps all instructions, the newest turn of the user and the newest step.

        The answer has room for the tokens asked for, up to half of the context.
        """

        def size(step: Sequence[int]) -> int:
            return len(encoder.encode([turns[number] for number in step], limit)) - nothing

        turns, nothing = without_old_reasoning(self.turns), len(encoder.encode([]))
        all_steps = steps(turns)
        users = [step for step in all_steps if turns[step[0]].author.role is Role.USER]
        instructions = [step for step in all_steps if turns[step[0]].author.role is Role.DEVELOPER]
        kept = [step for step in all_steps if step in (*instructions, *users[-1:], all_steps[-1])]
        room = limit - 1 - min(self.sampling.get("max_completion_tokens") or 0, limit // 2)
        room -= len(replace(self, turns=()).prompt(encoder)) + sum(map(size, kept))
        with suppress(ContextError):  # of a step that is too long by far
            for step in reversed([step for step in all_steps if step not in kept]):
                if (room := room - size(step)) < 0:
                    break
                kept.append(step)
        numbers = sorted(number for step in kept for number in step)
        dropped = f"truncation: {len(turns) - len(numbers)} old turns are left out, which the context cannot hold"
        return replace(self, turns=[turns[n] for n in numbers], warnings=(*self.warnings, dropped))

    def loosened(self) -> Iterator[Asked]:
        """Yields the request with fewer and fewer demands on the arguments of calls."""
        for change in (shape, lambda _: None):
            tools, structure = self.tools.loosened(change), self.structure
            yield replace(
                self, tools=tools, structure=forced_structure(tools, Structure()) if structure.calls else structure
            )

    def turn(self, encoder: Encoder) -> Turn:
        """Returns a reader of one sample's tokens."""
        turn = Turn(encoder.parser(), self.reading)
        if self.continued is not None:
            turn.begin(encoder.header(self.continued[0]))
        return turn


def reading(tools: Tools, body: Mapping[str, Any]) -> Reading:
    """Returns the rules for reading the answer to a request with these tools. body: with OpenAI's and vLLM's fields."""
    choice, stop = tools.choice, body.get("stop")
    mode = choice.mode if tools.offered or choice.mode != "none" else "auto"
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) for one in stops):
        raise expected("stop", "a text or a list of texts", stop)
    if mode in ("required", "function"):
        stops = []  # a call's JSON must not be cut
    return Reading(
        mode,
        choice.tool.name if choice.tool else None,
        bool(choice.tool and choice.tool.format),
        tuple(stops),
        bool(body.get("include_stop_str_in_output")),
        body.get("min_tokens") or 0,
        tools.names,
        body.get("include_reasoning") is not False,
        tools.parallel,
    )


def begin(
    body: Mapping[str, Any], known: Container[str], refused: Mapping[str, str], left_out: Mapping[str, str]
) -> tuple[Json, list[str]]:
    """Returns the body with FLAGS and COUNTS in their types, and a warning for each field without effect.

    refused: the expected value of each field that only its absence serves; raises ConversationError for such a field.
    left_out: the reason of each field without effect.
    """
    for name, wanted in refused.items():
        if body.get(name) not in (None, []):
            raise expected(name, wanted, body[name])
    warnings = [f"{name:.80} is no field of this API and has no effect" for name in body if name not in known]
    return typed(body), warnings + [f"{name} is left out: {why}" for name, why in left_out.items() if body.get(name)]


def typed(body: Mapping[str, Any], place: str = "") -> Json:
    """Returns the body, or its object at `place`, with FLAGS and COUNTS in their types; refuses other values."""
    found = dict(body)
    for names, kind, wanted in _TYPES:
        for name in names.intersection(name for name, value in body.items() if value is not None):
            try:
                found[name] = kind.validate_python(body[name])
            except ValidationError:
                raise expected(f"{place}{name}", wanted, body[name]) from None
    return found


def member(
    body: Mapping[str, Any], name: str, read: Container[str], warnings: list[str], what: str = "an object"
) -> Json:
    """Returns the object in a field, typed; {} for None. Adds a warning for each member that is not in `read`."""
    given = typed(mapping(body.get(name), name, what), f"{name}.")
    ignored = [key for key, value in given.items() if value is not None and key not in read]
    warnings += [f"{name}.{key:.80} has no effect on gpt-oss" for key in ignored]
    return given


def ask(
    body: Mapping[str, Any],
    defaults: Defaults,
    warnings: list[str],
    *,
    efforts: Sequence[tuple[str, Any]] = (),
    continued: tuple[str, str] | None = None,
    **fields: Any,
) -> Asked:
    """Makes the request from what each API reads in its own way, and what all have in common.

    efforts: path and word of each field that may name the effort. fields: of Asked. Adds to warnings.
    """
    template = template_arguments(body, warnings)
    words = [*efforts, ("chat_template_kwargs.reasoning_effort", template.get("reasoning_effort"))]
    param, word = next((named for named in words if named[1] is not None), ("reasoning_effort", defaults.effort))
    structure: Structure = fields["structure"]
    if structure and continued is not None:
        raise ConversationError(
            f"{structure.param}: an answer that continues the last message has no structure; leave one out.",
            structure.param,
        )
    return Asked(
        effort=defaults.efforts.get(word, word) if isinstance(word, str) else word,
        effort_param=param,
        identity=template.get("model_identity") or defaults.identity,
        continued=continued,
        instructions_in_system=defaults.instructions_in_system,
        date=defaults.date,
        warnings=(*fields["tools"].warnings, *warnings),
        **fields,
    )


def template_arguments(body: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Returns the `chat_template_kwargs` that gpt-oss's published template reads, except builtin_tools."""
    place, known = "chat_template_kwargs", ("reasoning_effort", "model_identity")
    given = member(body, place, (*known, "builtin_tools"), warnings)
    if given.get("builtin_tools"):
        path = f"{place}.builtin_tools"
        raise ConversationError(f"{path}: this server has no built-in tools; leave it out.", path)
    if not isinstance(identity := given.get("model_identity") or "", str):
        raise expected(f"{place}.model_identity", "a text", identity)
    return {name: given[name] for name in known if given.get(name) is not None}

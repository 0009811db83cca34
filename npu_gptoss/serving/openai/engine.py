"""Adapts vLLM's engine to the front end: starts a request with token ids and turns its outputs into steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.request import Asked
from npu_gptoss.frontend.sample import Facts
from npu_gptoss.frontend.turn import Turn
from npu_gptoss.harmony.encoding import Encoder, load_encoder
from npu_gptoss.serving import logger
from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.server import structures
from npu_gptoss.serving.openai.intake import PLACEHOLDER, is_gpt_oss, warn
from npu_gptoss.serving.openai.release import release
from npu_gptoss.serving.releases import vllm as names
from npu_gptoss.serving.tokenizer_file import checkpoint_directory
from npu_gptoss.tokenizer import chat_template

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import ModelConfig

IN_THE_LOOP = 20_000  # characters, about 10 ms; a thread encodes a longer conversation


def report_unused(model_config: ModelConfig, args: Namespace) -> None:
    """Logs that another chat template than the published ones, or another parser of calls, has no effect."""
    if not is_gpt_oss(model_config):  # vLLM's handlers read both
        return
    directory, parser = checkpoint_directory(model_config), args.tool_call_parser
    text = chat_template(directory)[0] if directory is not None else ""
    unused = {
        "--chat-template": args.chat_template,
        "The checkpoint's chat template": not args.chat_template and text and "You are ChatGPT" not in text,
        f"--tool-call-parser {parser}": parser not in (None, "openai"),
    }
    if names := " and ".join(name for name, given in unused.items() if given):
        logger.warning(
            "%s: without effect, since chats are written and read in harmony. Requests set its system turn by "
            "model_identity, reasoning_effort and instructions.",
            names,
        )


_served: list[Encoder] = []  # this process's server's encoder, once made


def prepare(model_config: ModelConfig) -> Encoder:
    """Makes the encoder of this process's server, which takes seconds. Raises VocabularyError."""
    made = load_encoder(checkpoint_directory(model_config))
    _served[:] = [made]
    return made


def served_encoder() -> Encoder:
    return _served[0] if _served else load_encoder(None)


def encoder_of(serving: Any) -> Encoder:
    """Returns the encoder for a serving object of vLLM's."""
    made = getattr(serving, "npu_gptoss_encoder", None)
    if made is None:
        made = serving.npu_gptoss_encoder = prepare(serving.model_config)
    return made


async def prompt_of(serving: Any, asked: Asked) -> tuple[Asked, list[int]]:
    """Returns the request as the model reads it, and its prompt.

    Raises ConversationError if harmony cannot write the request or the context cannot hold it.
    """
    encoder, limit = encoder_of(serving), release().max_model_len(serving)
    if encoder.characters(asked.turns) + asked.tools.characters <= IN_THE_LOOP:
        return asked.fitted(encoder, limit)
    return await asyncio.to_thread(asked.fitted, encoder, limit)


@dataclass
class Started:
    """A request in the engine. plain: vLLM's class of chats, with the fields that it samples by."""

    serving: Any
    name: str
    asked: Asked
    prompt: list[int]
    plain: Any
    params: Any
    outputs: AsyncGenerator[Any, None]
    model: str
    whole: bool
    tokens: int = 0  # generated so far

    def turn(self) -> Turn:
        return self.asked.turn(encoder_of(self.serving))

    def step(self, output: Any) -> Step:
        """Returns the step of one of `outputs`."""
        pieces = []
        for done in output.outputs:
            self.tokens += len(done.token_ids)
            if done.finish_reason is None:
                pieces.append(Piece(done.index, done.token_ids, None, None, done.logprobs))
            else:
                pieces.append(self._last_piece(done))
        extra = self._about(output) if output.finished or output.prompt_logprobs else None
        return Step(pieces, output.num_cached_tokens, extra)

    def logprobs(self, piece: Piece, which: Sequence[int]) -> list[dict[str, Any]]:
        """Returns OpenAI's log-probabilities of these tokens of a piece.

        vLLM's own have U+FFFD for a token that is a part of a character, and put the sampled token before likelier
        ones, in the place of the last of them.
        """
        plain, found = self.plain, []
        for number in which:
            token, known = piece.token_ids[number], piece.logprobs[number]
            likely = sorted(known, key=lambda one: -known[one].logprob)
            most = None if getattr(plain, "logprob_token_ids", None) else plain.top_logprobs or 0
            top = [self._logprob(one, known) for one in likely[:most]]
            found.append(self._logprob(token, known) | {"top_logprobs": top})
        return found

    def _logprob(self, token: int, known: Mapping[int, Any]) -> dict[str, Any]:
        raw, as_id = encoder_of(self.serving).token_bytes(token), self.plain.return_tokens_as_token_ids
        as_id = self.serving.return_tokens_as_token_ids if as_id is None else as_id
        text = f"token_id:{token}" if as_id else raw.decode(errors="backslashreplace")  # as OpenAI writes it
        return {"token": text, "logprob": max(float(known[token].logprob), -9999.0), "bytes": list(raw)}

    def _last_piece(self, done: Any) -> Piece:
        release().raise_if_error(self.serving, done.finish_reason, self.name)
        extra = release().about_choice(self.plain, done, self.whole)
        return Piece(done.index, done.token_ids, done.finish_reason, done.stop_reason, done.logprobs, extra)

    def _about(self, output: Any) -> dict[str, Any]:
        about = release().about_answer(self.serving, self.plain, output, self.tokens) if output.finished else {}
        if output.prompt_logprobs and self.whole:
            about["prompt_logprobs"] = [_logprobs(position) for position in output.prompt_logprobs]
        return about


def _logprobs(position: Any) -> Any:
    """Formats vLLM's log-probabilities of one prompt position, with -inf as OpenAI writes it."""
    if position is None:
        return None
    return {str(token): asdict(one) | {"logprob": max(one.logprob, -9999.0)} for token, one in position.items()}


async def start(
    serving: Any, asked: Asked, name: str, raw_request: Any, plain: Any = None, *, stream: bool = False
) -> Started:
    """Starts a request. plain: vLLM's chat request; built from `asked.sampling` for the other APIs.

    Raises an exception of `errors.of_the_request` before the engine has the request, if it cannot be served.
    """
    here = release()
    if plain is None:
        plain = names.ChatCompletionRequest.model_validate(asked.sampling | {"messages": PLACEHOLDER, "stream": stream})
    here.preflight(serving, plain.n or 1)
    prompt, said = here.reused_prompt(serving, plain), len(asked.warnings)
    if not prompt:
        asked, prompt = await prompt_of(serving, asked)
    warn(raw_request, asked.warnings[said:])
    params = here.sampling(serving, plain, len(prompt))
    keywords = await _hold(serving, params, asked, raw_request)
    _make_deltas(params, asked)
    if raw_request is not None:
        raw_request.state.request_metadata = names.RequestResponseMetadata(request_id=name)
    keywords |= here.scheduling(serving, plain, raw_request)
    outputs = await here.generate(serving, plain, raw_request, name, prompt, params, **keywords)
    model = serving.models.model_name(serving._maybe_get_adapters(plain))
    return Started(serving, name, asked, prompt, plain, params, outputs, model, whole=not stream)


async def _hold(serving: Any, params: Any, asked: Asked, raw_request: Any) -> dict[str, Any]:
    """Constrains an answer to its structure and its calls. Returns keywords of `generate`.

    Tools of agents have schemas that no grammar can hold (or not in time), with which OpenAI calls them nevertheless.
    """
    first: Refusal | None = None
    for one in (asked, *asked.loosened()):
        try:
            keywords = await _hold_to(serving, params, one)
        except Refusal as refusal:
            if not asked.tools.offered or refusal.status != HTTPStatus.BAD_REQUEST:
                raise
            first = first or refusal
            continue
        if first is not None:
            warn(raw_request, [f"the schemas of tools are enforced in part: {first.message}"])
        return keywords
    raise first


async def _hold_to(serving: Any, params: Any, asked: Asked) -> dict[str, Any]:
    fields, param = asked.structure.fields, asked.structure.param or "tools"
    if fields and not (release().frames and asked.structure.calls):
        await structures.check(serving.engine_client, fields, param)
    keywords = release().hold(serving, params, asked, fields)
    if keywords:  # vLLM frames the structure, which makes another one
        await structures.check(serving.engine_client, structures.structure_of(params.structured_outputs), param)
    return keywords


def _make_deltas(params: Any, asked: Asked) -> None:
    from vllm.sampling_params import RequestOutputKind

    if asked.reading.stop:  # also for whole answers, so that they end at the stop string
        params.output_kind = RequestOutputKind.DELTA
    if params.prompt_logprobs is None:  # they have vLLM's text, which nothing else uses
        params.detokenize = False


def use(raw_request: Any, counts: Mapping[str, int]) -> None:
    """Reports the request's token counts to vLLM's middleware."""
    metadata = getattr(getattr(raw_request, "state", None), "request_metadata", None)
    if metadata is not None:
        metadata.final_usage_info = names.UsageInfo(**counts)


def facts_of(kind: type[Facts], started: Started, **more: Any) -> Any:
    """Makes the facts of an API's answer. more: its fields besides those of every API."""
    return kind(
        id=started.name,
        model=started.model,
        prompt_tokens=len(started.prompt),
        cached_details=started.serving.enable_prompt_tokens_details,
        log=output_logger(started.serving, started.name, not started.whole),
        **more,
    )


def output_logger(self: Any, name: str, streamed: bool) -> Callable[..., None] | None:
    """Returns a function that logs an answer's text (`--enable-log-outputs`); None if the option is off."""
    if not (self.enable_log_outputs and self.request_logger):
        return None
    deltas = getattr(self, "enable_log_deltas", True)

    def log(text: str, tokens: Sequence[int] | None, finish: str | None) -> None:
        is_delta = tokens is not None
        if is_delta and not (deltas and text):
            return
        self.request_logger.log_outputs(
            request_id=name,
            outputs=text,
            output_token_ids=list(tokens) if is_delta else None,
            finish_reason=finish if is_delta or not streamed else "streaming_complete",
            is_streaming=streamed,
            delta=is_delta,
        )

    return log

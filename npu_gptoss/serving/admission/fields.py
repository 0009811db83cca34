"""Limits of the request fields, by route. Fields without a limit are not listed.

All releases share one table: fields and routes that a release lacks are ignored there. An unlisted field is free text
for the model, or vLLM checks it before use; `tests/serving/admission/test_fields.py` lists those fields, so that a new
field of another release is noticed. Comments give the reason where a limit differs from OpenAI's reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from npu_gptoss.serving.admission.refusal import Refusal, refuse
from npu_gptoss.serving.admission.rules import (
    Limits,
    Rule,
    as_number,
    at_most,
    fields_of,
    identifier,
    integer,
    logprobs,
    mapping,
    number,
    objects,
    size,
    text,
    texts,
    token_ids,
    unless,
)

Fields = Mapping[str, Rule]

INT32 = 2**31 - 1  # the range of tensors of counts and ranks
INT64 = 2**63 - 1

SCHEMA = size(256 * 1024)  # a schema of 256 KiB has thousands of properties
PATTERN = text(16 * 1024)
REQUEST_ID = identifier(256)
MODEL = text(1024, strict=True)  # vLLM looks it up in a table
CHOICES = texts(4096, 4096)

# arguments that transformers' apply_chat_template takes (CVE-2025-62426)
_TEMPLATE_OWN = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


def _template_name(value: Any, limits: Limits, name: str) -> None:
    if value in _TEMPLATE_OWN:
        raise refuse(name, "names that the template reads", value)


def _prompts(value: Any, limits: Limits, name: str) -> None:
    """Checks a text, token ids, or a list of either."""
    if not isinstance(value, list):
        return
    if not value:
        raise refuse(name, "a prompt", value)
    if not isinstance(value[0], str | list):
        token_ids("vocab_size", empty=False)(value, limits, name)
        return
    at_most(limits.max_prompts, "prompts", len(value), name)
    for index, item in enumerate(value):
        if not item and isinstance(item, str | list):
            raise refuse(f"{name}[{index}]", "a prompt that is not empty", item)
        token_ids("vocab_size")(item, limits, f"{name}[{index}]")


def _token(value: str, limits: Limits, name: str) -> None:
    if as_number(value) is None:
        raise refuse(name, "token ids as keys", value)
    integer(0, "last_token")(value, limits, name)


_NAMED_SCHEMA = fields_of({"schema": SCHEMA})
_FORMAT = fields_of({"json_schema": _NAMED_SCHEMA, "structures": objects(256, {"schema": SCHEMA})})

STRUCTURED: Fields = {
    "json": SCHEMA,
    "regex": PATTERN,
    "choice": CHOICES,
    "grammar": PATTERN,
    "structural_tag": SCHEMA,
    "whitespace_pattern": text(256),
}

TRANSFER = size(16 * 1024, otherwise=fields_of({}))
_TRANSFERS: Fields = {"kv_transfer_params": TRANSFER, "ec_transfer_params": TRANSFER}


def _extra(value: Any, limits: Limits, name: str) -> None:
    """Checks fields that vLLM passes on, and in which it looks for transfer parameters."""
    mapping(64, keys=text(256))(value, limits, name)
    fields_of(_TRANSFERS)(value, limits, name)


# fields of every request that reaches the scheduler
QUEUED: Fields = {
    "model": MODEL,
    "priority": integer(-INT32, INT32),
    "request_id": REQUEST_ID,
    "session_id": identifier(256),
    "cache_salt": text(1024),
    "mm_processor_kwargs": mapping(0),  # gpt-oss reads text
    "media_io_kwargs": mapping(0),
    "truncate_prompt_tokens": integer(-1, "max_model_len"),
}

SAMPLING: Fields = QUEUED | {
    "n": integer(1, "max_n"),
    "best_of": integer(1, 1),  # vLLM's engine supports no other value
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    # a factor on logits in float32, limited far from overflow and underflow
    "repetition_penalty": number(0.01, 100),
    "length_penalty": number(-100, 100),
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "min_p": number(0, 1),
    "top_k": integer(-1, INT32),
    "seed": integer(-INT64 - 1, INT64),
    "max_tokens": integer(0, INT64),
    "min_tokens": integer(0, "max_model_len"),
    "prompt_logprobs": logprobs(least=-1),
    "stop": texts(256, 4096),
    "stop_token_ids": token_ids("vocab_size", 1024),
    "allowed_token_ids": token_ids("tokenizer_size", empty=False),
    "logit_bias": mapping(2048, keys=_token, values=number(None)),
    "stream_options": fields_of({}),
    "response_format": _FORMAT,  # `frontend.structure` refuses a json_schema without one
    "structured_outputs": fields_of(STRUCTURED),
    "guided_json": SCHEMA,
    "guided_regex": PATTERN,
    "guided_choice": CHOICES,
    "guided_grammar": PATTERN,
    "guided_whitespace_pattern": text(256),
    "vllm_xargs": _extra,
    **_TRANSFERS,
    "logprob_token_ids": token_ids("vocab_size", 128),  # vLLM gathers at most 128 in a step
    "routed_experts_prompt_start": integer(0, "max_model_len"),
    "stream_interval": integer(1, INT32),
    "thinking_token_budget": integer(-1, INT64),
    # each step searches the output for patterns of every size
    "repetition_detection": fields_of(
        {"max_pattern_size": integer(0, 1024), "min_pattern_size": integer(0, 1024), "min_count": integer(0, INT32)}
    ),
}

FUNCTION: Fields = {"name": text(256, strict=True), "parameters": size(256 * 1024, otherwise=fields_of({}))}

TOOLS: Fields = {"tools": objects(512, {"function": fields_of(FUNCTION)})}

TEMPLATE: Fields = {
    "chat_template": unless(
        "chat_templates", "this server renders with its own template; --trust-request-chat-template takes others."
    ),
    "chat_template_kwargs": mapping(32, keys=_template_name, values=size(4096)),
}

CHAT: Fields = {
    **SAMPLING,
    **TOOLS,
    **TEMPLATE,
    "messages": objects(16384, empty=False),  # vLLM reads the role of the last message
    "top_logprobs": logprobs(least=-1),
    "max_completion_tokens": integer(1, INT64),
    "max_tokens": integer(1, INT64),
    "bad_words": texts(1024, 256, blank=False),  # a word of white space has no token
    "structural_tag": SCHEMA,
}


def _conversations(value: Any, limits: Limits, name: str) -> None:
    """Checks a list of lists of messages."""
    if not isinstance(value, list) or not value:
        raise refuse(name, "a list of at least one conversation", value)
    at_most(limits.max_prompts, "conversations", len(value), name)
    for index, item in enumerate(value):
        CHAT["messages"](item, limits, f"{name}[{index}]")


BATCH: Fields = CHAT | {"messages": _conversations}

COMPLETION: Fields = SAMPLING | {
    "prompt": _prompts,
    "bad_words": CHAT["bad_words"],
    "prompt_embeds": unless("prompt_embeds", "this server takes no embeddings; --enable-prompt-embeds takes them."),
    "logprobs": logprobs(),
}

_OF_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "stop_token_ids", "logit_bias", "structured_outputs", "vllm_xargs"),
    *("kv_transfer_params", "ec_transfer_params"),
)

RESPONSES: Fields = (
    QUEUED
    | {name: SAMPLING[name] for name in _OF_SAMPLING}
    | {
        "chat_template_kwargs": TEMPLATE["chat_template_kwargs"],
        "top_logprobs": logprobs(),
        "max_output_tokens": integer(1, INT64),
        "max_tool_calls": integer(0, INT32),
        "text": fields_of({"format": _NAMED_SCHEMA}),
        "tools": objects(512, FUNCTION),
        "previous_response_id": identifier(256),
        "previous_input_messages": objects(16384),
        "reasoning": fields_of({}),
        "prompt_cache_key": text(1024),
        "safety_identifier": text(1024),
    }
)

# Anthropic's form of a chat
MESSAGES: Fields = (
    QUEUED
    | {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "vllm_xargs")}
    | {
        **_TRANSFERS,
        "chat_template_kwargs": TEMPLATE["chat_template_kwargs"],
        "messages": objects(16384, empty=False),
        "max_tokens": integer(1, INT64),
        "stop_sequences": SAMPLING["stop"],
        "tools": objects(512, {"name": text(256, strict=True), "input_schema": FUNCTION["parameters"]}),
        "output_config": fields_of({"format": fields_of({"schema": SCHEMA})}),
        "thinking": fields_of({"budget_tokens": integer(0, INT64)}),
    }
)

# vLLM's own
SAMPLING_PARAMS: Fields = SAMPLING | {
    "logprobs": logprobs(least=-1),
    "bad_words": CHAT["bad_words"],
    "extra_args": _extra,
}

# a prompt of token ids
GENERATE_TOKENS: Fields = QUEUED | {
    "token_ids": token_ids("vocab_size", empty=False),
    "stream_options": SAMPLING["stream_options"],
    "sampling_params": fields_of(SAMPLING_PARAMS),
    "features": mapping(0),
    "content_parts": objects(0),
    **_TRANSFERS,
    "reasoning_parser_kwargs": size(16 * 1024),
}

SCORING: Fields = QUEUED | {"items": _prompts, "label_token_ids": token_ids("vocab_size", 1024)}

TOKENIZE: Fields = (
    TOOLS
    | TEMPLATE
    | {
        "model": MODEL,
        "messages": objects(16384),
        "mm_processor_kwargs": QUEUED["mm_processor_kwargs"],
        "media_io_kwargs": QUEUED["media_io_kwargs"],
    }
)

DETOKENIZE: Fields = {"model": MODEL, "tokens": token_ids("tokenizer_size")}


ROUTES: dict[str, Fields] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/v1/chat/completions/batch": BATCH,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/inference/v1/generate": GENERATE_TOKENS,
    "/generative_scoring": SCORING,
    "/v1/systemone": QUEUED,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}

INVOCATIONS = "/invocations"  # any kind of request; its fields decide


def fields_for(route: str, body: Mapping[str, Any]) -> Fields:
    """Returns the limits for a route; an empty table for a route without limits."""
    if route == INVOCATIONS:
        if "messages" in body:
            return CHAT | {name: COMPLETION[name] for name in ("prompt", "prompt_embeds") if "prompt" in body}
        return COMPLETION if "prompt" in body or "prompt_embeds" in body else QUEUED
    return ROUTES.get(route.removesuffix("/render"), {})


def check(route: str, body: Mapping[str, Any], limits: Limits) -> None:
    """Raises Refusal for the first field outside its limits."""
    if route == "/scale_elastic_ep" and not limits.elastic:
        raise Refusal(
            "This server was not started to be scaled (--enable-elastic-ep; vLLM 0.11: --data-parallel-backend ray); "
            "trying would stop its service."
        )
    for name, rule in fields_for(route, body).items():
        value = body.get(name)
        if value is not None:
            rule(value, limits, name)
    for relation in RELATIONS:
        relation(body, limits)


HEADERS = {
    b"x-request-id": ("X-Request-Id", REQUEST_ID),
    # of 0.33, overrides the body's field. The engine could not receive a larger number, and the request would never end
    b"x-vllm-priority": ("X-Vllm-Priority", QUEUED["priority"]),
}


def check_headers(headers: Mapping[bytes, bytes], limits: Limits) -> None:
    """Raises Refusal for a header outside its limits."""
    for header, (name, rule) in HEADERS.items():
        if header in headers:
            rule(headers[header].decode("latin-1"), limits, name)


# of an operator's routes, which vLLM 0.11 and 0.23 read without a check
QUERIES = {
    "/sleep": {"level": ("0", "1", "2"), "mode": ("abort", "wait", "keep")},
    "/reset_prefix_cache": {"device": ("gpu", "cpu", "GPU", "CPU")},
}


def check_query(route: str, query: bytes) -> None:
    """Raises Refusal for a parameter of the URL that vLLM would answer with 500."""
    known = QUERIES.get(route, {})
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if known else ():
        if name in known and value not in known[name]:
            raise refuse(name, " or ".join(known[name]), value)


def _sequences(body: Mapping[str, Any], limits: Limits) -> None:
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], str | list) else 1
    asked = count * int(as_number(body.get("n") or 1) or 1)
    at_most(limits.max_prompts, "sequences (prompts times n) in one request", asked, "n")


def _least_and_most(body: Mapping[str, Any], limits: Limits) -> None:
    most = as_number(body.get("max_completion_tokens") or body.get("max_tokens"))
    least = as_number(body.get("min_tokens"))
    if most and least and least > most:
        raise refuse("min_tokens", f"at most max_tokens, {most}", least)


RELATIONS = (_sequences, _least_and_most)

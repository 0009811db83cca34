"""The fields by which a client asks for a structure mean the same on every route and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import around, expect_source, repair
from npu_gptoss.serving.compat.structures import structure_of
from npu_gptoss.serving.compat.targets import CHAT_PROTOCOL, COMPLETION_PROTOCOL, PROTOCOL, RESPONSES_PROTOCOL

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# vLLM's names of old, which 0.33 leaves out like any field that it does not know
OF_OLD = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}


def asked_format(request: Any) -> dict[str, Any]:
    """The structure that `response_format` asks for, as fields of StructuredOutputsParams."""
    form = request.response_format
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_object": True}
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.json_schema is None:
            raise ValueError("response_format.json_schema.schema: expected a JSON schema, got none.")
        return {"json": form.json_schema.json_schema}
    return {"structural_tag": json.dumps(form.model_dump(by_alias=True))}


@repair(
    "response-formats",
    f"{PROTOCOL}:ChatCompletionRequest.to_sampling_params CompletionRequest.to_sampling_params",
    f"{PROTOCOL}:ResponsesRequest.to_sampling_params",
    upstream="vllm PR 26822",
)
def install_formats(module: ModuleType) -> None:
    """`response_format` of type text, and json_schema without a schema, end the engine; /v1/completions drops every
    format in silence, /v1/responses takes no json_object."""
    from vllm.sampling_params import StructuredOutputsParams

    chat, completion, responses = module.ChatCompletionRequest, module.CompletionRequest, module.ResponsesRequest
    expect_source(chat.to_sampling_params, "self.structured_outputs = StructuredOutputsParams()")
    expect_source(completion.to_sampling_params, 'self.response_format.type == "json_object"')
    expect_source(responses.to_sampling_params, 'raise NotImplementedError("json_object is not supported")')

    def with_format(original: Callable[..., SamplingParams], self: Any, *args: Any, **kwargs: Any) -> SamplingParams:
        asked = asked_format(self)  # a format without its schema is refused, not an assertion
        params = original(self, *args, **kwargs)
        wanted = params.structured_outputs
        if asked and isinstance(self, completion):  # of a chat, vLLM reads it
            wanted = wanted or StructuredOutputsParams()
            for name, value in asked.items():
                setattr(wanted, name, value)
        self.structured_outputs = params.structured_outputs = wanted if wanted and structure_of(wanted) else None
        return params

    for kind in (chat, completion):
        around(kind, "to_sampling_params")(with_format)

    _have_json_object(responses, text=None)  # at which 0.11.0 raises


@repair("response-formats", f"{RESPONSES_PROTOCOL}:ResponsesRequest.to_sampling_params", lines=("0.23",))
def install_formats_0_23(module: ModuleType) -> None:
    """/v1/responses drops the format json_object in silence."""
    expect_source(module.ResponsesRequest.to_sampling_params, 'response_format.type == "json_schema"')
    _have_json_object(module.ResponsesRequest)


def _have_json_object(responses: type, **hidden: None) -> None:
    """hidden: fields that vLLM's own reading must not see; on 0.23 it refuses a structure beside the format."""
    from vllm.sampling_params import StructuredOutputsParams

    @around(responses, "to_sampling_params")
    def responses_to_sampling_params(
        original: Callable[..., SamplingParams], self: Any, *args: Any, **kwargs: Any
    ) -> SamplingParams:
        form = self.text.format if self.text is not None else None
        if form is None or form.type != "json_object":
            return original(self, *args, **kwargs)
        params = original(self.model_copy(update=hidden), *args, **kwargs)
        params.structured_outputs = StructuredOutputsParams(json_object=True)
        return params


@repair(
    "guided-fields",
    f"{COMPLETION_PROTOCOL}:CompletionRequest.to_sampling_params",
    f"{CHAT_PROTOCOL}:ChatCompletionRequest.to_sampling_params",
    lines=("0.23",),
)
def install_fields_of_old_0_23(module: ModuleType) -> None:
    """`guided_json`, `guided_regex` and the like, which clients of vLLM have sent for years, are left out without a
    word to the client: what it gets is held to nothing."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def to_sampling_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        asked_format(self)  # a format without its schema is refused, not an assertion
        if self.structured_outputs is None:
            self.structured_outputs = _given_of_old(self)
        return original(self, *args, **kwargs)

    for kind in (ChatCompletionRequest, module.CompletionRequest):
        expect_source(kind.to_sampling_params, "structured_outputs=self.structured_outputs,")
        around(kind, "to_sampling_params")(to_sampling_params)


def _given_of_old(request: Any) -> Any:
    """The StructuredOutputsParams that a request asks for by the fields of old; None where by none."""
    from pydantic import TypeAdapter
    from vllm.sampling_params import StructuredOutputsParams

    given = {OF_OLD[name]: value for name, value in (request.model_extra or {}).items() if name in OF_OLD}
    given = {name: value for name, value in given.items() if value is not None}
    return TypeAdapter(StructuredOutputsParams).validate_python(given) if given else None


@repair(
    "guided-fields",
    f"{COMPLETION_PROTOCOL}:CompletionRequest.extract_structured_outputs",
    f"{CHAT_PROTOCOL}:ChatCompletionRequest.extract_structured_outputs",
    lines=("0.33",),
)
def install_fields_of_old(module: ModuleType) -> None:
    """`guided_json`, `guided_regex` and the like, which clients of vLLM have sent for years, are left out without a
    word to the client: what it gets is held to nothing."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def extract_structured_outputs(original: Callable[..., Any], self: Any) -> Any:
        found = original(self)
        return _given_of_old(self) if found is None else found

    for kind in (ChatCompletionRequest, module.CompletionRequest):
        expect_source(kind.extract_structured_outputs, "structured_outputs_from_response_format(")
        around(kind, "extract_structured_outputs")(extract_structured_outputs)

"""Compiles each requested structure once, in a limited child process, before vLLM parses it in the API server.

The child process validates a structure with vLLM's own code and compiles it with the engine's backend. vLLM's
validation in the server, which a regular expression can hang or crash, then only looks the verdict up. `admission.py`
asks for it while it reads a completion; for other routes it is asked for when the engine gets the request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss import envs
from npu_gptoss.frontend.structure import KINDS, OPTIONS
from npu_gptoss.serving.admission.bounded import Bounded
from npu_gptoss.serving.admission.left_out import LARK, left_out
from npu_gptoss.serving.admission.refusal import Refusal, escaped
from npu_gptoss.serving.admission.structures import Structures, Verdict
from npu_gptoss.serving.compat.engine.grammars import new_backend
from npu_gptoss.serving.compat.patch import (
    Original,
    around,
    either,
    expect_parameters,
    expect_source,
    repair,
    replace,
    vllms_own,
)
from npu_gptoss.serving.compat.targets import ASYNC, NEWER, PARSERS, SAMPLING_PARAMS
from npu_gptoss.serving.releases import here
from npu_gptoss.serving.releases.vllm import VALIDATION_ARGUMENTS, load_tokenizer, structure_key, validate_structure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

STRUCTURE = (*KINDS, OPTIONS[0])
SWITCHES = OPTIONS[1:]

OF_A_COMPLETION = "cmpl-"  # begins the ids of completions; their output is a plain text, no harmony turn

_structures: Structures | None = None  # of this process's server


def structure_of(params: StructuredOutputsParams | None) -> dict[str, Any]:
    """Returns the fields of the structure that a request asks for; {} if there is none."""
    if params is None:
        return {}
    fields = {name: getattr(params, name) for name in STRUCTURE}
    asked = {name: value for name, value in fields.items() if value is not None and value is not False}
    if asked.keys().isdisjoint(KINDS):
        return {}
    return asked | {name: True for name in SWITCHES if getattr(params, name, False)}


class StructureCompiler:
    """`work` and `prepare` of the child process."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any = None) -> None:
        """`tokenizer`: the server's own, which a forked process shares; None loads it."""
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.backends: dict[str, Any] = {}

    def prepare(self) -> None:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.vllm_config.model_config)
        configured = self.vllm_config.structured_outputs_config.backend
        names = ("xgrammar", "guidance") if configured == "auto" else (configured,)
        self.backends = {name: new_backend(name, self.vllm_config, self.tokenizer) for name in names}

    def work(self, question: bytes) -> bytes:
        try:
            answer = self.compile(json.loads(question))
        except Exception as error:
            said = str(error).replace("{err}", str(error.__cause__))  # a missing f-string prefix in vLLM 0.11.0
            answer = {"error": escaped(said or type(error).__name__, 300)}
        return json.dumps(answer).encode()

    def compile(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
        wanted = params.structured_outputs
        if (wanted.grammar or "").startswith(LARK) and "guidance" in self.backends:
            # vLLM asks xgrammar first, and knows no control tokens
            wanted._backend, wanted._backend_was_auto = "guidance", len(self.backends) > 1
        else:
            validate_structure(params, self.vllm_config, self.tokenizer)
        if wanted._backend_was_auto:
            schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
            # vLLM takes outlines for patterns of names, which guidance holds too
            if wanted._backend == "outlines" or left_out(schema):
                wanted._backend = "guidance"
        name = wanted._backend
        backend = self.backends.get(name) or new_backend(name, self.vllm_config, self.tokenizer)
        grammar = backend.compile_grammar(*structure_key(params))
        if (matcher := getattr(grammar, "ll_matcher", None)) is not None and matcher.get_error():
            raise ValueError(matcher.get_error())
        grammar.fill_bitmask(backend.allocate_token_bitmask(1), 0)  # the first step too
        return {"backend": name, "automatic": wanted._backend_was_auto, "fields": structure_of(wanted)}


def checked(client: Any) -> Structures:
    """Returns the compiler of this process's server; the first call creates it. client: vLLM's engine client."""
    global _structures
    if _structures is None:
        compiler = StructureCompiler(client.vllm_config, getattr(client, "tokenizer", None))
        seconds, memory = envs.get("NPU_GPTOSS_GRAMMAR_SECONDS"), envs.get("NPU_GPTOSS_GRAMMAR_MIB") << 20
        _structures = Structures(Bounded(compiler.work, compiler.prepare, seconds, memory))
    return _structures


async def check(client: Any, fields: Mapping[str, Any], param: str) -> None:
    """Compiles a structure before the engine receives it. param: the request's field. Raises Refusal."""
    verdict = await checked(client).verdict(dict(fields))
    if verdict.error is not None:
        status = HTTPStatus.BAD_REQUEST if verdict.lasting else HTTPStatus.SERVICE_UNAVAILABLE
        raise Refusal(f"{param}: this cannot be compiled for structured output: {verdict.error}.", param, status)


def close() -> None:
    """Stops the child process at the server's end."""
    global _structures
    if _structures is not None:
        _structures.bounded.stop()
        _structures = None


def _known(params: StructuredOutputsParams | None) -> Verdict | None:
    return None if _structures is None or params is None else _structures.known(structure_of(params))


def _validate(original: Callable[[], None], params: SamplingParams) -> None:
    """`original` is vLLM's validation, for structures without a verdict."""
    wanted = params.structured_outputs
    verdict = _known(wanted)
    if verdict is None or verdict.backend is None or wanted._backend not in (None, verdict.backend):
        original()
        return
    for name in STRUCTURE:
        setattr(wanted, name, verdict.fields.get(name))
    wanted._backend, wanted._backend_was_auto = verdict.backend, verdict.automatic


UNTIL = "vLLM compiles structures outside of its API server"
VALIDATES = "_validate_structured_output", "_validate_structured_outputs"


@repair(
    "structure-verdicts",
    f"vllm.v1.engine.processor:Processor.{VALIDATES[0]}",
    upstream="CVE-2026-55574, fixed in 0.24.0",
    until=UNTIL,
)
@repair("structure-verdicts", f"{SAMPLING_PARAMS}:SamplingParams.{VALIDATES[1]}", releases=NEWER, until=UNTIL)
def install_verdicts(module: ModuleType) -> None:
    """vLLM parses a client's regular expressions, grammars and schemas in the API server; some crash it, and others
    block it for ever."""
    owner = module.SamplingParams if module.__name__ == SAMPLING_PARAMS else module.Processor
    name = either(owner, *VALIDATES)
    validate = vllms_own(owner, name)
    params = "self" if owner is module.SamplingParams else "params"
    expect_parameters(validate, *VALIDATION_ARGUMENTS)  # `validate_structure` passes them
    expect_source(validate, f"{params}.structured_outputs._backend_was_auto = True")
    expect_source(validate, f"validate_xgrammar_grammar({params})")

    def checked(*arguments: Any) -> None:
        """`arguments`: as vLLM's, SamplingParams first, or behind the Processor of 0.11."""
        _validate(lambda: validate(*arguments), arguments[name == VALIDATES[0]])

    replace(owner, name, checked)


@repair("structure-requests", f"{ASYNC}:AsyncLLM.add_request", releases=NEWER, until=UNTIL)
def install_requests(module: ModuleType) -> None:
    """A structure from a route without an earlier check, such as /inference/v1/generate, is parsed in the API server
    and compiled in the engine without a limit. On 0.23 a structure of /v1/completions is never applied: the engine
    waits for the end of a reasoning, and a completion has none."""
    from vllm.exceptions import VLLMValidationError

    unavailable = here().module("vllm").unavailable
    expect_parameters(module.AsyncLLM.add_request, "reasoning_ended")
    expect_source(module.AsyncLLM.add_request, "self.input_processor.process_inputs(")

    @around(module.AsyncLLM, "add_request")
    async def add_request(
        original: Original, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **keywords: Any
    ) -> Any:
        wanted = structure_of(getattr(params, "structured_outputs", None))
        if wanted and _structures is not None:
            verdict = await _structures.verdict(wanted)
            if verdict.error is not None:
                said = f"This structure cannot be compiled: {verdict.error}."
                if verdict.lasting:
                    raise VLLMValidationError(said, parameter="structured_outputs")
                raise unavailable(said)
        if wanted and request_id.startswith(OF_A_COMPLETION) and keywords.get("reasoning_ended") is None:
            keywords["reasoning_ended"] = True
        return await original(self, request_id, prompt, params, *args, **keywords)


@repair(
    "structure-tags",
    f"{PARSERS}:_xgrammar_supports",
    "vllm.entrypoints.generate.base.protocol:validate_structural_tag_payload",
    releases="0.33",
    until=UNTIL,
)
@repair(
    "structure-tags",
    "vllm.entrypoints.openai.engine.protocol:validate_structural_tag_payload",
    releases="0.23",
    until=UNTIL,
)
def install_tags(module: ModuleType) -> None:
    """vLLM parses structural tags, and structures sent with tools, in the API server while it reads a request."""
    protocol = module
    if module.__name__ == PARSERS:
        from vllm.entrypoints.generate.base import protocol

        expect_source(module._xgrammar_supports, "validate_xgrammar_grammar(")

        @around(module, "_xgrammar_supports")
        def _xgrammar_supports(original: Original, structured_outputs: StructuredOutputsParams) -> bool:
            verdict = _known(structured_outputs)
            return original(structured_outputs) if verdict is None else verdict.backend == "xgrammar"

    expect_source(protocol.validate_structural_tag_response_format, "validate_structural_tag_payload(payload,")
    expect_source(protocol.validate_structured_outputs_structural_tag, "validate_structural_tag_payload(")

    @around(protocol, "validate_structural_tag_payload")
    def validate_structural_tag_payload(original: Original, payload: Any, *, parameter: str) -> None:
        """If the child process runs, it checks the engine's request in any case."""
        if _structures is None or not isinstance(payload, str):
            original(payload, parameter=parameter)

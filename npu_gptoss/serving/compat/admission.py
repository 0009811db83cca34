"""Admission around vLLM's server: what `serving/admission` has to know of vLLM, and where it is put in.

The gate stands before every middleware of vLLM. Its own key guard takes the place of vLLM's. A structured output is
checked with vLLM's own validation and compiled with the engine's backend, in a bounded process; vLLM's validation in
the server's own process, which a regular expression can hang or crash, then only looks the verdict up.
"""

from __future__ import annotations

import copy
import functools
import json
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from npu_gptoss import envs
from npu_gptoss.serving.admission.bounded import Bounded
from npu_gptoss.serving.admission.gate import Gate
from npu_gptoss.serving.admission.keys import KeyGuard
from npu_gptoss.serving.admission.refusal import Refusal, escaped, shown
from npu_gptoss.serving.admission.rules import Limits
from npu_gptoss.serving.admission.structures import Structures, Verdict
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, stock
from npu_gptoss.serving.compat.targets import API_SERVER, PROCESSOR, PROTOCOL

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

STRUCTURE = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern")
SWITCHES = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")

# fields of a request that can ask for a structure
ASKS = {f"guided_{name}" for name in STRUCTURE} | {"structured_outputs", "response_format", "structural_tag", "text"}

# where vLLM does nothing but read a request: whatever it raises there, the request is to blame
READS = {"to_sampling_params", "to_beam_search_params", "_make_request_with_harmony", "_preprocess_chat"}

# what serves a route, None in the application's state where the model has no use for it; vLLM says so with status 200
SERVES = {
    "/v1/chat/completions": "openai_serving_chat",
    "/v1/completions": "openai_serving_completion",
    "/v1/responses": "openai_serving_responses",
    "/v1/embeddings": "openai_serving_embedding",
    "/pooling": "openai_serving_pooling",
    "/classify": "openai_serving_classification",
    "/v1/audio/transcriptions": "openai_serving_transcription",
    "/v1/audio/translations": "openai_serving_translation",
} | dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "openai_serving_scores")

_structures: Structures | None = None  # of this process's server


def structure_of(params: StructuredOutputsParams) -> dict[str, Any]:
    """What a request asks of its output; {} where it asks for nothing."""
    fields = {name: getattr(params, name) for name in STRUCTURE}
    asked = {name: value for name, value in fields.items() if value is not None and value is not False}
    if not asked.keys() - {"whitespace_pattern"}:
        return {}
    return asked | {name: True for name in SWITCHES if getattr(params, name)}


class StructureCompiler:
    """`work` and `prepare` of the bounded process."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any = None) -> None:
        """`tokenizer`: the server's own, which a forked process has without loading it; None loads it."""
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.backends: dict[str, Any] = {}

    def prepare(self) -> None:
        from vllm.transformers_utils.tokenizer import init_tokenizer_from_configs

        if self.tokenizer is None:
            self.tokenizer = init_tokenizer_from_configs(model_config=self.vllm_config.model_config)
        configured = self.vllm_config.structured_outputs_config.backend
        names = ("xgrammar", "guidance") if configured == "auto" else (configured,)
        self.backends = {name: self._backend(name) for name in names}

    def _backend(self, name: str) -> Any:
        """The backend as the engine makes it."""
        from vllm.v1.structured_output import StructuredOutputManager

        manager = SimpleNamespace(
            backend=None,
            vllm_config=self.vllm_config,
            tokenizer=self.tokenizer,
            executor=SimpleNamespace(submit=lambda *_: None),
            _async_create_grammar=None,
        )
        named = SimpleNamespace(structured_outputs=SimpleNamespace(_backend=name))
        request = SimpleNamespace(structured_output_request=SimpleNamespace(grammar=None), sampling_params=named)
        stock(StructuredOutputManager.grammar_init)(manager, request)
        return manager.backend

    def work(self, question: bytes) -> bytes:
        try:
            answer = self.compile(json.loads(question))
        except Exception as error:
            said = str(error).replace("{err}", str(error.__cause__))  # vLLM 0.11.0 forgot an f before one sentence
            answer = {"error": escaped(said or type(error).__name__, 300)}
        return json.dumps(answer).encode()

    def compile(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.engine.processor import Processor
        from vllm.v1.structured_output.request import get_structured_output_key

        params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
        reader = SimpleNamespace(
            structured_outputs_config=self.vllm_config.structured_outputs_config,
            model_config=self.vllm_config.model_config,
        )
        stock(Processor._validate_structured_output)(reader, params)
        wanted = params.structured_outputs
        backend = self.backends[wanted._backend]
        grammar = backend.compile_grammar(*get_structured_output_key(params))
        if (matcher := getattr(grammar, "ll_matcher", None)) is not None and matcher.get_error():
            raise ValueError(matcher.get_error())
        grammar.fill_bitmask(backend.allocate_token_bitmask(1), 0)  # the first step, too
        return {
            "backend": wanted._backend,
            "automatic": wanted._backend_was_auto,
            "fields": structure_of(wanted),
        }


class VllmServer:
    """What the gate asks about vLLM's server; see `admission.gate.Server`."""

    def __init__(self, state: Any, trusts_templates: bool) -> None:
        self._state, self._trusts_templates = state, trusts_templates
        self._limits: Limits | None = None

    def prepare(self) -> None:
        """As the server starts to listen: fork while it is quiet, and load what checking takes in the background."""
        if not self._state.vllm_config.model_config.skip_tokenizer_init:
            self._checked().bounded.start()

    def _checked(self) -> Structures:
        global _structures
        if _structures is None:
            compiler = StructureCompiler(self._state.vllm_config, getattr(self._state.engine_client, "tokenizer", None))
            seconds, memory = envs.get("NPU_GPTOSS_GRAMMAR_SECONDS"), envs.get("NPU_GPTOSS_GRAMMAR_MIB") << 20
            _structures = Structures(Bounded(compiler.work, compiler.prepare, seconds, memory))
        return _structures

    def close(self) -> None:
        global _structures
        if _structures is not None:
            _structures.bounded.stop()
            _structures = None

    def check_route(self, route: str) -> None:
        name = SERVES.get(route)
        if name is not None and getattr(self._state, name, self) is None:
            raise Refusal(f"{route}: the served model has no answer of this kind.")

    async def limits(self) -> Limits:
        if self._limits is None:
            config = self._state.vllm_config
            model = config.model_config
            vocabulary = model.get_vocab_size()
            tokenizer = None if model.skip_tokenizer_init else await self._state.engine_client.get_tokenizer()
            self._limits = Limits(
                vocab_size=vocabulary,
                tokenizer_size=vocabulary if tokenizer is None else len(tokenizer),
                max_model_len=model.max_model_len,
                max_logprobs=model.max_logprobs,
                prompt_embeds=model.enable_prompt_embeds,
                chat_templates=self._trusts_templates,
                elastic=config.parallel_config.data_parallel_backend == "ray",
                max_n=envs.get("NPU_GPTOSS_MAX_N"),
                max_prompts=envs.get("NPU_GPTOSS_MAX_PROMPTS"),
            )
        return self._limits

    async def check_structure(self, route: str, body: dict[str, Any]) -> None:
        if not (ASKS & body.keys() or ("tools" in body and body.get("tool_choice") not in (None, "none", "auto"))):
            return
        wanted = structure_asked_by(route, body, await self.limits())
        if not wanted:
            return
        verdict = await self._checked().verdict(wanted)
        if verdict.error is not None:
            param = _place(wanted, body)
            status = HTTPStatus.BAD_REQUEST if verdict.lasting else HTTPStatus.SERVICE_UNAVAILABLE
            raise Refusal(f"{param}: this cannot be compiled for structured output: {verdict.error}.", param, status)

    def blame(self, error: BaseException) -> Refusal | None:
        names = READS | _validators()
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(frame.f_code.co_name in names and "vllm" in frame.f_globals["__name__"] for frame in frames):
            said = escaped(str(error), 200)
            return Refusal(f"The request cannot be read: {type(error).__name__}{': ' if said else ''}{said}.")
        return None


def _requests(route: str) -> tuple[type, ...]:
    """The classes that vLLM tries for a route, in its order."""
    from vllm.entrypoints.openai import protocol

    chat, completion = protocol.ChatCompletionRequest, protocol.CompletionRequest
    return {
        "/v1/chat/completions": (chat,),
        "/v1/completions": (completion,),
        "/v1/responses": (protocol.ResponsesRequest,),
        "/invocations": (chat, completion),
    }.get(route, ())


@functools.cache
def _validators() -> frozenset[str]:
    """Names of the functions by which vLLM reads a request."""
    from vllm.entrypoints.openai import protocol

    classes = (*_requests("/invocations"), *_requests("/v1/responses"), protocol.TokenizeChatRequest)
    return frozenset(
        name for cls in classes for name in cls.__pydantic_decorators__.model_validators if not name.startswith("__")
    )


def structure_asked_by(route: str, body: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """What vLLM would make the engine hold the output to, by vLLM's own reading; {} where it cannot read it.

    Raises Refusal for what it reads and refuses.
    """
    for kind in _requests(route):
        try:
            request = kind.model_validate(copy.deepcopy(dict(body)))
        except Exception:
            continue  # vLLM says why, as it reads the request itself
        pattern = () if route == "/v1/responses" else (None,)
        try:
            params: SamplingParams = request.to_sampling_params(limits.max_model_len, *pattern, {})
        except Exception as error:
            raise Refusal(f"The request cannot be read: {escaped(str(error), 300) or type(error).__name__}") from None
        return structure_of(params.structured_outputs) if params.structured_outputs is not None else {}
    return {}


def _place(wanted: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """The field of the request that asked."""
    kind = next((name for name in STRUCTURE if name in wanted), "json")
    if body.get(f"guided_{kind}") is not None:
        return f"guided_{kind}"
    if isinstance(inner := body.get("structured_outputs"), dict) and inner.get(kind) is not None:
        return f"structured_outputs.{kind}"
    others = ("structural_tag", "response_format", "tools")
    return next((name for name in others if body.get(name) is not None), "text.format")


@repair(
    "admission",
    f"{API_SERVER}:build_app",
    upstream="CVE-2026-48746, fixed in 0.22.0; CVE-2026-34756 and others one by one",
)
def install_gate(module: ModuleType) -> None:
    """vLLM's API key guards only what begins with /v1, by a path read from the client's Host header; fields that
    end the engine, hold it for hours or fail with 500 reach it unchecked."""
    expect_parameters(module.build_app, "args")
    expect_source(
        module.build_app,
        "if tokens := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:",
        "app.add_middleware(AuthenticationMiddleware, tokens=tokens)",
        "@app.exception_handler(RequestValidationError)",
    )
    from fastapi.responses import JSONResponse

    @around(module, "build_app")
    def build_app(original: Callable[..., Any], args: Namespace) -> Any:
        app = original(args)
        keys = [key for key in (args.api_key or [module.envs.VLLM_API_KEY]) if key]
        app.user_middleware[:] = [
            entry for entry in app.user_middleware if entry.cls is not module.AuthenticationMiddleware
        ]
        app.add_middleware(
            Gate,
            keys=KeyGuard(keys, open_metrics=envs.get("NPU_GPTOSS_OPEN_METRICS")),
            server=VllmServer(app.state, args.trust_request_chat_template),
            max_body=envs.get("NPU_GPTOSS_MAX_BODY_MIB") << 20,
        )

        @app.exception_handler(module.RequestValidationError)
        async def misread(_: Any, error: Any) -> Any:
            refusal = misread_refusal(error.errors())
            return JSONResponse(json.loads(refusal.body()), status_code=int(refusal.status))

        return app


def misread_refusal(errors: Any) -> Refusal:
    """The first of pydantic's complaints, which may be ninety, and may repeat the whole body."""
    first = errors[0] if errors else "the request cannot be read"
    if not isinstance(first, Mapping):
        return Refusal(escaped(str(first)))
    place = [str(part) for part in first.get("loc", ()) if part != "body"]
    param = escaped(".".join(place), 100) or None
    more = f" ({len(errors)} complaints of this kind)" if len(errors) > 1 else ""
    said = escaped(str(first.get("msg", "invalid")), 300)
    got = f", got {shown(first['input'])}" if "input" in first and param else ""
    return Refusal(f"{param or 'The request'}: {said}{got}{more}.", param)


@repair(
    "structure-verdicts",
    f"{PROCESSOR}:Processor._validate_structured_output",
    upstream="CVE-2026-55574, fixed in 0.24.0",
)
def install_verdicts(module: ModuleType) -> None:
    """vLLM parses a client's regular expressions, grammars and schemas in the server's own process, which some of
    them crash and others hold for ever."""
    validate = module.Processor._validate_structured_output
    expect_parameters(validate, "self", "params")
    expect_source(validate, "params.structured_outputs._backend_was_auto = True", "validate_xgrammar_grammar(params)")

    @around(module.Processor, "_validate_structured_output")
    def _validate_structured_output(original: Callable[..., None], self: Any, params: SamplingParams) -> None:
        wanted = params.structured_outputs
        verdict: Verdict | None = None
        if _structures is not None and wanted is not None:
            verdict = _structures.known(structure_of(wanted))
        if verdict is None or verdict.backend is None or wanted._backend not in (None, verdict.backend):
            original(self, params)
            return
        for name in STRUCTURE:
            setattr(wanted, name, verdict.fields.get(name))
        wanted._backend, wanted._backend_was_auto = verdict.backend, verdict.automatic


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

    @around(responses, "to_sampling_params")
    def responses_to_sampling_params(
        original: Callable[..., SamplingParams], self: Any, *args: Any, **kwargs: Any
    ) -> SamplingParams:
        form = self.text.format if self.text is not None else None
        if form is None or form.type != "json_object":
            return original(self, *args, **kwargs)
        params = original(self.model_copy(update={"text": None}), *args, **kwargs)
        params.structured_outputs = StructuredOutputsParams(json_object=True)
        return params

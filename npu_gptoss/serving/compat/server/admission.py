"""Connects `serving/admission` with vLLM's server, and installs it.

Admission runs before every middleware of vLLM and has its own key guard. `structures.py` compiles the structure of a
completion before a stream can begin; the front end reads chats, behind the last middleware.
"""

from __future__ import annotations

import inspect
import json
import traceback
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss import envs
from npu_gptoss.frontend.structure import structure_of
from npu_gptoss.harmony.conversation import ConversationError
from npu_gptoss.serving.admission.keys import KeyGuard, route_path
from npu_gptoss.serving.admission.middleware import AdmissionMiddleware
from npu_gptoss.serving.admission.refusal import Refusal, escaped
from npu_gptoss.serving.admission.rules import Limits
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.server import heartbeat, restart, structures
from npu_gptoss.serving.compat.server.completions import as_chats_do
from npu_gptoss.serving.compat.targets import API_SERVER, APP_ENTRY, BOTH

if TYPE_CHECKING:
    from argparse import Namespace

# functions that only read a request: their exceptions are caused by the request, or by the installation
READS = {
    *("request_body_to_args", "model_validate"),  # FastAPI's and pydantic's, with vLLM's validators
    *("to_sampling_params", "to_beam_search_params", "_make_request_with_harmony", "_preprocess_chat"),
    *("adjust_harmony_request", "to_chat_completion_request", "_render_responses_with_harmony"),  # of 0.33
}
READERS = ("vllm", "fastapi", "pydantic")
COMPLETIONS = "/v1/completions"
UPSTREAM = "CVE-2026-48746, fixed in 0.22.0; CVE-2026-34756 and others one by one"
UNTIL = "vLLM guards every route by its key and checks every field"

# each route's serving object, None in the application's state if the model lacks it; vLLM then answers with status 200
SERVES = {
    "/v1/chat/completions": "openai_serving_chat",
    "/v1/completions": "openai_serving_completion",
    "/v1/responses": "openai_serving_responses",
    "/v1/messages": "openai_serving_chat",
    "/v1/embeddings": "openai_serving_embedding",
    "/pooling": "openai_serving_pooling",
    "/classify": "openai_serving_classification",
    "/v1/audio/transcriptions": "openai_serving_transcription",
    "/v1/audio/translations": "openai_serving_translation",
} | dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "openai_serving_scores")


class VllmServer:
    """Answers admission's questions about vLLM's server. A method `check_…` raises Refusal."""

    def __init__(self, state: Any, args: Namespace) -> None:
        self._state, self._args = state, args
        self._limits: Limits | None = None

    def prepare(self) -> None:
        """Runs when the server starts to listen: forks while no request runs, and loads the compilers in the
        background."""
        from npu_gptoss.serving.metrics import refusals
        from npu_gptoss.serving.openai.engine import report_unused

        for status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED):  # so that rate() sees the first
            refusals().labels(str(int(status)))
        if not self._state.vllm_config.model_config.skip_tokenizer_init:
            structures.checked(self._state.engine_client).bounded.start()
            report_unused(self._state.vllm_config.model_config, self._args)

    def close(self) -> None:
        structures.close()

    def refused(self, status: HTTPStatus) -> None:
        """Counts a refusal, which vLLM's own counter of answers does not see."""
        from npu_gptoss.serving.metrics import refusals

        refusals().labels(str(int(status))).inc()

    def check_route(self, route: str) -> None:
        name = SERVES.get(route)
        if name is not None and getattr(self._state, name, self) is None:
            raise Refusal(f"POST {route} is not available: the served model only generates text.")

    async def check_engine(self, *, waits: bool) -> None:
        """waits: for an engine that is being started anew, up to a limit; without, a silent engine is refused too."""
        client = self._state.engine_client
        core = getattr(client, "engine_core", None)
        await restart.check(core, waits=waits)
        if core is not None and not waits:
            await heartbeat.check(client)

    async def limits(self) -> Limits:
        if self._limits is None:
            config = self._state.vllm_config
            model = config.model_config
            vocabulary = model.get_vocab_size()
            tokenizer = None if model.skip_tokenizer_init else self._state.engine_client.get_tokenizer()
            if inspect.isawaitable(tokenizer):  # of 0.11
                tokenizer = await tokenizer
            self._limits = Limits(
                vocab_size=vocabulary,
                tokenizer_size=vocabulary if tokenizer is None else len(tokenizer),
                max_model_len=model.max_model_len,
                max_logprobs=model.max_logprobs,
                prompt_embeds=model.enable_prompt_embeds,
                chat_templates=self._args.trust_request_chat_template,
                elastic=can_be_scaled(config.parallel_config),
                max_n=envs.get("NPU_GPTOSS_MAX_N"),
                max_prompts=envs.get("NPU_GPTOSS_MAX_PROMPTS"),
            )
        return self._limits

    async def check_structure(self, route: str, body: dict[str, Any]) -> None:
        if route != COMPLETIONS and not (route == "/invocations" and "prompt" in body):
            return
        try:
            wanted = structure_of(body)
        except ConversationError as error:
            raise Refusal(str(error), error.param) from None
        if wanted:
            await structures.check(self._state.engine_client, wanted.fields, wanted.param)

    def blame(self, error: BaseException) -> Refusal | None:
        """Returns the refusal if vLLM raised this while it parsed the request."""
        if _lacks_a_package(error):
            return None
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name in READS]
        if any(frame.f_globals["__name__"].partition(".")[0] in READERS for frame in frames):
            said = escaped(str(error), 200)
            return Refusal(f"The request cannot be read: {type(error).__name__}{': ' if said else ''}{said}.")
        return None


def can_be_scaled(parallel: Any) -> bool:
    """Returns whether /scale_elastic_ep would not stop the service. vLLM 0.11 has no option for it."""
    return getattr(parallel, "enable_elastic_ep", parallel.data_parallel_backend == "ray")


def _lacks_a_package(error: BaseException | None) -> bool:
    """Returns whether an import failed: then the request is not at fault, and the log must name the missing package."""
    while error is not None:
        if isinstance(error, ImportError):
            return True
        error = error.__cause__ or error.__context__
    return False


GUARDS = (
    "if tokens := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:",
    "app.add_middleware(AuthenticationMiddleware, tokens=tokens)",
)
MISREAD = (ValueError, TypeError, OverflowError, NotImplementedError)  # vLLM answers them with 400 and 501


@repair("admission", f"{API_SERVER}:build_app", releases=BOTH, upstream=UPSTREAM, until=UNTIL)
@repair("admission", f"{APP_ENTRY}:build_app", releases="0.33", upstream=UPSTREAM, until=UNTIL)
def install(module: ModuleType) -> None:
    """vLLM's API key guards only paths below /v1, and reads the path with the client's Host header; fields that end the
    engine, block it for hours or fail with 500 are not checked."""
    guarding = module.build_app
    if module.__name__ == APP_ENTRY:
        from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware as guarding
    expect_source(guarding, *GUARDS)
    around(module, "build_app")(_build_app)


def _keep_counters(app: Any) -> None:
    """Hands the built counters of requests to the next stack: made a second time, they would count nothing."""
    layer = app.middleware_stack
    while layer is not None:
        for entry in app.user_middleware:
            if entry.cls is type(layer) and getattr(layer, "instrumentations", None):
                entry.kwargs["instrumentations"] = layer.instrumentations
        layer = getattr(layer, "app", None)


def _build_app(original: Original, args: Namespace, *others: Any) -> Any:
    """`others` exist since 0.23: the supported tasks and the model's configuration."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.responses import Response
    from vllm import envs as vllm_envs

    from npu_gptoss.serving import tokenizer_file
    from npu_gptoss.serving.openai import messages, routes
    from npu_gptoss.serving.openai.engine import prepare
    from npu_gptoss.serving.openai.errors import misread
    from npu_gptoss.serving.openai.intake import Intake, is_gpt_oss
    from npu_gptoss.serving.releases.vllm import AuthenticationMiddleware

    app = original(args, *others)
    if "generate" not in (others[0] if others else ("generate",)):
        return app  # a server without an engine, which only renders
    if tokenizer_file.served and is_gpt_oss(tokenizer_file.served[0]):
        prepare(tokenizer_file.served[0])  # takes seconds, now and not in the first request
    messages.add_routes(app)
    routes.add_routes(app)
    _keep_counters(app)
    app.middleware_stack = None  # 0.33 has built it already; the first request builds it again
    keys = [key for key in (args.api_key or [vllm_envs.VLLM_API_KEY]) if key]
    app.user_middleware[:] = [entry for entry in app.user_middleware if entry.cls is not AuthenticationMiddleware]
    admission = Middleware(
        AdmissionMiddleware,
        keys=KeyGuard(keys, open_metrics=envs.get("NPU_GPTOSS_OPEN_METRICS")),
        server=VllmServer(app.state, args),
        max_body=envs.get("NPU_GPTOSS_MAX_BODY_MIB") << 20,
    )
    # within --middleware and --enable-request-id-headers, as vLLM's own check of keys, and within CORS: without its
    # headers a page in a browser cannot read why it was refused
    within = [entry.cls for entry in app.user_middleware].index(CORSMiddleware)
    app.user_middleware.insert(within + 1, admission)
    app.user_middleware.append(Middleware(Intake))  # the innermost

    handlers = app.exception_handlers
    if Exception in handlers:  # on 0.23 it logs a traceback for a client's mistake
        handlers |= dict.fromkeys(MISREAD, handlers[Exception]) | handlers
    for kind, handler in list(handlers.items()):
        handlers[kind] = as_chats_do(handler)

    @app.exception_handler(HTTPException)  # of the router: vLLM handles FastAPI's
    async def unknown_route(request: Any, error: Any) -> Any:
        route, allowed = route_path(request.scope), error.headers and error.headers.get("Allow")
        why = {404: "this server has no such route", 405: f"this route takes {allowed}"}
        said = f"{request.method} {escaped(route, 200)}: {why.get(error.status_code, error.detail)}."
        refusal = Refusal(said, status=HTTPStatus(error.status_code))
        return Response(refusal.body(route), error.status_code, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def misread_request(request: Any, error: Any) -> Any:
        refusal = misread(error.errors(), error.body)
        return JSONResponse(json.loads(refusal.body(route_path(request.scope))), status_code=int(refusal.status))

    return app

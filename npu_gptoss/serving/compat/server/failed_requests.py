"""Contains per-request exceptions (API server side): the request gets 400 or 500, the others go on.

A request that the engine core ended (`engine/failed_requests.py`) raises in its own stream: `RequestRefused`, a
ValueError, which vLLM's endpoints answer with 400 and its message, or `RequestFailed`, answered with 500. One that an
operator's /sleep or /pause ended is answered with 503. A stream that has begun gets an error event. The other samples
of a request with `n` > 1 end with it. An engine without streams (`LLM`) returns an output with the finish reason
`abort` and the message as stop reason, and raises its own errors.

Stock vLLM detokenizes the tokens of all requests in one task, and an exception there ends them all; here it ends its
own request.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from npu_gptoss.errors import InputError
from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.engine.failed_requests import FAILED, PASSES, PAUSED, REFUSED, words
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair, replace
from npu_gptoss.serving.compat.server.shutdown import stopping_error
from npu_gptoss.serving.compat.targets import ASYNC, BOTH


class RequestRefused(InputError):
    """The engine cannot fulfil this request."""


class RequestFailed(RuntimeError):
    """An error on the server's side ended this request."""


def failure(output: Any) -> Exception | None:
    """Returns the exception that an `EngineCoreOutput` reports, or None. A client that left reads none: a bare abort is
    the engine's own."""
    from vllm.v1.engine import FinishReason

    reason = output.stop_reason
    if output.finish_reason != FinishReason.ABORT:
        return None
    if not isinstance(reason, str) or reason.startswith(PAUSED):
        return stopping_error()()
    return (RequestRefused if reason.startswith(REFUSED) else RequestFailed)(reason)


@repair(
    "request-outputs", "vllm.v1.engine.output_processor:OutputProcessor.process_outputs", releases=BOTH, until="0.33"
)
def install_outputs(module: ModuleType) -> None:
    """An exception in one request's detokenizer, stop strings or log-probabilities ends all requests; if the engine
    core ended a request, its client gets no error."""
    processor = module.OutputProcessor
    expect_source(processor.process_outputs, "for engine_core_output in engine_core_outputs:", "reqs_to_abort.append(")
    expect_source(module.RequestOutputCollector.get, "if isinstance(output, Exception):\n raise output")

    @around(processor, "process_outputs")
    def process_outputs(
        original: Original,
        self: Any,
        engine_core_outputs: Sequence[Any],
        engine_core_timestamp: Any = None,
        iteration_stats: Any = None,
    ) -> Any:
        outputs: list[Any] = []
        aborts: list[str] = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            streams = state is not None and state.queue is not None
            error = failure(output) if streams else None
            if error is None:
                try:
                    done = original(self, (output,), engine_core_timestamp, iteration_stats)
                    outputs += done.request_outputs
                    aborts += done.reqs_to_abort
                    continue
                except PASSES:
                    raise
                except BaseException as problem:
                    if not streams:
                        raise
                    logger.exception("Request %s ends alone.", output.request_id)
                    error = RequestFailed(FAILED + words(problem))
                    if self.request_states.get(output.request_id) is None:  # the error came after its last output
                        aborts += [] if output.finished else [output.request_id]
                        continue
            aborts += _end(self, state, output, error)
        return module.OutputProcessorOutput(request_outputs=outputs, reqs_to_abort=aborts)


def _end(processor: Any, state: Any, output: Any, error: Exception) -> list[str]:
    """Takes a request out of the output processor; its client gets the error. Returns the ids that the engine still
    has to abort."""
    from npu_gptoss.serving.releases.vllm import abort_requests, take_out

    take_out(processor, state)
    state.queue.put(error)
    aborts = [] if output.finished else [output.request_id]
    if (parent := state.parent_req) is not None:
        parent.child_requests.discard(output.request_id)
        # the outputs of the other samples would come after the error, unread
        aborts += abort_requests(processor, [parent.request_id])
    return aborts


@repair("request-ids", f"{ASYNC}:AsyncLLM.add_request", until="0.23")
def install_ids(module: ModuleType) -> None:
    """Of two requests with one id and other numbers of samples, the end of one ends the other."""
    engine = module.AsyncLLM
    expect_source(engine.generate, "q = await self.add_request(request_id, prompt")

    @around(engine, "add_request")
    async def add_request(original: Original, self: Any, request_id: str, *arguments: Any, **keywords: Any) -> Any:
        processor = self.output_processor
        if request_id in processor.request_states or request_id in processor.parent_requests:
            raise RequestRefused(
                f"Another request with the id {request_id!r} is being served; send another X-Request-Id."
            )
        return await original(self, request_id, *arguments, **keywords)


@repair("error-words", f"{ASYNC}:EngineGenerateError", releases=BOTH, until="0.33")
def install_words(module: ModuleType) -> None:
    """A request that ends with an unexpected error gets an empty error message."""
    expect_source(module.AsyncLLM.generate, "except ValueError", "raise EngineGenerateError() from e")

    class EngineGenerateError(module.EngineGenerateError):
        """Raised without a message, `from` the cause; the client reads the cause."""

        def __str__(self) -> str:
            return super().__str__() or words(self.__cause__ or self)

    replace(module, "EngineGenerateError", EngineGenerateError)

"""Contains per-request exceptions (engine core side): the failing request ends, the others go on.

The API server's side is `server/failed_requests.py`. In stock vLLM an exception while a request is constructed or
added, or in its grammar, ends the engine, or its input thread, after which every request waits for ever.

A request that cannot be constructed or added becomes a `Refused`, which takes its place in vLLM's queues. A request
that the scheduler already has is reported (`report`, from any thread) and ended like an abort, before and after each
step, which frees its KV blocks. Its client gets an `EngineCoreOutput` with the finish reason `abort` and the error text
as stop reason; vLLM has no other output with both.

From the scheduler's output to the runner's, a step is shared by all its requests, so an exception in the executor still
ends the engine. `request_checks.py` checks beforehand the fields that could cause it, because a device does not raise
at an invalid index. If the input thread dies, the engine ends at once and logs the error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from npu_gptoss.errors import short
from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.engine import request_checks as gate
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import BOTH, CORE, SCHEDULER

REFUSED = "The engine refused this request: "  # the client's mistake
FAILED = "The engine ended this request: "  # an error on our side
PAUSED = "The server sleeps"  # an operator's act; POST /wake_up ends it
PAUSES = "pause_scheduler"  # of an EngineCore that can stop its scheduler, from 0.23 on: /sleep?level=0 does only that
LONGEST = 400  # characters of a foreign error that reach a client

# Errors of the process. All others belong to a request, BaseException too: a panic of a Rust library is no Exception.
PASSES = (KeyboardInterrupt, SystemExit, GeneratorExit)

_FAILURES = "_npu_gptoss_failures"  # of a StructuredOutputManager, which scheduler, core and grammars share
_REASON = "_npu_gptoss_reason"  # of a Request that has been reported
_UNTOLD = "_npu_gptoss_untold"  # of an EngineCore in its client's process, without a queue: outputs to send


def words(error: BaseException) -> str:
    """Formats a foreign error as one printable line of limited length, for UTF-8 and for terminals."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return short(" ".join(text[: 2 * LONGEST].split()), LONGEST)


@dataclass(frozen=True)
class Refused:
    """Stands in for a request until its client has received the error."""

    request_id: str
    client_index: int
    reason: str


def failures_of(manager: Any) -> deque[tuple[Any, str]]:
    """Returns an engine's queue of requests to end, with reasons; any thread may append to it."""
    return vars(manager).setdefault(_FAILURES, deque())


def report(failures: deque[tuple[Any, str]], request: Any, reason: str) -> None:
    """Marks a request to be ended with this reason. The first reason counts."""
    if _REASON not in vars(request):
        setattr(request, _REASON, reason)  # first: `add_request` reads it for a request that failed before
        failures.append((request, reason))


def tell(core: Any, refused: Refused) -> None:
    """Sends the client the end of its request."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    logger.warning("Request %r ends alone. %s", refused.request_id, refused.reason)
    output = EngineCoreOutput(
        request_id=refused.request_id, new_token_ids=[], finish_reason=FinishReason.ABORT, stop_reason=refused.reason
    )
    queue = getattr(core, "output_queue", None)
    if queue is not None:
        outputs = EngineCoreOutputs(outputs=[output], finished_requests={refused.request_id})
        queue.put_nowait((refused.client_index, outputs))
    else:
        vars(core).setdefault(_UNTOLD, []).append(output)


def end_reported(core: Any) -> None:
    """Ends the requests that were reported since the last call. Call it between steps only."""
    from vllm.v1.request import RequestStatus

    failures = failures_of(core.structured_output_manager)
    while failures:
        request, reason = failures.popleft()
        # a missing request was aborted by its client, or has not arrived yet: `add_request` will refuse it
        if core.scheduler.requests.get(request.request_id) is request:
            core.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
            tell(core, Refused(request.request_id, request.client_index, reason))


@repair(
    "request-input",
    f"{CORE}:EngineCore.preprocess_add_request .add_request EngineCoreProc.process_input_sockets",
    releases=BOTH,
    upstream="vllm PR 54196 for stop tokens beside min_tokens; none found for the rest",
    until="0.33",
)
def install_input(module: ModuleType) -> None:
    """A request that the engine core cannot construct or add ends the engine, or its input thread, after which every
    request waits for ever; an invalid token id crashes a step of the whole batch."""
    core, process = module.EngineCore, module.EngineCoreProc
    expect_source(process.process_input_sockets, "request = self.preprocess_add_request(req")
    expect_source(process._handle_client_request, "req, request_wave = request", "self.add_request(req, request_wave)")

    @around(core, "preprocess_add_request")
    def preprocess_add_request(original: Original, self: Any, request: Any) -> tuple[Any, int]:
        try:
            objection = gate.objection(request, self.vllm_config)
            if objection is None:
                return original(self, request)
            reason = REFUSED + objection
        except PASSES:
            raise
        except BaseException as error:
            reason = REFUSED + words(error)
        return Refused(request.request_id, request.client_index, reason), request.current_wave

    @around(core, "add_request")
    def add_request(original: Original, self: Any, request: Any, request_wave: int = 0) -> None:
        if isinstance(request, Refused):
            tell(self, request)
            return
        reason = vars(request).get(_REASON)
        there = self.scheduler.requests.get(request.request_id)
        if reason is None and there is not None and getattr(there, "streaming_queue", None) is None:
            # from another API server, with the same X-Request-Id: two requests of one id free each other's blocks
            reason = f"{REFUSED}another request with the id {request.request_id!r} is being served"
        if reason is None and not hasattr(self, PAUSES) and self.model_executor.is_sleeping:
            # from 0.23 on it would wait
            reason = f"{PAUSED}: POST /wake_up first."
        if reason is None:
            try:
                original(self, request, request_wave)
                return
            except PASSES:
                raise
            except BaseException as error:
                for name in ("waiting", "skipped_waiting"):  # heapq and deque add before they may raise
                    getattr(self.scheduler, name, self.scheduler.waiting).remove_requests([request])
                if self.scheduler.requests.get(request.request_id) is request:
                    del self.scheduler.requests[request.request_id]
                reason = REFUSED + words(error)
        tell(self, Refused(request.request_id, request.client_index, reason))

    @around(process, "process_input_sockets")
    def process_input_sockets(original: Original, self: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            original(self, *arguments, **keywords)
        except PASSES:
            raise
        except BaseException:
            logger.exception("The engine's input thread died, so the engine ends.")
            self.input_queue.put_nowait((module.EngineCoreRequestType.EXECUTOR_FAILED, b""))


@repair(
    "request-steps",
    f"{CORE}:EngineCore.step .step_with_batch_queue",
    releases=BOTH,
    upstream="vllm PR 47312",
    until="0.33",
)
def install_steps(module: ModuleType) -> None:
    """The engine core has no way to end a single failed request."""
    core, names = module.EngineCore, ("step", "step_with_batch_queue")
    for name in names:
        expect_source(getattr(core, name), "self.scheduler.schedule()", "self.scheduler.update_from_output(")
    expect_source(core.__init__, "self.step_fn = (self.step if", "self.structured_output_manager =")

    def step(original: Original, self: Any) -> tuple[Any, bool]:
        end_reported(self)
        outputs, executed = original(self)
        end_reported(self)
        if untold := vars(self).pop(_UNTOLD, None):
            outputs = outputs or {}
            outputs.setdefault(0, module.EngineCoreOutputs()).outputs.extend(untold)
        return outputs, executed

    for name in names:
        around(core, name)(step)


@repair("prompt-logprobs", f"{SCHEDULER}:Scheduler.update_from_output", until="0.23")
def install_prompt_logprobs(module: ModuleType) -> None:
    """The prompt log-probabilities of a preempted request end the engine.

    The request computes its prompt again, but its prompt log-probabilities were sent with its first token. If a chunk
    yields no token, stock vLLM asserts that there are none.
    """
    expect_source(module.Scheduler.update_from_output, "assert not prompt_logprobs_tensors")

    @around(module.Scheduler, "update_from_output")
    def update_from_output(original: Original, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        said = model_runner_output.prompt_logprobs_dict
        for request_id in [name for name in said if (r := self.requests.get(name)) is not None and r.num_output_tokens]:
            del said[request_id]
        return original(self, scheduler_output, model_runner_output)

"""Refusals and failures of the handlers, as objects that vLLM's routes answer with.

vLLM takes an error's HTTP status from its `code`. The client gets the front end's JSON: OpenAI's form, equal on each
release, or for /v1/messages Anthropic's, which vLLM's route builds from the type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from npu_gptoss.frontend.chat import PASSED
from npu_gptoss.harmony.encoding import ContextError
from npu_gptoss.serving import logger
from npu_gptoss.serving.admission.refusal import Refusal, escaped, shown
from npu_gptoss.serving.compat.server.shutdown import is_final
from npu_gptoss.serving.openai.release import release
from npu_gptoss.serving.releases import vllm as names

_PARAMETER = re.compile(r" \(parameter=(\w+).*\)$", re.DOTALL)  # ends vLLM's own errors
CONTEXT_CODE = "context_length_exceeded"  # clients shorten the conversation when they see it


def of_the_request() -> tuple[type[Exception], ...]:
    """Returns the exceptions, vLLM's and ours, that a client's mistakes cause."""
    return (ValueError, TypeError, OverflowError, NotImplementedError, Refusal, *release().client_errors)


@functools.cache
def printing(base: type) -> type:
    """Returns a subclass of vLLM's answer that prints the front end's JSON."""

    class Answered(base):
        @classmethod
        def of(cls, body: Mapping[str, Any], **attributes: Any) -> Any:
            """attributes: those that vLLM's routes read."""
            made = cls.model_construct(**attributes)
            made.__dict__["json"] = dict(body)
            return made

        def model_dump(self, **_: Any) -> dict[str, Any]:
            own = {"status": self.status} if "status" in self.__dict__["json"] else {}
            return self.__dict__["json"] | own

    return Answered


def refused(
    message: str, param: str | None = None, status: int = 400, kind: str | None = None, code: Any = None
) -> Any:
    """Returns vLLM's ErrorResponse. code: OpenAI's code for the mistake, if it has one; kind: the type."""
    kind = kind or ("BadRequestError" if status == HTTPStatus.BAD_REQUEST else HTTPStatus(status).phrase)
    info = names.ErrorInfo(message=message, type=kind, param=param, code=int(status))
    body = {"message": message, "type": kind, "param": param, "code": code or int(status)}
    return printing(names.ErrorResponse).of({"error": body}, error=info)


def refusal(error: Exception) -> Any:
    """Returns the error for a request that cannot be served, from the exception with the reason."""
    if isinstance(error, Refusal):
        return refused(error.message, error.param, int(error.status))
    if isinstance(error, ContextError):
        return refused(str(error), error.param, kind="invalid_request_error", code=CONTEXT_CODE)
    if callable(getattr(error, "errors", None)):  # pydantic's
        found = misread(error.errors())
        return refused(found.message, found.param)
    param = getattr(error, "param", None) or getattr(error, "parameter", None) or _field(str(error))
    said = escaped(_PARAMETER.sub("", str(error)), 1000) or type(error).__name__
    return refused(said, param, int(getattr(error, "status_code", HTTPStatus.BAD_REQUEST)))


async def unknown_model(serving: Any, request: Any) -> Any:
    """Returns the error for a request whose model the server does not have; else None."""
    unknown = await serving._check_model(request)
    return None if unknown is None else refused(unknown.error.message, "model", unknown.error.code, unknown.error.type)


def _field(message: str) -> str | None:
    """Returns the sampling field that a message of vLLM's names: in backticks, or as its first word."""
    named = re.match(r"(\w+) (?:must|should|cannot) |[^`]*`(\w+)`", message)
    name = named and (named[1] or named[2])
    return name if name in PASSED else None


def failure(error: Exception) -> Any:
    """Returns the error that ends a begun answer: the client's mistake, the engine's end, or a fault of ours."""
    if is_final(error):
        return refused(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE)
    if isinstance(error, of_the_request()):
        return refusal(error)
    # vLLM's errors name it so, or so: a full queue of 0.33 (--max-num-queued-reqs) is 503
    status = getattr(error, "status_code", None) or getattr(error, "http_status", HTTPStatus.INTERNAL_SERVER_ERROR)
    return refused(escaped(str(error), 1000) or type(error).__name__, status=int(status))


def failed(what: str, error: Exception) -> Any:
    """Returns the error in the place of a whole answer, and logs a fault of ours; a server that ends or is full, 503,
    is none."""
    known = failure(error)
    if known.error.code == HTTPStatus.INTERNAL_SERVER_ERROR:
        log_failure(what, error)
    return known


def misread(errors: Sequence[Any], body: Any = None) -> Refusal:
    """Picks pydantic's deepest complaint about the body and names its path in the client's spelling."""
    if not errors or not isinstance(errors[0], Mapping):  # vLLM's own error about a Content-Type
        return Refusal(escaped(str(errors[0] if errors else "The request cannot be read.")))
    paths = [_path(error.get("loc", ()), body) for error in errors]
    deepest = max(range(len(errors)), key=lambda number: len(paths[number]))
    error, param = errors[deepest], _spelled(paths[deepest])
    said = escaped(str(error.get("msg", "invalid")), 300).removeprefix("Value error, ").removesuffix(".")
    named = _PARAMETER.search(said)
    said = said[: named.start()].removesuffix(".") if named else said
    said = f"expected {said.removeprefix('Input should be ')}" if said.startswith("Input should be ") else said
    got = f", got {shown(error['input'])}" if "input" in error and param and error.get("type") != "missing" else ""
    return Refusal(f"{f'{param}: ' if param else ''}{said}{got}.", param or (named[1] if named else _field(said)))


def _path(place: Sequence[Any], body: Any) -> list[Any]:
    """Drops names of types that pydantic tried: parts that are no key or index of the body, except the last."""
    path: list[Any] = []
    for number, part in enumerate(place):
        if part in ("body", "query") and number == 0:
            continue
        if (isinstance(body, Mapping) and part in body) or (
            isinstance(body, Sequence) and not isinstance(body, str) and isinstance(part, int) and part < len(body)
        ):
            body = body[part]
        elif (
            body is not None
            and not isinstance(part, int)
            and (number < len(place) - 1 or not isinstance(body, Mapping))
        ):
            continue
        path.append(part)
    return path


def _spelled(path: Sequence[Any]) -> str:
    spelled = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return escaped(spelled.removeprefix("."), 100)


def log_failure(what: str, error: Exception) -> None:
    """Logs a failure, without traceback if the engine ended: that is logged once and ends every request."""
    logger.error("%s: %s", what, error, exc_info=None if is_final(error) else error)

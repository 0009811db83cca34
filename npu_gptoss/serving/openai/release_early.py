"""How the handlers reach the engine of vLLM 0.11 and 0.23."""

from __future__ import annotations

from typing import Any

CLIENT_ERRORS: tuple[type[Exception], ...] = ()  # besides Python's


def preflight(serving: Any, samples: int) -> None:
    """Raises an error if the engine takes no requests."""
    if serving.engine_client.errored:
        raise serving.engine_client.dead_error


def reused_prompt(serving: Any, request: Any) -> list[int] | None:
    """Returns the prompt's tokens if another server has encoded it."""
    return None


def scheduling(serving: Any, request: Any, raw_request: Any) -> dict[str, Any]:
    """Returns keywords of `generate` by which the engine schedules."""
    return {"priority": request.priority}


def about_choice(request: Any, output: Any, whole: bool) -> dict[str, Any] | None:
    """Returns choice fields from the engine, from a sample's last CompletionOutput."""
    return None

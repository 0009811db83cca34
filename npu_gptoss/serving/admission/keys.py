"""Checks API keys: on a server with keys, every route except /health and /ping requires one.

vLLM 0.11.0 guards only paths under /v1 and takes the path from the client's Host header (CVE-2026-48746). This check
uses the router's path.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal

OPEN = frozenset({"/health", "/ping"})  # load balancers and orchestrators have no key
METRICS = "/metrics"
ANTHROPIC = b"x-api-key"  # the header of Anthropic's clients
CHALLENGE = ((b"www-authenticate", b"Bearer"),)

NEEDED = (
    "An API key is needed: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`, once, with a key of this "
    "server."
)


def route_path(scope: Mapping[str, Any]) -> str:
    """Returns the path that the router matches: without the proxy's prefix (`--root-path`)."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) :][:1] in ("", "/"):
        return path[len(root) :]
    return path


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyGuard:
    """Holds the digests of the keys; without keys it admits every client."""

    def __init__(self, keys: Iterable[str], open_metrics: bool = False) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = OPEN | {METRICS, METRICS + "/"} if open_metrics else OPEN

    def objection(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Returns the refusal of this HTTP or WebSocket connection; None if it is admitted."""
        if not self._digests or route_path(scope) in self._open:
            return None
        given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", ANTHROPIC)]
        if given and len(dict(given)) == len(given) and all(self._knows(name, value) for name, value in given):
            return None
        return Refusal(NEEDED, status=HTTPStatus.UNAUTHORIZED)

    def _knows(self, name: bytes, value: bytes) -> bool:
        scheme, _, key = (b"bearer", b"", value) if name == ANTHROPIC else value.partition(b" ")
        digest, known = _digest(key), False
        for other in self._digests:  # compare all of them, so that the time reveals nothing
            known |= secrets.compare_digest(digest, other)
        return known and scheme.lower() == b"bearer"

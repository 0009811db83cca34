"""Prints name, checkpoint and longest context of the model that an OpenAI-compatible server serves, separated by tabs.

    served_model.py URL [NAME]

perf.sh and eval.sh run it before a long run: without an answer it names the fault. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence

TIMEOUT = 20  # seconds


class ServerError(Exception):
    """The sentence names the question, the answer and the remedy."""


def served_models(url: str) -> dict[str, tuple[str, str]]:
    """name -> checkpoint and longest context in tokens, "" where the server does not name them.

    url: `http://host:port`, with or without `/v1`.
    """
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    if not address.startswith(("http://", "https://")):
        raise ServerError(f"{url} is no address of a server: expected http://{url}")
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as response:
            models = json.load(response)["data"]
            return {model["id"]: (model.get("root") or "", str(model.get("max_model_len") or "")) for model in models}
    except urllib.error.HTTPError as error:
        remedy = "start it without --api-key for this" if error.code == 401 else "is it an OpenAI-compatible server?"
        raise ServerError(f"{address} answers {error.code} {error.reason}; {remedy}{proxy_of(address)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(
            f"no server answers at {address} ({reason}). Start one (scripts/serve.sh, make serve), wait until it is "
            f"ready, or name another with --url{proxy_of(address)}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ServerError(f"{address} answers something else than a list of models; is --url right?") from None


def proxy_of(address: str) -> str:
    """The hint for a proxy that answers in the server's place; evalscope asks it too."""
    parts = urllib.parse.urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or urllib.request.proxy_bypass(parts.netloc):
        return ""
    return f"; the proxy {proxy} was asked; for a server that it cannot reach, set no_proxy={parts.hostname}"


def choose(models: dict[str, tuple[str, str]], wanted: str) -> tuple[str, str, str]:
    """The model called `wanted`, or the only one."""
    if wanted and wanted not in models:
        raise ServerError(f"the server has no model {wanted!r}; it serves {', '.join(models) or 'none'}")
    if not wanted and len(models) != 1:
        raise ServerError(f"the server serves {', '.join(models) or 'no model'}; name one with --model")
    name = wanted or next(iter(models))
    return name, *models[name]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not 1 <= len(words) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print("\t".join(choose(served_models(words[0]), words[1] if len(words) > 1 else "")))
    except ServerError as error:
        print(f"{error}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

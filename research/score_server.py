"""Scores a server of the trained tiny checkpoint by labelled chats over HTTP, greedily (docs/tiny-checkpoint.md).

python -m research.score_server http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from research.tiny_data import evaluation_set
from research.tiny_score import Example, Score, tally

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a local server needs no proxy


def fetched(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with DIRECT.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=300) as response:
        return json.load(response)


def score_server(url: str, examples: Sequence[Example], at_a_time: int = 16) -> Score:
    """Scores a server; its url has no path. Raises OSError where a request fails."""
    (model,) = [served["id"] for served in fetched(f"{url}/v1/models")["data"]]

    def is_right(example: Example) -> bool:
        body = {"model": model, "temperature": 0, "max_tokens": 200, "messages": list(example.messages)}
        body |= {"reasoning_effort": example.reasoning_effort}
        body |= {"tools": list(example.tools)} if example.tools else {}
        message = fetched(f"{url}/v1/chat/completions", body)["choices"][0]["message"]
        call = message["tool_calls"][0]["function"] if message.get("tool_calls") else {}
        return example.is_right_reply(message["content"], call.get("name"), call.get("arguments"))

    with ThreadPoolExecutor(at_a_time) as pool:
        return tally(examples, pool.map(is_right, examples))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the server, without a path")
    parser.add_argument("--examples", type=int, default=240, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the examples (default %(default)s)")
    parser.add_argument("--at-a-time", type=int, default=16, help="requests (default %(default)s)")
    options = parser.parse_args(arguments)
    print(score_server(options.url.rstrip("/"), evaluation_set(options.seed, options.examples), options.at_a_time))
    return 0


if __name__ == "__main__":
    sys.exit(main())

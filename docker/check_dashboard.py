"""Sends a real Prometheus each query of the dashboard and each alert, while requests run on a server.

    python docker/check_dashboard.py http://127.0.0.1:8000 [--prometheus PROGRAM]

Works with any gpt-oss server. Exits with 1 if a query fails, or finds nothing although its series exist; an alert may
find nothing. Needs promql-parser, which `make setup` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from tests.docker.dashboard import Query

LISTEN = "127.0.0.1:19090"
SECONDS = 40  # of load; the rates of the dashboard span a minute


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


@contextlib.contextmanager
def prometheus(program: str, server: str) -> Iterator[str]:
    target = urllib.parse.urlsplit(server).netloc
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        text = (ROOT / "docker/prometheus.yml").read_text()
        config.write_text(text.replace("gpt-oss:8000", target).replace("scrape_interval: 5s", "scrape_interval: 1s"))
        shutil.copy(ROOT / "docker/alerts.yml", folder)
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={LISTEN}"]
        process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield f"http://{LISTEN}"
        finally:
            process.terminate()
            process.wait(30)


def load(server: str, seconds: float) -> int:
    """Sends requests of several lengths, some at once, for some seconds; returns how many."""
    model = get(f"{server}/v1/models")["data"][0]["id"]
    end, sent = time.monotonic() + seconds, 0

    def ask(length: int) -> None:
        body = {"model": model, "prompt": [100 + length] * length, "max_tokens": 12, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()

    def ask_wrongly() -> None:
        headers = {"Content-Type": "application/json"}
        for body in (b"no json", b"{}"):  # refused by the admission, and by vLLM
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(urllib.request.Request(f"{server}/v1/completions", body, headers), timeout=30)

    with ThreadPoolExecutor(4) as pool:
        while time.monotonic() < end:
            ask_wrongly()  # for the panels of refusals
            lengths = [3, 40, 40, 200][: 1 + sent % 4]
            list(pool.map(ask, lengths))
            sent += len(lengths)
    return sent


def answer(where: str, expression: str) -> list[Any]:
    """The result of an instant query. Raises RuntimeError with Prometheus's own words."""
    try:
        return get(f"{where}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")["data"]["result"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.loads(error.read()).get("error", str(error))) from None


def verdict(where: str, query: Query) -> str:
    from tests.docker.dashboard import ALERT, series

    try:
        found = answer(where, query.expression)
    except RuntimeError as error:
        return f"WRONG: {error}"
    if found:
        values = ", ".join(f"{item['value'][1]} {item['metric'] or ''}".strip() for item in found[:3])
        return f"ok: {values}"[:150]
    absent = [wanted.metric for wanted in series(query.expression) if not answer(where, wanted.metric)]
    if absent:
        return f"WRONG: no series {', '.join(absent)}"
    if query.panel.startswith(ALERT):
        return "ok, and quiet"
    # on a CPU no step replays a graph, so no bucket has a series
    return "ok, and nothing to show: no graphs here" if "mode!=" in query.expression else "WRONG: nothing found"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("--prometheus", default="prometheus", metavar="PROGRAM")
    options = parser.parse_args()
    try:
        from tests.docker.dashboard import alerts, queries
    except ModuleNotFoundError as error:
        print(f"check_dashboard.py: {error.name} is missing here; make setup installs it in .venv.", file=sys.stderr)
        return 2
    wrong, asked = 0, [*queries(), *alerts()]
    with prometheus(options.prometheus, options.server) as where:
        print(f"{load(options.server, SECONDS)} requests in {SECONDS} s", flush=True)
        for query in asked:
            result = verdict(where, query)
            wrong += result.startswith("WRONG")
            print(f"{query.panel} / {query.legend or 'table'}: {result}")
    print(f"{len(asked)} queries, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

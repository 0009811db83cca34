"""A server with its second engine on another node, as in docs/several-machines.md; both are one machine here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from subprocess import Popen

import pytest
import requests

pytest.importorskip("vllm")

from npu_gptoss.tiny.checkpoint import write_tiny
from scripts import serve_here
from tests.serving.server import START_LIMIT, Server, free_port

pytestmark = [pytest.mark.serving, pytest.mark.slow, pytest.mark.long]

NAME = "gpt-oss-tiny"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Popen[bytes], Popen[bytes]]]:
    """The server, the first node's process and the second's."""
    folder = tmp_path_factory.mktemp("nodes")
    model, port = folder / "model", free_port()
    write_tiny(model, trained=True)
    base = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = serve_here.serving_environment(model, model, base | own)
    share = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1")
    share += ("--data-parallel-rpc-port", str(free_port()))
    started = []
    try:
        for node, more in enumerate(((), ("--headless", "--data-parallel-start-rank", "1"))):
            command = serve_here.serve_command(model, NAME, "127.0.0.1", port, (*share, *more))
            started.append(serve_here.start(command, environment, folder / f"log-{node}"))
        server = Server(f"http://127.0.0.1:{port}", NAME, folder / "log-0")
        serve_here.wait_until_ready(started[0], server.url, server.log, timeout=2 * START_LIMIT)
        yield server, *started
    finally:
        for process in started:
            serve_here.stop(process, patience=1)


def answer(server: Server, question: str) -> str | int:
    """The content of the answer, or the status of its refusal."""
    body = {"model": server.name, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    return reply.json()["choices"][0]["message"]["content"] if reply.ok else reply.status_code


def test_the_engines_of_two_nodes_answer_rightly_together(nodes) -> None:
    server, _, _ = nodes
    sums = [(a, b) for a in range(2, 6) for b in (1, 3)]
    with ThreadPoolExecutor(len(sums)) as pool:
        answers = list(pool.map(lambda pair: answer(server, f"What is {pair[0]} + {pair[1]}?"), sums))
    assert answers == [f"{a} + {b} = {a + b}." for a, b in sums]
    assert all(server.metric("npu_gptoss_steps_total", engine=engine) > 0 for engine in "01"), "one engine did it all"


def test_a_node_that_dies_is_a_503_and_an_exit_status_of_the_first(nodes) -> None:
    server, first, second = nodes
    os.killpg(second.pid, signal.SIGKILL)
    assert answer(server, "What is 3 + 4?") == 503
    assert first.wait(60) == 1
    assert serve_here.likely_reason(server.log)

"""The server's end and its port, on 0.11 and 0.23."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import types
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai import api_server

from npu_gptoss.serving.compat.server import shutdown

pytestmark = pytest.mark.serving


def dead_core(exitcode: int | None, cause: str | None = None) -> Any:
    """The client of an engine core whose process has ended. cause: None without the repair engine-pulse-client."""
    process = types.SimpleNamespace(name="EngineCore_DP0", exitcode=exitcode)
    manager = types.SimpleNamespace(processes=[process])
    pulse = {} if cause is None else {"npu_gptoss_pulse": types.SimpleNamespace(cause=cause)}
    return types.SimpleNamespace(resources=types.SimpleNamespace(engine_manager=manager), **pulse)


def test_second_server_does_not_share_the_port(patched: Any) -> None:
    with patched("server-port"), api_server.create_server_socket(("127.0.0.1", 0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(SystemExit, match=f"127.0.0.1 port {port}: Address already in use"):
            api_server.create_server_socket(("127.0.0.1", port))


def test_invalid_drain_time_is_refused_at_the_start(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_GPTOSS_DRAIN_SECONDS", "for ever")
    with patched("server-port"), pytest.raises(SystemExit, match="NPU_GPTOSS_DRAIN_SECONDS='for ever'"):
        api_server.create_server_socket(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("cause", "exitcode", "words"),
    [
        ("ValueError: x\x1b[2J", None, "ValueError: x [2J"),
        ("", -9, "SIGKILL"),
        (None, 3, "exit status 3"),
        ("", None, ""),
    ],
)
def test_last_log_line_names_the_cause_of_death(caplog, monkeypatch, cause, exitcode, words):
    monkeypatch.setattr(shutdown.logger, "propagate", True)
    caplog.set_level("ERROR", logger=shutdown.logger.name)
    caplog.handler.setFormatter(None)
    shutdown.logger.addHandler(caplog.handler)
    try:
        with pytest.raises(SystemExit) as ended:
            asyncio.run(shutdown._died(types.SimpleNamespace(engine_core=dead_core(exitcode, cause))))
    finally:
        shutdown.logger.removeHandler(caplog.handler)
    assert ended.value.code == 1
    message = caplog.records[0].getMessage()
    assert words in message
    assert message.isprintable()


@pytest.mark.parametrize(("chosen", "seconds"), [({}, 75), ({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "9"}, 9)])
def test_idle_connection_is_closed_before_clients_let_go(chosen: dict[str, str], seconds: int) -> None:
    code = """
from npu_gptoss import plugin
plugin.register()
from vllm import envs
print(envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
"""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"}
    said = subprocess.run([sys.executable, "-c", code], env=environment | chosen, capture_output=True, text=True)
    assert said.stdout.split()[-1:] == [str(seconds)], said.stderr

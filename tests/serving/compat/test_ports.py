"""Ports that vLLM chooses stay free until it listens on them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm import utils

from npu_gptoss.serving.compat.server import ports

pytestmark = pytest.mark.serving


@pytest.fixture
def given_away() -> range:
    """Ports that the system gives to outgoing connections."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(low, high + 1)


def test_a_chosen_port_is_none_that_the_system_gives_to_others(patched, given_away):
    with patched():
        assert utils.get_open_port() in given_away, "stock vLLM is right"
    with patched("ports"):
        chosen = [utils.get_open_port() for _ in range(50)]
        assert not set(chosen) & set(given_away)
        assert len(set(chosen)) > 40, "two processes choose the same one"
        assert len(utils.get_open_ports_list(5)) == 5


def test_a_port_that_somebody_listens_on_is_not_chosen(patched, monkeypatch, given_away):
    port = ports.quiet_port()
    monkeypatch.setattr(ports, "RANGE", range(port, port + 1))
    with patched("ports"), socket.socket() as listener:
        assert utils.get_open_port() == port
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert utils.get_open_port() in given_away, "the system's choice is what is left"


def test_a_range_that_the_system_gives_away_is_not_chosen_from(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "_GIVEN_AWAY", tmp_path / "range")
    assert ports.quiet_port() is None, "another system"
    (tmp_path / "range").write_text(f"{ports.RANGE[0]}\t{ports.RANGE[-2]}\n")
    assert ports.quiet_port() in (ports.RANGE[-1], None), "that one is the last, and may be somebody's"


def test_the_port_that_a_user_gives_is_kept(patched, monkeypatch):
    port = ports.quiet_port()
    monkeypatch.setenv("VLLM_PORT", str(port))
    with patched("ports"):
        assert utils.get_open_port() == port

"""Ports that vLLM chooses stay free until it listens on them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from vllm import utils

from npu_gptoss.serving.compat.server import ports


@pytest.fixture
def given_away() -> range:
    """Ports that the system uses for outgoing connections."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(low, high + 1)


def test_chosen_port_is_outside_of_the_systems_range(patched, given_away):
    with patched("ports"):
        chosen = [utils.get_open_port() for _ in range(50)]
        assert not set(chosen) & set(given_away)
        assert len(set(chosen)) > 40, "two processes choose the same one"
        assert len(utils.get_open_ports_list(5)) == 5


def test_port_in_use_is_not_chosen(patched, monkeypatch, given_away):
    port = ports.quiet_port()
    monkeypatch.setattr(ports, "RANGE", range(port, port + 1))
    with patched("ports"), socket.socket() as listener:
        assert utils.get_open_port() == port
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert utils.get_open_port() in given_away, "only the system's choice is left"


def test_systems_range_is_avoided(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "_GIVEN_AWAY", tmp_path / "range")
    assert ports.quiet_port() is None, "unknown system"
    (tmp_path / "range").write_text(f"{ports.RANGE[0]}\t{ports.RANGE[-2]}\n")
    assert ports.quiet_port() in (ports.RANGE[-1], None), "the last port, which may be in use"


def test_port_of_the_user_is_kept(patched, monkeypatch):
    port = ports.quiet_port()
    monkeypatch.setenv("VLLM_PORT", str(port))
    with patched("ports"):
        assert utils.get_open_port() == port

"""Before a long run the server is asked what it serves; every way that fails is a sentence."""

from __future__ import annotations

import sys
import urllib.request

import pytest

from tests.scripts.fake_server import fake_server
from tests.scripts.shell import SCRIPTS
from tests.serving.server import free_port

sys.path.insert(0, str(SCRIPTS))
import served_model


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_only_model_is_found_with_its_checkpoint(suffix: str, capsys: pytest.CaptureFixture) -> None:
    with fake_server({"gpt-oss-20b": "/models/20b"}) as url:
        assert served_model.main([url + suffix]) == 0
    assert capsys.readouterr().out == "gpt-oss-20b\t/models/20b\t16384\n"


def test_of_several_models_one_has_to_be_named(capsys: pytest.CaptureFixture) -> None:
    with fake_server({"a": "/a", "b": "/b"}) as url:
        assert served_model.main([url]) == 2
        assert "serves a, b; name one with --model" in capsys.readouterr().err
        assert served_model.main([url, "b"]) == 0
        assert capsys.readouterr().out == "b\t/b\t16384\n"
        assert served_model.main([url, "c"]) == 2
        assert "no model 'c'; it serves a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, "", "answers 401 Unauthorized; start it without --api-key"),
        (404, "", "answers 404 Not Found; is it an OpenAI-compatible server?"),
        (200, "<html>", "something else than a list of models"),
        (200, '{"data": 3}', "something else than a list of models"),
        (200, '{"data": []}', "serves no model"),
    ],
)
def test_another_server_is_recognised(status: int, body: str, words: str, capsys: pytest.CaptureFixture) -> None:
    with fake_server({}, status, body) as url:
        assert served_model.main([url]) == 2
    assert words in capsys.readouterr().err


def test_a_proxy_that_was_asked_instead_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It answers for a server that it cannot reach; evalscope would ask it too."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    with fake_server({}, 502, "") as proxy, fake_server({"a": "/a"}) as url:
        monkeypatch.setenv("http_proxy", proxy)
        for host, asked in (("", True), ("127.0.0.1", False)):
            monkeypatch.setenv("no_proxy", host)
            monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers what the environment was
            assert (served_model.main([url]) == 2) == asked
        printed = capsys.readouterr()
    assert f"the proxy {proxy} was asked; for a server that it cannot reach, set no_proxy=127.0.0.1" in printed.err
    assert printed.out == "a\t/a\t16384\n"


def test_no_server_is_told_with_what_to_do(capsys: pytest.CaptureFixture) -> None:
    assert served_model.main([f"http://127.0.0.1:{free_port()}"]) == 2
    printed = capsys.readouterr().err
    assert "no server answers" in printed
    assert "scripts/serve.sh" in printed

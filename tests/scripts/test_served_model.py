"""Before a long run the scripts ask the server for its model; each failure is a sentence."""

from __future__ import annotations

import urllib.request

import pytest

from scripts import served_model
from tests.scripts.fake_server import fake_server
from tests.serving.server import free_port


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_only_model_is_found_with_its_checkpoint(suffix: str, capsys: pytest.CaptureFixture) -> None:
    with fake_server({"gpt-oss-20b": "/models/20b"}) as url:
        assert served_model.main([url + suffix]) == 0
    assert capsys.readouterr().out == "gpt-oss-20b\t/models/20b\t16384\n"


def test_of_several_models_one_has_to_be_named(capsys: pytest.CaptureFixture) -> None:
    with fake_server({"a": "/a", "b": "/b"}) as url:
        for wanted, status in (([], 2), (["c"], 2), (["b"], 0)):
            assert served_model.main([url, *wanted]) == status
            printed = capsys.readouterr()
            assert printed.out == "b\t/b\t16384\n" if status == 0 else "serves a, b" in printed.err


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, "", "--api-key"),
        (404, "", "404 Not Found"),
        (200, "<html>", "something else"),
        (200, '{"data": 3}', "something else"),
        (200, '{"data": []}', "no model"),
    ],
)
def test_another_server_is_recognised(status: int, body: str, words: str, capsys: pytest.CaptureFixture) -> None:
    with fake_server({}, status, body) as url:
        assert served_model.main([url]) == 2
    assert words in capsys.readouterr().err


def test_a_proxy_that_was_asked_instead_is_named(monkeypatch, capsys) -> None:
    """It answers for a server that it cannot reach; evalscope would ask it too."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    with fake_server({}, 502, "") as proxy, fake_server({"a": "/a"}) as url:
        monkeypatch.setenv("http_proxy", proxy)
        for host, asked in (("", True), ("127.0.0.1", False)):
            monkeypatch.setenv("no_proxy", host)
            monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers what the environment was
            assert (served_model.main([url]) == 2) == asked
        printed = capsys.readouterr()
    assert proxy in printed.err
    assert "no_proxy=127.0.0.1" in printed.err
    assert printed.out == "a\t/a\t16384\n"


def test_an_address_without_its_scheme_is_no_missing_server(capsys: pytest.CaptureFixture) -> None:
    assert served_model.main(["localhost:8085"]) == 2
    assert "http://localhost:8085" in capsys.readouterr().err


def test_a_missing_server_is_reported_with_a_remedy(capsys: pytest.CaptureFixture) -> None:
    assert served_model.main([f"http://127.0.0.1:{free_port()}"]) == 2
    assert "scripts/serve.sh" in capsys.readouterr().err

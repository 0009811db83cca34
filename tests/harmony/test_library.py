"""openai-harmony's vocabulary is found or built without the network, or one sentence names the missing file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.harmony import library
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE, VocabularyError, is_published_vocabulary

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vocabulary in the environment, the caches or the temporary folder, and no way out."""
    for name in (BASE_VARIABLE, library.CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in PROXIES:
        monkeypatch.setenv(name, NOWHERE)


def load_in_a_new_process(model_dir: Path) -> subprocess.CompletedProcess[str]:
    """The encoding is loaded once a process."""
    code = "import pathlib, sys; from npu_gptoss.harmony.library import load_encoding as load; "
    code += "print(load(pathlib.Path(sys.argv[1])).encode('hello'))"
    return subprocess.run([sys.executable, "-c", code, str(model_dir)], capture_output=True, text=True, timeout=120)


def test_a_vocabulary_is_not_built_from_the_checkpoint(directory, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "tokenizer.json").symlink_to(directory / "tokenizer.json")
    done = load_in_a_new_process(checkpoint)
    assert done.stdout == "[24912]\n", done.stderr
    assert is_published_vocabulary(tmp_path / "cache" / "npu_gptoss" / VOCABULARY_FILE)
    assert not (checkpoint / VOCABULARY_FILE).exists()  # the checkpoint is the user's


def test_missing_vocabulary_of_a_checkpoint_is_reported(published, tmp_path):
    (tmp_path / VOCABULARY_FILE).write_bytes(published)
    done = load_in_a_new_process(tmp_path)
    assert done.stdout == "[24912]\n", done.stderr


def test_a_read_only_home_stops_the_server(directory, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/tokenizer.json").symlink_to(directory / "tokenizer.json")
    (tmp_path / "cache").write_text("no folder")
    library.provide_vocabulary(tmp_path / "checkpoint")
    assert is_published_vocabulary(Path(os.environ.pop(BASE_VARIABLE)) / VOCABULARY_FILE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    with pytest.raises(VocabularyError, match=r"Not a directory\. Let XDG_CACHE_HOME or TMPDIR name"):
        library.provide_vocabulary(tmp_path / "checkpoint")


def test_a_missing_vocabulary_is_no_sentence_with_the_remedy(tmp_path):
    with pytest.raises(VocabularyError) as error:
        library.provide_vocabulary(None)
    said = str(error.value)
    assert said.startswith(f"openai-harmony needs {VOCABULARY_FILE}")
    assert f"${BASE_VARIABLE} (unset) nor in {tmp_path / 'cache' / 'npu_gptoss'}" in said
    assert "Run `npu-gptoss vocabulary MODEL_DIR`" in said
    assert "\n" not in said


def test_a_checkpoint_with_another_tokenizer_does_not_say_so(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}}))
    with pytest.raises(VocabularyError, match="is not the tokenizer of gpt-oss"):
        library.provide_vocabulary(tmp_path)
    assert BASE_VARIABLE not in os.environ


@pytest.mark.parametrize("variable", [BASE_VARIABLE, library.CACHE_VARIABLE])
def test_a_vocabulary_that_the_user_chose_is_exchanged(directory, tmp_path, monkeypatch, published, variable):
    name = VOCABULARY_FILE if variable == BASE_VARIABLE else library.CACHED_FILE
    (tmp_path / name).write_bytes(published)
    monkeypatch.setenv(variable, str(tmp_path))
    library.provide_vocabulary(directory)
    assert os.environ.get(BASE_VARIABLE) == (str(tmp_path) if variable == BASE_VARIABLE else None)


def test_a_setting_that_leads_nowhere_stops_the_start(tmp_path, monkeypatch, published):
    model = tmp_path / "model"
    model.mkdir()
    (model / VOCABULARY_FILE).write_bytes(published)
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path / "nowhere"))
    library.provide_vocabulary(model)
    assert os.environ[BASE_VARIABLE] == str(model)


def test_a_broken_vocabulary_is_not_named(tmp_path, monkeypatch):
    (tmp_path / VOCABULARY_FILE).write_text("YQ== 0\n")
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path))
    done = load_in_a_new_process(tmp_path)
    last = done.stderr.splitlines()[-1]
    assert "VocabularyError: openai-harmony cannot load its vocabulary" in last
    assert f"npu-gptoss vocabulary {tmp_path}" in last

"""The vocabulary is there, rebuilt, broken or missing; where it is there, openai-harmony really loads it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from npu_gptoss.doctor import vocabulary as checked
from npu_gptoss.doctor.vocabulary import vocabulary
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE
from tests.doctor.machines import ascend, machine, only, write


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vocabulary of the user's, named or cached."""
    monkeypatch.delenv(BASE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_RS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(checked, "can_load", lambda: False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gpt-oss's tokenizer."""
    from tests.harmony.conftest import tokenizer_files  # skips where openai-harmony is not installed

    return tokenizer_files(tmp_path_factory.getbasetemp())


def test_a_vocabulary_that_lies_beside_the_model_is_loaded(tmp_path, model):
    only(vocabulary(machine(tmp_path), model), "ok", f"works offline: found in {model}")
    assert BASE_VARIABLE not in os.environ


def test_a_vocabulary_that_a_server_will_rebuild_is_rebuilt_and_loaded(tmp_path, model):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").symlink_to(model / "tokenizer.json")
    only(vocabulary(machine(tmp_path), bare), "ok", f"works offline: rebuilt from {bare / 'tokenizer.json'}")
    assert not (bare / VOCABULARY_FILE).exists(), "the doctor writes nothing"


def test_a_harmony_that_does_not_load_or_garbles_is_a_failure(tmp_path, model, monkeypatch):
    harmony = pytest.importorskip("openai_harmony")
    monkeypatch.setattr(checked, "SAMPLE", "<|start|>\ud800")
    only(vocabulary(machine(tmp_path), model), "failed", "decodes its own tokens to another text", VOCABULARY_FILE)

    load = Mock(side_effect=RuntimeError("error downloading or loading vocab file"))
    monkeypatch.setattr(harmony, "load_harmony_encoding", load)
    only(vocabulary(machine(tmp_path), model), "failed", "cannot load it: error downloading", "force-reinstall")


def test_a_vocabulary_that_is_not_the_published_one_is_a_failure(tmp_path):
    wrong = write(tmp_path / "wrong" / VOCABULARY_FILE, "IQ== 0\n")
    here = machine(tmp_path, **{BASE_VARIABLE: str(wrong.parent)})
    only(vocabulary(here, None), "failed", f"{wrong} is not the published vocabulary", "Delete it")


def test_no_vocabulary_and_no_tokenizer_is_a_failure(tmp_path):
    (tmp_path / "bare").mkdir()
    only(vocabulary(machine(tmp_path), tmp_path / "bare"), "failed", "cannot be rebuilt", BASE_VARIABLE)


def test_without_a_model_it_is_a_warning_unless_harmony_has_it(tmp_path, monkeypatch):
    only(vocabulary(machine(tmp_path), None), "warning", "rebuilds it from its checkpoint's tokenizer.json")
    monkeypatch.setattr(checked, "can_load", lambda: True)
    only(vocabulary(machine(tmp_path), None), "ok", "its own cache")


def test_without_openai_harmony_nothing_is_served(tmp_path):
    only(vocabulary(ascend(tmp_path, {"vllm-ascend": "0.11.0"}), None), "failed", "pip install openai-harmony")
    only(vocabulary(machine(tmp_path, {}), None), "warning", "pip install openai-harmony")

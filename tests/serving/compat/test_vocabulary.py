"""The harmony vocabulary: a server without network starts, or says in one sentence what it lacks."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.entrypoints import harmony_utils
from vllm.entrypoints.openai.serving_responses import OpenAIServingResponses

from npu_gptoss.harmony.vocabulary import (
    BASE_VARIABLE,
    VOCABULARY_FILE,
    VocabularyError,
    is_published_vocabulary,
)
from npu_gptoss.serving.compat import vocabulary
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary
from tests.serving.compat.fake_engine import FakeEngine, _common
from tests.serving.compat.in_process import in_a_fork

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def published() -> bytes:
    pytest.importorskip("bpe_openai")
    return packaged_vocabulary()


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vocabulary in the environment, the caches or the temporary folder, and no way out."""
    monkeypatch.delenv(BASE_VARIABLE, raising=False)
    monkeypatch.delenv(vocabulary.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.fixture
def serve(patched) -> Callable[..., str]:
    """The stop tokens of a new server for a model, or its error. In another process: it changes the environment."""

    def start(model: str, *patches: str) -> str:
        def serving() -> object:
            harmony_utils._harmony_encoding = None
            common = _common(FakeEngine([1]), "gpt_oss")
            common["model_config"].model = common["model_config"].tokenizer = model
            with patched(*patches):
                return OpenAIServingResponses(**common).default_sampling_params

        return in_a_fork(serving)

    return start


def test_a_server_without_network_takes_the_vocabulary_from_the_checkpoint(serve, tokenizer_directory, tmp_path):
    assert "error downloading or loading vocab file" in serve(str(tokenizer_directory))
    assert "200002" in serve(str(tokenizer_directory), "harmony-vocabulary")
    assert is_published_vocabulary(tmp_path / "cache" / "npu_gptoss" / VOCABULARY_FILE)
    assert not (tokenizer_directory / VOCABULARY_FILE).exists()  # the checkpoint is the user's


def test_a_vocabulary_that_cannot_be_had_is_one_sentence(serve, tmp_path):
    said = serve("openai/gpt-oss-20b", "harmony-vocabulary")
    assert said.startswith("VocabularyError: openai-harmony needs o200k_base.tiktoken")
    assert f"$TIKTOKEN_ENCODINGS_BASE (unset), {tmp_path / 'cache' / 'npu_gptoss'}" in said
    assert "Run `npu-gptoss vocabulary MODEL_DIR`" in said
    assert "\n" not in said


def test_a_checkpoint_with_another_tokenizer_says_so(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}}))
    with pytest.raises(VocabularyError, match=r"Building it failed: .*lacks 199997 of the ids"):
        vocabulary.provide_vocabulary(tmp_path)
    assert BASE_VARIABLE not in os.environ


@pytest.mark.parametrize("variable", [BASE_VARIABLE, vocabulary.CACHE_VARIABLE])
def test_what_the_user_has_set_up_is_left_alone(tmp_path, monkeypatch, published, variable):
    name = VOCABULARY_FILE if variable == BASE_VARIABLE else vocabulary.CACHED_FILE
    (tmp_path / name).write_bytes(published)
    monkeypatch.setenv(variable, str(tmp_path))
    vocabulary.provide_vocabulary(None)
    assert os.environ.get(BASE_VARIABLE) == (str(tmp_path) if variable == BASE_VARIABLE else None)


def test_a_setting_that_leads_nowhere_does_not_stop_the_server(tmp_path, monkeypatch, published):
    model = tmp_path / "model"
    model.mkdir()
    (model / VOCABULARY_FILE).write_bytes(published)
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path / "nowhere"))
    vocabulary.provide_vocabulary(model)
    assert os.environ[BASE_VARIABLE] == str(model)


def test_a_broken_file_is_named(tmp_path, monkeypatch, patched):
    (tmp_path / VOCABULARY_FILE).write_text("YQ== 0\n")
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(harmony_utils, "_harmony_encoding", None)
    with patched("harmony-vocabulary"), pytest.raises(VocabularyError) as error:
        harmony_utils.get_encoding()
    assert "openai-harmony cannot load o200k_base.tiktoken" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_the_checkpoint_is_found_in_the_hugging_face_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--openai--gpt-oss-20b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config = types.SimpleNamespace(tokenizer=None, model="openai/gpt-oss-20b", revision=None)
    assert vocabulary.checkpoint_directory(config) == snapshot
    config.model = str(tmp_path / "no such folder")
    assert vocabulary.checkpoint_directory(config) is None

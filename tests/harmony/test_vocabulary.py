"""The vocabulary for openai-harmony: rebuilt exactly, refused in words, never half-written."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from npu_gptoss.cli import main
from npu_gptoss.harmony import vocabulary
from npu_gptoss.harmony.vocabulary import (
    VOCABULARY_FILE,
    VOCABULARY_SHA256,
    VocabularyError,
    build_vocabulary,
    byte_characters,
    find_vocabulary,
    is_published_vocabulary,
)
from npu_gptoss.tiny.tokenizer_files import parse_ranks
from tests.refused import refused


@pytest.fixture(scope="module")
def vocab(published: bytes) -> dict[str, int]:
    characters = byte_characters()
    return {"".join(characters[byte] for byte in token): rank for rank, token in enumerate(parse_ranks(published))}


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)


def write_tokenizer(directory: Path, vocab: dict[str, int]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
    return directory


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "tokenizer.json")


def test_rebuilt_vocabulary_is_the_published_one(tmp_path, vocab, published, capsys):
    model = write_tokenizer(tmp_path / "model", vocab)
    assert find_vocabulary(model) is None
    assert main(["vocabulary", str(model)]) == 0
    assert VOCABULARY_SHA256 in capsys.readouterr().out
    assert (model / VOCABULARY_FILE).read_bytes() == published
    assert leftovers(model) == [VOCABULARY_FILE]
    assert (model / VOCABULARY_FILE).stat().st_mode & 0o777 == 0o644  # a server may be another user
    assert find_vocabulary(model) == model


def test_special_tokens_listed_in_the_vocabulary_are_left_out(tmp_path, vocab):
    model = write_tokenizer(tmp_path / "model", {**vocab, "<|return|>": 200_002})
    assert is_published_vocabulary(build_vocabulary(model, tmp_path / "out"))


def test_swapped_ranks_are_refused_and_nothing_is_written(tmp_path, vocab, capsys):
    first, second = list(vocab)[1000:1002]
    model = write_tokenizer(tmp_path / "model", {**vocab, first: vocab[second], second: vocab[first]})
    assert main(["vocabulary", str(model), "--output", str(tmp_path / "out")]) == 2
    assert "is not the tokenizer of gpt-oss" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert leftovers(model) == []


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"model": {"vocab": []}}',
        '{"model": {"vocab": {"a": 0, "b": "1"}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {"\\u4f60": 0}}}',
    ],
)
def test_wrong_tokenizer_is_a_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with refused("tokenizer.json", VocabularyError):
        build_vocabulary(tmp_path)


def test_read_only_checkpoint_sends_the_vocabulary_to_the_cache(tmp_path, vocab, monkeypatch, caplog):
    model = write_tokenizer(tmp_path / "model", vocab)
    write = vocabulary.write_atomically

    def refuse_model(path: Path, content: bytes) -> Path:  # root may write anywhere, so permissions cannot be the test
        if path.parent == model:
            raise PermissionError(13, "Permission denied")
        return write(path, content)

    monkeypatch.setattr(vocabulary, "write_atomically", refuse_model)
    with caplog.at_level(logging.WARNING):
        assert build_vocabulary(model) == tmp_path / "cache" / "npu_gptoss" / VOCABULARY_FILE
    assert "is not writable (Permission denied)" in caplog.text
    assert find_vocabulary(model) == tmp_path / "cache" / "npu_gptoss"
    with refused("--output", VocabularyError):
        build_vocabulary(model, model)


def test_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        vocabulary.write_atomically(tmp_path / "file", b"content")
    assert leftovers(tmp_path) == []


def test_file_with_a_wrong_hash_is_not_found_and_said_so(tmp_path, published, caplog):
    (tmp_path / VOCABULARY_FILE).write_bytes(published[:-2] + b"0\n")
    with caplog.at_level(logging.WARNING):
        assert find_vocabulary(tmp_path) is None
    assert "is not the published vocabulary" in caplog.text


def test_environment_variable_comes_before_the_model_directory(tmp_path, published, monkeypatch):
    for name in ("base", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / VOCABULARY_FILE).write_bytes(published)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path / "base"))
    assert find_vocabulary(tmp_path / "model") == tmp_path / "base"
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path / "nowhere"))
    assert find_vocabulary(tmp_path / "model") == tmp_path / "model"


def test_vocabulary_command_needs_no_torch_and_no_vllm():
    code = (
        "import sys; import npu_gptoss.harmony.vocabulary, npu_gptoss.harmony.vocabulary_command as c, npu_gptoss.cli;"
        "bad = {'torch', 'vllm', 'transformers', 'tokenizers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

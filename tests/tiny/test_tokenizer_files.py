"""The tokenizer of a tiny checkpoint: same tokens as the official encoders."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from npu_gptoss.harmony.vocabulary import VocabularyError, parse_ranks
from npu_gptoss.tiny import tokenizer_files
from npu_gptoss.tiny.tokenizer_files import (
    O200K_PATTERN,
    SPECIAL_TOKENS,
    packaged_vocabulary,
    recover_merges,
    write_tokenizer_files,
)
from tests.refused import refused

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\t\ttabs \n\n\r\n newlines \n",
    "1234567 3.14159 2026-01-02 ١٢٣",
    "It's we'll THEY'RE I'D 've",
    "naïve façade – “quotes” … € ¿qué? ñ",
    "你好，世界。こんにちは 안녕하세요 привет",
    "👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b \ufeff",
    'def f(x: int) -> dict[str, "T"]:\n\treturn {**x, "a": [1, 2]}  # done\n',
    "https://example.org/a/b?c=d&e=%20#f",
    "<|start|>user<|message|>What is 3 + 4?<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
    "<|reserved_200000|><|endofprompt|><|call|><|constrain|><|startoftext|><|endoftext|>",
    "CamelCaseWordsAndSCREAMING_SNAKE_case",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bpe_openai")
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_files(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path):
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(directory / "tokenizer.json"))


def random_texts(count: int) -> list[str]:
    generator = random.Random(0)
    alphabet = [*map(chr, range(32, 0x250)), *"\n\t 你好世界ñ👍éß٣", *"    aeiou0123456789'"]
    return ["".join(generator.choices(alphabet, k=generator.randint(1, 200))) for _ in range(count)]


def test_tokens_equal_tiktoken(tokenizer, directory):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {token: rank for rank, token in enumerate(parse_ranks((directory / "o200k_base.tiktoken").read_bytes()))}
    specials = {text: i for i, text in SPECIAL_TOKENS.items()}
    encoding = tiktoken.Encoding("o200k_harmony", pat_str=O200K_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    for text in TEXTS + random_texts(300):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == encoding.encode(text, allowed_special="all"), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_published_ids(tokenizer):
    assert SPECIAL_TOKENS[200_002] == "<|return|>"
    assert SPECIAL_TOKENS[200_000] == "<|reserved_200000|>"
    for i, text in SPECIAL_TOKENS.items():
        assert tokenizer.token_to_id(text) == i
        assert tokenizer.encode(text, add_special_tokens=False).ids == [i]
        assert tokenizer.decode([i], skip_special_tokens=True) == ""
    assert tokenizer.get_vocab_size() == 200_019


def test_merges_are_recovered_in_the_order_of_their_ranks():
    ranks = [b"a", b"b", b"c", b"ab", b"bc", b"abc"]
    assert recover_merges(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc"), (b"ab", b"c")]


CUT_OFF = Path.read_bytes


@pytest.mark.parametrize(
    ("place", "name", "value", "field"),
    [
        (importlib.util, "find_spec", lambda name: None, "bpe-openai"),
        (Path, "read_bytes", lambda path: CUT_OFF(path)[:-100], "bpe-openai"),
        (tokenizer_files, "VOCABULARY_SHA256", "0" * 64, "bpe-openai"),
    ],
    ids=["missing", "cut off", "altered"],
)
def test_other_ranks_than_the_published_are_refused(monkeypatch, place, name, value, field):
    pytest.importorskip("bpe_openai")
    monkeypatch.setattr(place, name, value)
    with refused(field, VocabularyError):
        packaged_vocabulary()


def test_transformers_reads_the_tokenizer(directory):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token_id == 200_002
    assert tokenizer.pad_token_id == 199_999
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else list(ids["input_ids"])
    assert ids[0] == 200_006
    assert tokenizer.decode(ids).endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")


def test_files_are_small_texts_with_the_published_fields(directory):
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [200_002, 199_999, 200_012]
    assert json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"

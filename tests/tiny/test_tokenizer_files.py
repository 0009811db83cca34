"""The tokenizer of a tiny checkpoint: same tokens as the official encoders, harmony chats included."""

from __future__ import annotations

import importlib.util
import json
import random
from datetime import datetime, timezone
from pathlib import Path

import pytest

from npu_gptoss.harmony.vocabulary import VocabularyError, parse_ranks
from npu_gptoss.tiny import tokenizer_files
from npu_gptoss.tiny.tokenizer_files import (
    CHAT_TEMPLATE_FILE,
    O200K_PATTERN,
    SPECIAL_TOKENS,
    packaged_vocabulary,
    recover_merges,
    write_tokenizer_files,
)

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


def test_tokens_equal_openai_harmony(tokenizer, directory, monkeypatch):
    harmony = pytest.importorskip("openai_harmony")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    for text in TEXTS + random_texts(100):
        if "<|endofprompt|>" in text:
            continue  # a special token of tokenizer.json, plain text to openai-harmony
        assert tokenizer.encode(text, add_special_tokens=False).ids == encoding.encode(text, allowed_special="all"), (
            repr(text)
        )


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
    ("place", "name", "value", "sentence"),
    [
        (importlib.util, "find_spec", lambda name: None, r"pip install 'npu-gptoss\[tiny\]'"),
        (Path, "read_bytes", lambda path: CUT_OFF(path)[:-100], r"cannot be read \(Compressed file ended"),
        (tokenizer_files, "VOCABULARY_SHA256", "0" * 64, "expected 0000"),
    ],
    ids=["missing", "cut off", "altered"],
)
def test_ranks_that_are_not_the_published_ones_are_refused_in_words(monkeypatch, place, name, value, sentence):
    pytest.importorskip("bpe_openai")
    monkeypatch.setattr(place, name, value)
    with pytest.raises(VocabularyError, match=sentence):
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


TOOL = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
}


@pytest.mark.parametrize("instructions", ["", "Be brief."])
@pytest.mark.parametrize("tools", [[], [TOOL], [TOOL, {"name": "now", "description": "Time now"}]])
def test_chat_template_renders_what_openai_harmony_renders(directory, monkeypatch, instructions, tools):
    jinja2 = pytest.importorskip("jinja2")
    harmony = pytest.importorskip("openai_harmony")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    chat = [{"role": "system", "content": instructions}] if instructions else []
    chat.append({"role": "user", "content": "Weather?"})
    if tools:
        call = {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
        chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
        chat.append({"role": "tool", "tool_call_id": "1", "content": '{"temp":3}'})
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    rendered = environment.from_string(CHAT_TEMPLATE_FILE.read_text()).render(
        messages=chat,
        tools=[{"type": "function", "function": tool} for tool in tools] or None,
        add_generation_prompt=True,
        strftime_now=lambda _: today,
    )
    message, role = harmony.Message, harmony.Role
    turns = [
        message.from_role_and_content(role.SYSTEM, harmony.SystemContent.new().with_conversation_start_date(today))
    ]
    developer = harmony.DeveloperContent.new()
    if instructions:
        developer = developer.with_instructions(instructions)
    if tools:
        developer = developer.with_function_tools(
            [harmony.ToolDescription.new(**{"parameters": None, **t}) for t in tools]
        )
    if instructions or tools:
        turns.append(message.from_role_and_content(role.DEVELOPER, developer))
    turns.append(message.from_role_and_content(role.USER, "Weather?"))
    if tools:
        call = message.from_role_and_content(role.ASSISTANT, '{"city":"Paris"}').with_channel("commentary")
        turns.append(call.with_recipient("functions.get_weather").with_content_type("json"))
        author = harmony.Author.new(role.TOOL, "functions.get_weather")
        result = message.from_author_and_content(author, '{"temp":3}').with_channel("commentary")
        turns.append(result.with_recipient("assistant"))
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    want = encoding.render_conversation_for_completion(harmony.Conversation.from_messages(turns), role.ASSISTANT)
    assert rendered == encoding.decode_utf8(want)


def test_files_are_small_texts_with_the_published_fields(directory):
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [200_002, 199_999, 200_012]
    assert json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"

"""A bad line of a prompts file is an error that names the line, never a prompt that is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gptoss.engine.prompts import read_prompts_file
from tests.refused import refused


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_three_forms_are_read_in_order_and_empty_lines_count_as_lines(tmp_path: Path) -> None:
    """Line ends of Unicode alone are text."""
    messages = '{"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "low"}'
    path = write(tmp_path, '{"prompt": "a\u2028b\x85c"}', "", "  ", '{"prompt_token_ids": [1, 2]}', messages, "")
    text, ids, chat = read_prompts_file(path)
    assert (text.form, text.value) == ("prompt", "a\u2028b\x85c")
    assert (ids.form, ids.value, ids.label) == ("prompt_token_ids", [1, 2], f"{path} line 4")
    assert (chat.form, chat.options) == ("messages", {"reasoning_effort": "low"})


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "--prompts-file"),
        ("[" * 100_000, "--prompts-file"),
        ("[1]", "--prompts-file"),
        ('"text"', "--prompts-file"),
        ('["prompt"]', "--prompts-file"),
        ('"prompt"', "--prompts-file"),
        ("{}", "--prompts-file"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "--prompts-file"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": null}', "prompt"),
        ('{"prompt_token_ids": "1,2"}', "prompt_token_ids"),
        ('{"prompt_token_ids": [1, "2"]}', "prompt_token_ids"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids"),
        ('{"prompt_token_ids": [1.0]}', "prompt_token_ids"),
        ('{"messages": {}}', "messages"),
        ('{"prompt": "a", "temperature": 1}', "temperature"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, field: str) -> None:
    with refused(field):
        read_prompts_file(write(tmp_path, '{"prompt": "a"}', "", line))


def test_a_file_without_prompts_or_without_text_is_an_error(tmp_path: Path) -> None:
    with refused("--prompts-file"):
        read_prompts_file(write(tmp_path, "", " "))
    with refused("--prompts-file"):
        read_prompts_file(tmp_path / "none.jsonl")
    with refused("--prompts-file"):
        read_prompts_file(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with refused("--prompts-file"):
        read_prompts_file(tmp_path / "latin.jsonl")

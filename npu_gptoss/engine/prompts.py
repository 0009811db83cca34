"""The lines of a prompts file: JSON objects that are each one prompt in one of three forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_gptoss.engine.chat import FIELDS as CHAT_FIELDS
from npu_gptoss.errors import InputError
from npu_gptoss.model.config_fields import is_int

OPTION = "--prompts-file"
# form -> what else may stand beside it
FORMS: dict[str, frozenset[str]] = {
    "prompt": frozenset(),
    "prompt_token_ids": frozenset(),
    "messages": CHAT_FIELDS,
}


@dataclass(frozen=True)
class PromptEntry:
    """One prompt as the user gave it; `label` says where, for errors. `value`: text, ids, or the messages."""

    label: str
    form: str
    value: Any
    options: Mapping[str, Any]


def read_prompts_file(path: Path) -> list[PromptEntry]:
    """Empty lines are skipped; any other line that is no prompt is an error with its number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"the prompts file {path} cannot be read: {error.strerror}", field=OPTION) from None
    except UnicodeDecodeError as error:
        raise InputError(f"the prompts file {path} is not UTF-8: {error}", field=OPTION) from None
    entries = [_read_line(f"{path} line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not entries:
        raise InputError(f"the prompts file {path} holds no prompt; expected one JSON object a line", field=OPTION)
    return entries


def _read_line(label: str, line: str) -> PromptEntry:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{label} is not JSON: {error}", field=OPTION) from None
    forms = [form for form in FORMS if isinstance(value, dict) and form in value]
    if len(forms) != 1:
        raise InputError(
            f"{label} must be a JSON object with one of {', '.join(FORMS)}, got {line.strip()[:80]}", field=OPTION
        )
    form = forms[0]
    unknown = sorted(value.keys() - {form} - FORMS[form])
    if unknown:
        raise InputError(f"{label}: nothing reads {', '.join(map(repr, unknown))} beside {form!r}", field=unknown[0])
    content = value.pop(form)
    expected = str if form == "prompt" else list
    if not isinstance(content, expected):
        kind = "a text" if expected is str else "a list"
        raise InputError(f"{label}: {form} must be {kind}, got {json.dumps(content)[:80]}", field=form)
    if form == "prompt_token_ids" and not all(map(is_int, content)):
        raise InputError(f"{label}: prompt_token_ids must be whole numbers, got {json.dumps(content)[:80]}", field=form)
    return PromptEntry(label, form, content, value)

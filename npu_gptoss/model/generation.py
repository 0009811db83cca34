"""generation_config.json: the tokens that end an answer, and vLLM's defaults for numbers that a request lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_gptoss.errors import InputError, quoted
from npu_gptoss.files import is_there, read_json
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.config_fields import Rule, is_int, is_number

FILE_NAME = "generation_config.json"

# harmony's <|return|>, <|call|> and <|endoftext|>: what ends an answer when generation_config.json does not say
HARMONY_STOP_TOKENS = (200002, 200012, 199999)

_REMEDY = "Take the generation_config.json of the original checkpoint, or delete it."
# Every request that does not bring its own would be refused otherwise
_NUMBERS: dict[str, Rule] = {
    "temperature": Rule("a number from 0 to 1000", lambda v: is_number(v) and 0 <= v <= 1000),
    "top_p": Rule("a number above 0 and at most 1", lambda v: is_number(v) and 0 < v <= 1),
    "min_p": Rule("a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1),
    "top_k": Rule("an integer from -1 to 2147483647", lambda v: is_int(v) and -1 <= v < 2**31),
    "repetition_penalty": Rule("a number above 0 and at most 1000", lambda v: is_number(v) and 0 < v <= 1000),
    "max_new_tokens": Rule("an integer from 1 to 2147483647", lambda v: is_int(v) and 1 <= v < 2**31),
}


def stop_token_ids(directory: Path, config: GptOssConfig) -> frozenset[int]:
    """Returns the tokens that end an answer: eos_token_id of generation_config.json (an id or a list) and of
    config.json.

    Raises InputError, which names the file, for a file that cannot be used; without a file harmony's tokens count.
    """
    path = directory / FILE_NAME
    if not is_there(path, InputError):
        return frozenset((*config.eos_token_ids, *HARMONY_STOP_TOKENS))
    values = read_json(path, InputError)
    if not isinstance(values, dict):
        _refuse(path, "the file", "a JSON object", values)
    for name, rule in _NUMBERS.items():
        if values.get(name) is not None and not rule.holds(values[name]):
            _refuse(path, name, rule.expected, values[name])
    listed = values.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for token in ids:
        if not is_int(token) or not 0 <= token < config.vocab_size:
            expected = f"token ids of the vocabulary (0 to {config.vocab_size - 1})"
            _refuse(path, "eos_token_id", expected, token)
    return frozenset((*config.eos_token_ids, *ids))


def _refuse(path: Path, field: str, expected: str, got: Any) -> None:
    raise InputError(f"{path}: {field} must be {expected}, got {quoted(got)}. {_REMEDY}", field=field)

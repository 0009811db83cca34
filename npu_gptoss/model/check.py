"""Checks a checkpoint's directory without reading a weight.

`npu-gptoss generate`, `vllm serve` and `make serve` refuse with the same sentence, before anything slow begins. The
values of the tensors are checked as they are loaded (values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_gptoss.errors import InputError
from npu_gptoss.files import MIB, MOST_BYTES, is_directory, is_there, read_json, wrong
from npu_gptoss.model.checkpoint import check_checkpoint
from npu_gptoss.model.config import CONFIG_NAME, ConfigError, GptOssConfig, as_stored
from npu_gptoss.model.config_fields import overridden
from npu_gptoss.model.generation import stop_token_ids
from npu_gptoss.tokenizer import FILE_NAME as TOKENIZER_NAME
from npu_gptoss.tokenizer import check_template, check_vocabulary, load_tokenizer

# What some library opens by itself where it finds it
_OPENED = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")
_OF_LIBRARIES = """
    adapter_config.json added_tokens.json chat_template.json hf_quant_config.json merges.txt modules.json params.json
    preprocessor_config.json processor_config.json special_tokens_map.json vocab.json
"""
_MOST_BYTES = dict.fromkeys(_OF_LIBRARIES.split(), 100 * MIB) | MOST_BYTES
_MOST_FILES = 10_000
_OBJECTS = ("tokenizer_config.json", "preprocessor_config.json")  # vLLM reads the second for every model


def check_directory(
    directory: Path, *, overrides: Mapping[str, Any] | None = None, weights: bool = True, text: bool = True
) -> GptOssConfig:
    """Checks config.json, generation_config.json, the files of the weights by their headers, and the tokenizer.

    overrides: fields that replace fields of config.json. weights, text: True when weights, a tokenizer are needed.
    Returns the configuration. Raises InputError with one sentence.
    """
    if overrides:
        values = as_stored(read_json(directory / CONFIG_NAME, ConfigError), directory)
        try:
            config = GptOssConfig.from_dict(overridden(values, overrides) if isinstance(values, dict) else values)
        except ConfigError as error:
            raise error.at(f"{directory / CONFIG_NAME} with the fields that an option replaces") from None
    else:
        config = GptOssConfig.from_directory(directory)
    check_files(directory)
    stop_token_ids(directory, config)
    if weights:
        check_checkpoint(directory, config)
    if text:
        check_tokenizer(directory, config)
    return config


def check_files(directory: Path) -> None:
    """Refuses files that would stop a library: irregular files, files that are too large, too many files."""
    if not is_directory(directory):
        raise wrong(directory, "expected a directory, but there is none. Check the path.", str(directory))
    try:
        str(directory).encode()
    except UnicodeEncodeError:  # the tokenizer's library opens no such path
        raise wrong(directory, "expected a path in UTF-8. Rename the directory.", str(directory)) from None
    for number, path in enumerate(directory.iterdir()):
        if number == _MOST_FILES:
            said = f"expected a checkpoint, got more than {_MOST_FILES} files. Check the path."
            raise wrong(directory, said, str(directory))
        if path.suffix not in _OPENED:
            continue
        most = _MOST_BYTES.get(path.name)
        if is_there(path) and most is not None and path.stat().st_size > most:
            raise wrong(path, f"expected at most {most // MIB} MiB, got more. Download it again.")


def check_tokenizer(directory: Path, config: GptOssConfig) -> None:
    """Refuses a tokenizer that cannot be read, or that has ids beyond the vocabulary of the model."""
    check_files(directory)
    for name in _OBJECTS:
        path = directory / name
        if is_there(path, InputError) and not isinstance(read_json(path, InputError), dict):
            said = "expected a JSON object. Get it from the original checkpoint, or delete it"
            raise InputError(f"{path}: {said}.", field=path.name)
    check_template(directory)
    path = directory / TOKENIZER_NAME
    check_vocabulary(path, load_tokenizer(path), config.vocab_size)

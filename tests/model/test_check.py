"""The check of a directory: it takes fine-tuned checkpoints and refuses damaged ones before anything is loaded."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.engine import Engine
from npu_gptoss.errors import InputError
from npu_gptoss.model import config_fields
from npu_gptoss.model.check import check_directory
from npu_gptoss.model.config import ConfigError
from npu_gptoss.model.generation import HARMONY_STOP_TOKENS, stop_token_ids
from tests.model.corrupt import VOCABULARY, write_pristine
from tests.refused import refused


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine")
    write_pristine(path, "bf16-single")
    return path


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def change(directory: Path, name: str, **fields: Any) -> None:
    values = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps({**values, **fields}))


def refusal(directory: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        check_directory(directory)
    assert str(directory) in str(caught.value)
    return caught.value


def test_a_folder_of_modelscope_cannot_be_read(directory: Path) -> None:
    """Its download writes files of its own beside the checkpoint, and keeps OpenAI's and Apple's forms below it."""
    for name in (".msc", ".mv", "configuration.json", "original/config.json", "metal/model.bin", "._____temp/part"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    (directory / "original/model.safetensors").write_bytes(b"of other names")
    plain = Engine(shutil.copytree(directory, directory.parent / "gpt-oss-20b___BF16"), device="cpu", num_blocks=8)
    check_directory(directory)
    assert plain.logits([1, 2, 3]).isfinite().all()


def test_an_empty_template_is_not_of_another_format(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(" \n")
    check_directory(directory)


# What the tools write beside the published fields
FINE_TUNES: dict[str, dict[str, Any]] = {
    "unsloth": {"unsloth_version": "2025.9.1", "unsloth_fixed": True, "use_cache": True, "torch_dtype": "bfloat16"},
    "trl": {"use_cache": False, "dtype": "bfloat16", "torch_dtype": None, "transformers_version": "4.57.1"},
    "axolotl": {"_name_or_path": "openai/gpt-oss-20b", "_attn_implementation_autoset": True, "use_cache": False},
    "mergekit": {"transformers_version": "4.55.2", "_name_or_path": "./base", "pad_token_id": None},
    "notes": {"model_name": "mine", "trained_steps": 600, "max_seq_length": 4096, "final": True, "comment": None},
}


@pytest.mark.parametrize("tool", FINE_TUNES)
def test_fine_tunes_load_and_unknown_notes_are_one_warning_each(directory, tool, caplog, monkeypatch) -> None:
    monkeypatch.setattr(config_fields, "_warned", set())
    change(directory, "config.json", **FINE_TUNES[tool])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check_directory(directory)
    warned = [record.getMessage() for record in caplog.records if "nothing reads the field" in record.getMessage()]
    notes = {"unsloth": ["unsloth_version"], "notes": sorted(FINE_TUNES["notes"])}.get(tool, [])
    assert [any(note in line for line in warned) for note in notes] == [True] * len(notes)
    assert len(warned) == len(notes)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eos_token_id": VOCABULARY}, "eos_token_id"),
        ({"eos_token_id": [250, 10**12]}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"eos_token_id": "250"}, "eos_token_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**70}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_a_generation_config_that_no_request_survives_is_refused(directory, fields, named) -> None:
    change(directory, "generation_config.json", **fields)
    assert refusal(directory).field == named


def test_absent_generation_config_means_harmony_a_broken_one_fails(directory: Path) -> None:
    config = check_directory(directory)
    assert stop_token_ids(directory, config) == {250, 251}
    path = directory / "generation_config.json"
    path.write_text("{")
    assert refusal(directory).field == path.name
    with refused("generation_config.json"):
        Engine(directory)
    path.unlink()
    assert stop_token_ids(directory, config) == {250, *HARMONY_STOP_TOKENS}


def test_a_tokenizer_that_panics_is_a_sentence(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The library's panic is a BaseException, and the library writes it to the terminal."""
    pattern = {"type": "Split", "pattern": {"Regex": "(A+)+$"}, "behavior": "Isolated", "invert": False}
    change(directory, "tokenizer.json", pre_tokenizer=pattern)
    assert "tokenizer.json" in str(refusal(directory))
    with pytest.raises(InputError, match="cannot"):
        Engine(directory, num_blocks=4).text.encode(64 * "A" + "!")
    assert capfd.readouterr().err == ""


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(directory: Path) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    change(directory, "tokenizer.json", model={**model, "vocab": {**model["vocab"], "far": VOCABULARY}})
    assert refusal(directory).field == "tokenizer.json"


def test_missing_and_foreign_files_are_named(directory: Path) -> None:
    (directory / "other.safetensors").write_bytes(b"x")
    assert "other.safetensors" in str(refusal(directory))
    (directory / "other.safetensors").unlink()
    (directory / "tokenizer.json").unlink()
    assert refusal(directory).field == "tokenizer.json"
    check_directory(directory, text=False)
    (directory / "config.json").rename(directory / "adapter_config.json")
    assert "adapter_config.json" in str(refusal(directory))


@pytest.mark.parametrize(
    "name", ["a\nb", "tab\t", " lead ", "100%s{x}", "ünï→模型", "-dash", "back\\slash", "x.gguf", "*", "~x"]
)
def test_an_odd_name_of_the_folder_is_read_or_one_line(name: str, directory: Path) -> None:
    odd = directory.with_name(name)
    directory.rename(odd)
    check_directory(odd)
    (odd / "tokenizer.json").unlink()
    with pytest.raises(InputError) as caught:
        check_directory(odd)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_text_is_refused_for_what_it_is(directory: Path) -> None:
    odd = directory.with_name(os.fsdecode(b"\xff"))
    directory.rename(odd)
    with pytest.raises(InputError, match="Rename the directory"):
        check_directory(odd)


def test_overrides_mend_a_config(directory: Path) -> None:
    change(directory, "config.json", rope_scaling={"rope_type": "linear", "factor": 2.0})
    with refused("rope_scaling.rope_type", ConfigError):
        check_directory(directory)
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    assert check_directory(directory, overrides={"rope_scaling": yarn}).rope_scaling.factor == 32.0
    for wrong in (5, "yarn", [yarn]):
        with refused("rope_scaling", ConfigError):
            check_directory(directory, overrides={"rope_scaling": wrong})

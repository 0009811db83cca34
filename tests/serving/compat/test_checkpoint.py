"""A checkpoint that cannot be served is refused with a sentence, in the process that the user started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.start import checkpoint
from tests.model.corrupt import INDEX, VOCABULARY, write_pristine
from tests.refused import refused
from tests.serving.compat.of_release import OLD


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine")
    write_pristine(path, "bf16-shards")
    return path


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


class Reached(Exception):
    """vLLM has begun to read the checkpoint itself."""


@pytest.fixture(autouse=True)
def stop_where_vllm_begins_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine import arg_utils

    monkeypatch.setattr(arg_utils, "maybe_override_with_speculators", Mock(side_effect=Reached))


def engine_config(directory: Path, **options: Any) -> Any:
    return EngineArgs(model=str(directory), max_model_len=256, enforce_eager=True, **options).create_engine_config()


def outside(directory: Path) -> None:
    content = json.loads((directory / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = "../../etc/x.safetensors"
    (directory / INDEX).write_text(json.dumps(content))


def no_stop(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": 1000000000000}')


def no_shard(directory: Path) -> None:
    next(directory.glob("model-*.safetensors")).unlink()


def no_object(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(outside, "of this directory"), (no_stop, "eos_token_id"), (no_shard, "is not there"), (no_object, "config.json")],
)
def test_damaged_checkpoint_is_refused_before_vllm_reads_it(directory, patched, damage, words):
    damage(directory)
    with patched("checkpoint-check"), pytest.raises(InputError, match=words):
        engine_config(directory)


def test_config_file_that_vllm_would_pass_over_is_refused(directory: Path, patched: Any, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", str(directory), "--config=server.yaml"])
    with patched("checkpoint-check"), refused("--config=server.yaml"):
        engine_config(directory)
    monkeypatch.setattr(sys, "argv", ["own.py", "--config=own.yaml"])
    with patched("checkpoint-check"), pytest.raises(Reached):
        engine_config(directory)


def test_a_tokenizer_s_path_without_a_folder_is_no_name_on_the_hub(directory: Path, patched: Any) -> None:
    missing = str(directory / "tokenizer")
    with patched("checkpoint-check"), pytest.raises(InputError, match=f"{missing}: expected a tokenizer's directory"):
        engine_config(directory, tokenizer=missing)


def test_a_cpu_waits_for_no_step_that_has_ended(directory: Path, patched: Any) -> None:
    options = EngineArgs(model=str(directory), max_model_len=256, async_scheduling=True)
    with patched("checkpoint-check"), pytest.raises(Reached):
        options.create_engine_config()
    assert options.async_scheduling is (current_platform.device_type != "cpu")


def test_a_file_of_modelopt_is_not_taken_for_a_field_of_config_json(directory: Path, patched: Any) -> None:
    (directory / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}, "quantization": {}}')
    with patched("checkpoint-check"), refused("hf_quant_config.json"):
        engine_config(directory)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00003.safetensors"])
def test_file_in_place_of_the_folder_is_refused(directory: Path, patched: Any, name: str) -> None:
    (directory / name).touch()
    with patched("checkpoint-check"), pytest.raises(InputError, match=f"give its folder, {directory}"):
        engine_config(directory / name)


def test_good_checkpoints_and_other_models_reach_vllm(directory: Path, patched: Any) -> None:
    rope = json.loads((directory / "config.json").read_text())["rope_scaling"]
    with patched("checkpoint-check"):
        asked = [{}, {"load_format": "dummy"}, {"hf_overrides": {"use_cache": False}}]
        asked.append({"hf_overrides": lambda config: config})
        for options in asked + ([{"rope_scaling": rope}] if OLD else []):
            with pytest.raises(Reached):
                engine_config(directory, **options)
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        with pytest.raises(Reached):
            engine_config(directory, load_format="dummy")
        with pytest.raises(Reached):  # of another model, for what we know
            engine_config(directory, hf_config_path="other")
        (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        with pytest.raises(Reached):
            engine_config(directory)
        (directory / "config.json").rename(directory / "params.json")  # Mistral's own
        with pytest.raises(Reached):
            engine_config(directory)


def test_an_override_is_checked_and_a_tokenizer_that_nobody_reads_is_not(directory: Path, patched: Any) -> None:
    with patched("checkpoint-check"), refused("num_hidden_layers"):
        engine_config(directory, hf_overrides={"num_hidden_layers": 0})
    (directory / "tokenizer.json").write_text("{")
    with patched("checkpoint-check"), pytest.raises(Reached):
        engine_config(directory, skip_tokenizer_init=True)


def panics(directory: Path) -> None:
    path = directory / "tokenizer.json"
    pattern = {"type": "Split", "pattern": {"Regex": "(A+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": pattern}))


@pytest.mark.parametrize(
    ("damage", "vocabulary", "words"),
    [
        (panics, VOCABULARY, "cannot turn a text into tokens|cannot be read as a tokenizer"),
        (lambda _: None, 16, r"expected ids below vocab_size of config.json \(16\)"),
        (lambda _: None, VOCABULARY, None),
    ],
)
def test_broken_tokenizer_of_a_hub_is_refused_before_a_request(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage, vocabulary, words
) -> None:
    damage(directory)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    cached = tmp_path / "hub" / "models--somebody--gpt-oss"
    shutil.copytree(directory, cached / "snapshots" / "1234")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1234")
    config = SimpleNamespace(
        tokenizer="somebody/gpt-oss",
        tokenizer_revision=None,
        skip_tokenizer_init=False,
        hf_config=SimpleNamespace(model_type="gpt_oss", vocab_size=vocabulary),
    )
    if words is None:
        checkpoint.check_tokenizer_of_hub(config)
        return
    with pytest.raises(InputError, match=words):
        checkpoint.check_tokenizer_of_hub(config)
    config.hf_config.model_type = "qwen3"
    checkpoint.check_tokenizer_of_hub(config)


@pytest.mark.slow
@pytest.mark.long
def test_corrupt_checkpoints_end_vllm_serve_with_a_sentence() -> None:
    """The command itself, up to the fork of the engine."""
    command = [sys.executable, "-m", "tests.model.fuzz", "--through", "serve", "--count", "15", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_a_gguf_of_gpt_oss_is_refused_with_what_to_take(tmp_path: Path) -> None:
    """vLLM's own answer named an architecture, or asked for a config.json, behind 70 lines."""
    file = tmp_path / "model.gguf"
    for content, ours in ((b"GGUF\3\0general.architecture\x07gpt-oss", True), (b"GGUF\3\0qwen3", False)):
        file.write_bytes(content)
        for path in (file, tmp_path):
            with refused(str(file)) if ours else nullcontext():
                checkpoint.check_gguf(path)
    file.write_bytes(b"GGUF\3\0general.architecture\x07gpt-oss")
    (tmp_path / "config.json").write_text("{}")  # of safetensors beside it
    checkpoint.check_gguf(tmp_path)

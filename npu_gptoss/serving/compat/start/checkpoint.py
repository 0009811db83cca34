"""Checks a checkpoint before vLLM reads it, in the process that the user started; a refusal is one sentence.

Stock vLLM reads config.json first, with transformers, whose exceptions name no file. It reads the weights last, in a
forked engine: a missing shard takes a minute and three tracebacks. `serve`, `LLM` and `AsyncLLM` all call
`EngineArgs.create_engine_config` before they read the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.errors import InputError, short
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ARGUMENTS, SERVE

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

_PATHS = ("/", "./", "../", "~")  # a model that begins so is a path, not a name on the hub


@repair("checkpoint-check", f"{ARGUMENTS}:EngineArgs.create_engine_config", releases=("0.11", "0.23"), until="0.33")
def install_check(module: ModuleType) -> None:
    """A checkpoint that cannot be served hangs vLLM, or a forked engine refuses it after a minute, under tracebacks;
    the error of a broken config.json does not name the file."""
    owner = module.EngineArgs
    expect_parameters(owner.create_engine_config, "usage_context", "headless")
    expect_source(owner.create_engine_config, "maybe_override_with_speculators(", "self.create_model_config()")

    @around(owner, "create_engine_config")
    def create_engine_config(original: Callable[..., Any], self: EngineArgs, *args: Any, **options: Any) -> Any:
        check(self)
        made = original(self, *args, **options)
        check_tokenizer_of_hub(made.model_config)
        return made


@repair("refusal-sentence", f"{SERVE}:ServeSubcommand.cmd", releases=("0.11", "0.23"), until="0.33")
def install_sentence(module: ModuleType) -> None:
    """vllm serve ends with a traceback instead of a sentence that says what to do."""
    owner = module.ServeSubcommand
    expect_source(owner.cmd, "args.model = args.model_tag", "uvloop.run(run_server(args))")

    @around(owner, "cmd")
    def cmd(original: Callable[..., None], args: argparse.Namespace) -> None:
        from pydantic import ValidationError

        model = getattr(args, "model_tag", None) or args.model
        try:
            if model.startswith(_PATHS) and not Path(model).exists():
                raise InputError(f"{model}: expected a checkpoint's directory, but there is none. Check the path.")
            original(args)
        except InputError as error:
            _end(str(error))
        except ValidationError as error:  # vLLM wraps exceptions from the check of its options
            found = [entry.get("ctx", {}).get("error") or entry["msg"] for entry in error.errors()]
            if not any(isinstance(one, InputError) for one in found) and not is_gpt_oss(Path(model)):
                raise
            _end(" ".join(short(str(one), 2000) for one in found))


def _end(sentence: str) -> None:
    print(f"vllm serve: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def check(options: EngineArgs) -> None:
    """Raises InputError for a local gpt-oss checkpoint that cannot be served. Leaves other models to vLLM."""
    from vllm.platforms import current_platform

    from npu_gptoss.serving.releases import here

    directory = Path(options.model)
    overrides = options.hf_overrides
    if current_platform.device_type not in here().devices or not os.path.isdir(directory):  # noqa: PTH112  # never raises
        return
    if options.hf_config_path or not isinstance(overrides or {}, dict) or not is_gpt_oss(directory):
        return
    from npu_gptoss.model.check import check_directory, check_tokenizer

    rope = {name: getattr(options, name, None) for name in ("rope_scaling", "rope_theta")}  # only in 0.11.0
    weights = options.load_format != "dummy"
    config = check_directory(
        directory,
        overrides={**{name: value for name, value in rope.items() if value}, **(overrides or {})},
        weights=weights,
        text=False,
    )
    tokenizer = Path(options.tokenizer or directory)
    if not options.skip_tokenizer_init and tokenizer.is_dir():
        check_tokenizer(tokenizer, config)  # takes 1.5 s; vLLM's own attempt ends in a traceback
    _read_as_vllm_does(directory, weights)


def check_tokenizer_of_hub(model_config: ModelConfig) -> None:
    """Checks a tokenizer from a hub. vLLM would end with a panic of the library, at the start or at a request; an id
    beyond the vocabulary would end the engine at the first request with it."""
    from npu_gptoss.model.config_fields import MODEL_TYPE
    from npu_gptoss.tokenizer import FILE_NAME, check_vocabulary, load_tokenizer

    name = model_config.tokenizer
    ours = getattr(model_config.hf_config, "model_type", None) == MODEL_TYPE
    if not ours or model_config.skip_tokenizer_init or os.path.isdir(name):  # noqa: PTH112  # never raises
        return
    try:
        path = Path(_download(name, FILE_NAME, revision=model_config.tokenizer_revision))
    except Exception:  # no such file, or no network: vLLM needs the file next, and reports that
        return
    check_vocabulary(path, load_tokenizer(path), model_config.hf_config.vocab_size)


def _download(name: str, file: str, revision: str | None) -> str:
    """Returns the file's path, from the cache if it is there."""
    from vllm import envs as vllm_envs

    if vllm_envs.VLLM_USE_MODELSCOPE:
        from modelscope.hub.file_download import model_file_download

        return model_file_download(name, file, revision=revision)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(name, file, revision=revision)
    return found if isinstance(found, str) else hf_hub_download(name, file, revision=revision)


def is_gpt_oss(directory: Path) -> bool:
    """Returns whether config.json names gpt-oss. An unreadable file counts as gpt-oss, so that our check reports the
    error."""
    from npu_gptoss.files import is_there, read_json
    from npu_gptoss.model.config import CONFIG_NAME
    from npu_gptoss.model.config_fields import ARCHITECTURE, MODEL_TYPE

    try:
        if not is_there(directory / CONFIG_NAME):
            return not any(directory.glob("*.gguf")) and not (directory / "params.json").exists()
        values = read_json(directory / CONFIG_NAME)
    except (InputError, OSError):
        return True
    if not isinstance(values, dict):
        return True
    architectures = values.get("architectures")
    named = isinstance(architectures, list) and ARCHITECTURE in architectures
    return named or values.get("model_type") == MODEL_TYPE


def _read_as_vllm_does(directory: Path, weights: bool) -> None:
    """Opens the files with vLLM's own libraries too, which are stricter than our readers in some places."""
    from npu_gptoss.tokenizer import panics_told

    remedy = "Take the file of the original checkpoint."
    with panics_told(f"{directory / 'generation_config.json'} cannot be read by transformers", remedy):
        from transformers import GenerationConfig

        if (directory / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(directory)
    if weights:
        from safetensors import safe_open

        for file in sorted(directory.glob("*.safetensors")):
            with panics_told(f"{file} cannot be read by safetensors", remedy), safe_open(file, framework="pt"):
                pass

"""Checks a checkpoint before vLLM reads it, in the process that the user started; a refusal is one sentence.

Stock vLLM reads config.json first, with transformers, whose exceptions name no file. It reads the weights last, in a
forked engine: a missing shard takes a minute and three tracebacks. `serve`, `LLM` and `AsyncLLM` all call
`EngineArgs.create_engine_config` before they read the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.errors import InputError, Refusal
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.start import ends
from npu_gptoss.serving.compat.start.small_files import spell_overrides
from npu_gptoss.serving.compat.targets import ALL
from npu_gptoss.serving.releases import here

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_PATHS = ("/", "./", "../", "~")  # a model that begins so is a path, not a name on the hub


@repair(
    "checkpoint-check",
    "vllm.engine.arg_utils:EngineArgs.__post_init__ .create_engine_config",
    releases=ALL,
    until="vLLM checks a checkpoint before it starts an engine, and asks plugins which model to use",
    essential=True,  # a rope section of --hf-overrides would lose rope_theta
)
def install_check(module: ModuleType) -> None:
    """A checkpoint that cannot be served hangs vLLM, or a forked engine refuses it after a minute, under tracebacks;
    the error of a broken config.json does not name the file.

    The wrapper also decides between our model and vLLM's own (`serving/aside.py`).
    """
    owner = module.EngineArgs
    expect_source(owner.create_engine_config, "maybe_override_with_speculators(", "self.create_model_config()")

    @around(owner, "__post_init__")
    def __post_init__(original: Original, self: EngineArgs) -> None:
        for path, what in ((self.model, "checkpoint"), (self.tokenizer or "", "tokenizer")):
            if path.startswith(_PATHS) and not os.path.exists(path):  # noqa: PTH110  # never raises
                raise InputError(f"{path}: expected a {what}'s directory, but there is none. Check the path.")
        original(self)  # looks it up in the hub's cache

    @around(owner, "create_engine_config")
    def create_engine_config(original: Original, self: EngineArgs, *args: Any, **options: Any) -> Any:
        from npu_gptoss.serving import aside, limits, tokenizer_file
        from npu_gptoss.serving.releases.vllm import current_platform

        if current_platform.device_type not in here().devices:
            made = original(self, *args, **options)
            tokenizer_file.served[:] = [made.model_config]  # the front end answers nevertheless
            return made

        def make() -> VllmConfig:
            ours = not aside.stepped_aside()
            if ours:
                check(self)
                if current_platform.device_type == "cpu":  # steps end before they return: nothing to overlap
                    self.async_scheduling = False
            spell_overrides(self)
            made = original(self, *args, **options)
            check_tokenizer_of_hub(made.model_config)
            tokenizer_file.served[:] = [made.model_config]
            if ours:
                limits.check_model(made.model_config)
            return made

        return aside.configured(make, self)


def check(options: EngineArgs) -> None:
    """Raises InputError for a local gpt-oss checkpoint that cannot be served. Leaves other models to vLLM."""
    from npu_gptoss.model.check import check_directory, check_tokenizer
    from npu_gptoss.model.config import GptOssConfig

    directory = Path(options.model)
    overrides = options.hf_overrides
    check_gguf(directory)
    if os.path.isfile(directory) and directory.suffix != ".gguf":  # noqa: PTH113  # never raises
        GptOssConfig.from_directory(directory)  # says which folder to give
    if not os.path.isdir(directory) or options.hf_config_path:  # noqa: PTH112  # never raises
        return
    if not isinstance(overrides or {}, dict) or not is_gpt_oss(directory):
        return
    if ends.serves() and (words := [word for word in sys.argv if word.startswith("--config=")]):
        said = f"{words[0]}: vLLM passes over this spelling. Write a blank in place of the equals sign."
        raise InputError(said, field=words[0])
    if options.config_format == "mistral":  # vLLM would look for its params.json, on 0.11 in the hub
        raise InputError(Refusal("--config-format", "mistral", "gpt-oss has a config.json"))
    if options.model_impl == "terratorch":  # vLLM ends at an assertion before it asks a model
        raise InputError(Refusal("--model-impl", options.model_impl, "TerraTorch has no language models"))
    rope = {name: getattr(options, name, None) for name in ("rope_scaling", "rope_theta")}  # only in 0.11.0
    config = check_directory(
        directory,
        overrides={**{name: value for name, value in rope.items() if value}, **(overrides or {})},
        weights=options.load_format != "dummy",
        text=False,
    )
    if config.quantization is None and (directory / "hf_quant_config.json").is_file():
        said = "vLLM would read these weights by it, and they are not quantized. Delete it."
        raise InputError(f"{directory / 'hf_quant_config.json'}: {said}", field="hf_quant_config.json")
    tokenizer = Path(options.tokenizer or directory)
    if not options.skip_tokenizer_init and tokenizer.is_dir():
        check_tokenizer(tokenizer, config)  # takes 1.5 s; vLLM's own attempt ends in a traceback
    _check_generation(directory)


def check_gguf(path: Path) -> None:
    """Refuses a GGUF file of gpt-oss, or a directory of nothing else."""
    files = [path] if path.suffix == ".gguf" else [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            if b"gpt-oss" in opened.read(1 << 16):  # general.architecture is among the first fields
                why = "vLLM does not read gpt-oss from GGUF"
                raise InputError(Refusal(str(file), None, why, "take the model's safetensors, in MXFP4 or BF16"))


def check_tokenizer_of_hub(model_config: ModelConfig) -> None:
    """Checks a tokenizer from a hub. vLLM would end with a panic of the library, at the start or at a request; an id
    beyond the vocabulary would end the engine at the first request with it."""
    from npu_gptoss.model.config_fields import MODEL_TYPE
    from npu_gptoss.serving.tokenizer_file import tokenizer_file
    from npu_gptoss.tokenizer import check_vocabulary, load_tokenizer

    name = model_config.tokenizer
    ours = getattr(model_config.hf_config, "model_type", None) == MODEL_TYPE
    if not ours or model_config.skip_tokenizer_init or os.path.isdir(name):  # noqa: PTH112  # never raises
        return
    if path := tokenizer_file(name, model_config.tokenizer_revision, download=True):
        check_vocabulary(path, load_tokenizer(path), model_config.hf_config.vocab_size)


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


def _check_generation(directory: Path) -> None:
    """Opens generation_config.json with vLLM's own library too, which is stricter than our reader."""
    from npu_gptoss.tokenizer import panics_told

    file = directory / "generation_config.json"
    with panics_told(f"{file} cannot be read by transformers", "Take the file of the original checkpoint."):
        from transformers import GenerationConfig

        if file.is_file():
            GenerationConfig.from_pretrained(directory)

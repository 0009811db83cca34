"""The small files of a checkpoint, in the spelling of any transformers that wrote them.

Training saves config.json and the tokenizer with its own transformers, and a server has another.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.files import is_there, read_json
from npu_gptoss.serving.compat.patch import Original, around, repair
from npu_gptoss.serving.compat.targets import ALL

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.engine.arg_utils import EngineArgs

CONFIG = "transformers.configuration_utils:PretrainedConfig"
SPELLED = "vLLM reads null sections, `torch.bfloat16` and FSDP's class in config.json"


@repair("config-spellings", f"{CONFIG}.get_config_dict", releases=ALL, until=SPELLED)
def install_config(module: ModuleType) -> None:
    """A config.json that training wrote in another spelling ends the start with a traceback, or is read as MXFP4 over
    weights in BF16."""

    @around(module.PretrainedConfig, "get_config_dict")
    def get_config_dict(original: Original, cls: type, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        from npu_gptoss.model.config import as_stored
        from npu_gptoss.model.config_fields import MODEL_TYPE, normalized

        name = pretrained_model_name_or_path
        values, rest = original(cls, name, **options)
        if values.get("model_type") == MODEL_TYPE:
            values = normalized(as_stored(values, Path(name)) if os.path.isdir(name) else values)  # noqa: PTH112
            values = _rope_spelled(values) if "rope_parameters" in values else values
        return values, rest


def spell_overrides(options: EngineArgs) -> None:
    """Completes a rope section of `--hf-overrides` by the fields that config.json has, in this transformers' spelling.

    vLLM replaces the section of its own spelling whole: rope_theta, or the override itself, would be lost.
    """
    from transformers import PretrainedConfig

    from npu_gptoss.model.config_fields import MODEL_TYPE, ROPE_FIELDS, overridden

    asked = options.hf_overrides
    if isinstance(asked, dict) and asked.keys() & set(ROPE_FIELDS):
        values, _ = PretrainedConfig.get_config_dict(options.hf_config_path or options.model, revision=options.revision)
        if values.get("model_type") == MODEL_TYPE:
            rope = _rope_spelled({name: v for name, v in overridden(values, asked).items() if name in ROPE_FIELDS})
            options.hf_overrides = {name: value for name, value in asked.items() if name not in ROPE_FIELDS} | rope


def _rope_spelled(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json with its rope fields where this process's transformers reads them."""
    from transformers import __version__

    from npu_gptoss.model.config_fields import PUBLISHED_YARN, read_rope

    made = dict(values)
    rope = read_rope(made)
    section = {"rope_type": "yarn", **rope.get("rope_scaling", PUBLISHED_YARN)}
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    if int(__version__.partition(".")[0]) < 5:
        return made | {"rope_scaling": section, **theta}
    return made | {"rope_parameters": section | theta}


@repair(
    "tokenizer-class",
    "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
    releases=ALL,
    until="vLLM reads tokenizer.json whatever the files beside it say",
)
def install_tokenizer(module: ModuleType) -> None:
    """The files beside tokenizer.json decide: a class or a field of another release ends the start, and others
    (`split_special_tokens`, an added token, `GPT2Tokenizer`) give other ids than the offline engine's."""

    @around(module.AutoTokenizer, "from_pretrained")
    def from_pretrained(original: Original, cls: type, *args: Any, **options: Any) -> Any:
        from transformers import PreTrainedTokenizerFast

        from npu_gptoss.tokenizer import chat_template

        file = _tokenizer_of_gpt_oss(args[0], options)
        if file is None:
            return original(cls, *args, **options)
        given = {name: value for name, value in options.items() if name not in _OF_LOADING}
        text, _ = chat_template(file.parent)
        settings = {"chat_template": text or None, "model_input_names": ["input_ids", "attention_mask"]}
        made = PreTrainedTokenizerFast(tokenizer_file=str(file), **settings | given)
        # not an argument: by it transformers 5 asks the hub whether this is a tokenizer of Mistral's, also for a path
        made.name_or_path = str(args[0])
        for name, token in _named_tokens(file.parent, made.backend_tokenizer).items():
            if name not in given:
                setattr(made, name, token)
        return made


_OF_HUB = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
_OF_LOADING = (*_OF_HUB, "config", "force_download", "proxies", "tokenizer_type", "trust_remote_code", "use_fast")


def _tokenizer_of_gpt_oss(name: Any, options: dict[str, Any]) -> Path | None:
    """Returns tokenizer.json of gpt-oss in a folder or on a hub; the files beside it that are read are there then."""
    from transformers.utils import cached_file

    from npu_gptoss.harmony.rendering import CONTROL
    from npu_gptoss.serving.compat.start.checkpoint import is_gpt_oss
    from npu_gptoss.tokenizer import FILE_NAME, TEMPLATE_NAME

    def found(file: str) -> Path | None:
        lenient = ("gated_repo", "missing_entries", "connection_errors")
        hub = {key: options[key] for key in _OF_HUB if key in options}
        path = cached_file(name, file, **hub, **{f"_raise_exceptions_for_{problem}": False for problem in lenient})
        return path and Path(path)

    config, path = found("config.json"), None
    if config is None or is_gpt_oss(config.parent):
        path = found(FILE_NAME)
    if path is None or (config is None and not all(word.encode() in path.read_bytes() for word in CONTROL)):
        return None
    for file in ("tokenizer_config.json", TEMPLATE_NAME):
        found(file)
    return path


def _named_tokens(directory: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the names that the files give to tokens of tokenizer.json. config.json's token ends an answer, as in the
    offline engine."""
    from npu_gptoss.model.config_fields import is_int

    def values(file: str) -> dict[str, Any]:
        read = read_json(directory / file) if is_there(directory / file) else None
        return read if isinstance(read, dict) else {}

    written = values("tokenizer_config.json")
    named = {name: written.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    named = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    ids = values("config.json").get("eos_token_id")
    ending = ids[0] if isinstance(ids, list) and ids else ids
    if is_int(ending) and ending >= 0:
        named["eos_token"] = tokenizer.id_to_token(ending) or named["eos_token"]
    return {
        name: token
        for name, token in named.items()
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None
    }

"""The small files of a checkpoint, in the spelling of any transformers that wrote them.

Training saves config.json and the tokenizer with its own transformers, and a server has another.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

ALL = "0.11 0.23 0.33"
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
    until="vLLM reads tokenizer.json whatever class is named beside it",
)
def install_tokenizer(module: ModuleType) -> None:
    """The class in tokenizer_config.json decides: one of transformers 5, or a list of special tokens, ends the start of
    older releases; `GPT2Tokenizer`, which training may leave there, gives other ids."""
    expect_source(module.AutoTokenizer.from_pretrained, "get_tokenizer_config")

    @around(module.AutoTokenizer, "from_pretrained")
    def from_pretrained(original: Original, cls: type, *args: Any, **options: Any) -> Any:
        from transformers import PreTrainedTokenizerFast, __version__

        written = module.get_tokenizer_config(args[0], **options)
        extra, wanted = written.get("extra_special_tokens"), written.get("tokenizer_class")
        known = wanted is None or any(map(module.tokenizer_class_from_name, (wanted, f"{wanted}Fast")))
        listed = isinstance(extra, list) and int(__version__.partition(".")[0]) < 5
        if known and not listed and not _of_gpt_oss(Path(args[0])):
            return original(cls, *args, **options)
        if listed:  # what transformers 4 calls by another name
            options |= {"extra_special_tokens": {}, "additional_special_tokens": extra}
        return PreTrainedTokenizerFast.from_pretrained(*args, **options)


def _of_gpt_oss(directory: Path) -> bool:
    from npu_gptoss.serving.compat.start.checkpoint import is_gpt_oss

    return (directory / "tokenizer.json").is_file() and (directory / "config.json").is_file() and is_gpt_oss(directory)

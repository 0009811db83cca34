"""The small files of a checkpoint, in the spelling of any transformers that wrote them.


Training saves config.json and the tokenizer with its own transformers, and a server has another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair


@repair(
    "config-spellings",
    "transformers.configuration_utils:PretrainedConfig.get_config_dict",
    releases=("0.11", "0.23", "0.33"),
    until="vLLM reads null sections, `torch.bfloat16` and FSDP's class in config.json",
)
def install_config(module: ModuleType) -> None:
    """A config.json that training wrote in another spelling ends the start with a traceback, or is read as MXFP4 over
    weights in BF16."""
    owner = module.PretrainedConfig
    expect_parameters(owner.get_config_dict, "pretrained_model_name_or_path")

    @around(owner, "get_config_dict")
    def get_config_dict(original: Callable[..., Any], cls: type, name: Any, **options: Any) -> Any:
        from npu_gptoss.model.config import as_stored
        from npu_gptoss.model.config_fields import MODEL_TYPE, normalized

        values, rest = original(cls, name, **options)
        if values.get("model_type") == MODEL_TYPE:
            values = normalized(as_stored(values, Path(name)) if os.path.isdir(name) else values)  # noqa: PTH112
        return values, rest


@repair(
    "tokenizer-class",
    "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
    until="0.23",
)
def install_tokenizer(module: ModuleType) -> None:
    """A tokenizer that transformers 5 saved (class TokenizersBackend, a list of special tokens) is refused with the
    advice to trust the checkpoint's code."""
    expect_source(module.AutoTokenizer.from_pretrained, 'config_tokenizer_class + "Fast"')

    @around(module.AutoTokenizer, "from_pretrained")
    def from_pretrained(original: Callable[..., Any], cls: type, name: Any, *args: Any, **options: Any) -> Any:
        written = module.get_tokenizer_config(name, **options)
        extra, wanted = written.get("extra_special_tokens"), written.get("tokenizer_class")
        known = wanted is None or any(map(module.tokenizer_class_from_name, (wanted, f"{wanted}Fast")))
        if known and not isinstance(extra, list):
            return original(cls, name, *args, **options)
        from transformers import PreTrainedTokenizerFast

        if isinstance(extra, list):  # what transformers 4 calls by another name
            options |= {"extra_special_tokens": {}, "additional_special_tokens": extra}
        return PreTrainedTokenizerFast.from_pretrained(name, *args, **options)

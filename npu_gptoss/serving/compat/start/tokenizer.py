"""Tokenizers that transformers 5 saved, for the vLLM whose transformers is 4: their tokenizer.json decides."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_source, repair


@repair(
    "tokenizer-class",
    "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
    until="0.23",
)
def install(module: ModuleType) -> None:
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

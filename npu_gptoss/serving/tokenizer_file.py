"""Finds the tokenizer.json that vLLM reads: in a folder, in the cache of a hub, or on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from npu_gptoss.tokenizer import FILE_NAME

served: list[Any] = []  # vLLM's ModelConfig of this process's server, once it is made


def tokenizer_file(name: str | None, revision: str | None, *, download: bool = False) -> Path | None:
    """Returns the file of a folder, or of a repository (of ModelScope with VLLM_USE_MODELSCOPE); None if there is
    none, or no network."""
    if name is None or (Path(name) / FILE_NAME).is_file():
        return name and Path(name) / FILE_NAME
    try:
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true":  # as vLLM reads it
            from modelscope.hub.file_download import model_file_download

            return Path(model_file_download(name, FILE_NAME, revision=revision, local_files_only=not download))
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        found = try_to_load_from_cache(name, FILE_NAME, revision=revision)
        if download and not isinstance(found, str):
            found = hf_hub_download(name, FILE_NAME, revision=revision)
    except Exception:  # an OSError of the network, or an error of a hub's own: whoever needs the file reports it
        return None
    return Path(found) if isinstance(found, str) else None


def checkpoint_directory(model_config: Any) -> Path | None:
    """Returns the folder of the checkpoint's tokenizer.json: a local folder, the Hugging Face cache, or None."""
    of_tokenizer = tokenizer_file(model_config.tokenizer, model_config.tokenizer_revision)
    found = of_tokenizer or tokenizer_file(model_config.model, model_config.revision)
    return found and found.parent

"""Finds the tokenizer.json that vLLM reads: in a folder, in the cache of a hub, or on the hub."""

from __future__ import annotations

import os
from pathlib import Path

from npu_gptoss.tokenizer import FILE_NAME


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

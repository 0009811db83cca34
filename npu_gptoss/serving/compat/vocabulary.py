"""The harmony vocabulary without the network.

openai-harmony downloads `o200k_base.tiktoken` the first time it is asked for its encoding, unless
`TIKTOKEN_ENCODINGS_BASE` names a directory that has it or its cache does. Offline, a stock server dies of that. Here
the file is looked for where it may lie, built from the served checkpoint's own `tokenizer.json` when it is nowhere, and
a vocabulary that cannot be had ends in a sentence. The network is not asked.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.files import cache_directory
from npu_gptoss.harmony import vocabulary
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE, VocabularyError
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import CONTEXT, ENGINE, HARMONY, HARMONY_UTILS, RENDERER_0_23, RESPONSES_CONTEXT

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("vllm.npu_gptoss")

CACHE_VARIABLE = "TIKTOKEN_RS_CACHE_DIR"  # openai-harmony's own cache of downloads …
CACHED_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"  # … and the file's name in there, the SHA-1 of its address


_served: list[Path | None] = [None]


def served_directory() -> Path | None:
    """Where the files of the served gpt-oss lie, once a server's object was made for it."""
    return _served[0]


def checkpoint_directory(model_config: ModelConfig) -> Path | None:
    """Where the served checkpoint's tokenizer.json lies: a local directory, the Hugging Face cache, or nowhere."""
    names = dict.fromkeys((model_config.tokenizer, model_config.model))
    for name in filter(None, names):
        if (Path(name) / "tokenizer.json").is_file():
            return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in filter(None, names):
        try:
            found = try_to_load_from_cache(name, "tokenizer.json", revision=model_config.revision)
        except HFValidationError:
            continue
        if isinstance(found, str):
            return Path(found).parent
    return None


def harmony_can_load() -> bool:
    """Whether openai-harmony finds the vocabulary by itself, without the network."""
    try:
        importlib.metadata.version("oss-harmony")  # a build of the library that has the ranks inside
        return True
    except importlib.metadata.PackageNotFoundError:
        pass
    base = os.environ.get(BASE_VARIABLE)
    if base:
        return (Path(base) / VOCABULARY_FILE).is_file()
    cache = os.environ.get(CACHE_VARIABLE) or str(Path(tempfile.gettempdir()) / "tiktoken-rs-cache")
    return vocabulary.is_published_vocabulary(Path(cache) / CACHED_FILE)


def provide_vocabulary(model_dir: Path | None) -> None:
    """Let openai-harmony find the vocabulary; raise VocabularyError with what to do when there is none to be had."""
    if harmony_can_load():
        return
    directory = vocabulary.find_vocabulary(model_dir)
    reason = ""
    if directory is None and model_dir is not None:
        try:
            directory = vocabulary.build_vocabulary(model_dir, cache_directory()).parent
            logger.info("The harmony vocabulary was built from %s into %s.", model_dir / "tokenizer.json", directory)
        except VocabularyError as error:
            reason = f" Building it failed: {error}"
    if directory is None:
        places = [f"${BASE_VARIABLE} ({os.environ.get(BASE_VARIABLE) or 'unset'})", str(cache_directory())]
        if model_dir is not None:
            places.insert(1, str(model_dir))
        raise VocabularyError(
            f"openai-harmony needs {VOCABULARY_FILE}, and it lies in none of: {', '.join(places)}.{reason} "
            "Run `npu-gptoss vocabulary MODEL_DIR` on a checkpoint with its tokenizer.json, and set "
            f"{BASE_VARIABLE} to the directory that it prints. It is not downloaded."
        )
    os.environ[BASE_VARIABLE] = str(directory)


@repair(
    "harmony-vocabulary",
    f"{ENGINE}:OpenAIServing.__init__",
    f"{HARMONY} {CONTEXT}:get_encoding",
    lines=("0.11",),
    upstream="vllm issues 22525 and 57099",
)
def install(serving_engine: ModuleType) -> None:
    """openai-harmony downloads its vocabulary when it is asked for its encoding, and a server without network does
    not start."""
    from vllm.entrypoints import harmony_utils

    expect_parameters(serving_engine.OpenAIServing.__init__, "self", "engine_client", "model_config")
    _provide(serving_engine.OpenAIServing, harmony_utils, CONTEXT)


@repair(
    "harmony-vocabulary",
    f"{RENDERER_0_23}:OpenAIServingRender.__init__",
    f"{HARMONY_UTILS} {RESPONSES_CONTEXT}:get_encoding",
    lines=("0.23",),
    upstream="vllm issues 22525 and 57099",
)
def install_0_23(renderer: ModuleType) -> None:
    """openai-harmony downloads its vocabulary when it is asked for its encoding, and a server without network answers
    every chat with 500."""
    from vllm.entrypoints.openai.parser import harmony_utils

    expect_parameters(renderer.OpenAIServingRender.__init__, "self", "model_config")
    _provide(renderer.OpenAIServingRender, harmony_utils, RESPONSES_CONTEXT)


def _provide(serving: type, harmony_utils: ModuleType, copy: str) -> None:
    """`serving`: a class whose objects are made before anybody asks for the encoding."""
    # not at the top: the doctor asks this module where openai-harmony is not installed
    from npu_gptoss.harmony.encoding import text_tokenizer

    original_get = harmony_utils.get_encoding
    expect_source(original_get, "if _harmony_encoding is None:", "load_harmony_encoding(")

    takes = inspect.signature(serving.__init__)

    @around(serving, "__init__")
    def __init__(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        model_config = takes.bind(*args, **kwargs).arguments["model_config"]
        if getattr(model_config.hf_config, "model_type", None) == MODEL_TYPE:
            _served[0] = checkpoint_directory(model_config)
            if _served[0] is not None:
                text_tokenizer(_served[0])  # seconds, which are the start's and not the first request's
        original(*args, **kwargs)

    def get_encoding() -> Any:
        if harmony_utils._harmony_encoding is None:
            provide_vocabulary(_served[0])
            try:
                return original_get()
            except Exception as error:
                raise VocabularyError(
                    f"openai-harmony cannot load {VOCABULARY_FILE} from ${BASE_VARIABLE} "
                    f"({os.environ.get(BASE_VARIABLE)}): {error}. Run `npu-gptoss vocabulary MODEL_DIR` to rebuild it."
                ) from error
        return original_get()

    replace(harmony_utils, "get_encoding", get_encoding, copies=(copy,))

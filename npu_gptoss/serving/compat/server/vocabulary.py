"""Gives vLLM openai-harmony's encoding without the network (`harmony/library.py`), and encodes in linear time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import ENGINE, HARMONY, HARMONY_UTILS, RENDERER_0_23


@repair(
    "harmony-vocabulary",
    f"{ENGINE}:OpenAIServing.__init__",
    f"{HARMONY}:_harmony_encoding",
    upstream="vllm issues 22525 and 57099",
    until="0.33",
)
def install(serving_engine: ModuleType) -> None:
    """openai-harmony downloads its vocabulary when its encoding is loaded, so a server without network does not
    start."""
    from vllm.entrypoints import harmony_utils

    expect_parameters(serving_engine.OpenAIServing.__init__, "self", "engine_client", "model_config")
    _provide(serving_engine.OpenAIServing, harmony_utils)


@repair(
    "harmony-vocabulary",
    f"{RENDERER_0_23}:OpenAIServingRender.__init__",
    f"{HARMONY_UTILS}:_harmony_encoding",
    releases=("0.23",),
    upstream="vllm issues 22525 and 57099",
    until="0.33",
)
def install_0_23(renderer: ModuleType) -> None:
    """openai-harmony downloads its vocabulary when its encoding is loaded, so a server without network answers every
    chat with 500."""
    from vllm.entrypoints.openai.parser import harmony_utils

    expect_parameters(renderer.OpenAIServingRender.__init__, "self", "model_config")
    _provide(renderer.OpenAIServingRender, harmony_utils)


def _provide(serving: type, harmony_utils: ModuleType) -> None:
    """`serving`: a class whose objects are created before vLLM loads the encoding, which it keeps in a variable."""
    expect_source(harmony_utils.get_encoding, "if _harmony_encoding is None:", "load_harmony_encoding(")
    takes = inspect.signature(serving.__init__)

    @around(serving, "__init__")
    def __init__(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from npu_gptoss.serving.openai.engine import prepare

        model_config = takes.bind(*args, **kwargs).arguments["model_config"]
        if getattr(model_config.hf_config, "model_type", None) == MODEL_TYPE:
            prepare(model_config)  # takes seconds, at the start and not in the first request
        original(*args, **kwargs)

    replace(harmony_utils, "_harmony_encoding", _linear_encoding())


def _linear_encoding() -> Any:
    """openai-harmony's encoding, loaded when it is first used."""
    import openai_harmony

    class LinearEncoding(openai_harmony.HarmonyEncoding):
        def __init__(self) -> None:
            pass

        @functools.cached_property
        def _inner(self) -> Any:
            from npu_gptoss.harmony.library import load_encoding

            return load_encoding()._inner

        def render_conversation_for_completion(self, conversation: Any, *_: Any, **__: Any) -> list[int]:
            from npu_gptoss.serving.openai.engine import served_encoder

            return served_encoder().encode(conversation.messages)

    return LinearEncoding()

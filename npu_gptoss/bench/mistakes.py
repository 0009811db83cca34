"""Deliberate mistakes in a loaded model: a comparison that shows agreement should show that it would show these.

Each is one that ports of gpt-oss have made or that its formulas invite (`verify --mutate` has them for every kernel),
and changes what the layers are given, not the kernels, so that it can be made on any device in no time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from npu_gptoss.engine import Engine
from npu_gptoss.model.rope import cos_sin_cache
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.weights import Layer

NEVER = -1e4  # a sink's logit: its weight is zero beside any key's, and no kernel's arithmetic sees an infinity
NO_LIMIT = 1e9


def _sinks_dropped(layer: Layer) -> Layer:
    return replace(layer, attention=replace(layer.attention, sinks=torch.full_like(layer.attention.sinks, NEVER)))


def _window(step: int) -> Callable[[Layer], Layer]:
    def change(layer: Layer) -> Layer:
        window = layer.attention.window
        return layer if window is None else replace(layer, attention=replace(layer.attention, window=window + step))

    return change


def _clamp_left_out(layer: Layer) -> Layer:
    return replace(layer, moe=replace(layer.moe, experts=replace(layer.moe.experts, swiglu_limit=NO_LIMIT)))


def _router_bias_dropped(layer: Layer) -> Layer:
    return replace(layer, moe=replace(layer.moe, router_bias=torch.zeros_like(layer.moe.router_bias)))


_OF_LAYERS: dict[str, Callable[[Layer], Layer]] = {
    "sinks dropped": _sinks_dropped,
    "window one key less": _window(-1),
    "window one key more": _window(+1),
    "clamp left out": _clamp_left_out,
    "router's bias dropped": _router_bias_dropped,
}
RAMP = "YaRN's ramp rounded"
MISTAKES = (*_OF_LAYERS, RAMP)


@contextmanager
def mistaken(engine: Engine, mistake: str) -> Iterator[None]:
    """Inside, the engine computes prompts with the mistake, one of MISTAKES; afterwards all is as before.

    Graphs hold what they were captured with, so decode steps that replay one stay right.
    """
    right = engine.model
    engine.model = _with_mistake(right, mistake)
    try:
        yield
    finally:
        engine.model = right


def _with_mistake(model: GptOss, mistake: str) -> GptOss:
    """A copy that shares all that is right with the model."""
    wrong = copy.copy(model)
    if mistake == RAMP:
        config = model.config
        config = replace(config, rope_scaling=replace(config.rope_scaling, truncate=not config.rope_scaling.truncate))
        wrong.cos_sin = cos_sin_cache(config, len(model.cos_sin), model.cos_sin.dtype, model.cos_sin.device)
    else:
        wrong.layers = tuple(map(_OF_LAYERS[mistake], model.layers))
    return wrong

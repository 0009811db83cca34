"""gpt-oss on CPU: V1 must not be refused, and no layer may get a window that its model did not give it."""

from __future__ import annotations

import types

import pytest
from vllm.config import ModelConfig
from vllm.engine import arg_utils

pytestmark = pytest.mark.serving


def model_config(model_type: str = "gpt_oss", disable_sliding_window: bool = False) -> ModelConfig:
    """A ModelConfig with only the fields that the code under test reads."""
    config = object.__new__(ModelConfig)
    config.hf_text_config = types.SimpleNamespace(model_type=model_type, sliding_window=128)
    config.hf_config = config.hf_text_config
    config.disable_sliding_window = disable_sliding_window
    return config


@pytest.fixture
def oracle(monkeypatch):
    """Asks vLLM whether its V1 engine can serve the model on CPU."""
    monkeypatch.setattr(arg_utils.current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(ModelConfig, "is_v1_compatible", True)
    refusals = []
    monkeypatch.setattr(
        arg_utils, "_raise_or_fallback", lambda feature_name, recommend_to_remove: refusals.append(feature_name)
    )

    def ask(config: ModelConfig) -> tuple[bool, list[str]]:
        refusals.clear()
        return arg_utils.EngineArgs(model="unused")._is_v1_supported_oracle(config), list(refusals)

    return ask


def test_v1_is_not_refused_on_cpu(patched, oracle):
    with patched():
        assert oracle(model_config()) == (False, ["sliding window (CPU backend)"])
    with patched("model-wide-window"):
        assert oracle(model_config()) == (True, [])


def test_no_layer_gets_a_window_from_the_cache_config(patched):
    with patched():
        assert model_config().get_sliding_window() == 128
    with patched("model-wide-window"):
        assert model_config().get_sliding_window() is None


def test_other_models_and_a_disabled_window_keep_theirs(patched, oracle):
    with patched("model-wide-window"):
        assert model_config("mistral").get_sliding_window() == 128
        assert oracle(model_config("mistral"))[0] is False
        assert model_config(disable_sliding_window=True).get_sliding_window() == 128

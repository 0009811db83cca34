"""gpt-oss on a CPU: V1 is not refused, and no layer gets a window that its model did not set."""

from __future__ import annotations

import types

import pytest
from vllm.config import ModelConfig
from vllm.engine import arg_utils

pytestmark = pytest.mark.serving


def model_config(model_type: str = "gpt_oss", disable_sliding_window: bool = False) -> ModelConfig:
    """A ModelConfig with only the fields that the tested code reads."""
    config = object.__new__(ModelConfig)
    config.hf_text_config = types.SimpleNamespace(model_type=model_type, sliding_window=128)
    config.hf_config = config.hf_text_config
    config.disable_sliding_window = disable_sliding_window
    return config


@pytest.fixture
def oracle(monkeypatch):
    """Asks vLLM if its V1 engine can serve the model on a CPU."""
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


def test_model_wide_window_is_gone_and_v1_is_not_refused_on_cpu(patched, oracle):
    with patched("model-wide-window"):
        assert oracle(model_config()) == (True, [])
        assert model_config().get_sliding_window() is None


def test_other_models_and_a_disabled_window_keep_theirs(patched, oracle):
    with patched("model-wide-window"):
        assert model_config("mistral").get_sliding_window() == 128
        assert oracle(model_config("mistral"))[0] is False
        assert model_config(disable_sliding_window=True).get_sliding_window() == 128

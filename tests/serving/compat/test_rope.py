"""YaRN: what vLLM 0.11.0 makes of `truncate: false`, and that neither its model nor ours keeps it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig as HuggingFaceConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models import gpt_oss as stock

from npu_gptoss.model.rope import yarn_inv_freq
from npu_gptoss.serving import rotary
from npu_gptoss.serving.compat import rope
from tests.model.published import gpt_oss_20b, published_config

pytestmark = pytest.mark.serving

POSITIONS = torch.tensor([0, 1, 127, 4095, 4096, 131071])


def transformers_cache() -> torch.Tensor:
    """[positions, head_dim]: cosines, then sines, as transformers rotates by them."""
    embedding = GptOssRotaryEmbedding(HuggingFaceConfig(**published_config()))
    cos, sin = embedding(torch.zeros(1, dtype=torch.float32), POSITIONS[None])
    return torch.cat((cos[0], sin[0]), dim=-1)


@pytest.fixture
def fresh_rope(monkeypatch):
    """vLLM shares rotary objects; here each test has its own."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def stock_cache(monkeypatch, fresh_rope):
    """The cache of vLLM's own gpt-oss attention, built without its linear layers."""
    monkeypatch.setattr(stock, "get_tensor_model_parallel_world_size", lambda: 1)
    for name in ("QKVParallelLinear", "RowParallelLinear", "Attention"):
        monkeypatch.setattr(stock, name, lambda *args, **kwargs: torch.nn.Identity())

    def build(**changes) -> torch.Tensor:
        rotary_embedding._ROPE_DICT.clear()
        config = published_config()
        config["rope_scaling"] |= changes
        layer = stock.OAIAttention(HuggingFaceConfig(**config), prefix="model.layers.0.attn")
        return layer.rotary_emb.cos_sin_cache[POSITIONS].float()

    return build


def test_vllms_own_model_rotates_by_unrounded_frequencies(patched, stock_cache):
    expected = transformers_cache()
    with patched():
        assert (stock_cache() - expected).abs().max() > 0.1
    with patched("yarn-truncate"):
        assert torch.equal(stock_cache(), expected)


def test_a_config_that_rounds_is_rounded(patched, stock_cache):
    with patched():
        expected = stock_cache(truncate=True)
    with patched("yarn-truncate"):
        assert torch.equal(stock_cache(truncate=True), expected)


def test_a_config_that_does_not_say_is_rounded():
    """As in transformers, whose default is truncate=True."""
    scaling = {name: value for name, value in published_config()["rope_scaling"].items() if name != "truncate"}
    cache = torch.zeros(8, 64)
    config = SimpleNamespace(rope_scaling=scaling, head_dim=64, rope_theta=150_000.0)
    rope.fill(SimpleNamespace(cos_sin_cache=cache), config)
    assert not cache.any(), "left as vLLM has filled it"


def test_our_model_rotates_by_unrounded_frequencies(patched, fresh_rope):
    with patched():
        cache = rotary.rotary_embedding(gpt_oss_20b()).cos_sin_cache
    factor = yarn_inv_freq(gpt_oss_20b())[1]  # ours is in the scale of the scores
    torch.testing.assert_close(cache[POSITIONS].float() * factor, transformers_cache(), rtol=1e-6, atol=1e-6)

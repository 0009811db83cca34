"""The engine against OpenAI's own model: `gpt_oss/torch/model.py` of the wheel gpt-oss, in float32.

A second oracle, which shares no line with transformers. pip downloads the wheel once, by its hash, into `.checkpoints`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from npu_gptoss.engine import Engine
from npu_gptoss.tiny.checkpoint import write_tiny
from tests.oracle import random_prompts

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".checkpoints/openai"
LOCK = ROOT / "requirements/openai-reference.txt"
# OpenAI's name -> that of the official checkpoint on the hub, where a layer is `model.layers.N`
LAYER = {
    "attn.sinks": "self_attn.sinks",
    "attn.norm.scale": "input_layernorm.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """The module of OpenAI's model."""
    if not any(WHEELS.glob("*.whl")):
        download = ["download", "-q", "--no-deps", "--require-hashes", "--python-version", "3.12"]
        where = ["--only-binary", ":all:", "-r", str(LOCK), "-d", str(WHEELS)]
        done = subprocess.run([sys.executable, "-m", "pip", *download, *where], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the wheel of {LOCK.name} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(next(WHEELS.glob("*.whl")))
        yield importlib.import_module("gpt_oss.torch.model")


def official(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The parameter `name` of OpenAI's model, from a checkpoint of floats in the hub's layout."""
    if not name.startswith("block."):
        names = {"embedding.weight": "model.embed_tokens", "norm.scale": "model.norm", "unembedding.weight": "lm_head"}
        return state[f"{names[name]}.weight"]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest.startswith("attn.qkv."):
        kind = rest.rpartition(".")[2]
        return torch.cat([state[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"])
    if rest in ("mlp.mlp1_weight", "mlp.mlp2_weight"):
        weights = state[f"{prefix}mlp.experts.{'gate_up' if '1' in rest else 'down'}_proj"]
        return weights.transpose(1, 2)
    return state[prefix + LAYER[rest]]


@torch.no_grad()
def test_logits_differ_from_those_of_openais_own_model(reference: Any, tmp_path: Path) -> None:
    """Over prompts shorter and longer than the window, whose layers alternate."""
    write_tiny(tmp_path, trained=True)
    engine = Engine(tmp_path, device="cpu", dtype="float32", num_blocks=40)
    config = engine.config
    model = reference.Transformer(
        reference.ModelConfig(
            num_hidden_layers=config.num_hidden_layers,
            num_experts=config.num_local_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
        ),
        torch.device("cpu"),
    ).float()
    state = {
        name: tensor.float() for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for name, parameter in model.named_parameters():
        parameter.copy_(official(state, name))
    for prompt in random_prompts([5, 300], config.vocab_size, seed=2):
        want, got = model(torch.tensor(prompt)), engine.logits(prompt)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    for block in model.block:
        block.attn.sinks.fill_(-1e4)
    assert (model(torch.tensor(prompt)) - got).abs().max() > 1, "a lost sink is seen"

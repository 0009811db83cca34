"""Random adapters in the files of peft, and of unsloth's modules for experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from npu_gptoss.model.config import GptOssConfig


def write_adapter(
    folder: Path, config: GptOssConfig, *, seed: int, rank: int = 4, experts: bool = True, split: bool = False
) -> Path:
    """Adapts attention, router and experts, as much as the weights themselves are worth. split: some experts' linear
    layers alone, as unsloth trains them."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def add(module: str, inputs: int, outputs: int, times: int = 1) -> None:
        a = torch.randn(times * rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank * times, generator=generator) / (2 * rank) ** 0.5
        tensors[f"base_model.model.{module}.lora_A.weight"], tensors[f"base_model.model.{module}.lora_B.weight"] = a, b

    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for letter, inputs, outputs in zip("qkvo", (hidden, hidden, hidden, query), (query, key, key, hidden)):  # noqa: B905
            add(f"{layer}.self_attn.{letter}_proj", inputs, outputs)
        add(f"{layer}.mlp.router", hidden, count)
        if experts and not split:
            add(f"{layer}.mlp.experts.base_layer", hidden, 2 * inner, count)
            add(f"{layer}.mlp.experts", inner, hidden, count)
        elif split:
            for expert in range(0, count, 2):
                add(f"{layer}.mlp.experts.{expert}.gate_proj", hidden, inner)
                add(f"{layer}.mlp.experts.{expert}.up_proj", hidden, inner)
                add(f"{layer}.mlp.experts.down_projs.{expert}", inner, hidden)
    folder.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings |= {"target_modules": ["q_proj"], "alpha_pattern": {"o_proj": 2 * rank}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder

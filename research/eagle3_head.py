"""Writes a random EAGLE3 head for a gpt-oss checkpoint, in the format of `speculators`, which vLLM reads.

For the 20b the head has the shape of RedHatAI/gpt-oss-20b-speculator.eagle3: a Llama layer with its target's heads,
the target's width inside its MLP, and logits over 32 000 tokens. A smaller target gets a smaller head, with logits over
half of its vocabulary. The head uses the target's embedding.

A server accepts hardly any of its drafts, so each step brings a request one token at the cost of a step with drafts.
Tests use it to show that speculation does not change answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig

DRAFT_VOCABULARY, DRAFTS = 32_000, 5  # as published
STD = 0.02
TAPPED = 3  # layers of the target that the head reads


def tapped_layers(layers: int) -> tuple[int, ...]:
    """Returns the layers behind which the head reads its target: vLLM's choice, or the last three if it has fewer."""
    chosen = {2, layers // 2, layers - 3}
    if len(chosen) < TAPPED or min(chosen) < 1:
        chosen = set(range(layers - TAPPED, layers))
    if min(chosen) < 1:
        raise InputError(f"an EAGLE3 head reads its target behind three layers before the last, got {layers} layers")
    return tuple(sorted(chosen))


def head_config(target: GptOssConfig, name: str) -> dict[str, Any]:
    """Makes config.json. name: of the target."""
    copied = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = {name: getattr(target, name) for name in (*copied, "vocab_size", "max_position_embeddings")}
    layer |= {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    layer |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": DRAFTS}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": min(DRAFT_VOCABULARY, target.vocab_size // 2),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(tapped_layers(target.num_hidden_layers)),
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": ["GptOssForCausalLM"]},
        },
    }


def head_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of matrices and norms by name; rows are outputs."""
    layer = config["transformer_layer_config"]
    hidden, inner, dim = (layer[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    query, key = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    of = "layers.0."
    return {
        "fc.weight": (hidden, TAPPED * hidden),
        f"{of}input_layernorm.weight": (hidden,),
        f"{of}hidden_norm.weight": (hidden,),
        f"{of}self_attn.q_proj.weight": (query, 2 * hidden),  # of the embedding beside the target's state
        f"{of}self_attn.k_proj.weight": (key, 2 * hidden),
        f"{of}self_attn.v_proj.weight": (key, 2 * hidden),
        f"{of}self_attn.o_proj.weight": (hidden, query),
        f"{of}post_attention_layernorm.weight": (hidden,),
        f"{of}mlp.gate_proj.weight": (inner, hidden),
        f"{of}mlp.up_proj.weight": (inner, hidden),
        f"{of}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }


def head_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Draws normal matrices, norms of one, and the tokens that the head knows: d2t [drafts], the id of each minus its
    place; t2d [vocabulary], a mask of them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, STD, generator=generator)
        for name, shape in head_shapes(config).items()
    }
    vocabulary, drafts = config["transformer_layer_config"]["vocab_size"], config["draft_vocab_size"]
    known = torch.randperm(vocabulary, generator=generator)[:drafts].sort().values
    tensors["d2t"] = known - torch.arange(drafts)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def write_head(directory: Path, checkpoint: Path, seed: int = 0) -> None:
    """Writes config.json and model.safetensors for the target in `checkpoint`."""
    config = head_config(GptOssConfig.from_directory(checkpoint), checkpoint.name)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(head_tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

"""The random head has the published shape, a token table and a config that vLLM reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.errors import InputError
from research.eagle3_head import DRAFTS, head_config, head_shapes, tapped_layers, write_head
from tests.checkpoints import write_random_checkpoint


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, path = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    write_random_checkpoint(target, layers=4, hidden=256, heads=8, kv_heads=2)
    write_head(path, target)
    return path


def test_a_head_for_the_20b_has_the_published_shape():
    config = head_config(full_config("20b"), "gpt-oss-20b")
    layer = config["transformer_layer_config"]
    heads = (layer["num_attention_heads"], layer["num_key_value_heads"], layer["head_dim"])
    assert (config["draft_vocab_size"], layer["num_hidden_layers"], *heads) == (32_000, 1, 64, 8, 64)
    shapes = head_shapes(config)
    assert shapes["fc.weight"] == (2880, 3 * 2880)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64 * 64, 2 * 2880)
    assert sum(map(math.prod, shapes.values())) == pytest.approx(0.183e9, rel=0.01), "parameters beside the embedding"


def test_the_token_table_names_the_tokens_that_the_head_knows(head):
    tensors = load_file(head / "model.safetensors")
    known = torch.arange(256) + tensors["d2t"]  # vLLM turns a place into a token so
    assert known.unique().numel() == 256
    assert tensors["t2d"].nonzero().flatten().tolist() == known.tolist()


@pytest.mark.parametrize(("layers", "behind"), [(4, (1, 2, 3)), (6, (3, 4, 5)), (24, (2, 12, 21)), (36, (2, 18, 33))])
def test_a_head_reads_three_different_layers(layers, behind):
    """For 4 layers vLLM's choice names two, and would feed a head of three only two."""
    assert tapped_layers(layers) == behind


def test_three_layers_are_too_few():
    with pytest.raises(InputError, match="got 3 layers"):
        tapped_layers(3)


def test_vllm_reads_the_head_as_an_eagle3_one_of_llama(head):
    pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    read = SpeculatorsConfig.from_pretrained(head)
    assert read.architectures == ["Eagle3LlamaForCausalLM"]
    assert (read.draft_vocab_size, read.norm_before_residual) == (256, True)
    assert tuple(read.eagle_aux_hidden_state_layer_ids) == (1, 2, 3)
    written = json.loads((head / "config.json").read_text())
    options = SpeculatorsConfig.extract_vllm_speculative_config(written)
    assert options == {"method": "eagle3", "num_speculative_tokens": DRAFTS}

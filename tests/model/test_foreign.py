"""Folders of other tools are named, with a remedy for the user's own path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from npu_gptoss.files import CheckpointError
from npu_gptoss.model.check import check_directory
from npu_gptoss.model.config import ConfigError
from npu_gptoss.model.foreign import FORMS, recognise
from tests.checkpoints import random_config, random_tensors, write_random_checkpoint
from tests.refused import refused

LAYER = "model.layers.0."
EXPERTS = LAYER + "mlp.experts."
FILES = {
    "GGUF": "gpt-oss-20b-Q4_K_M.gguf",
    "ModelSlim": "quant_model_weight_w8a8_dynamic.safetensors",
    "ModelOpt": "hf_quant_config.json",
    "an adapter": "adapter_model.safetensors",
    "ONNX": "model.onnx",
    "OpenVINO": "openvino_model.bin",
    "Metal": "model.bin",
    "save_sharded_state": "model-rank-0-part-0.safetensors",
    "distributed": "__0_0.distcp",
    "MLX": "weights.00.npz",
}
METHODS = {
    "AWQ": {"quant_method": "awq"},
    "GPTQ": {"quant_method": "gptq"},
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "HQQ": {"quant_method": "hqq"},
    "torchao": {"quant_method": "torchao"},
    "Quark": {"quant_method": "quark"},
    "auto-round": {"quant_method": "auto-round"},
    "NVFP4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "four bits": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "FP8": {"quant_method": "compressed-tensors", "format": "float-quantized"},
}
NAMES = {
    "original/": "block.0.attn.qkv.weight",
    "unsloth": EXPERTS + "gate_up_projs.3.weight",
    "llm-compressor": EXPERTS + "experts.0.gate_proj.weight",
    "without merging": LAYER + "self_attn.q_proj.base_layer.weight",
    "wrapper": "_orig_mod." + LAYER + "self_attn.q_proj.weight",
    "without its experts": "gate_up_proj$",
    "distributed": LAYER + "_flat_param",
}


@pytest.mark.parametrize("tool", FILES)
def test_files_of_another_tool_are_no_incomplete_download(tmp_path: Path, tool: str) -> None:
    directory = tmp_path / "a model"
    directory.mkdir()
    (directory / FILES[tool]).write_bytes(b"x" * 20)
    for config in (None, random_config().to_dict()):
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises((ConfigError, CheckpointError), match=tool) as caught:
            check_directory(directory, text=False)
        assert caught.value.field == str(directory)


@pytest.mark.parametrize("tool", METHODS)
def test_quantisation_of_another_tool_is_named(tmp_path: Path, tool: str) -> None:
    config = random_config().to_dict() | {"quantization_config": METHODS[tool]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("quantization_config.quant_method", ConfigError) as caught:
        check_directory(tmp_path)
    assert tool in str(caught.value)


@pytest.mark.parametrize("tool", NAMES)
def test_names_of_another_tool_are_no_incomplete_download(tmp_path: Path, tool: str) -> None:
    config = random_config(layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    tensors = random_tensors(config)
    tensors[NAMES[tool]] = tensors.pop(LAYER + "self_attn.q_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with refused(str(tmp_path), CheckpointError) as caught:
        check_directory(tmp_path, text=False)
    assert tool in str(caught.value)
    command = f"npu-gptoss convert {tmp_path} {tmp_path}-converted" in str(caught.value)
    assert command == (tool not in ("without its experts", "distributed"))


def test_path_of_the_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    directory = tmp_path / "it's"
    form = recognise(None, ["block.0.attn.sinks"])
    assert form.convertible
    assert f"npu-gptoss convert '{tmp_path}/it'\"'\"'s' '{tmp_path}/it'\"'\"'s-converted'" in form.advice(directory)


def test_a_gguf_beside_the_official_files_is_passed_over(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path)
    (tmp_path / "gpt-oss.gguf").write_bytes(b"GGUF")
    check_directory(tmp_path, text=False)


def test_official_names_are_no_other_tool_s() -> None:
    for mxfp4 in (False, True):
        config = random_config(mxfp4=mxfp4)
        assert recognise(None, random_tensors(config), config.to_dict()) is None


def test_half_precision_is_told_the_way_to_bf16(tmp_path: Path) -> None:
    config = random_config(layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    save_file({n: t.to(torch.float16) for n, t in random_tensors(config).items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"npu-gptoss convert {tmp_path} "):
        check_directory(tmp_path, text=False)


def test_every_form_has_evidence_and_a_remedy() -> None:
    for form in FORMS:
        assert form.files or form.methods or form.fields or form.names != r"(?!)", form.tool
        assert form.advice("/a b").endswith("."), form.tool

"""Merged adapters equal peft's own merge_and_unload, computed in float32 on transformers' own weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from npu_gptoss.convert import lora
from npu_gptoss.convert.command import open_adapters
from npu_gptoss.convert.lora import AdapterError
from npu_gptoss.convert.source import open_source
from npu_gptoss.convert.write import Job, convert
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.moe.mxfp4 import compress
from tests.convert import foreign
from tests.convert.foreign import Tensors, small, write
from tests.refused import refused

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EXPERTS = {"target_modules": ["v_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "attention": ATTENTION,
    "rslora": {**ATTENTION, "use_rslora": True, "r": 9},
    "patterns": {
        **ATTENTION,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "o_proj": 5},
        "alpha_pattern": {"model.layers.0.self_attn.(q|k)_proj": 64, "v_proj": 1},
    },
    "dora": {**ATTENTION, "use_dora": True},
    "fan_in_fan_out": {**ATTENTION, "fan_in_fan_out": True},
    "modules_to_save": {**ATTENTION, "modules_to_save": ["lm_head"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "router": {"target_modules": [], "target_parameters": ["mlp.router.weight"]},
    "experts": EXPERTS,
    "gate_up alone": {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    "down alone": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "experts, patterns": {**EXPERTS, "alpha_pattern": {"experts.down_proj": 1}, "rank_pattern": {"down_proj": 2}},
}


def with_adapter(base: Path, seed: int = 0, **settings: Any) -> Any:
    """peft's model with a random adapter, float32."""
    model = transformers.GptOssForCausalLM.from_pretrained(base, dtype=torch.float32).float()  # also of MXFP4
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    randomise(model, seed)
    return model


def randomise(model: Any, seed: int, name: str = "default") -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}" in key and "magnitude" not in key:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def merged_by_peft(model: Any) -> Tensors:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.merge_and_unload().state_dict().items()}


def merged_here(source: Path, out: Path, *adapters: str, to: str = "bf16") -> Tensors:
    opened = open_source(source)
    convert(Job(opened, out, to, open_adapters(opened, list(adapters))), progress=False)
    return {name: tensor for file in sorted(out.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_merged(got: Tensors, want: Tensors) -> None:
    """Rounded to bfloat16 from float32 sums: one in a thousand may fall to the other neighbour."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        same = (got[name] == tensor).float().mean().item()
        near = torch.allclose(got[name].float(), tensor.float(), rtol=2**-7, atol=1e-7)
        assert same > 0.999 and near, f"{name}: {same:.4f} are the same"  # noqa: PT018


def compare_with_peft(base: Path, folder: Path, kind: dict[str, Any]) -> None:
    """Saves an adapter as peft does, and merges it both ways."""
    model = with_adapter(base, **kind)
    model.save_pretrained(folder / "adapter")
    assert_merged(merged_here(base, folder / "out", str(folder / "adapter")), merged_by_peft(model))


def assert_factored(base: Path, adapter: Path) -> None:
    """A server adds B A x where the merge adds B A."""
    source = open_source(base)
    (opened,) = open_adapters(source, [str(adapter)])
    specs = expected_tensors(dataclasses.replace(source.config, quantization=None))
    for name, deltas in opened.deltas.items():
        special = any(delta.embedding or "magnitude_vector" in delta.factors for delta in deltas)
        if not special and name not in opened.replaced:
            shape = specs[name].shape
            a, b = lora.factors(deltas, shape)
            got = (b @ a).mT if len(shape) == 3 else b @ a
            torch.testing.assert_close(got, lora.merged(name, torch.zeros(shape), [opened]))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, tensors = small()
    return write(tmp_path_factory.mktemp("base"), tensors, config)


@pytest.fixture(params=[False, True], ids=["in-out", "out-in"])
def transposed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """transformers 5 says of its experts that they are [experts, in, out], and peft then lays out A and B otherwise."""
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts
    monkeypatch.setattr(experts, "is_transposed", not request.param, raising=False)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_is_merged_as_peft_merges_it(base: Path, tmp_path: Path, kind: str) -> None:
    compare_with_peft(base, tmp_path, KINDS[kind])
    assert_factored(base, tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["experts", "gate_up alone", "down alone"])
def test_both_layouts_of_experts_factors_are_read(base: Path, tmp_path: Path, transposed: bool, kind: str) -> None:
    compare_with_peft(base, tmp_path, KINDS[kind])
    assert_factored(base, tmp_path / "adapter")


def test_square_experts_take_the_layout_of_gate_up(tmp_path: Path, transposed: bool) -> None:
    """gpt-oss has hidden and intermediate sizes of 2880: down_proj alone does not tell in from out."""
    config, tensors = small(hidden=64, intermediate=64)
    base = write(tmp_path / "base", tensors, config)
    compare_with_peft(base, tmp_path, EXPERTS)
    alone = with_adapter(base, **KINDS["down alone"])
    alone.save_pretrained(tmp_path / "alone")
    with pytest.raises(AdapterError, match="square"):
        merged_here(base, tmp_path / "none", str(tmp_path / "alone"))


def test_several_adapters_add_up_by_their_weights(base: Path, tmp_path: Path) -> None:
    model = with_adapter(base, **ATTENTION)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"]))
    randomise(model, 5, "second")
    model.save_pretrained(tmp_path)
    got = merged_here(base, tmp_path / "out", f"{tmp_path}:0.5", f"{tmp_path / 'second'}:-2")
    model.add_weighted_adapter(["default", "second"], [0.5, 1.0], "sum", combination_type="cat")
    for module in model.modules():  # peft takes no negative weight
        if isinstance(module, peft.tuners.lora.Linear) and "second" in module.lora_A:
            module.scaling["second"] *= -2
            module.scaling["default"] *= 0.5
            module.merge(adapter_names=["default", "second"])
        elif isinstance(module, peft.tuners.lora.Linear):
            module.scaling["default"] *= 0.5
            module.merge(adapter_names=["default"])
    want = {n: t.to(torch.bfloat16) for n, t in model.unload().state_dict().items()}
    assert_merged(got, want)


def test_base_in_mxfp4_is_expanded_as_transformers_does(tmp_path: Path) -> None:
    config, tensors = small(mxfp4=True)
    base = write(tmp_path / "base", tensors, config)
    model = with_adapter(base, **EXPERTS)
    model.save_pretrained(tmp_path / "adapter")
    want = merged_by_peft(model)
    assert_merged(merged_here(base, tmp_path / "out", str(tmp_path / "adapter")), want)
    packed = merged_here(base, tmp_path / "packed", str(tmp_path / "adapter"), to="mxfp4")
    name = "model.layers.1.mlp.experts.down_proj"
    floats = load_file(tmp_path / "out/model-00003-of-00004.safetensors")[name]
    blocks, scales = compress(floats.transpose(1, 2).contiguous(), published=True)
    assert (packed[f"{name}_scales"] != scales).sum() == 0
    assert torch.equal(packed[f"{name}_blocks"], blocks)


def test_experts_that_no_adapter_touches_keep_their_bytes(tmp_path: Path) -> None:
    config, tensors = small(mxfp4=True)
    base = write(tmp_path / "base", tensors, config)
    with_adapter(base, **ATTENTION).save_pretrained(tmp_path / "adapter")
    got = merged_here(base, tmp_path / "out", str(tmp_path / "adapter"), to="mxfp4")
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor) == ("self_attn" not in name or "bias" in name or "sinks" in name), name


def test_model_saved_without_merging_is_merged(base: Path, tmp_path: Path) -> None:
    settings = {**EXPERTS, "modules_to_save": ["lm_head"]}
    model = with_adapter(base, **settings)
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in/adapter_model.safetensors").unlink()
    whole = {name: t.to(torch.bfloat16).clone() for name, t in model.state_dict().items()}
    save_file(whole, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_bytes((base / "config.json").read_bytes())
    got = merged_here(tmp_path / "in", tmp_path / "out")
    want = merged_by_peft(model)
    for name, tensor in want.items():  # the factors were rounded to bfloat16, too
        assert (got[name].float() - tensor.float()).norm() <= 2e-3 * tensor.float().norm(), name
    (tmp_path / "in/adapter_config.json").unlink()
    with refused("adapter_config.json"):
        merged_here(tmp_path / "in", tmp_path / "none")


def test_adapter_of_split_experts_fits_the_fused_ones(base: Path, tmp_path: Path) -> None:
    """unsloth trains linear layers, one an expert."""
    _, tensors = small()
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_up_projs"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    stem = "base_model.model.model.layers.1.mlp.experts.gate_up_projs.2"
    a, b = torch.randn(2, 96) * 0.1, torch.randn(128, 2) * 0.1
    factors = {f"{stem}.lora_A.default.weight": a, f"{stem}.lora_B.default.weight": b}
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    want = dict(tensors)
    split = foreign.unsloth(tensors)["model.layers.1.mlp.experts.gate_up_projs.2.weight"].float()
    want[name] = tensors[name].clone()
    want[name][2] = (split + 2 * b @ a).t().to(torch.bfloat16)
    assert_merged(merged_here(base, tmp_path / "out", str(tmp_path / "adapter")), want)


def test_adapter_of_tinker_takes_the_experts_factors_apart(base: Path, tmp_path: Path) -> None:
    """Three axes, one factor for all experts, names of its own, and a scaling by r of the config, whatever the rank."""
    _, tensors = small()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    draw = torch.Generator().manual_seed(3)
    stored, want = {}, {name: tensor.float() for name, tensor in tensors.items()}
    layer, experts = "model.layers.1", "model.layers.1.mlp.experts."
    gate_up, down = want[experts + "gate_up_proj"], want[experts + "down_proj"]
    for name, target, of_a, of_b in (
        (f"{layer}.attn.q_proj", want[f"{layer}.self_attn.q_proj.weight"], [4], []),
        ("model.unembed_tokens", want["lm_head.weight"], [4], []),
        (experts + "w1", gate_up[..., 0::2].mT, [1, 2], [4]),
        (experts + "w3", gate_up[..., 1::2].mT, [4, 2], [1]),
        (experts + "w2", down.mT, [4, 2], [4]),
    ):
        a = 0.1 * torch.randn([*of_a, target.shape[-1]], generator=draw)
        b = 0.1 * torch.randn([*of_b, target.shape[-2], of_a[-1]], generator=draw)
        stored |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        target += 2 * b @ a
    save_file(stored, tmp_path / "adapter/adapter_model.safetensors")
    got = merged_here(base, tmp_path / "out", str(tmp_path / "adapter"))
    assert_merged(got, {name: tensor.to(torch.bfloat16) for name, tensor in want.items()})
    assert_factored(base, tmp_path / "adapter")


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "peft_type": lambda c: c.update(peft_type="IA3"),
    "lora_alpha": lambda c: c.pop("lora_alpha"),
    "r": lambda c: c.update(r=5),
    "rank_pattern": lambda c: c.update(rank_pattern={"q_proj": "x"}),
    "alpha_pattern": lambda c: c.update(alpha_pattern={"(q_proj": 3}),
    "init_lora_weights": lambda c: c.update(init_lora_weights="pissa_niter_4"),
    "layer_replication": lambda c: c.update(layer_replication=[[0, 2]]),
    "a_field_of_tomorrow": lambda c: c.update(a_field_of_tomorrow={"x": 1}),
}


@pytest.mark.parametrize("field", WRONG)
def test_adapter_of_another_kind_is_refused_by_its_field(base: Path, tmp_path: Path, field: str) -> None:
    with_adapter(base, **ATTENTION).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    WRONG[field](config)
    file.write_text(json.dumps(config))
    with refused(field, AdapterError):
        merged_here(base, tmp_path / "out", str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "weights", "remedy"),
    [
        ("LORA", "adapters", "mlx_lm"),
        ("PREFIX_TUNING", "adapter_model", "train LoRA"),
        ("IA3", "adapter_model", "with peft"),
    ],
)
def test_remedy_is_none_that_cannot_work(base: Path, tmp_path: Path, kind: str, weights: str, remedy: str) -> None:
    """peft merges no prompts, and mlx-lm's adapter has names of its own."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    save_file({"x": torch.zeros(2)}, tmp_path / f"{weights}.safetensors")
    with pytest.raises(AdapterError, match=remedy):
        merged_here(base, tmp_path / "out", str(tmp_path))


FACTOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
BROKEN: dict[str, Callable[[Tensors], object]] = {
    "another base": lambda t: t.update({f"{FACTOR}A.weight": torch.zeros(4, 97)}),
    "another rank": lambda t: t.update({f"{FACTOR}A.weight": torch.zeros(5, 96)}),
    "half a pair": lambda t: t.pop(f"{FACTOR}B.weight"),
    "bias": lambda t: t.update({f"{FACTOR}B.bias": torch.zeros(512)}),
    "unknown": lambda t: t.update({"base_model.model.model.layers.9.self_attn.q_proj.weight": torch.zeros(2)}),
    "a resized vocabulary": lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(320, 96)}),
    "nothing": lambda t: t.clear(),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_adapter_that_does_not_fit_is_refused(base: Path, tmp_path: Path, fault: str) -> None:
    with_adapter(base, **ATTENTION).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    BROKEN[fault](tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError):
        merged_here(base, tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_tokens_that_training_added_do_not_vanish_without_a_word(base: Path, tmp_path: Path) -> None:
    """In OUT a text would have other tokens than in the training."""
    with_adapter(base, **ATTENTION).save_pretrained(tmp_path / "adapter")
    whole = Path(shutil.copytree(base, tmp_path / "base"))
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.save(str(whole / "tokenizer.json"))
    source = open_source(whole)
    for named in (0, 1):
        tokenizer.save(str(tmp_path / "adapter/tokenizer.json"))
        open_adapters(source, [str(tmp_path / "adapter")])
        assert sum("<tool>" in note for note in source.notes) == len(source.notes) == named
        tokenizer.add_tokens(["<tool>"])


def test_adapters_that_replace_the_same_tensor_are_refused(base: Path, tmp_path: Path) -> None:
    with_adapter(base, **KINDS["modules_to_save"]).save_pretrained(tmp_path / "a")
    with_adapter(base, **KINDS["dora"]).save_pretrained(tmp_path / "b")
    for both in ([str(tmp_path / "a")] * 2, [str(tmp_path / "b"), str(tmp_path / "a")], [f"{tmp_path / 'a'}:0.5"]):
        with refused("--lora", AdapterError):
            merged_here(base, tmp_path / "out", *both)


def missing_alpha(delta: lora.Delta, tensor: torch.Tensor) -> None:
    object.__setattr__(delta, "scaling", 1.0)
    ADD(delta, tensor)


def mixed_experts(delta: lora.Delta, tensor: torch.Tensor) -> None:
    ADD(delta, tensor.flip(0))


ADD = lora.Delta.add_to
MISTAKES = {"no alpha": (missing_alpha, "attention"), "experts in another order": (mixed_experts, "experts")}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_with_peft_sees_a_mistake(base, tmp_path, monkeypatch, mistake) -> None:
    wrong, kind = MISTAKES[mistake]
    monkeypatch.setattr(lora.Delta, "add_to", wrong)
    with pytest.raises(AssertionError):
        compare_with_peft(base, tmp_path, KINDS[kind])


@pytest.mark.parametrize(("text", "weight"), [("DIR", 1.0), ("DIR:-1", -1.0), ("DIR:nan", 1.0), ("a:b", 1.0)])
def test_weight_behind_the_last_colon_is_read(text: str, weight: float) -> None:
    assert lora.parse(text) == (Path(text.removesuffix(f":{text.rpartition(':')[2]}") if weight != 1 else text), weight)

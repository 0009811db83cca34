"""Other weights in a running model: the bits of a model that starts with them, at the addresses of the first."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from npu_gptoss.convert.write import _quantised
from npu_gptoss.dense import Shortlist
from npu_gptoss.files import CheckpointError
from npu_gptoss.model import assembly
from npu_gptoss.model.assembly import FLOATS, FP8, MXFP4
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.sharding import EXPERT, TENSOR, Shard
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.update import WeightUpdate
from npu_gptoss.model.weights import named_tensors
from npu_gptoss.moe import PreparedExperts, prepare_experts, small_ops
from npu_gptoss.moe.triton import layout
from tests.checkpoints import random_config, random_tensors
from tests.refused import refused

BF16 = torch.bfloat16
PACKED, PLAIN = random_config(layers=2, mxfp4=True), random_config(layers=2, mxfp4=False)
LAST = "model.layers.1.mlp.experts.down_proj_scales"

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in the layout of the GPU's kernels too, beside the one of the CPU's."""

    def both(experts: Any, **options: Any) -> PreparedExperts:
        made = prepare_experts(experts, kernel="small_ops", **options)
        return replace(
            made, layouts={each: each(experts, made.swiglu_limit) for each in (small_ops.prepare, layout.prepare)}
        )

    monkeypatch.setattr(assembly, "prepare_experts", both)


def model_of(config: GptOssConfig, tensors: Tensors, form: str, shard: Shard | None = None) -> GptOss:
    ranks = None if shard is None else Ranks(shard)
    copies = ((name, tensor.clone()) for name, tensor in tensors.items())
    return GptOss.from_tensors(config, copies, "cpu", BF16, ranks=ranks, weights=form)


def state(model: GptOss) -> dict[str, torch.Tensor]:
    return dict(named_tensors(model.weights, "weights"))


def shuffled(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    return random.Random(0).sample(list(tensors.items()), len(tensors))


def replaced(model: GptOss, config: GptOssConfig, form: str, tensors: Tensors) -> None:
    """A complete update; the sender overwrites its memory behind each tensor."""
    update = WeightUpdate(model, config, "here")
    for name, tensor in shuffled(tensors):
        assert not update.complete
        sent = tensor.clone()
        update.take(name, sent)
        sent.fill_(1)
    assert update.complete
    update.close()


def same(first: GptOss, second: GptOss) -> bool:
    mine, other = state(first), state(second)
    assert mine.keys() == other.keys()
    return all(mine[name].dtype == other[name].dtype and torch.equal(mine[name], other[name]) for name in mine)


def trained(config: GptOssConfig) -> dict[str, torch.Tensor]:
    """Values that MXFP4 cannot hold, where the layout is BF16."""
    found = random_tensors(config, seed=1)
    return {name: tensor * 1.03 if tensor.is_floating_point() else tensor for name, tensor in found.items()}


SHARDS = [None, Shard(1, 2, TENSOR), Shard(1, 2, EXPERT)]


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.layout if shard else "one")
@pytest.mark.parametrize(
    ("config", "form", "sent"),
    [(PACKED, MXFP4, PACKED), (PACKED, FP8, PACKED), (PLAIN, FLOATS, PLAIN), (PLAIN, FP8, PLAIN)],
    ids=["mxfp4", "mxfp4 to fp8", "bf16", "bf16 to fp8"],
)
def test_an_update_gives_the_bits_of_a_fresh_model(config, form, sent, shard) -> None:
    served, new = model_of(config, random_tensors(config), form, shard), trained(sent)
    before = {name: tensor.data_ptr() for name, tensor in state(served).items()}
    replaced(served, config, form, new)
    assert same(served, model_of(config, new, form, shard))
    assert {name: tensor.data_ptr() for name, tensor in state(served).items()} == before


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.layout if shard else "one")
def test_a_bf16_update_of_packed_experts_equals_the_converted_checkpoint(shard) -> None:
    served, new = model_of(PACKED, random_tensors(PACKED), MXFP4, shard), trained(PLAIN)
    replaced(served, PACKED, MXFP4, new)
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in new.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            expected[f"{name}_blocks"], expected[f"{name}_scales"], change = _quantised(tensor, None)
            assert change.error > 0
        else:
            expected[name] = tensor
    assert same(served, model_of(PACKED, expected, MXFP4, shard))


def test_an_mxfp4_update_of_floats_is_expanded() -> None:
    served, new = model_of(PACKED, random_tensors(PLAIN), FLOATS), random_tensors(PACKED, seed=1)
    replaced(served, PACKED, FLOATS, new)
    assert same(served, model_of(PACKED, random_tensors(PLAIN, seed=1), FLOATS))


def test_an_update_renews_the_shortlist_of_lm_head() -> None:
    served, new = model_of(PLAIN, random_tensors(PLAIN), FLOATS), trained(PLAIN)
    served.shortlist = Shortlist.of(served.lm_head)
    replaced(served, PLAIN, FLOATS, new)
    expected = Shortlist.of(new["lm_head.weight"].to(BF16))
    assert torch.equal(served.shortlist.rows, expected.rows)
    assert torch.equal(served.shortlist.bounds, expected.bounds)


@pytest.mark.parametrize("lost", [LAST, "model.layers.0.self_attn.k_proj.bias", "lm_head.weight"])
def test_an_update_without_one_of_its_tensors_is_refused_by_name(lost: str) -> None:
    new = trained(PACKED)
    update = WeightUpdate(model_of(PACKED, random_tensors(PACKED), MXFP4), PACKED, "here")
    for name, tensor in shuffled(new):
        if name != lost:
            update.take(name, tensor)
    assert not update.complete
    with refused(lost, CheckpointError) as caught:
        update.close()
    assert "mixed" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.norm.weight", torch.full((96,), float("nan"))),
        ("model.norm.weight", torch.ones(95)),
        ("model.norm.weight", torch.ones(96, dtype=torch.float16)),
        ("model.layers.2.self_attn.sinks", torch.ones(8)),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", torch.ones(64, 96)),
    ],
    ids=["NaN", "shape", "dtype", "layer", "name"],
)
def test_a_tensor_that_does_not_fit_leaves_the_weights_unchanged(name: str, tensor: torch.Tensor) -> None:
    served = model_of(PACKED, random_tensors(PACKED), MXFP4)
    with refused(name, CheckpointError) as caught:
        WeightUpdate(served, PACKED, "here").take(name, tensor)
    assert "unchanged" in str(caught.value)
    assert same(served, model_of(PACKED, random_tensors(PACKED), MXFP4))


def test_a_tensor_that_comes_twice_is_refused() -> None:
    update, new = WeightUpdate(model_of(PLAIN, random_tensors(PLAIN), FLOATS), PLAIN, "here"), trained(PLAIN)
    update.take("lm_head.weight", new["lm_head.weight"])
    with refused("lm_head.weight", CheckpointError) as caught:
        update.take("lm_head.weight", new["lm_head.weight"])
    assert "mixed" in str(caught.value)


def test_a_layout_of_another_kernel_is_refused_before_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    made = assembly.prepare_experts
    monkeypatch.setattr(
        assembly, "prepare_experts", lambda *given, **o: replace(made(*given, **o), layouts={0: object()})
    )
    served = model_of(PLAIN, random_tensors(PLAIN), FLOATS)
    name = "model.layers.0.mlp.experts.down_proj"
    with refused("weights", CheckpointError) as caught:
        WeightUpdate(served, PLAIN, "here").take(name, trained(PLAIN)[name])
    assert "unchanged" in str(caught.value)

"""Shares of the weights: together they are the whole, and no bias is added twice."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.model.config import tensor_parallel_objection
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.model.sharding import EXPERT, TENSOR, Shard
from tests.checkpoints import random_config, random_tensors
from tests.model.published import gpt_oss_20b
from tests.refused import refused


def shares(name: str, tensor: torch.Tensor, size: int, experts: str) -> list[torch.Tensor]:
    return [Shard(rank, size, experts).cut(name, tensor) for rank in range(size)]


@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("experts", [TENSOR, EXPERT])
def test_the_shares_of_every_tensor_make_the_whole(experts: str, mxfp4: bool) -> None:
    config = random_config(layers=1, mxfp4=mxfp4)
    cut, shard = set(), Shard(0, 2, experts)
    local = expected_tensors(shard.local(config))
    for name, tensor in random_tensors(config).items():
        parts = shares(name, tensor, 2, experts)
        axis = shard.axis(name)
        first, *others = local[name].shape  # of a model of this size, which has all tokens and experts
        alone = name == "lm_head.weight" or (experts == EXPERT and ".experts." in name)
        assert [part.shape for part in parts] == [(first // 2 if alone else first, *others)] * 2, name
        if shard.only_on_rank_0(name):
            assert torch.equal(parts[0] + parts[1], tensor)
            assert parts[1].abs().max() == 0
        elif axis is None:
            assert torch.equal(parts[0], tensor)
            assert torch.equal(parts[1], tensor)
        else:
            cut.add(name)
            assert torch.equal(torch.cat(parts, axis), tensor)
            assert parts[0].shape[axis] * 2 == tensor.shape[axis]
    once = ["o_proj.bias"] if experts == EXPERT else ["o_proj.bias", "down_proj_bias"]
    for name in expected_tensors(config):  # what is added before ranks are summed
        assert Shard(0, 2, experts).only_on_rank_0(name) == name.endswith(tuple(once)), name
    matrices = {n for n in expected_tensors(config) if "_proj" in n and not n.endswith("bias")}
    assert matrices <= cut  # whatever is large is shared


def test_a_rank_alone_copies_nothing() -> None:
    whole = torch.zeros(64, 96)
    assert Shard(0, 1).cut("lm_head.weight", whole) is whole


@pytest.mark.parametrize("axis", [0, 1])
def test_a_share_does_not_keep_the_whole_in_memory(axis: int) -> None:
    """Of lm_head that would be a gigabyte on every rank: a view of the first rows is contiguous, but owns nothing."""
    name = {0: "lm_head.weight", 1: "model.layers.0.self_attn.o_proj.weight"}[axis]
    for part in shares(name, torch.zeros(64, 96), 4, TENSOR):
        assert part.is_contiguous()
        held = part.untyped_storage().nbytes()
        assert held == part.numel() * part.element_size()


def test_gate_stays_next_to_its_up() -> None:
    """Columns are interleaved; a cut between a pair would swap gate and up in every other rank."""
    pairs = torch.arange(16).view(1, 1, 16)
    for part in shares("model.layers.0.mlp.experts.gate_up_proj", pairs, 4, TENSOR):
        assert part[0, 0, 0] % 2 == 0


def test_each_expert_lives_on_one_rank_at_the_index_of_its_weights() -> None:
    config = random_config(experts=8)
    maps = torch.stack([Shard(rank, 4, EXPERT).expert_map(config, torch.device("cpu")) for rank in range(4)])
    assert ((maps >= 0).sum(0) == 1).all()
    assert (maps >= -1).all()
    assert maps.max(0).values.tolist() == [0, 1] * 4
    cut = shares("model.layers.0.mlp.experts.down_proj_bias", torch.arange(8)[:, None], 4, EXPERT)
    assert [part.flatten().tolist() for part in cut] == [(one >= 0).nonzero().flatten().tolist() for one in maps]
    assert Shard(0, 4, TENSOR).expert_map(config, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("sizes", "size", "experts", "field"),
    [
        ({"kv_heads": 2}, 4, EXPERT, "num_key_value_heads"),
        ({"experts": 6, "kv_heads": 4}, 4, EXPERT, "num_local_experts"),
        ({"intermediate": 96, "mxfp4": True}, 2, TENSOR, "intermediate_size"),
        ({"vocab_size": 511}, 2, TENSOR, "vocab_size"),  # dealing out experts would not help
    ],
)
def test_an_uneven_share_is_refused(sizes: dict[str, int], size: int, experts: str, field: str) -> None:
    with refused(field):
        Shard(0, size, experts).check(random_config(layers=1, **sizes))
    with refused(field):  # and no rank gets a share that is rounded down
        Shard(0, size, experts).local(random_config(layers=1, **sizes))


@pytest.mark.parametrize("size", ["20b", "120b"])
def test_published_mxfp4_experts_are_cut_by_two_and_dealt_out_by_more(size: str) -> None:
    """2880 inputs are 90 groups of 32 with a scale each: 4 and 8 do not divide 90. BF16 has no groups."""
    packed = full_config(size)
    assert packed.quantization == "mxfp4"
    plain = replace(packed, quantization=None)
    for ranks in (1, 2, 4, 8):
        Shard(0, ranks, EXPERT).check(packed)
        Shard(0, ranks, TENSOR).check(plain)
        with nullcontext() if ranks <= 2 else refused("intermediate_size"):
            Shard(0, ranks, TENSOR).check(packed)


def test_a_rank_knows_the_sizes_of_its_share() -> None:
    config = random_config(layers=1)
    for experts, inner in ((TENSOR, config.intermediate_size // 2), (EXPERT, config.intermediate_size)):
        local = Shard(1, 2, experts).local(config)
        assert local.intermediate_size == inner
        assert local.num_attention_heads == config.num_attention_heads // 2
        assert local.num_key_value_heads == config.num_key_value_heads // 2
        assert (local.num_local_experts, local.vocab_size) == (config.num_local_experts, config.vocab_size)


def test_layouts_are_named_as_records_have_them() -> None:
    """One rank deals nothing out: its two layouts are one, and must not be compared as if they were two."""
    assert [Shard(0, size, TENSOR).layout for size in (1, 2)] == ["tp1", "tp2"]
    assert [Shard(0, size, EXPERT).layout for size in (1, 2)] == ["tp1", "ep2"]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    for rank in (-1, 2):
        with refused("rank"):
            Shard(rank, 2)
    with refused("experts"):
        Shard(0, 2, "pipeline")


@pytest.mark.parametrize(
    ("ranks", "uneven"),
    [
        (1, []),
        (8, []),
        (16, []),  # each pair of ranks has a copy of one key/value head
        (64, []),
        (3, ["query heads 64", "key/value heads 8"]),  # 2880 can be cut in three
        (12, ["query heads 64", "key/value heads 8"]),
        (128, ["query heads 64", "intermediate size 2880"]),
    ],
)
def test_refusal_names_the_sizes_that_ranks_cannot_share(ranks: int, uneven: list[str]) -> None:
    objection = tensor_parallel_objection(gpt_oss_20b(), ranks)
    if not uneven:
        assert objection is None
    else:
        assert objection is not None
        assert objection.asked == f"--tensor-parallel-size {ranks}"
        assert f" {' and '.join(uneven)} of" in objection.why

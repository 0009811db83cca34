"""The plain transformer against transformers' GptOssForCausalLM, and proof that the comparison notices mistakes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.dense import small_ops
from npu_gptoss.kernels import platform_override
from npu_gptoss.model.assembly import WEIGHTS, expert_format
from npu_gptoss.model.checkpoint import iterate_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import expected_tensors, split_layer
from npu_gptoss.model.transformer import GptOss
from tests.checkpoints import new_checkpoint, random_config, write_random_checkpoint
from tests.oracle import load_oracle, oracle_logits, random_prompts
from tests.refused import refused

TOLERANCE = 1e-4  # absolute, on logits of standard deviation 2
CAUGHT = 10 * TOLERANCE  # what a mistake must exceed, so that it is caught with room to spare

Tensors = dict[str, torch.Tensor]
SUFFIXES = sorted({split_layer(name)[1] for name in expected_tensors(random_config())})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def config(directory: Path) -> GptOssConfig:
    return GptOssConfig.from_directory(directory)


@pytest.fixture(scope="module")
def tensors(directory: Path, config: GptOssConfig) -> Tensors:
    return dict(iterate_tensors(directory, config, dtype=torch.float32, progress=False))


@pytest.fixture(scope="module")
def prompt(config: GptOssConfig) -> list[int]:
    return random_prompts([300], config.vocab_size)[0]


@pytest.fixture(scope="module")
def expected(directory: Path, prompt: list[int]) -> torch.Tensor:
    return oracle_logits(load_oracle(directory), prompt)


def build(config: GptOssConfig, tensors: Tensors) -> GptOss:
    return GptOss.from_tensors(config, tensors.items(), "cpu", torch.float32)


def prompt_logits(model: GptOss, token_ids: list[int], padding: list[int] = (), block_size: int = 16) -> torch.Tensor:
    """One request in one step; `padding` are token ids of rows behind the real ones. Returns all rows."""
    config, tokens = model.config, len(token_ids)
    blocks = -(-tokens // block_size)
    shape = (blocks, block_size, config.num_key_value_heads, config.head_dim)
    caches = [(torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype)) for _ in model.layers]
    metadata = AttentionMetadata(
        query_start_loc=(0, tokens),
        seq_lens=(tokens,),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(tokens),
    )
    ids = torch.tensor([*token_ids, *padding])
    positions = torch.cat([torch.arange(tokens), torch.zeros(len(padding), dtype=torch.int64)])
    return model.logits(model.forward(ids, positions, caches, metadata))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    return float((got - want).abs().max())


def test_logits_equal_transformers_in_fp32(config, tensors, prompt, expected) -> None:
    assert expected.std() > 1  # the tolerance is absolute, so the logits must not be tiny
    assert error(prompt_logits(build(config, tensors), prompt), expected) < TOLERANCE


@pytest.mark.parametrize("sizes", [{"heads": 4, "kv_heads": 4, "head_dim": 32}, {"experts": 4, "experts_per_token": 1}])
def test_other_head_and_expert_counts_equal_transformers(tmp_path: Path, sizes: dict[str, int]) -> None:
    config = write_random_checkpoint(tmp_path, seed=5, layers=2, window=20, truncate=True, **sizes)
    prompt = random_prompts([70], config.vocab_size)[0]
    model = GptOss.load(tmp_path, dtype=torch.float32, progress=False)
    assert error(prompt_logits(model, prompt), oracle_logits(load_oracle(tmp_path), prompt)) < TOLERANCE


# Mistakes, made in the weights or in the configuration: (name, change of one tensor, names it applies to)


TENSOR_MISTAKES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sink dropped": ("self_attn.sinks", lambda sinks: torch.full_like(sinks, -1e30)),
    "sink counted twice": ("self_attn.sinks", lambda sinks: sinks + torch.log(torch.tensor(2.0))),
    "sink of head 0 for all heads": ("self_attn.sinks", lambda sinks: sinks[:1].expand_as(sinks).clone()),
    "gate and up swapped": ("mlp.experts.gate_up_proj", lambda w: w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    "gate and up halved instead of interleaved": (
        "mlp.experts.gate_up_proj",
        lambda w: torch.cat([w[..., ::2], w[..., 1::2]], dim=-1),
    ),
    **{
        f"{bias} {word}": (bias, lambda tensor, factor=factor: tensor * factor)
        for bias in (name for name in SUFFIXES if name.endswith("bias"))
        for word, factor in (("dropped", 0.0), ("added twice", 2.0))
    },
    # each tensor reaches the logits
    **{f"{suffix} reversed": (suffix, lambda tensor: tensor.flip(0)) for suffix in SUFFIXES},
}


@pytest.mark.parametrize("mistake", TENSOR_MISTAKES)
def test_parity_notices_mistaken_weights(mistake, config, tensors, prompt, expected) -> None:
    suffix, change = TENSOR_MISTAKES[mistake]
    changed = {n: change(t) if n.endswith(suffix) else t for n, t in tensors.items()}
    assert error(prompt_logits(build(config, changed), prompt), expected) > CAUGHT


CONFIG_MISTAKES: dict[str, Callable[[GptOssConfig], GptOssConfig]] = {
    "window 127": lambda c: replace(c, sliding_window=127),
    "window 129": lambda c: replace(c, sliding_window=129),
    "no window": lambda c: replace(c, layer_types=("full_attention",) * c.num_hidden_layers),
    "window on the odd layers": lambda c: replace(c, layer_types=c.layer_types[::-1]),
    "YaRN truncated": lambda c: replace(c, rope_scaling=replace(c.rope_scaling, truncate=True)),
    "swiglu limit 1": lambda c: replace(c, swiglu_limit=1.0),
    "one expert fewer": lambda c: replace(c, num_experts_per_tok=c.num_experts_per_tok - 1),
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_parity_notices_mistaken_configuration(mistake, config, tensors, prompt, expected) -> None:
    model = build(CONFIG_MISTAKES[mistake](config), tensors)
    assert error(prompt_logits(model, prompt), expected) > CAUGHT


def test_parity_notices_router_weights_that_are_not_renormalised(monkeypatch, config, tensors, prompt, expected):
    def softmax_first(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = router_logits.float().softmax(-1).topk(top_k, dim=-1)
        return weights, ids

    monkeypatch.setattr(small_ops, "route", softmax_first)
    assert error(prompt_logits(build(config, tensors), prompt), expected) > CAUGHT


def test_padded_rows_holding_nan_leave_the_real_rows_alone(config, tensors, prompt) -> None:
    poisoned_id = next(i for i in range(config.vocab_size) if i not in prompt)
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[poisoned_id] = float("nan")
    model = build(config, {**tensors, "model.embed_tokens.weight": embedding})
    logits = prompt_logits(model, prompt, padding=[poisoned_id] * 5)
    assert logits[len(prompt) :].isnan().all()  # the padding did hold NaN all the way
    clean = prompt_logits(build(config, tensors), prompt)
    assert error(logits[: len(prompt)], clean) < TOLERANCE


# Loading


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.2.self_attn.sinks", "model.layers.0.mlp.router.bias"]
)
def test_a_parameter_that_nothing_filled_is_an_error(name: str, config: GptOssConfig, tensors: Tensors) -> None:
    with refused(name):
        build(config, {n: t for n, t in tensors.items() if n != name})


def test_a_stream_in_another_dtype_is_converted(config: GptOssConfig, tensors: Tensors) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    got = build(config, rounded)
    attention, moe = got.layers[1].attention, got.layers[1].moe
    for tensor in (got.embedding, got.lm_head, attention.qkv_weight, attention.sinks, moe.router_bias):
        assert tensor.dtype == torch.float32
    assert torch.equal(got.embedding, rounded["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_a_parameter_filled_twice_is_an_error(name: str, config: GptOssConfig, tensors: Tensors) -> None:
    stream = [*tensors.items(), (name, tensors[name])]
    with refused(name):
        GptOss.from_tensors(config, stream, "cpu", torch.float32)


@pytest.mark.parametrize(
    "name",
    ["model.layers.4.self_attn.sinks", "model.layers.0.self_attn.q_norm.weight", "model.layers.x.sinks", "other"],
)
def test_a_tensor_that_nothing_reads_is_an_error(name: str, config: GptOssConfig, tensors: Tensors) -> None:
    with refused(name):
        build(config, {**tensors, name: torch.zeros(1)})


def test_loading_holds_the_tensors_of_one_layer_only(config: GptOssConfig, tensors: Tensors) -> None:
    """Tensors that a layer does not keep (here the projections, which are fused) must be freed before the next
    layer."""
    alive: dict[int, weakref.ref[torch.Tensor]] = {}
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in tensors:
            tensor = tensors[name].clone()
            if name.endswith("q_proj.weight"):
                alive[len(alive)] = weakref.ref(tensor)
                most = max(most, sum(reference() is not None for reference in alive.values()))
            yield name, tensor
            del tensor

    GptOss.from_tensors(config, stream(), "cpu", torch.float32)
    assert len(alive) == config.num_hidden_layers
    assert most == 1


def test_memory_ends_with_the_sinks(config: GptOssConfig, tensors: Tensors) -> None:
    """CANN 8.5 to 9.0.1 reads up to 16 of them from each eighth one on (`padding.with_slack`)."""
    for layer in build(config, tensors).layers:
        sinks = layer.attention.sinks
        assert sinks.untyped_storage().nbytes() >= (len(sinks) + 8) * sinks.element_size()


def test_layers_that_arrive_interleaved_are_put_together(config, tensors, prompt) -> None:
    backwards = dict(sorted(tensors.items(), key=lambda item: item[0][::-1]))
    assert list(backwards) != list(tensors)
    got = prompt_logits(build(config, backwards), prompt)
    assert torch.equal(got, prompt_logits(build(config, tensors), prompt))


# Formats of the experts


@pytest.fixture(scope="module")
def mxfp4_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, mxfp4=True, layers=2)


@pytest.fixture(scope="module")
def mxfp4_config(mxfp4_directory: Path) -> GptOssConfig:
    return GptOssConfig.from_directory(mxfp4_directory)


def test_weights_have_the_requested_format(mxfp4_directory: Path, prompt: list[int]) -> None:
    by_format = {
        weights: prompt_logits(
            GptOss.load(mxfp4_directory, dtype=torch.float32, progress=False, weights=weights), prompt[:50]
        )
        for weights in WEIGHTS
    }
    assert torch.equal(by_format["auto"], by_format["bf16"])
    assert torch.equal(by_format["mxfp4"], by_format["bf16"])
    assert 1e-3 < error(by_format["fp8"], by_format["bf16"]) < 1  # three bits of mantissa


def test_formats_that_cannot_be_are_refused_in_words(mxfp4_config: GptOssConfig) -> None:
    with refused("weights"):
        expert_format(mxfp4_config, "int4", torch.bfloat16)
    with refused("weights"):
        expert_format(replace(mxfp4_config, quantization=None), "mxfp4", torch.bfloat16)


def test_auto_keeps_mxfp4_where_a_kernel_computes_with_it(mxfp4_config: GptOssConfig) -> None:
    with platform_override("cuda", frozenset({"triton"})):
        assert expert_format(mxfp4_config, "auto", torch.bfloat16) == "mxfp4"
        assert expert_format(replace(mxfp4_config, quantization=None), "auto", torch.bfloat16) == "bf16"
    for kind in ("cpu", "ascend"):
        with platform_override(kind):
            assert expert_format(mxfp4_config, "auto", torch.bfloat16) == "bf16"


@pytest.mark.parametrize("half", ["blocks", "scales"])
def test_half_of_a_packed_matrix_is_not_enough(mxfp4_directory: Path, mxfp4_config: GptOssConfig, half: str) -> None:
    name = f"model.layers.1.mlp.experts.down_proj_{half}"
    packed = dict(iterate_tensors(mxfp4_directory, mxfp4_config, dtype=torch.float32, progress=False))
    del packed[name]
    with refused(name):
        build(mxfp4_config, packed)

"""The model as vLLM builds it, without an engine: the inputs of each layer, its load, its parts on ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from transformers import GptOssConfig as PretrainedGptOssConfig
from vllm import LLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
    set_default_torch_dtype,
)
from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights, safetensors_weights_iterator
from vllm.utils import get_distributed_init_method, get_open_port

from npu_gptoss.attention.padding import SINK_SLACK
from npu_gptoss.model import checkpoint
from npu_gptoss.model.checkpoint import CheckpointError, expand_stream
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import rotation_cache
from npu_gptoss.moe import ExpertWeights, Mxfp4Experts
from npu_gptoss.moe.activation import swigluoai
from npu_gptoss.moe.mxfp4 import GROUP, expand_transposed
from npu_gptoss.serving import compat, loading
from npu_gptoss.serving import model as serving_model
from npu_gptoss.serving.model import FusedMoE, GptOssForCausalLM
from npu_gptoss.serving.moe import GptOssExpertsMethod
from tests.checkpoints import new_checkpoint, random_config, random_tensors, write_random_checkpoint
from tests.oracle import load_oracle, oracle_logits, random_prompts
from tests.refused import refused
from tests.serving.asking import TOLERANCE, VOCABULARY, next_logits, worst
from tests.tolerances import assert_close

pytestmark = pytest.mark.serving

LAYERS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, layers=LAYERS, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def config(directory: Path) -> GptOssConfig:
    return GptOssConfig.from_directory(directory)


@pytest.fixture(scope="module")
def tensors(config: GptOssConfig) -> dict[str, torch.Tensor]:
    return random_tensors(config)


@pytest.fixture(scope="module")
def vllm_config(directory: Path) -> Iterator[VllmConfig]:
    """vLLM's whole configuration in fp32, and the process groups of a single rank."""
    arguments = EngineArgs(model=str(directory), skip_tokenizer_init=True, max_model_len=512, dtype="float32")
    created = arguments.create_engine_config()
    with set_current_vllm_config(created):
        if not model_parallel_is_initialized():  # an engine of another test file may have done it
            method = get_distributed_init_method("127.0.0.1", get_open_port())
            init_distributed_environment(1, 0, method, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
    return created


def build(vllm_config: VllmConfig, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    """A new model, not loaded."""
    vllm_config.compilation_config.static_forward_context.clear()  # of the layers of an earlier one
    vllm_config.model_config.dtype = dtype
    with set_default_torch_dtype(dtype):
        built = initialize_model(vllm_config)
    vllm_config.model_config.dtype = torch.float32
    return built


@pytest.fixture
def model(vllm_config: VllmConfig) -> GptOssForCausalLM:
    return build(vllm_config)


def finish(model: GptOssForCausalLM, vllm_config: VllmConfig) -> None:
    process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))


# What is handed to which layer


def test_the_model_is_ours_and_every_layer_has_its_own_window_and_sinks(model, config):
    assert type(model) is GptOssForCausalLM
    windows = []
    for layer in model.model.layers:
        implementation = layer.self_attn.attn.impl
        windows.append(implementation.window)
        assert implementation.sinks is layer.self_attn.sinks
        behind = implementation.sinks.untyped_storage().nbytes() // implementation.sinks.element_size()
        assert behind - len(implementation.sinks) == SINK_SLACK, "CANN up to 9.0.1 reads past their end"
        assert layer.self_attn.attn.sliding_window is None  # or vLLM would open a second group of KV caches
    assert windows == [128, None, 128]
    assert windows == [config.window(i) for i in range(LAYERS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_is_vllms_object_with_our_cache_in_the_models_dtype(dtype, vllm_config, config):
    """On Ascend a kernel hangs on the name of the class, and a cache in another dtype breaks graph mode."""
    rotary = build(vllm_config, dtype).model.layers[0].self_attn.rotary_emb
    assert type(rotary) is YaRNScalingRotaryEmbedding
    assert rotary.cos_sin_cache.dtype == dtype
    assert rotary.cos_sin_cache.shape[0] == config.max_position_embeddings
    assert torch.equal(rotary.cos_sin_cache[:5000], rotation_cache(config, 5000, dtype))


def test_two_models_in_one_process_do_not_share_the_cache_of_another_yarn(vllm_config, config, monkeypatch):
    """vLLM keeps rope objects by arguments, among which `truncate` is not."""
    build(vllm_config)
    rounded = replace(config, rope_scaling=replace(config.rope_scaling, truncate=True))
    monkeypatch.setitem(vllm_config.model_config.hf_config.rope_scaling, "truncate", True)
    got = build(vllm_config).model.layers[0].self_attn.rotary_emb.cos_sin_cache[:3000]
    assert torch.equal(got, rotation_cache(rounded, 3000, torch.float32))
    assert not torch.equal(got, rotation_cache(config, 3000, torch.float32))
    monkeypatch.undo()
    build(vllm_config)


def test_a_model_of_one_window_layer_keeps_all_keys_and_the_window(tmp_path: Path, start_engine: Any) -> None:
    """vLLM takes the window of such a model for one of the whole model, and would free the keys behind it."""
    write_random_checkpoint(tmp_path, layers=1, vocab_size=VOCABULARY)
    engine: LLM = start_engine(tmp_path, logprobs_mode="raw_logits")
    (prompt,) = random_prompts((300,), VOCABULARY)
    assert worst(next_logits(engine, [prompt]), [oracle_logits(load_oracle(tmp_path), prompt)[-1]]) < TOLERANCE


# Loading


def without(tensors: dict[str, torch.Tensor], name: str) -> list[tuple[str, torch.Tensor]]:
    return [(key, tensor) for key, tensor in tensors.items() if key != name]


DAMAGED = [
    "model.layers.1.self_attn.sinks",
    "model.layers.0.self_attn.k_proj.bias",
    "model.layers.2.mlp.experts.down_proj_bias",
    "model.layers.2.mlp.router.bias",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_missing_double_or_misshapen_tensor_is_named(name, model, tensors, directory):
    with refused(name, CheckpointError):
        model.load_weights(without(tensors, name))
    with refused(name, CheckpointError):
        model.load_weights([*tensors.items(), (name, tensors[name])])
    with refused(name, CheckpointError):
        model.load_weights({**tensors, name: tensors[name][:-1]}.items())


def test_a_file_that_is_cut_off_is_named(model, tmp_path, monkeypatch):
    write_random_checkpoint(tmp_path, layers=LAYERS, vocab_size=VOCABULARY)
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1000)
    monkeypatch.setattr(model, "checkpoint", str(tmp_path))
    with refused("model.safetensors", CheckpointError):
        model.load_weights(safetensors_weights_iterator([str(file)], use_tqdm_on_load=False))


@pytest.mark.parametrize("part", ["self_attn.sinks", "mlp.experts.down_proj_bias", "mlp.experts.gate_up_proj_bias"])
def test_a_model_that_was_not_loaded_does_not_run(part, model, vllm_config, tensors):
    """vLLM's dummy loader, or a later loader of ours, must not forget these; until then they hold NaN."""
    name = f"model.layers.1.{part}"
    assert model.get_parameter(name).isnan().all()
    model.load_weights(tensors.items())
    model.get_parameter(name).data.flatten()[3] = float("nan")
    with refused(name):
        finish(model, vllm_config)


def test_packed_experts_that_vllms_dummy_loader_fills_are_numbers(vllm_config, monkeypatch):
    """It fills floats alone, and a scale of used memory may be NaN: "damaged, download it again"."""

    def held(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(255) if made.dtype == torch.uint8 else made

    empty = torch.empty
    monkeypatch.setattr(serving_model, "kept_packed", lambda *_: True)
    config = random_config(layers=1, mxfp4=True).to_dict()
    monkeypatch.setattr(vllm_config.model_config, "hf_config", PretrainedGptOssConfig(**config))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", held)
        ready = build(vllm_config)
    initialize_dummy_weights(ready)
    finish(ready, vllm_config)
    (layer,) = ready.model.layers
    made = layer.mlp.experts.prepared_experts.weights
    assert 0 < made.gate_up_proj.abs().max() < 1e-2
    assert 0 < made.down_proj.abs().max() < 1e-2


def test_a_parameter_that_no_official_tensor_fills_is_named(model, tensors):
    model.model.norm.register_parameter("offset", torch.nn.Parameter(torch.zeros(96)))
    with pytest.raises(RuntimeError, match=r"no tensor of gpt-oss fills model\.norm\.offset"):
        model.load_weights(tensors.items())


def test_no_model_is_built_without_the_essential_patches(vllm_config, monkeypatch):
    def left_out() -> None:
        raise compat.PatchError("model-wide-window is left out")

    monkeypatch.setattr(compat, "require_essential", left_out)
    with pytest.raises(compat.PatchError, match="model-wide-window"):
        build(vllm_config)


def test_loading_a_second_time_is_refused_and_not_half_done(loaded, tensors):
    """vLLM can be asked to reload weights; the experts are the kernel's by then."""
    with refused("weights"):
        loaded.load_weights(tensors.items())


# The experts


@pytest.fixture(scope="module")
def loaded(vllm_config: VllmConfig, tensors: dict[str, torch.Tensor]) -> GptOssForCausalLM:
    ready = build(vllm_config)
    ready.load_weights(tensors.items())
    finish(ready, vllm_config)
    return ready


def test_the_clamp_of_the_checkpoints_config_reaches_the_experts(vllm_config, tensors, monkeypatch):
    monkeypatch.setattr(vllm_config.model_config.hf_config, "swiglu_limit", 5.5)
    ready = build(vllm_config)
    ready.load_weights(tensors.items())
    finish(ready, vllm_config)
    assert {layer.mlp.experts.prepared_experts.swiglu_limit for layer in ready.model.layers} == {5.5}


@pytest.mark.parametrize(
    "change",
    [{"has_bias": False}, {"renormalize": False}, {"apply_router_weight_on_input": True}, {"routed_scaling_factor": 2}],
    ids=str,
)
def test_setting_of_the_layer_that_kernels_would_drop_is_refused(change, vllm_config, monkeypatch):
    monkeypatch.setattr(serving_model, "FusedMoE", lambda **given: FusedMoE(**given | change))
    with refused(*change):
        build(vllm_config)


def test_the_experts_are_kept_once(loaded: GptOssForCausalLM) -> None:
    """120 billion parameters do not fit twice: the kernel owns them, the layer has let them go."""
    assert not [name for name, _ in loaded.named_parameters() if ".experts." in name]
    assert not [name for name, _ in loaded.named_buffers() if ".experts." in name]


def test_option_of_a_step_that_nothing_reads_is_refused(loaded):
    experts = loaded.model.layers[0].mlp.experts
    with refused("shared_expert_gate"):
        experts.quant_method.apply(experts, torch.zeros(2, 96), torch.zeros(2, 8), 4, shared_expert_gate=1)


def test_another_activation_is_refused_when_it_is_prepared(model, vllm_config, tensors):
    model.load_weights(tensors.items())
    model.model.layers[2].mlp.experts.quant_method.activation = "silu"
    with refused("activation"):
        finish(model, vllm_config)


# Ranks (one process stands for each rank in turn; several processes are another test's business)


EXPERTS = "model.layers.0.mlp.experts."


def shard(tensors: dict[str, torch.Tensor], experts: SimpleNamespace) -> ExpertWeights:
    """Layer 0's experts as the loader cuts, expands and places them for one rank."""
    return ExpertWeights(**placed(tensors, experts, packed=False), expert_map=experts.expert_map)


def placed(tensors: dict[str, torch.Tensor], experts: SimpleNamespace, packed: bool) -> dict[str, torch.Tensor]:
    """The parameters that a rank's layer creates, filled by the loader."""
    layer = torch.nn.Module()
    layer.tp_rank = experts.tp_rank
    method, width = SimpleNamespace(packed=packed), experts.intermediate_size_per_partition
    GptOssExpertsMethod.create_weights(method, layer, experts.num_experts, 96, width, torch.float32)
    parameters = {EXPERTS + name: parameter for name, parameter in layer.named_parameters()}
    for parameter in parameters.values():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else 255)  # a scale of 255 is NaN
    placements = {name: loading._experts(name, parameter, experts) for name, parameter in parameters.items()}
    of_layer = ((name, tensor) for name, tensor in tensors.items() if name.startswith(EXPERTS))
    for name, tensor in expand_stream(loading._cut(of_layer, placements), torch.float32, placements):
        placements[name].place(tensor if tensor.dtype == torch.uint8 else tensor.float())
    return {name.removeprefix(EXPERTS): parameter.data for name, parameter in parameters.items()}


def rank(
    tp_rank: int = 0, tp_size: int = 1, expert_map: torch.Tensor | None = None, intermediate: int = 64
) -> SimpleNamespace:
    """The attributes of vLLM's layer that the loader reads."""
    return SimpleNamespace(
        tp_rank=tp_rank,
        tp_size=tp_size,
        intermediate_size_per_partition=intermediate // tp_size,
        expert_map=expert_map,
        num_experts=8 if expert_map is None else int((expert_map >= 0).sum()),
    )


def owned(*experts: int) -> torch.Tensor:
    """vLLM's expert map of a rank that owns these experts, in this order."""
    table = torch.full((8,), -1)
    table[list(experts)] = torch.arange(len(experts))
    return table


# Of 192 columns: shares that begin and end on the border of a group of 32, and within one, as 2880 / 4 and / 8 do
SHARES = [rank(i, size, intermediate=192) for size in (1, 2, 4, 8) for i in range(size)]
SHARES += [rank(expert_map=owned(*own), intermediate=192) for own in ((5, 0, 3), (1, 2, 3, 4), (0, 2, 4, 6), (6, 7))]


@pytest.fixture(scope="module")
def packed() -> dict[str, torch.Tensor]:
    return random_tensors(random_config(layers=1, intermediate=192, mxfp4=True))


def test_a_share_cut_before_the_expansion_has_the_bits_of_one_after(packed) -> None:
    whole = {name: tensor.float() for name, tensor in expand_stream(packed.items(), torch.float32)}
    for experts in SHARES:
        width = experts.intermediate_size_per_partition
        columns = slice(experts.tp_rank * width, (experts.tp_rank + 1) * width)
        pairs = slice(2 * columns.start, 2 * columns.stop)
        owned: Any = slice(None)
        if experts.expert_map is not None:
            owned = [int((experts.expert_map == local).nonzero()) for local in range(experts.num_experts)]
        wanted = ExpertWeights(
            gate_up_proj=whole[EXPERTS + "gate_up_proj"][owned][..., pairs],
            gate_up_proj_bias=whole[EXPERTS + "gate_up_proj_bias"][owned][..., pairs],
            down_proj=whole[EXPERTS + "down_proj"][owned][:, columns],
            down_proj_bias=whole[EXPERTS + "down_proj_bias"][owned] * (experts.tp_rank == 0),
        )
        got = shard(packed, experts)
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), f"{name} of rank {experts.tp_rank}"


def expanded_bytes(packed: dict[str, torch.Tensor], experts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the float32 tensors that a rank makes of MXFP4."""
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint, "expand_transposed", lambda *halves: made.append(expand_transposed(*halves)) or made[-1]
        )
        shard(packed, experts)
    return sum(tensor.nbytes for tensor in made)


def test_a_rank_expands_its_own_share_and_not_the_whole(packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks would otherwise expand the 229 GB of 120b four times over."""
    whole = expanded_bytes(packed, rank(intermediate=192), monkeypatch)
    for experts in SHARES:
        share = 1 / experts.tp_size if experts.expert_map is None else experts.num_experts / 8
        around = (
            62 / (3 * 192) if experts.tp_size > 2 else 0
        )  # a third of the bytes is down_proj, cut around its groups
        assert expanded_bytes(packed, experts, monkeypatch) <= (share + around) * whole


# Of 96 columns, 3 groups of 32: 48, 24 and 12 a rank, of which some begin and some end within a group
CUTS = {size: [rank(i, size, intermediate=96) for i in range(size)] for size in (1, 2, 4, 8)}


@pytest.fixture(scope="module")
def three_groups() -> dict[str, torch.Tensor]:
    return random_tensors(random_config(layers=1, intermediate=96, mxfp4=True))


def kept_packed(tensors: dict[str, torch.Tensor], experts: SimpleNamespace) -> Mxfp4Experts:
    return Mxfp4Experts(**placed(tensors, experts, packed=True), expert_map=experts.expert_map)


@pytest.mark.parametrize("size", CUTS)
def test_ranks_that_keep_whole_groups_packed_count_each_column_once(size: int, three_groups) -> None:
    """A rank's own columns to the bit, and of the others that its groups hold no gate, no up and no bias."""
    whole = kept_packed(three_groups, rank(intermediate=96)).expand(torch.float32)
    owners = torch.zeros(96, dtype=torch.int64)
    for experts in CUTS[size]:
        kept, width = kept_packed(three_groups, experts), experts.intermediate_size_per_partition
        got = kept.expand(torch.float32)
        first = experts.tp_rank * width // GROUP * GROUP
        columns = torch.arange(first, first + kept.intermediate_size)
        own = columns // width == experts.tp_rank
        assert kept.intermediate_size - width < 2 * GROUP
        assert torch.equal(got.down_proj, whole.down_proj[:, columns])
        for name in ("gate_up_proj", "gate_up_proj_bias"):
            wanted = getattr(whole, name).unflatten(-1, (96, 2))[..., columns, :] * own[:, None]
            assert torch.equal(getattr(got, name), wanted.flatten(-2)), name
        assert torch.equal(got.down_proj_bias, whole.down_proj_bias * (experts.tp_rank == 0))
        middle = swigluoai(torch.randn(50, 96) @ got.gate_up_proj + got.gate_up_proj_bias[:, None])
        counted = middle.abs().amax((0, 1)) > 0
        assert torch.equal(counted, own)
        owners[columns[counted]] += 1
    assert owners.tolist() == [1] * 96


@pytest.mark.parametrize(("ranks", "refusal"), [(8, nullcontext()), (3, refused("--tensor-parallel-size"))])
def test_ranks_that_do_not_divide_the_model_are_refused(ranks, refusal, config, monkeypatch):
    """Which do, tests/model/test_sharding.py asks."""
    monkeypatch.setattr(serving_model, "get_tensor_model_parallel_world_size", lambda: ranks)
    with refusal:
        serving_model._check_sharding(config)


# The compiler


def test_the_layers_are_one_graph_for_every_number_of_tokens(model, vllm_config, tensors, monkeypatch):
    """Dynamo must trace the unit of compilation without a break, once for all sizes: piecewise graphs rest on it."""
    model.load_weights(tensors.items())
    finish(model, vllm_config)
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    # on a CPU our configuration has turned dynamo off for the whole process (serving/releases/cpu_0_11.py)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    compiled = torch.compile(model.model.forward, backend=collect, fullgraph=True)
    with torch.inference_mode(), set_forward_context(None, vllm_config):
        for tokens in (5, 9, 17):
            ids, positions = torch.arange(tokens), torch.arange(tokens)
            torch._dynamo.mark_dynamic(ids, 0)
            torch._dynamo.mark_dynamic(positions, 0)
            assert_close(compiled(ids, positions), model.model.forward(ids, positions), scale=4)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("vllm.unified_attention_with_output") == LAYERS  # vLLM splits the graph here
    assert called.count("vllm.moe_forward") == LAYERS

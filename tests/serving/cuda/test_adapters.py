"""Adapters in vLLM 0.33's own managers and our model, against models with the merged weights; no GPU is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Having

import pytest
import torch

from tests.refused import refused

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")

from safetensors.torch import load_file, save_file
from vllm.config.lora import LoRAConfig
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.convert.lora import merged, open_adapter
from npu_gptoss.model import adapters as module
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.serving import limits
from npu_gptoss.serving.cuda import ranks
from tests.checkpoints import random_config, random_tensors
from tests.moe.cases import adapted
from tests.serving.cuda import test_model
from tests.serving.cuda.lora import write_adapter
from tests.serving.cuda.test_model import Server
from tests.triton import TRITON_HERE

pytestmark = TRITON_HERE  # on a GPU: test_lora.py

RANK, SLOTS = 8, 2
BASE, ONE, TWO, THREE = range(4)
ROUTER = "model.layers.1.mlp.router"


class Runner(LoRAModelRunnerMixin):
    """vLLM's runner, as far as it knows of adapters."""

    def __init__(self, server: Server, config: Having) -> None:
        self.lora_config, self.server = config.lora_config, server
        self.load_lora_model(server.model, config, torch.device("cpu"))

    def get_model(self) -> torch.nn.Module:
        return self.server.model

    def step(self, rows: Sequence[int], requests: Sequence[LoRARequest | None]) -> None:
        """One step of as many requests, each with its adapter, compared with the merged models."""
        ids = [0 if one is None else one.lora_int_id for one in requests]
        tokens = [each for each, count in zip(ids, rows, strict=True) for _ in range(count)]
        self._set_active_loras(tuple(ids), tuple(tokens), set(filter(None, requests)))
        self.server.plain.chosen = ids
        self.server.step(rows, prefilling=[count > 1 for count in rows])


@dataclasses.dataclass
class Merged:
    """Each request by the model into which its adapter is merged."""

    models: Sequence[GptOss]
    chosen: Sequence[int] = ()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.models[BASE].head(hidden)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, caches: object, step: AttentionMetadata):
        results = []
        for request, which in enumerate(self.chosen):
            rows = slice(*step.query_start_loc[request : request + 2])
            table, slots = step.block_table[request : request + 1], step.slot_mapping[rows]
            own = AttentionMetadata((0, rows.stop - rows.start), (step.seq_lens[request],), table, slots)
            results.append(self.models[which].forward(ids[rows], positions[rows], caches, own))
        return torch.cat(results)


@pytest.fixture(scope="module")
def config() -> GptOssConfig:
    return random_config(layers=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, config: GptOssConfig) -> list[Path]:
    """None for the base, three adapters."""
    root = tmp_path_factory.mktemp("adapters")
    made = [write_adapter(root / str(seed), config, seed=seed, split=seed == TWO) for seed in (ONE, TWO, THREE)]
    return [root / "none", *made]


@pytest.fixture(scope="module")
def models(config: GptOssConfig, folders: list[Path]) -> list[GptOss]:
    specs, made = expected_tensors(config), []
    for folder in folders:
        read = [open_adapter(folder, 1.0, config, specs)] if folder.exists() else []
        tensors = ((name, merged(name, tensor.float(), read)) for name, tensor in random_tensors(config).items())
        made.append(GptOss.from_tensors(config, tensors, "cpu", torch.float32))
    return made


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, config: GptOssConfig, models: list[GptOss]) -> Runner:
    """Three requests at a time, two slots."""
    monkeypatch.setattr(limits, "checked_config", lambda _: config)
    monkeypatch.setattr(ranks, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(
        module, "expert_mlp", lambda hidden, prepared, *routing: _definition(hidden, prepared.weights, *routing)
    )
    torch.manual_seed(0)
    whole = test_model.config_of(Path("base"))
    whole.lora_config = LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=SLOTS)
    whole.model_config = Having(**vars(whole.model_config), enable_sleep_mode=False, get_vocab_size=lambda: 1)
    whole.model_config.is_encoder_decoder = False
    whole.model_config.hf_config = Having(get_text_config=lambda: None)
    monkeypatch.setattr(test_model, "config_of", lambda *_: whole)
    server = Server.of(Path("base"), config)
    server.plain, server.tolerance = Merged(models), 1e-4  # W + B A is another order of sums
    return Runner(server, whole)


def _definition(hidden, weights, topk_weights, topk_ids, adapters):
    return adapted(weights, adapters, hidden, topk_weights, topk_ids)


def asked(folders: list[Path], which: int) -> LoRARequest:
    return LoRARequest(f"number {which}", which, str(folders[which]))


def test_requests_of_a_step_have_their_own_adapters(runner: Runner, folders: list[Path]) -> None:
    one, two, three = (asked(folders, which) for which in (ONE, TWO, THREE))
    assert runner.add_lora(one)
    runner.step([5, 40, 20], [None, one, two])  # the second is loaded by its first request
    runner.step([1, 1, 1], [None, one, two])
    runner.step([1, 30, 1], [None, one, two])
    assert runner.list_loras() == {ONE, TWO}
    runner.step([1, 1, 1], [None, one, one])
    runner.step([1, 1, 1], [None, three, one])  # in the slot of the second, of which nothing may stay
    assert runner.list_loras() == {ONE, THREE}
    assert runner.remove_lora(THREE)
    runner.step([1, 1, 1], [None, None, None])


def test_steps_without_adapters_are_the_models_own(runner: Runner, folders: list[Path], monkeypatch) -> None:
    """Such a step has graphs of its own, and sends nothing to the GPU."""
    one = asked(folders, ONE)
    runner.step([5, 40, 20], [None, one, None])
    with monkeypatch.context() as patch:
        patch.setattr(module.Adapters, "step", lambda *_: pytest.fail("adapted"))
        patch.setattr(module.Adapters, "assign", lambda *_: pytest.fail("sent"))
        runner.step([1, 1, 1], [None, None, None])
        with runner.maybe_setup_dummy_loras(runner.lora_config):
            hook = create_lora_capture_hook(runner.lora_config, runner)
            hook(0, 4, 4)
            assert not runner.get_model().adapters.active
            patch.undo()
            hook(SLOTS + 1, 4, 4)
            assert runner.get_model().adapters.active
    runner.step([1, 1, 1], [None, one, None])  # after capture has removed all adapters


def test_an_adapter_of_experts_loads_beside_packed_experts(runner: Runner, folders: list[Path]) -> None:
    """It is for the tensors of BF16, which an MXFP4 checkpoint has as blocks and scales."""
    runner.get_model().config = random_config(layers=2, mxfp4=True)
    assert runner.add_lora(asked(folders, ONE))


def swapped(adapters: module.Adapters) -> None:
    assign = adapters.assign
    adapters.assign = lambda rows: assign(torch.where(rows >= 0, SLOTS - 1 - rows, rows))


def without(name: str) -> Callable[[module.Adapters], None]:
    def mutate(adapters: module.Adapters) -> None:
        write = adapters.write
        adapters.write = lambda slot, all_: write(slot, {key: all_[key] for key in all_ if name not in key})

    return mutate


def unscaled(adapters: module.Adapters) -> None:
    write = adapters.write
    adapters.write = lambda slot, all_: write(
        slot, {key: (a, b / 2 if "o_proj" in key else b) for key, (a, b) in all_.items()}
    )


@pytest.mark.parametrize(
    "mutate", [swapped, unscaled, *map(without, ("q_proj", "v_proj", "router", "1.mlp.experts.down_proj"))]
)
def test_a_mutation_is_seen(runner: Runner, folders: list[Path], mutate: Callable[[module.Adapters], None]) -> None:
    mutate(runner.get_model().adapters)
    with pytest.raises(AssertionError, match="Tensor-likes"):
        runner.step([5, 40, 20], [None, asked(folders, ONE), asked(folders, THREE)])


def test_an_adapter_that_cannot_be_served_names_the_merge(runner, folders, config, tmp_path) -> None:
    """Each is refused alone: the server and the other adapters go on."""
    wide = write_adapter(tmp_path / "wide", config, seed=5, rank=2 * RANK, experts=False)
    head = write_adapter(tmp_path / "head", config, seed=5, experts=False)
    file = head / "adapter_model.safetensors"
    a, b = torch.zeros(4, config.hidden_size), torch.zeros(config.vocab_size, 4)
    save_file(load_file(file) | {"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b}, file)
    others = {
        "replaced": ("model.norm.weight", torch.ones(config.hidden_size), "model.norm.weight"),
        "rescaled": (f"{ROUTER}.lora_magnitude_vector", torch.ones(config.num_local_experts), f"{ROUTER}.weight"),
    }
    refused_too = []
    for name, (key, tensor, field) in others.items():
        folder = write_adapter(tmp_path / name, config, seed=5, experts=False)
        file = folder / "adapter_model.safetensors"
        save_file(load_file(file) | {f"base_model.model.{key}": tensor}, file)
        refused_too.append((folder, field))
    for folder, field in ((wide, "--max-lora-rank"), (head, "lm_head.weight"), *refused_too):
        with refused(field) as caught:
            runner.add_lora(LoRARequest("wrong", 9, str(folder)))
        assert f"convert base MERGED --lora {folder}" in str(caught.value)
    with pytest.raises(LoRAAdapterNotFoundError):
        runner.add_lora(LoRARequest("missing", 9, str(tmp_path / "missing")))
    runner.step([5, 40, 20], [None, asked(folders, ONE), None])

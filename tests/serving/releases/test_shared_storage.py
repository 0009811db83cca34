"""One engine computes a prompt and another decodes it through a folder: the tokens must be equal."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.shared_storage_connector", reason="needs vLLM 0.11")

from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import shared_storage_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from npu_gptoss.serving.releases import shared_storage_0_11
from npu_gptoss.serving.releases.shared_storage_0_11 import parts
from tests.checkpoints import write_random_checkpoint
from tests.oracle import random_prompts
from tests.serving.asking import VOCABULARY, ask, tokens

pytestmark = [pytest.mark.serving, pytest.mark.slow]

BLOCK = 16
# a block and one token, its neighbours, and prompts that take several steps of 64 tokens
LENGTHS = (3, 16, 17, 18, 33, 100, 129, 200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage") / "checkpoint"
    write_random_checkpoint(path, layers=2, vocab_size=VOCABULARY)
    return path


@pytest.fixture
def server(start_engine: Callable[..., Any], checkpoint: Path) -> Callable[[Path], Any]:
    """One of the engines that share a folder."""

    def start(folder: Path) -> Any:
        transfer = {
            "kv_connector": "SharedFolderConnector",
            "kv_connector_module_path": "npu_gptoss.serving.releases.shared_storage_0_11",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        return start_engine(checkpoint, max_num_batched_tokens=64, block_size=BLOCK, kv_transfer_config=transfer)

    return start


def ended(engine: Any) -> None:
    engine.llm_engine.engine_core.shutdown()
    gc.collect()


def test_another_engine_decodes_a_stored_prompt_alike(server: Callable[..., Any], tmp_path: Path) -> None:
    prompts = random_prompts(LENGTHS, VOCABULARY)
    first = server(tmp_path)
    want = tokens(ask(first, prompts, max_tokens=12))
    ended(first)
    files = sorted(tmp_path.glob("*/*"))
    assert [file.name for file in files] == ["0-of-1.safetensors"] * sum(length > BLOCK for length in LENGTHS)
    stored = sorted(next(iter(load_file(file).values())).shape[0] for file in files)
    assert stored == sorted((length - 1) // BLOCK * BLOCK for length in LENGTHS if length > BLOCK)

    second = server(tmp_path)
    assert tokens(ask(second, prompts, max_tokens=12)) == want
    # a prompt's log-probabilities are of tokens that this engine computes
    (asked,) = ask(second, prompts[-1:], max_tokens=1, prompt_logprobs=0)
    assert len(asked.prompt_logprobs) == LENGTHS[-1]

    for file in files:  # the control: it is the files that count
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)
    second.reset_prefix_cache()
    got = tokens(ask(second, prompts, max_tokens=12))
    assert [answer == right for answer, right in zip(got, want, strict=True)] == [length <= BLOCK for length in LENGTHS]
    ended(second)


def test_a_cache_of_two_tensors_is_read_and_written_as_one_is(tmp_path: Path) -> None:
    """vllm-ascend keeps keys and values apart."""
    whole = torch.arange(2 * 3 * 4 * 5 * 6).view(2, 3, 4, 5, 6)
    for as_one, as_two in zip(parts(whole), parts(tuple(whole)), strict=True):
        assert torch.equal(as_one, as_two)
        assert as_one.shape == (12, 5, 6)
    parts(whole)[1][7] = -1
    assert (whole[1, 1, 3] == -1).all(), "not a view"


def test_stored_keys_are_read_into_a_cache_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base class reads with `.cuda()`."""
    monkeypatch.setattr(shared_storage_0_11, "get_world_group", lambda: SimpleNamespace(rank=0))
    parallel, cache = SimpleNamespace(world_size=1), SimpleNamespace(block_size=BLOCK)
    transfer = SimpleNamespace(get_from_extra_config=lambda name, default: str(tmp_path))
    config = SimpleNamespace(parallel_config=parallel, cache_config=cache, kv_transfer_config=transfer)
    layer = SimpleNamespace(kv_cache=[torch.rand(2, 3, BLOCK, 1, 4)])
    want = layer.kv_cache[0][:, 2].clone()
    context = SimpleNamespace(attn_metadata=object(), no_compile_layers={"layer": layer}, virtual_engine=0)
    connector = shared_storage_0_11.SharedFolderConnector(config, KVConnectorRole.WORKER)
    for is_store in (True, False):
        metadata = shared_storage_connector.SharedStorageConnectorMetadata()
        metadata.add_request(list(range(BLOCK + 1)), [2], BLOCK, is_store, [])
        connector.bind_connector_metadata(metadata)
        if is_store:
            connector.save_kv_layer("layer", layer.kv_cache[0], None)
            connector.wait_for_save()
            layer.kv_cache[0].zero_()
        else:
            connector.start_load_kv(context)
    assert torch.equal(layer.kv_cache[0][:, 2], want)

"""On a GPU, a server that asks for what only vLLM's own gpt-oss has is served by it, behind our front end."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch
from safetensors.torch import save_file

from npu_gptoss.convert.command import open_adapters
from npu_gptoss.convert.source import open_source
from npu_gptoss.convert.write import Job, convert
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.tiny.checkpoint import write_tiny
from research.score_server import fetched
from tests.near_ties import NEAR
from tests.near_ties import regrets_where_they_part as regrets
from tests.oracle import random_prompts
from tests.serving.server import Server, serve
from tests.soak.server import COMPACT, SHARE

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-cuda"),
]

FLAGS = (*COMPACT, *SHARE, "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager")
ADAPTERS, RANK, TOKENS = ("one", "two"), 8, 12
LOADS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
ASIDE = "npu-gptoss steps aside"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16: vLLM's kernels for MXFP4 are made for larger models."""
    path = tmp_path_factory.mktemp("aside") / "gpt-oss-tiny"
    write_tiny(path, trained=True)
    return path


@pytest.fixture(scope="module")
def merged(base: Path) -> dict[str, Path]:
    """Random adapters of the attention, and the checkpoints into which each is merged."""
    found = {}
    for seed, name in enumerate(ADAPTERS):
        config = json.loads((base / "config.json").read_text())
        heads, keys, hidden = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
        query, key, dim = heads * config["head_dim"], keys * config["head_dim"], RANK
        sizes = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for layer in range(config["num_hidden_layers"]):
            for module, (width, height) in sizes.items():
                place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                tensors[f"{place}.lora_A.weight"] = torch.randn(dim, width, generator=generator) / width**0.5
                tensors[f"{place}.lora_B.weight"] = torch.randn(height, dim, generator=generator) / dim**0.5
        folder = base.parent / f"adapter-{name}"
        folder.mkdir()
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
        settings |= {"target_modules": list(sizes), "bias": "none", "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        found[name] = base.parent / f"merged-{name}"
        source = open_source(base)
        convert(Job(source, found[name], "bf16", open_adapters(source, [str(folder)])), progress=False)
    return found


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[Server]:
    flags = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", str(len(ADAPTERS)))
    with serve(base, base.parent / "lora.log", *FLAGS, *flags, on="cuda", variables=LOADS) as running:
        yield running


def told(server: Server, route: str, body: dict[str, str]) -> None:
    """A route that answers with a plain text."""
    request = urllib.request.Request(
        server.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


def completed(server: Server, model: str, prompts: list[list[int]]) -> list[list[int]]:
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choices = fetched(f"{server.url}/v1/completions", body | {"prompt": prompts})["choices"]
    return [choice["token_ids"] for choice in choices]


def exact(checkpoint: Path, prompts: list[list[int]]) -> tuple[Engine, list[list[int]]]:
    engine = Engine(checkpoint, device="cpu", dtype="float32", num_blocks=100)
    results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return engine, [list(result.token_ids) for result in results]


def test_adapters_answer_as_the_merged_checkpoints(server: Server, base: Path, merged: dict[str, Path]) -> None:
    prompts = random_prompts((5, 40, 200), 200_000)
    for name in ADAPTERS:
        place = {"lora_name": name, "lora_path": str(base.parent / f"adapter-{name}")}
        told(server, "/v1/load_lora_adapter", place)
    plain = completed(server, server.name, prompts)
    engine, wanted = exact(base, prompts)
    assert all(one < NEAR for one in regrets(engine, prompts, plain, wanted))
    for name in ADAPTERS:
        tokens = completed(server, name, prompts)
        engine, wanted = exact(merged[name], prompts)
        assert all(one < NEAR for one in regrets(engine, prompts, tokens, wanted))
        assert max(regrets(engine, prompts, plain, wanted)) > NEAR, "the adapter changes nothing"
    told(server, "/v1/unload_lora_adapter", {"lora_name": ADAPTERS[0]})
    with pytest.raises(HTTPError) as refused:
        completed(server, ADAPTERS[0], prompts)
    assert refused.value.code == 404
    assert completed(server, ADAPTERS[1], prompts[:1])


def test_our_front_end_answers_for_vllms_model(server: Server) -> None:
    body = {"model": server.name, "temperature": 0, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    message = fetched(f"{server.url}/v1/chat/completions", body)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("3 + 4 = 7.", "Let me think. 3 + 4 = 7.")
    assert server.log.read_text().count(ASIDE) == 1


def test_pooling_is_vllms_own(base: Path) -> None:
    with serve(base, base.parent / "pooling.log", *FLAGS, "--runner", "pooling", on="cuda") as running:
        found = fetched(f"{running.url}/v1/embeddings", {"model": running.name, "input": "What is 3 + 4?"})
        width = json.loads((base / "config.json").read_text())["hidden_size"]
        assert len(found["data"][0]["embedding"]) == width
        assert running.log.read_text().count(ASIDE) == 1

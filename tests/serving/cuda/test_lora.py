"""On a GPU: one server of ours, two adapters and the base in one batch, against the merged checkpoints."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import pytest

from npu_gptoss.convert.command import open_adapters
from npu_gptoss.convert.source import open_source
from npu_gptoss.convert.write import Job, convert
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.tiny.checkpoint import write_tiny
from research.score_server import fetched
from scripts.serve_here import ours
from tests.endure.server import COMPACT, SHARE
from tests.near_ties import NEAR
from tests.near_ties import regrets_where_they_part as regrets
from tests.oracle import random_prompts
from tests.serving.cuda.lora import write_adapter
from tests.serving.server import Server, serve

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
pytestmark = [pytest.mark.cuda, pytest.mark.slow]

SIZES = [1, 2, 4, 8, 16, 32]
GRAPHED = ("--compilation-config", json.dumps({"cudagraph_capture_sizes": SIZES}))
FLAGS = (*COMPACT, *SHARE, *GRAPHED, "--max-model-len", "1024", "--max-num-seqs", str(SIZES[-1]))
BASE, ONE, TWO = "gpt-oss-tiny", "one", "two"
RANK, TOKENS = 8, 12
LOADS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
SPEED_TOKENS, ROUNDS = 400, 5
SLOWER = 1.1  # a tiny model's step is all host time: 0.1 of it are 0.02 of a 20b's


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base in MXFP4, and what it is with each adapter merged."""
    base = tmp_path_factory.mktemp("lora") / BASE
    write_tiny(base, trained=True, mxfp4=True)
    found, source = {BASE: base}, open_source(base)
    for seed, name in enumerate((ONE, TWO)):
        folder = write_adapter(adapter(base, name), GptOssConfig.from_directory(base), seed=seed, rank=RANK)
        found[name] = base.parent / f"merged-{name}"
        convert(Job(source, found[name], "bf16", open_adapters(source, [str(folder)])), progress=False)
    return found


def adapter(base: Path, name: str) -> Path:
    return base.parent / f"adapter-{name}"


@pytest.fixture(scope="module")
def servers(checkpoints: dict[str, Path]) -> Iterator[tuple[Server, Server]]:
    """One with adapters of which `one` is loaded at the start, and one without."""
    base = checkpoints[BASE]
    lora = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")
    lora += ("--lora-modules", f"{ONE}={adapter(base, ONE)}")
    with (
        serve(base, base.parent / "lora.log", *FLAGS, *lora, on="cuda", variables=LOADS) as adapted,
        serve(base, base.parent / "plain.log", *FLAGS, on="cuda") as plain,
    ):
        yield adapted, plain


def told(server: Server, route: str, body: dict[str, str]) -> None:
    """A route that answers with a plain text."""
    data, header = json.dumps(body).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(server.url + route, data, header), timeout=60).close()


def completed(server: Server, model: str, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return fetched(f"{server.url}/v1/completions", body | {"prompt": prompt})["choices"][0]["token_ids"]


def exact(checkpoint: Path, prompts: list[list[int]]) -> tuple[Engine, list[list[int]]]:
    engine = Engine(checkpoint, device="cpu", dtype="float32", num_blocks=100)
    results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return engine, [list(result.token_ids) for result in results]


def test_base_and_two_adapters_in_one_batch_answer_as_merged(servers, checkpoints) -> None:
    """`two` is loaded, dropped and loaded again while the others are answered."""
    server, _ = servers
    assert ours(server.log), "vLLM's own model serves"
    prompts = random_prompts((5, 17, 40, 90, 200, 300), 200_000)
    two = {"lora_name": TWO, "lora_path": str(adapter(checkpoints[BASE], TWO))}
    with ThreadPoolExecutor(40) as pool:
        load = [pool.submit(completed, server, (BASE, ONE)[n % 2], prompts[n % 6], 200) for n in range(12)]
        told(server, "/v1/load_lora_adapter", two)
        told(server, "/v1/unload_lora_adapter", {"lora_name": TWO})
        with pytest.raises(HTTPError) as refused:
            completed(server, TWO, prompts[0])
        assert refused.value.code == 404
        told(server, "/v1/load_lora_adapter", two)
        asked = {
            name: [pool.submit(completed, server, name, prompt) for prompt in prompts] for name in (BASE, ONE, TWO)
        }
        answers = {name: [one.result() for one in futures] for name, futures in asked.items()}
        assert all(len(one.result()) == 200 for one in load)
    one_by_one = {name: [completed(server, name, prompt) for prompt in prompts] for name in answers}
    for name in answers:
        engine, wanted = exact(checkpoints[name], prompts)
        assert all(one < NEAR for one in regrets(engine, prompts, one_by_one[name], wanted)), name
        apart = {other: regrets(engine, prompts, answers[other], wanted) for other in answers}
        assert all(one < NEAR for one in apart.pop(name)), name
        assert all(max(each, default=0) > NEAR for each in apart.values()), "the adapters change nothing"


def test_our_front_end_takes_the_name_of_an_adapter(servers: tuple[Server, Server]) -> None:
    server, _ = servers
    chat = {"temperature": 0, "max_tokens": 100, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    base, one = (fetched(f"{server.url}/v1/chat/completions", chat | {"model": name}) for name in (BASE, ONE))
    assert base["choices"][0]["message"]["content"] == "3 + 4 = 7."
    assert (one["model"], one["choices"] == base["choices"]) == (ONE, False)


@pytest.mark.parametrize("streams", [1, 16])
def test_base_requests_are_as_fast_as_without_adapters(servers: tuple[Server, Server], streams: int) -> None:
    """Seconds of the same work by turns on both servers, of which the other one waits."""

    def seconds(server: Server) -> float:
        began = time.perf_counter()
        list(pool.map(lambda prompt: completed(server, BASE, prompt, SPEED_TOKENS), prompts))
        return time.perf_counter() - began

    prompts = random_prompts([64] * streams, 200_000)
    with ThreadPoolExecutor(streams) as pool:
        rounds = [[seconds(server) for server in servers] for _ in range(ROUNDS)][1:]
    adapted, plain = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(
        f"{streams} streams of the tiny model: {adapted / plain:.3f} of the time without --enable-lora ({plain:.3f} s)"
    )
    assert adapted / plain < SLOWER

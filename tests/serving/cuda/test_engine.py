"""Our model in vLLM's engine on a GPU: its graphs, against launches one by one and against the offline engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.engine import Engine, SamplingParams
from research.eagle3_head import write_head
from tests.checkpoints import write_random_checkpoint
from tests.markdown import ROOT
from tests.near_ties import NEAR, regrets_where_they_part
from tests.oracle import random_prompts
from tests.serving.cuda.answers import (
    GARBAGE,
    LEAKING,
    NEVER_REFRESHED,
    OWN,
    RIGHT,
    UNCLEARED,
    WRONG,
    Answer,
    Question,
)

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-cuda"),
]

SHAPE = {"layers": 4, "hidden": 256, "intermediate": 256, "heads": 8, "kv_heads": 2}
TOKENS = 40
SIZES = [1, 2, 4, 8, 16]
SHARED = {"max_model_len": 512, "max_num_seqs": 16, "enable_prefix_caching": False}
GRAPHS = SHARED | {"compilation_config": {"cudagraph_capture_sizes": SIZES}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "checkpoint"
    write_random_checkpoint(path, mxfp4=True, **SHAPE)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Seven, in a graph of eight rows."""
    return random_prompts((5, 17, 40, 200, 3, 128, 300), 512)


@pytest.fixture(scope="module")
def ask(directory: Path, prompts: list[list[int]]) -> Callable[..., Answer]:
    kept: dict[str, Answer] = {}

    def ask(options: dict[str, Any], **more: Any) -> Answer:
        question = json.dumps(asdict(Question(str(directory), prompts, TOKENS, options, **more)))
        if question not in kept:
            run = subprocess.run(
                [sys.executable, "-m", "tests.serving.cuda.answers"],
                input=question,
                env=os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert run.returncode == 0, run.stderr[-3000:]
            answer = json.loads(run.stdout.splitlines()[-1])
            kept[question] = Answer(**answer | {"full": {int(rows): n for rows, n in answer["full"].items()}})
        return kept[question]

    return ask


@pytest.fixture(scope="module")
def eager(ask: Callable[..., Answer]) -> list[list[int]]:
    return ask(SHARED | {"enforce_eager": True}).tokens


def regrets(directory: Path, prompts: list[list[int]], got: list[list[int]], want: list[list[int]]) -> list[float]:
    """Of the answers that part; all have TOKENS tokens."""
    exact = Engine(directory, device="cpu", dtype="float32", num_blocks=200)
    assert {len(answer) for answer in (*got, *want)} == {TOKENS}
    return regrets_where_they_part(exact, prompts, got, want)


def test_without_graphs_the_tokens_are_the_offline_engines(directory, prompts, eager) -> None:
    engine = Engine(directory, device="cuda", num_blocks=200, graphs="none")
    results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert [list(result.token_ids) for result in results] == eager


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_replayed_tokens_are_bit_for_bit_those_launched_one_by_one(mode, ask, eager) -> None:
    config = GRAPHS["compilation_config"] | {"cudagraph_mode": mode}
    answer = ask(GRAPHS | {"compilation_config": config})
    assert answer.tokens == eager
    assert answer.late == 0, "a graph was captured while requests waited"
    if mode == "PIECEWISE":
        assert answer.full == {}
        assert answer.piecewise >= TOKENS - 1
    else:
        assert answer.captured == SIZES
        assert answer.full == {8: TOKENS - 1}, "seven requests end together, in the bucket of eight"


@pytest.mark.parametrize("name", NEVER_REFRESHED)
def test_what_a_graph_reads_from_another_place_is_noticed(name, ask, eager) -> None:
    assert ask(GRAPHS, spoil=name).tokens != eager


FULL, PIECES = "FULL_DECODE_ONLY", "PIECEWISE"
PADDED = [(FULL, GARBAGE), (PIECES, GARBAGE), (FULL, LEAKING), (FULL, UNCLEARED), (PIECES, UNCLEARED)]


@pytest.fixture(scope="module")
def padded(ask: Callable[..., Answer]) -> dict[tuple[str, str], Future[Answer]]:
    """Each step of decode has one padding row, of NaN. The engines start together."""

    def answer(mode: str, padding: str) -> Answer:
        config = GRAPHS["compilation_config"] | {"cudagraph_mode": mode}
        return ask(GRAPHS | {"compilation_config": config}, padding=padding)

    with ThreadPoolExecutor() as pool:
        return {way: pool.submit(answer, *way) for way in PADDED}


@pytest.mark.parametrize("mode", [FULL, PIECES])
def test_nan_in_padding_rows_reaches_no_live_row(mode, padded, eager) -> None:
    """And attention leaves zeros there, whatever was in its memory."""
    answer = padded[mode, GARBAGE].result()
    largest, rows = answer.tail
    assert rows >= (TOKENS - 1) * SHAPE["layers"], "no row was padding"
    assert float(largest) == 0
    assert answer.tokens == eager


def test_padding_rows_that_write_keys_are_noticed(padded, eager) -> None:
    assert padded[FULL, LEAKING].result().tokens != eager


@pytest.mark.parametrize("mode", [FULL, PIECES])
def test_padding_rows_that_attention_does_not_clear_are_noticed(mode, padded) -> None:
    assert padded[mode, UNCLEARED].result().tail[0] == "nan"


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"max_num_batched_tokens": 64}, 1),
        ({"enable_prefix_caching": True}, 2),
        ({"num_gpu_blocks_override": 56}, 1),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}, 1),
    ],
    ids=["chunks", "prefix cache", "preemption", "n-gram drafts"],
)
def test_other_batches_part_at_near_ties_only(options, times, directory, prompts, ask, eager) -> None:
    """A row that is computed among others has its sums in another order."""
    answer = ask(GRAPHS | options, times=times)
    found = regrets(directory, prompts, answer.tokens, eager)
    print(f"{len(found)} of {len(prompts)} part, regrets {[round(regret, 3) for regret in found]}")
    assert all(regret < NEAR for regret in found)
    if "num_gpu_blocks_override" in options:
        assert answer.preemptions > 0, "every request had its blocks"
    if "speculative_config" in options:
        assert set(answer.full) - {8}, "no step verified drafts in a graph"


NGRAM, EAGLE3 = "ngram", "eagle3"
WAYS = [(NGRAM, 1), (NGRAM, 7), (EAGLE3, 3), (EAGLE3, 5)]  # of drafting, with the number of drafts
STALE = (NGRAM, 3)  # a graph that reads the lengths of another step


@pytest.fixture(scope="module")
def drafted(directory, ask, tmp_path_factory) -> dict[tuple[str, int], Future[Answer]]:
    """Answers of all ways of drafting, which start together: a start takes a minute, most of it the host's."""
    head = tmp_path_factory.mktemp("head")
    write_head(head, directory)
    methods = {NGRAM: {"method": NGRAM, "prompt_lookup_max": 2}, EAGLE3: {"method": EAGLE3, "model": str(head)}}

    def answer(way: tuple[str, int]) -> Answer:
        method, drafts = way
        options = {
            "speculative_config": methods[method] | {"num_speculative_tokens": drafts},
            "compilation_config": {"cudagraph_capture_sizes": [size * (1 + drafts) for size in (1, 2, 4, 8)]},
        }
        drafters = [OWN, WRONG, RIGHT] if method == NGRAM and way != STALE else [OWN]
        return ask(SHARED | options, drafters=drafters, spoil="lengths" if way == STALE else None)

    with ThreadPoolExecutor() as pool:
        pool.submit(ask, SHARED | {"enforce_eager": True})  # which `eager` then has
        return {way: pool.submit(answer, way) for way in (*WAYS, STALE)}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}, {way[1]} drafts")
def test_no_drafter_changes_a_token_but_at_near_ties(way, directory, prompts, drafted, eager) -> None:
    answer = drafted[way].result()
    for drafter, found in answer.drafted.items():
        apart = regrets(directory, prompts, found["tokens"], eager)
        print(f"{way}, {drafter}: accepted {found['accepted']} of {found['proposed']}, {len(apart)} part", apart)
        assert all(regret < NEAR for regret in apart)
        assert found["proposed"] > 0
    assert answer.late == 0, "a graph was captured while requests waited"
    assert answer.full.get(8 * (1 + way[1]), 0) > 0, "seven requests never verified in the graph of eight"


def test_the_check_of_drafts_notices_lengths_of_another_step(directory, prompts, drafted, eager) -> None:
    assert max(regrets(directory, prompts, drafted[STALE].result().tokens, eager), default=0) > NEAR


@pytest.mark.parametrize("way", [way for way in WAYS if way[0] == NGRAM], ids=lambda way: f"{way[1]} drafts")
def test_wrong_drafts_are_all_refused_and_right_ones_all_taken(way, prompts, drafted) -> None:
    """But in requests that parted from the record: what it says next is then neither wrong nor right."""
    found = drafted[way].result().drafted
    for drafter in (WRONG, RIGHT):
        pairs = zip(found[drafter]["tokens"], found[OWN]["tokens"], strict=True)
        parted = sum(ours != record for ours, record in pairs)
        assert parted <= len(prompts) // 3
        proposed, accepted = found[drafter]["proposed"], found[drafter]["accepted"]
        surprises = accepted if drafter == WRONG else proposed - accepted
        assert surprises <= parted * TOKENS * way[1], f"{drafter}: accepted {accepted} of {proposed}"

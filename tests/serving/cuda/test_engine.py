"""Our model in vLLM's engine on a GPU: its graphs, against launches one by one and against the offline engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.dense.operations import TOKEN
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.kernels.selection import override_variable
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
    RELOADED,
    RIGHT,
    SENT,
    SLEPT,
    STARTED,
    UNCLEARED,
    WRONG,
    Answer,
    Question,
)
from tests.serving.cuda.dflash_head import write_dflash

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
pytestmark = [pytest.mark.cuda, pytest.mark.slow]

SHAPE = {"layers": 4, "hidden": 256, "intermediate": 256, "heads": 8, "kv_heads": 2}
TOKENS = 40
SIZES = [1, 2, 4, 8, 16]
AT_ONCE = 6  # engines: a start is most of a minute, nearly all of it the host's
LIMIT = 900  # seconds for an answer, where many other processes start
SHARED = {"max_model_len": 512, "max_num_seqs": 16, "enable_prefix_caching": False}


def graphed(**config: Any) -> dict[str, Any]:
    return SHARED | {"compilation_config": {"cudagraph_capture_sizes": SIZES, **config}}


# vLLM compares the device's free memory before and after a sleep: more than engines beside this one take meanwhile
SLEEPS = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 8 << 30, "weight_transfer_config": {"backend": "nccl"}}
EAGER, FULL, PIECES, COLD = "eager", "FULL_DECODE_ONLY", "PIECEWISE", "no warm-up"
MODES = ["FULL_AND_PIECEWISE", FULL, PIECES]
OTHERS = {
    "chunks": ({"max_num_batched_tokens": 64}, {}),
    "prefix cache": ({"enable_prefix_caching": True}, {"times": 2}),
    "preemption": ({"num_gpu_blocks_override": 56, "max_model_len": 400}, {}),
    # as vLLM's own sizes and batch are: the prompts fit into a graph that was captured in a step of decode
    "prompts in pieces": (graphed(cudagraph_capture_sizes=[*SIZES, 64, 768]) | {"max_num_seqs": 768}, {}),
    "last rows in pieces": (
        graphed(cudagraph_capture_sizes=[*SIZES, 64]) | {"max_num_seqs": 64, "enable_prefix_caching": True},
        {"times": 2},
    ),
}
PADDED = [(FULL, GARBAGE), (PIECES, GARBAGE), (FULL, LEAKING), (FULL, UNCLEARED), (PIECES, UNCLEARED)]
NGRAM, EAGLE3, DFLASH = "ngram", "eagle3", "dflash"
HEADS = {EAGLE3: "a head that is written first", DFLASH: "a drafter that is written first"}
WAYS = [(NGRAM, 1), (NGRAM, 7), (EAGLE3, 3), (EAGLE3, 5), (DFLASH, 7)]  # of drafting, with the number of drafts
RENEWED, OTHER = (RELOADED, SLEPT, SENT), "another checkpoint"
STALE = (NGRAM, 3)  # a graph that reads the lengths of another step
ALONE, TOGETHER = "alone", "together"
NARROW = {"kv_cache_dtype": "fp8"}
HALVED = [("fp8", mode) for mode in (FULL, PIECES)]  # in bytes of KV cache
HALVED_EAGER, HALVED_DRAFTS = ("fp8", EAGER), ("fp8", EAGLE3, 3)
BATCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    ALONE: ({"max_num_seqs": 1}, {}),
    TOGETHER: ({}, {}),
    **{name: OTHERS[name] for name in ("chunks", "prefix cache", "preemption", "prompts in pieces")},
}
DRAWN, VLLMS = "drawn", "drawn, steps of vLLM's"
# greedy answers after drawn ones, picked from a shortlist or, as on several GPUs, from all logits
AFTERWARDS = {"from a shortlist": {}, "from logits": {override_variable(TOKEN): "small_ops"}}
INVARIANT, USUAL = [(batch, "invariant") for batch in BATCHES], [(batch, "usual") for batch in (ALONE, TOGETHER)]


def _drafting(method: str, drafts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {"prompt_lookup_max": 2} if method == NGRAM else {"model": HEADS[method]}
    options = {
        "max_model_len": 500,  # ends within a page
        "speculative_config": {"method": method, "num_speculative_tokens": drafts, **own},
        "compilation_config": {"cudagraph_capture_sizes": [size * (1 + drafts) for size in (1, 2, 4, 8)]},
    }
    all_of_them = method == NGRAM and (method, drafts) != STALE
    more = {"drafters": [OWN, WRONG, RIGHT] if all_of_them else [OWN]}
    return SHARED | options, more | ({"spoil": "lengths"} if (method, drafts) == STALE else {})


def _with_bits(batch: str, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    options, more = BATCHES[batch]
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if mode == "invariant" else {}
    return graphed() | options, more | {"bits": True, "environment": invariant}


# options of vLLM's, and fields of a Question
ASKED: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {
    EAGER: (SHARED | {"enforce_eager": True}, {}),
    **{mode: (graphed(cudagraph_mode=mode), {}) for mode in MODES},
    COLD: (graphed() | {"kernel_config": {"enable_jit_warmup": False}}, {}),
    **{name: (graphed(), {"spoil": name}) for name in NEVER_REFRESHED},
    **{(mode, how): (graphed(cudagraph_mode=mode), {"padding": how}) for mode, how in PADDED},
    **{name: (graphed() | options, more) for name, (options, more) in OTHERS.items()},
    **{way: (graphed() | SLEEPS, {"others": (way, OTHER)}) for way in (STARTED, *RENEWED)},
    **{way: _drafting(*way) for way in (*WAYS, STALE)},
    **{(batch, mode): _with_bits(batch, mode) for batch, mode in (*INVARIANT, *USUAL)},
    DRAWN: (graphed(), {"drawn": True}),
    VLLMS: (graphed(), {"drawn": True, "environment": {"NPU_GPTOSS_SKIP_PATCHES": "steady-steps"}}),
    **{way: (graphed(), {"drawn_before": True, "environment": which}) for way, which in AFTERWARDS.items()},
    HALVED_EAGER: (SHARED | NARROW | {"enforce_eager": True}, {}),
    **{("fp8", mode): (graphed(cudagraph_mode=mode) | NARROW, {}) for _, mode in HALVED},
    HALVED_DRAFTS: (_drafting(EAGLE3, 3)[0] | NARROW, {"drafters": [OWN]}),
}


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
def heads(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each stand-in of HEADS, the folder."""
    found = {HEADS[way]: tmp_path_factory.mktemp(way) for way in HEADS}
    write_head(found[HEADS[EAGLE3]], directory)
    write_dflash(found[HEADS[DFLASH]], directory)
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "checkpoint"
    write_random_checkpoint(path, seed=1, mxfp4=True, **SHAPE)
    return path


@pytest.fixture(scope="module")
def answer(
    request, directory: Path, heads: dict[str, str], other: Path, prompts: list[list[int]]
) -> Iterator[Callable[[Any], Answer]]:
    """The answer to a question of ASKED. All questions of the chosen tests start at once, AT_ONCE engines at a time."""

    def ask(options: dict[str, Any], more: dict[str, Any]) -> Answer:
        question = json.dumps(asdict(Question(str(directory), prompts, TOKENS, options, **more)))
        for name, path in (heads | {OTHER: str(other)}).items():
            question = question.replace(name, path)
        run = subprocess.run(
            [sys.executable, "-m", "tests.serving.cuda.answers"],
            input=question,
            env=os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        # the first words are the device's: what fails behind an assertion there fills the end
        wrong = [line for line in run.stderr.splitlines() if "Error" in line or "ssert" in line]
        assert run.returncode == 0, "\n".join([*wrong[:9], "…", run.stderr[-2000:]])
        found = json.loads(run.stdout.splitlines()[-1])
        return Answer(**found | {"full": {int(rows): n for rows, n in found["full"].items()}})

    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {EAGER: None} | {params["asked"]: None for params in chosen if params.get("asked") in ASKED}
    pool = ThreadPoolExecutor(AT_ONCE)
    asked: dict[Any, Future[Answer]] = {name: pool.submit(ask, *ASKED[name]) for name in wanted}

    def found(name: Any) -> Answer:
        if name not in asked:
            asked[name] = pool.submit(ask, *ASKED[name])
        return asked[name].result()

    yield found
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def eager(answer: Callable[[Any], Answer]) -> list[list[int]]:
    return answer(EAGER).tokens


@pytest.fixture(scope="module")
def exact(directory: Path) -> Engine:
    return Engine(directory, device="cpu", dtype="float32", num_blocks=200)


def regrets(exact: Engine, prompts: list[list[int]], got: list[list[int]], want: list[list[int]]) -> list[float]:
    """Of the answers that part; all have TOKENS tokens."""
    assert {len(tokens) for tokens in (*got, *want)} == {TOKENS}
    return regrets_where_they_part(exact, prompts, got, want)


def test_without_graphs_the_tokens_are_the_offline_engines(directory, prompts, eager) -> None:
    engine = Engine(directory, device="cuda", num_blocks=200, graphs="none")
    results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert [list(result.token_ids) for result in results] == eager


@pytest.mark.parametrize("asked", MODES)
def test_replayed_tokens_equal_the_eager_ones_bit_for_bit(asked, answer, eager) -> None:
    found = answer(asked)
    assert found.tokens == eager
    assert found.late == 0, "a graph was captured while requests waited"
    assert found.compiled == [], "a kernel was compiled while requests waited"
    if asked == PIECES:
        assert found.full == {}
        assert found.piecewise >= TOKENS - 1
    else:
        assert found.captured == SIZES
        assert found.full == {8: TOKENS - 1}, "seven requests end together, in the bucket of eight"
        assert found.steady == TOKENS - 2, "the first step of decode is vLLM's"


@pytest.mark.parametrize("asked", [DRAWN])
def test_steady_steps_draw_the_tokens_that_vllms_steps_draw(asked, prompts, answer) -> None:
    """With seeds; the answers end one after the other, and at each end a step is vLLM's."""
    found, right = answer(asked), answer(VLLMS)
    assert found.tokens == right.tokens
    assert [len(tokens) for tokens in found.tokens] == [TOKENS - 4 * index for index in range(len(prompts))]
    assert right.steady == 0
    assert TOKENS - 5 * len(prompts) <= found.steady < TOKENS - len(prompts)
    assert found.late == 0, "a graph was captured while requests waited"
    assert found.compiled == [], "a kernel was compiled while requests waited"


@pytest.mark.parametrize("asked", AFTERWARDS)
def test_greedy_answers_after_drawn_ones_are_greedy(asked, answer, eager) -> None:
    found = answer(asked)
    assert found.tokens == eager
    assert found.steady == TOKENS - 2, "the first step of decode is vLLM's"


@pytest.mark.parametrize("asked", HALVED, ids=" ".join)
def test_graphs_over_a_cache_in_fp8_give_the_eager_tokens(asked, answer, eager) -> None:
    """Random weights magnify a key's rounding, so that the tokens differ from those of a cache in bfloat16."""
    found = answer(asked)
    assert found.tokens == answer(HALVED_EAGER).tokens != eager
    assert (found.late, found.compiled) == (0, [])


@pytest.mark.parametrize("asked", [HALVED_DRAFTS], ids=lambda way: f"{way[1]}, {way[2]} drafts")
def test_drafts_over_a_cache_in_fp8_change_few_tokens(asked, prompts, answer) -> None:
    """A row among others has its sums in another order, and from a rounded key on the difference grows."""
    found, alone = answer(asked).drafted[OWN], answer(HALVED_EAGER).tokens
    assert found["proposed"] > 0
    assert sum(a == b for a, b in zip(found["tokens"], alone, strict=True)) >= len(prompts) // 2


@pytest.mark.parametrize("asked", [COLD])
def test_kernels_that_are_compiled_while_requests_wait_are_noticed(asked, answer) -> None:
    """The kernels depend on other packages: FlashInfer's are tuned in a step that runs our model."""
    assert answer(asked).compiled


@pytest.mark.parametrize("asked", NEVER_REFRESHED)
def test_a_graph_that_reads_another_address_is_noticed(asked, answer, eager) -> None:
    assert answer(asked).tokens != eager


@pytest.mark.parametrize("asked", [(FULL, GARBAGE), (PIECES, GARBAGE)], ids=" ".join)
def test_nan_in_padding_rows_reaches_no_live_row(asked, answer, eager) -> None:
    """And attention writes zeros there. Each step of decode has one padding row."""
    found = answer(asked)
    largest, rows = found.tail
    assert rows >= (TOKENS - 1) * SHAPE["layers"], "no row was padding"
    assert float(largest) == 0
    assert found.tokens == eager


@pytest.mark.parametrize("asked", [(FULL, LEAKING)], ids=" ".join)
def test_padding_rows_that_write_keys_are_noticed(asked, answer, eager) -> None:
    assert answer(asked).tokens != eager


@pytest.mark.parametrize("asked", [(FULL, UNCLEARED), (PIECES, UNCLEARED)], ids=" ".join)
def test_padding_rows_that_attention_does_not_clear_are_noticed(asked, answer) -> None:
    assert answer(asked).tail[0] == "nan"


@pytest.mark.parametrize("asked", RENEWED)
def test_graphs_compute_with_other_weights_right_after_an_update(asked, answer, eager) -> None:
    """Two checkpoints in MXFP4; one is sent in BF16. Level 2 throws away all memory of the load, tables included."""
    found = answer(asked)
    assert found.tokens == answer(STARTED).tokens != eager
    assert found.full == {8: TOKENS - 1}, "not by the graphs of before"
    assert found.late == 0, "a graph was captured while requests waited"


@pytest.mark.parametrize("asked", OTHERS)
def test_other_batches_part_at_near_ties_only(asked, prompts, answer, exact, eager) -> None:
    """A row that is computed among others has its sums in another order."""
    got = answer(asked)
    found = regrets(exact, prompts, got.tokens, eager)
    print(f"{asked}: {len(found)} of {len(prompts)} part, regrets {[round(regret, 3) for regret in found]}")
    assert all(regret < NEAR for regret in found)
    if asked == "preemption":
        assert got.preemptions > 0, "every request had its blocks"
    if "pieces" in asked:
        assert got.piecewise > 0, "no prompt was computed in pieces"


@pytest.mark.parametrize("asked", INVARIANT[1:], ids=" ".join)
def test_in_vllms_invariant_mode_no_bit_depends_on_the_batch(asked, answer) -> None:
    found, alone = answer(asked), answer(INVARIANT[0])
    assert (found.tokens, found.logprobs) == (alone.tokens, alone.logprobs)
    assert found.full == {}, "the host's lengths in a graph"
    assert found.compiled == [], "a kernel was compiled while requests waited"


@pytest.mark.parametrize("asked", USUAL[1:], ids=" ".join)
def test_bits_that_depend_on_the_batch_are_noticed(asked, answer) -> None:
    assert answer(asked).logprobs != answer(USUAL[0]).logprobs


@pytest.mark.parametrize("asked", WAYS, ids=lambda way: f"{way[0]}, {way[1]} drafts")
def test_no_drafter_changes_a_token_but_at_near_ties(asked, prompts, answer, exact, eager) -> None:
    got = answer(asked)
    for drafter, found in got.drafted.items():
        apart = regrets(exact, prompts, found["tokens"], eager)
        print(f"{asked}, {drafter}: accepted {found['accepted']} of {found['proposed']}, {len(apart)} part", apart)
        assert all(regret < NEAR for regret in apart)
        assert found["proposed"] > 0
    assert got.late == 0, "a graph was captured while requests waited"
    assert got.compiled == [], "a kernel was compiled while requests waited"
    assert got.full.get(8 * (1 + asked[1]), 0) > 0, "seven requests never verified in the graph of eight"


@pytest.mark.parametrize("asked", [STALE], ids=lambda way: f"{way[0]}, {way[1]} drafts")
def test_the_check_of_drafts_notices_lengths_of_another_step(asked, prompts, answer, exact, eager) -> None:
    tokens = answer(asked).drafted[OWN]["tokens"]
    assert max(regrets(exact, prompts, tokens, eager), default=0) > NEAR


@pytest.mark.parametrize("asked", [way for way in WAYS if way[0] == NGRAM], ids=lambda way: f"{way[1]} drafts")
def test_wrong_drafts_are_all_refused_and_right_ones_all_taken(asked, prompts, answer) -> None:
    """Requests that parted from the record do not count: no script knows their tokens."""
    found = answer(asked).drafted
    for drafter in (WRONG, RIGHT):
        pairs = zip(found[drafter]["tokens"], found[OWN]["tokens"], strict=True)
        parted = sum(ours != record for ours, record in pairs)
        assert parted <= len(prompts) // 3
        proposed, accepted = found[drafter]["proposed"], found[drafter]["accepted"]
        surprises = accepted if drafter == WRONG else proposed - accepted
        assert surprises <= parted * TOKENS * asked[1], f"{drafter}: accepted {accepted} of {proposed}"

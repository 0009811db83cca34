"""Drafts on vllm-ascend 0.23.0 and the emulated CANN 9.1 change no token: n-grams' and an EAGLE3 head's, whether right,
wrong or random.

The head is random, and vllm-ascend drafts by it; what counts as its drafts is then replaced (`spoils.drafting`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from emulator.tests.test_triton import PACKAGES
from research.eagle3_head import write_head
from tests.oracle import load_oracle
from tests.serving.emulated.rounds import EAGER, PIECEWISE, SPOILT, counts, graphs, right, steps, turn
from tests.serving.emulated.test_two_devices import PARALLEL

TOKENS = 9
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
DRAFTERS = [None, "drafts_random", "drafts_perfect", "drafts_adversarial"]
STALE, UNCORRECTED = "drafts_perfect, updates_dropped", "drafts_adversarial, lengths_uncorrected"


@pytest.fixture(scope="module")
def head(checkpoint, tmp_path_factory) -> dict[str, Any]:
    """A random head, read behind the last three of the four layers."""
    if not PACKAGES.is_dir():
        pytest.skip("the compiler is not set up: make setup-ascend-compiler")
    folder = tmp_path_factory.mktemp("head")
    write_head(folder, checkpoint)
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}


def drafted(spoils: list[str | None]) -> list[dict[str, Any]]:
    return [turn(SPOILT, tokens=TOKENS, spoil=spoil) for spoil in spoils]


def tokens_of(results: list[Any]) -> list[list[list[int]]]:
    return [[answer["tokens"] for answer in found] for found in results]


def accepted(printed: str) -> list[int]:
    """How many drafts each round accepted, of the first engine core."""
    return [after["accepted"] - before["accepted"] for before, after in pairwise(counts(printed))]


def test_drafts_right_wrong_and_random_change_no_token(serve_9_1, expected):
    """Steps in which each request has both drafts replay the graph of three rows a request, others replay pieces; only
    the prompts' own step, which is larger than any graph, runs without one."""
    drafters = [None, "drafts_none", "drafts_some", "drafts_perfect", "drafts_adversarial", "drafts_random"]
    rounds = [*drafted([*drafters, STALE]), turn((40,), tokens=TOKENS, spoil="drafts_none")]
    (faults, *results), printed = serve_9_1([{"look": True}, *rounds], options={"speculative_config": NGRAMS})
    assert faults == {}, "of the canary"
    assert right(rounds, results, expected) == [True] * len(drafters) + [False, True]
    assert tokens_of(results[1 : len(drafters)]) == tokens_of(results[:1]) * (len(drafters) - 1)
    (looked_full, *full), (looked_pieces, *pieces) = (steps(printed, mode) for mode in ("FULL", "PIECEWISE"))
    of_drafts, of_pieces = [3, 6, 9, 12, 18, 24], [1, 2, 3, 6, 9, 12, 18, 24]
    assert (looked_full, looked_pieces) == (4 * len(of_drafts), 4 * len(of_pieces)), "four replays of each graph"
    assert steps(printed, "NONE")[1:] == [1] * len(rounds)
    _, none, some, perfect, adversarial, *_, lone = full
    assert none == lone == 0 < pieces[2]
    assert 2 <= perfect < adversarial < TOKENS > some, "all of three tokens a step are right, or two"
    assert pieces[-1] == TOKENS - 1
    assert steps(printed, "padding")[-1] == 0, "a lone row reads the experts of no other"


# graphs that a step without a prompt replays: of the target, and of the head for three drafts
MODES = {"full": ({}, 1 + 1), "eager": (EAGER, 0), "piecewise": (PIECEWISE, 5 + 3 * 2)}


@pytest.mark.parametrize("mode", ["full", *(pytest.param(mode, marks=pytest.mark.long) for mode in list(MODES)[1:])])
def test_drafts_of_a_head_change_no_token(mode, head, serve_9_1, expected, checkpoint, tmp_path):
    """The scheduler runs a step ahead, so it counts drafts before they are refused. Lengths that are not corrected for
    that, or that are left from the capture, are noticed."""
    options, graphs_a_step = MODES[mode]
    drafters, wrong = ["head_reads_kept", *DRAFTERS[1:]], [UNCORRECTED, *([STALE] if mode == "full" else [])]
    rounds = drafted([*drafters, *wrong])
    variables = {"HEAD_READS": str(tmp_path / "reads")}
    results, printed = serve_9_1(rounds, options=options | {"speculative_config": head}, variables=variables)
    assert right(rounds, results, expected) == [True] * len(drafters) + [False] * len(wrong)
    assert tokens_of(results[1 : len(drafters)]) == tokens_of(results[:1]) * (len(drafters) - 1)
    found, replays = accepted(printed), graphs(printed)[1]
    assert found[0] < min(found[2:4]), "the head of random weights is nearly always wrong"
    assert [count % max(graphs_a_step, 1) for count in replays] == [0] * len(replays)
    if mode == "full":  # each request always has three drafts; only the prompts' step runs without a graph
        assert (set(steps(printed, "PIECEWISE")), set(steps(printed, "NONE"))) == ({0}, {1})
    assert mode == "eager" or replays[2] < replays[3] < replays[0]
    assert mode != "eager" or not any(replays)
    reads_as_transformers(torch.load(tmp_path / "reads"), rounds[0]["prompts"][0] + results[0][0]["tokens"], checkpoint)


def reads_as_transformers(reads: dict[int, torch.Tensor], tokens: list[int], checkpoint: Any) -> None:
    """reads: by the place of a token, the residual streams behind three layers."""
    with torch.no_grad():
        states = load_oracle(checkpoint)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    want = torch.cat([states[layer][0] for layer in (1, 2, 3)], -1)
    places = range(len(tokens) - 2)  # past them the last step has drafts
    assert set(places) <= set(reads)
    torch.testing.assert_close(
        torch.stack([reads[place] for place in places]), want[: len(places)], atol=1e-4, rtol=1e-4
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"disable_hybrid_kv_cache_manager": True},
        {"max_num_batched_tokens": 200, "enable_prefix_caching": False},
        {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "async_scheduling": False},
    ],
    ids=["a step at a time", "one group", "chunks", "full and piecewise"],
)
def test_drafts_of_a_head_change_no_token_under_options(options, head, serve_9_1, expected):
    rounds = drafted(DRAFTERS)
    results, _ = serve_9_1(rounds, options=options | {"speculative_config": head}, canary=True)
    assert right(rounds, results, expected) == [True] * len(DRAFTERS)


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["ngrams", "head"])
def test_drafts_are_fewer_at_the_end_of_a_context(drafter, head, serve_9_1, expected):
    """A head's step runs without a graph then: a full graph holds as many rows for each request."""
    rounds = drafted(DRAFTERS)
    options = {"speculative_config": head if drafter == "head" else NGRAMS, "max_model_len": max(SPOILT) + TOKENS}
    results, printed = serve_9_1(rounds, options=options)
    assert right(rounds, results, expected) == [True] * len(DRAFTERS)
    assert (max(steps(printed, "NONE")) > 1) == (drafter == "head")


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["ngrams", "head"])
def test_with_drafts_wrong_full_graphs_are_replaced_by_pieces(drafter, head, serve_9_1, expected):
    rounds = drafted(DRAFTERS)
    options = {"speculative_config": head if drafter == "head" else NGRAMS}
    results, printed = serve_9_1(rounds, options=options, spoil="block_table_rebound", canary=True)
    assert printed.count("PIECEWISE graphs take their place") == 1
    assert right(rounds, results, expected) == [True] * len(DRAFTERS)


LAYOUTS = [how for how in PARALLEL if how != "PP=2"]


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["ngrams", "head"])
@pytest.mark.parametrize(("how", "mode"), [*((how, {}) for how in LAYOUTS), ("TP=2, experts in parallel", EAGER)])
def test_drafts_on_two_devices_change_no_token(how, mode, drafter, head, serve_9_1, expected):
    """Workers remember the first round's answers and draft by them in the second, all right but each step's last."""
    rounds = drafted([None, None])
    options = mode | PARALLEL[how] | {"speculative_config": head if drafter == "head" else NGRAMS}
    results, printed = serve_9_1(rounds, options=options, spoil="drafts_adversarial")
    assert right(rounds, results, expected) == [True, True]
    for prompt, first, second in zip(rounds[0]["prompts"], *tokens_of(results), strict=True):
        assert first == second == expected(tuple(prompt), tuple(first)).argmax(-1).tolist()
    assert ("decode, FULL" in printed) == (mode != EAGER)
    assert ("mixed prefill-decode, PIECEWISE" in printed) == (mode != EAGER and drafter == "ngrams")
    if "DP" not in how:  # engine cores of other processes count for themselves
        assert accepted(printed)[1] >= len(SPOILT) * 2

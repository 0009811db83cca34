"""gpt-oss in every mode of stock vllm-ascend against transformers: float32, and bfloat16 within its rounding.

Each size is captured once, at the start; a served session replays.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from tests.checkpoints import random_config, write_random_checkpoint
from tests.oracle import load_oracle, oracle_logits
from tests.serving.emulated.rounds import (
    EAGER,
    FULL,
    LENGTHS,
    ONE_CHUNK_BEYOND_HALF_THE_MASK,
    PIECEWISE,
    THREE_IN_A_BUCKET_OF_FOUR,
    TOKENS,
    VOCABULARY,
    WORKSPACE,
    errors,
    graphs,
    prompts,
    right,
    turn,
)

ORDINARY = [
    turn(LENGTHS),
    turn((300, 700), seed=1),  # nothing in common with the first round
    turn(LENGTHS),  # now from the prefix cache
    turn(ONE_CHUNK_BEYOND_HALF_THE_MASK),
    turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2),
]
PURE = [  # no prompt is computed in the same step as a decode
    turn(THREE_IN_A_BUCKET_OF_FOUR, seed=5),
    turn((140,), seed=6),
    turn((130, 131, 132, 133, 134, 135, 136, 137), seed=4),
]
# requests that narrow their choice by top_k and top_p, by their number
HOT = {"temperature": 1.0}
NARROW = {  # one token is left, so sampling is greedy
    "1": HOT | {"top_k": 1},
    "2": HOT | {"top_p": 1e-6},
    "3": {"temperature": 1.7, "top_k": 1, "top_p": 0.5},
}
WIDE = {
    "4": HOT | {"top_k": 3, "seed": 1},
    "5": HOT | {"top_p": 0.6, "seed": 2},
    "6": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 3},
    "7": HOT | {"seed": 4},
}


def kept(
    logprobs: torch.Tensor, temperature: float = 1.0, top_k: int = VOCABULARY, top_p: float = 1.0, **_: Any
) -> set:
    """The tokens that a request may get, by definition: the k likeliest, and of these the fewest that reach p."""
    likely = (logprobs / temperature).topk(top_k)
    probabilities = likely.values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return set(likely.indices[before < top_p].tolist())


def outside(answers: list[dict[str, Any]]) -> set[str]:
    """The requests of `WIDE` that got a token which they may not get."""
    return {
        number
        for number, options in WIDE.items()
        for token, logprobs in zip(answers[int(number)]["tokens"], answers[int(number)]["logprobs"], strict=True)
        if token not in kept(torch.tensor(logprobs), **options)
    }


DRAWN = [turn((40,), tokens=12), {"prompts": prompts((40,)) * 8, "tokens": 12, "sampling": NARROW | WIDE}]
SIZES = [1, 2, 4, 8]
PIECES = random_config().num_hidden_layers + 1
SMALL_OPS = {f"NPU_GPTOSS_KERNEL_{operation}": "small_ops" for operation in ("ATTENTION_PAGED", "MOE_EXPERTS")}
FULL_AND_PIECEWISE = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "async_scheduling": False}
# by CANN and mode: an engine, its graphs for a size, and the graphs that a decode step replays
MODES: dict[tuple[str, str], tuple[dict[str, Any], int, int]] = {
    ("8.3", "eager"): ({"options": EAGER}, 0, 0),
    ("8.3", "piecewise"): ({}, PIECES, PIECES),
    ("8.3", "full decode graphs"): ({"options": FULL, "machine": WORKSPACE}, 1, 1),
    ("8.3", "small ops"): ({"options": EAGER, "variables": SMALL_OPS}, 0, 0),
    ("9.1", "eager"): ({"options": EAGER}, 0, 0),
    ("9.1", "piecewise"): ({"options": PIECEWISE}, PIECES, PIECES),
    ("9.1", "full decode graphs"): ({}, 1, 1),
    ("9.1", "full and piecewise"): ({"options": FULL_AND_PIECEWISE}, PIECES + 1, 1),
}
LONG = "eager", "full and piecewise"  # the steps of the others, and their warm-up, run without graphs too


@pytest.mark.parametrize(
    ("cann", "mode"), [pytest.param(*how, marks=[pytest.mark.long] * (how[1] in LONG)) for how in MODES]
)
def test_every_mode_equals_transformers_in_float32(cann, mode, serve_on, expected):
    """Replays the graphs of the start in every decode step, and keeps a narrowed choice in a batch with free ones."""
    how, graphs_a_size, graphs_a_step = MODES[cann, mode]
    drawn = DRAWN if cann == "8.3" else []
    rounds = ORDINARY + PURE + drawn
    results, printed = serve_on(cann)(rounds, **how, checked=True)
    assert right(rounds, results, expected) == [True] * len(rounds)
    assert not re.findall(r"Warning: .*\[R\d\d\]", printed), "a rule was broken that no card complains about"
    assert ("decode, FULL" in printed) == ("full" in mode)
    captured, replays = graphs(printed)
    assert captured == [len(SIZES) * graphs_a_size] * (len(rounds) + 1), "at the start"
    decode_steps = TOKENS - 1  # a prompt's own step has more rows than a graph
    assert replays[len(ORDINARY) :][: len(PURE)] == [decode_steps * graphs_a_step] * len(PURE)
    if drawn:
        (alone,), together = results[-len(drawn) :]
        assert [together[int(number)]["tokens"] for number in NARROW] == [alone["tokens"]] * len(NARROW)
        assert outside(together) == set()
        assert all(together[int(number)]["tokens"] != alone["tokens"] for number in WIDE), "nothing was drawn"


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in ("eager", "piecewise")), "full decode graphs"]
)
def test_bfloat16_stays_within_the_rounding_of_transformers_in_bfloat16(mode, serve, checkpoint, expected):
    rounds = [turn(LENGTHS, tokens=3)]
    how, *_ = MODES["8.3", mode]
    results, _ = serve(rounds, **{**how, "options": {**how.get("options", {}), "dtype": "bfloat16"}})
    rounded = load_oracle(checkpoint, torch.bfloat16)
    ours = torch.cat(errors(rounds, results, expected)[0])
    theirs = torch.cat(
        [
            (
                torch.log_softmax(oracle_logits(rounded, prompt + answer["tokens"][:-1])[len(prompt) - 1 :], -1)
                - expected(tuple(prompt), tuple(answer["tokens"]))
            ).abs()
            for prompt, answer in zip(rounds[0]["prompts"], results[0], strict=True)
        ]
    )
    # a router that decides otherwise by a hair moves one prompt by much, in either implementation
    assert float(ours.median()) < 1.5 * float(theirs.median())
    assert float(ours.mean()) < 2 * float(theirs.mean())


def test_experts_in_nz_are_served_and_captured_with_the_numbers_of_nd(serve):
    rounds = [turn(LENGTHS, tokens=3)]
    (nd, _), (nz, printed) = (
        serve(rounds, options={"dtype": "bfloat16"}, variables={"NPU_GPTOSS_EXPERT_FORMAT": wanted})
        for wanted in ("nd", "nz")
    )
    assert "NPU_GPTOSS_EXPERT_FORMAT" not in printed  # the warning that experts stay in ND
    assert nd == nz


def test_the_published_format_is_claimed_before_ascend_claims_it(serve, expected, tmp_path):
    """vllm-ascend takes any quantised checkpoint for its own; ours are the same values as the BF16 checkpoint's."""
    write_random_checkpoint(tmp_path / "mxfp4", vocab_size=VOCABULARY, mxfp4=True)
    rounds = [turn((5, 140))]
    info = {"VLLM_LOGGING_LEVEL": "INFO"}
    results, printed = serve(rounds, options=EAGER, model=tmp_path / "mxfp4", variables=info)
    assert right(rounds, results, expected) == [True]
    assert printed.count("experts are expanded to BF16, which is tight: ") == 1
    assert "They cannot stay packed here: moe.experts.ascend_packed needs triton_ascend, which is not i" in printed
    assert json.loads(printed.partition("PATCHES ")[2].splitlines()[0]) == {
        "ascend-host-mask": "applied",
        "ascend-full-graph": "applied",
    }

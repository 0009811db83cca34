"""Each size is captured once, at the start, and what a served session does is replay."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.checkpoints import random_config
from tests.serving.emulated.rounds import EAGER, FULL, THREE_IN_A_BUCKET_OF_FOUR, TOKENS, WORKSPACE, right, turn

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

SIZES = [1, 2, 4, 8]
PIECES = random_config().num_hidden_layers + 1


@pytest.mark.parametrize(
    ("mode", "graphs_a_step"),
    [({"options": EAGER}, 0), ({}, PIECES), ({"options": FULL, "machine": WORKSPACE}, 1)],
    ids=["eager", "piecewise", "full decode graphs"],
)
def test_each_size_is_captured_once_and_replayed_in_every_decode_step(mode, graphs_a_step, serve, expected):
    rounds = [
        turn(THREE_IN_A_BUCKET_OF_FOUR),
        turn((140,), seed=2),
        turn(THREE_IN_A_BUCKET_OF_FOUR, seed=3),
        turn((130, 131, 132, 133, 134, 135, 136, 137), seed=4),
    ]
    results, printed = serve(rounds, **mode)
    assert right(rounds, results, expected) == [True] * len(rounds)
    counts = [json.loads(line.removeprefix("GRAPHS ")) for line in printed.splitlines() if line.startswith("GRAPHS ")]
    assert [count["captured"] for count in counts] == [len(SIZES) * graphs_a_step] * (len(rounds) + 1)
    replayed = [count["replayed"] for count in counts]
    decode_steps = TOKENS - 1  # a prompt's own step has more rows than a graph
    of_rounds = [after - before for before, after in pairwise(replayed)]
    assert of_rounds == [decode_steps * graphs_a_step] * len(rounds)

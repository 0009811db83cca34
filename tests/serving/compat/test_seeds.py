"""A seed's tokens depend on the request alone: not on the cut of its prompt, not on its neighbours."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.serving.compat.in_process import HONEST, core_of, greedy, in_a_fork, run

pytestmark = pytest.mark.serving

SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
REPAIRED = ("seed-rows", "seed-neighbours")


def cut(engine: Any, budget: int, *requests: Any) -> list[Any]:
    """`run`, with at most `budget` tokens a step."""
    scheduler = core_of(engine).scheduler
    scheduler.max_num_scheduled_tokens = budget
    try:
        return run(engine, *requests)
    finally:
        scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens


@pytest.mark.parametrize("budget", [9, 16, 39])
def test_seed_draws_the_same_tokens_when_its_prompt_is_cut(engine, patched, budget):
    asked = (HONEST, greedy(**SEEDED))
    with patched():
        assert "does not use offset" in in_a_fork(lambda: cut(engine, budget, asked))
    with patched(*REPAIRED):
        uncut = run(engine, asked)
        assert cut(engine, budget, asked) == uncut
        assert run(engine, (HONEST, greedy(**SEEDED | {"seed": 8}))) != uncut


def test_seed_draws_the_same_tokens_with_unseeded_neighbours(engine, patched):
    asked = (HONEST, greedy(**SEEDED))
    others = [
        (HONEST[::-1], greedy()),
        (HONEST[5:], greedy(temperature=0.7)),
        (HONEST[9:], greedy(**SEEDED | {"seed": 9})),
    ]
    with patched():
        alone = run(engine, asked)
    with patched(*REPAIRED):
        assert run(engine, asked) == alone
        first, neighbour, _, last = run(engine, asked, *others)
        assert [first] == alone
        assert [neighbour, last] == [run(engine, other)[0] for other in (others[0], others[2])]
        # a cut prompt and rows that decode in one step
        assert cut(engine, 20, others[0], asked)[1] == alone[0]

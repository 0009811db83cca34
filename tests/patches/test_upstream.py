"""`patches/vllm-ascend-0.23.0`: what the newest release still lacks."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from ascend_emulator.launch import Machine

from emulator.tests.machine import venv
from npu_gptoss.attention.window import keys_before
from tests.checkpoints import write_random_checkpoint
from tests.patches import trees
from tests.serving.emulated.conftest import asking, importing
from tests.serving.emulated.rounds import EAGER, VOCABULARY, prompts
from tests.serving.emulated.test_stock_9_1 import FULL

WINDOW = 128
UNLIMITED = 2**31 - 1


def windows_asked_for(source: Path) -> list[int]:
    """`pre_tokens` of every call and assignment of a file, for a layer whose window is 128 keys."""
    names = {"self": SimpleNamespace(sliding_window=WINDOW), "sliding_window": WINDOW, "SWA_INT_MAX": UNLIMITED}
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.keyword(arg="pre_tokens", value=value):
                pass
            case ast.Assign(targets=[ast.Name(id="pre_tokens")], value=value):
                pass
            case _:
                continue
        if not isinstance(value, ast.Name):  # else the assignment is what counts
            found.append(eval(compile(ast.Expression(value), str(source), "eval"), names))
    return found


@pytest.mark.slow
def test_window_keeps_128_keys_not_129(newest_ascend: Path, tmp_path: Path) -> None:
    """The operator's band does not count the query's own key."""
    (diff,) = trees.PATCHES.glob("vllm-ascend-0.23.0/*.diff")
    file = trees.changed_file(diff)
    assert windows_asked_for(newest_ascend / file) == [WINDOW] * 7
    repaired = trees.copied(newest_ascend, tmp_path / "copy", diff)
    assert windows_asked_for(repaired / file) == [keys_before(WINDOW)] * 7 == [127] * 7


LENGTH, DISTANCES, STEPS = 300, range(125, 131), 2


def keys_seen(answers: list[dict]) -> list[int]:
    """How many keys a layer with a window sees: of the prompt's last row, and of the decode step after it.

    The model has that layer only, so that its logits change with a token if and only if they see it. The first answer
    is of a prompt, the others of the same with one other token, one of DISTANCES before its last.
    """
    plain, *others = answers
    assert [other["tokens"] for other in others] == [plain["tokens"]] * len(others), "else they differ by their answers"
    return [
        1
        + max(distance + step for distance, other in zip(DISTANCES, others, strict=True) if changed(plain, other, step))
        for step in range(STEPS)
    ]


def changed(one: dict, other: dict, step: int) -> bool:
    pairs = zip(one["logprobs"][step], other["logprobs"][step], strict=True)
    return max(abs(a - b) for a, b in pairs) > 1e-5  # rounding of float32 is a hundredth of it


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize(("repaired", "seen"), [(False, 129), (True, 128)], ids=["released", "with the diff"])
def test_on_the_emulated_9_1_the_diff_makes_128_keys_of_129(tmp_path: Path, repaired: bool, seen: int) -> None:
    """Eager, and with decode steps as one graph, whose calls are captured and updated in other lines."""
    machine = Machine("9.1")
    (site,) = venv(machine).glob("lib/python3*/site-packages")
    (diff,) = trees.PATCHES.glob("vllm-ascend-0.23.0/*.diff")
    write_random_checkpoint(tmp_path / "one-layer", vocab_size=VOCABULARY, layers=1)
    (plain,) = prompts((LENGTH,))
    asked = [plain, *([*plain[: -1 - d], (plain[-1 - d] + 1) % VOCABULARY, *plain[LENGTH - d :]] for d in DISTANCES)]
    paths = {"PYTHONPATH": str(trees.copied(site, tmp_path / "copy", diff))} if repaired else {}
    with importing(machine, NPU_GPTOSS="0", **paths) as process:
        serve = asking(process, tmp_path / "one-layer", tmp_path)
        for options, strict in ((EAGER, True), (FULL, False)):
            turn = {"prompts": asked, "tokens": STEPS, "spoil": None}
            (answers,), _ = serve([turn], options=options, machine={"strict": strict})
            assert keys_seen(answers) == [seen] * STEPS

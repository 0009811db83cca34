"""An Ascend A3 (910C) on both stacks: rows go to experts by MC2 and all-to-all, where an A2 gathers them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.cards import CARDS
from ascend_emulator.launch import Machine

from tests.checkpoints import new_checkpoint
from tests.oracle import load_oracle
from tests.serving.emulated.conftest import asking, importing, of_oracle
from tests.serving.emulated.rounds import EAGER, FULL, PIECEWISE, VOCABULARY, WORKSPACE, right, turn
from tests.serving.emulated.test_two_devices import PARALLEL

STACKS = {"8.3": "8.3.rc1", "9.1": "9.1"}
LAYOUTS: dict[str, dict[str, Any]] = {"one die": {}, **{how: PARALLEL[how] for how in PARALLEL if "PP" not in how}}
MODES: dict[str, dict[str, Any]] = {"eager": EAGER, "piecewise": PIECEWISE, "full decode graphs": FULL}
# the rest once, in `make test-all`
QUICK = ("9.1", "eager", "TP=2, experts in parallel")
EXPERTS = PARALLEL["TP=2, experts in parallel"]


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Each stack in a process of its own: vllm-ascend 0.23 reads when it is imported what it is built for."""
    with importing(Machine(STACKS[request.param], devices=2, card="A3")) as process:
        yield request.param, process


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An A3's dispatch takes no narrower rows."""
    return new_checkpoint(tmp_path_factory, vocab_size=VOCABULARY, hidden=1024, layers=2)


@pytest.fixture(scope="module")
def expected(wide: Path) -> Any:
    return of_oracle(load_oracle(wide))


Serve = Callable[..., tuple[list[Any], str]]


@pytest.fixture
def serve(stack: tuple[str, subprocess.Popen[str]], wide: Path, tmp_path: Path) -> Serve:
    return asking(stack[1], wide, tmp_path)


QUICK_OR_LONG = [
    pytest.param(name, mode, how, marks=[pytest.mark.long] * ((name, mode, how) != QUICK))
    for name in STACKS
    for mode in MODES
    for how in LAYOUTS
]


@pytest.mark.parametrize(("stack", "mode", "how"), QUICK_OR_LONG, indirect=["stack"], scope="module")
def test_an_a3_equals_transformers_in_float32(stack, mode, how, serve, expected):
    """Prompts of more rows than a graph has go by all-to-all, decode steps by MC2, whose padding is not written."""
    rounds = [turn((5,), seed=3), turn((1, 2, 127, 128, 129, 300)), turn((140, 7, 260), seed=2)]
    machine = WORKSPACE if mode == "full decode graphs" and stack[0] == "8.3" else {}
    results, printed = serve(rounds, options={**MODES[mode], **LAYOUTS[how]}, machine=machine)
    assert right(rounds, results, expected) == [True, True, True]
    assert ("decode, FULL" in printed) == (mode == "full decode graphs" and (stack[0] == "9.1" or "DP" not in how))


BOTH = pytest.mark.parametrize("stack", STACKS, indirect=True, scope="module")
MANY = {"max_num_seqs": 64, "compilation_config": {"cudagraph_capture_sizes": [64, 1]}}


def refusal(serve: Serve, **how: Any) -> str:
    """All that an engine says that does not start."""
    with pytest.raises(AssertionError, match="nothing was served") as caught:
        serve([], **how)
    return str(caught.value)


@pytest.mark.long
@BOTH
def test_a_buffer_too_small_for_dispatch_is_refused_in_words(stack, serve):
    said = refusal(serve, options={**MANY, **EXPERTS}, variables={"HCCL_BUFFSIZE": "1"})
    assert "HCCL_BUFFSIZE=1: on an A3 2 ranks send each other up to 32 rows each" in said
    assert "set HCCL_BUFFSIZE=2 on all ranks" in said
    assert "561002" not in said


@pytest.mark.long
@BOTH
def test_experts_in_parallel_on_one_die_are_refused_in_words(stack, serve):
    said = refusal(serve, options={**EAGER, "enable_expert_parallel": True})
    assert "--enable-expert-parallel" in said
    assert "2 and 768" in said


@pytest.mark.long
@pytest.mark.parametrize("stack", ["9.1"], indirect=True, scope="module")
def test_rows_that_combine_leaves_unwritten_are_seen(stack, serve):
    """Two requests in a graph of four: the next layer's routing would read NaN [R57]."""
    options = {**FULL, **PARALLEL["DP=2, experts in parallel"]}
    results, printed = serve([turn((140, 7, 260))], options=options, spoil="combine_not_zeroed")
    assert isinstance(results[0], str)
    assert "[R57]" in printed


@pytest.mark.long
def test_vllm_ascend_built_for_an_a2_ends_at_its_start_on_an_a3(wide, tmp_path):
    """As with the wheels of the package index, which vllm-ascend 0.23 compares with the card. A process knows its card
    from its imports on."""
    with importing(Machine("9.1", card="A3"), ASCEND_EMULATOR_BUILD=CARDS["910B3"].kind) as process:
        said = refusal(asking(process, wide, tmp_path), options=EAGER)
    assert "AscendDeviceType.A3 does not match the installed version's device type: AscendDeviceType.A2" in said

"""Experts that stay in MXFP4 on an emulated card with Triton-Ascend: the bits of the expanded ones, in every mode.

On the stack of CANN 9.1 vLLM and vllm-ascend then take their own Triton kernels, as they do on a card.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.launch import Machine
from ascend_emulator.stacks import NAMES, named

from emulator.tests.test_triton import PACKAGES, needs_compiler
from npu_gptoss.doctor.memory import CARD
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.device_memory import VARIABLE, Part, room_bytes, weight_bytes
from tests.checkpoints import new_checkpoint, write_random_checkpoint
from tests.serving.emulated.conftest import asking, importing
from tests.serving.emulated.rounds import EAGER, FULL, PIECEWISE, THREE_IN_A_BUCKET_OF_FOUR, VOCABULARY, WORKSPACE, turn

pytestmark = [pytest.mark.ascend_compiler, needs_compiler]

ROUNDS = [turn((300, 7), tokens=4), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2, tokens=4)]
LAYERS = 2
BF16 = {"dtype": "bfloat16"}
EXPANDED, PACKED = {VARIABLE: "expanded"}, {VARIABLE: "packed"}
MODES: dict[str, dict[str, Any]] = {"eager": EAGER, "piecewise": PIECEWISE, "full decode graphs": FULL}
QUICK = ("8.3", "full decode graphs")  # in `make test`
OF_9_1 = ("rotate_write_kernel", "_compute_slot_mapping_kernel")  # ours, and one of stock
Serve = Callable[..., tuple[list[Any], str]]


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, vocab_size=VOCABULARY, layers=LAYERS, mxfp4=True)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.touch()
    return path


@pytest.fixture(scope="module")
def with_triton(stack: str, trace: Path) -> Iterator[subprocess.Popen[str]]:
    with importing(Machine(named(stack).cann[0], devices=4, triton=PACKAGES, trace=trace)) as process:
        yield process


@pytest.fixture
def serve(stack: str, with_triton: subprocess.Popen[str], mxfp4: Path, tmp_path: Path) -> Serve:
    ask = asking(with_triton, mxfp4, tmp_path)

    def run(rounds: list[dict[str, Any]], **options: Any) -> tuple[list[Any], str]:
        """torch-npu 2.7.1 cannot ask a full decode graph for its workspace (R37)."""
        full = stack == "8.3" and "compilation_config" in options["options"]
        return ask(rounds, machine=WORKSPACE if full else None, **options)

    return run


def allocated(printed: str) -> int:
    """Bytes of the device when the engine had started."""
    return int(printed.partition("ALLOCATED ")[2].split()[0])


def launches(trace: Path, kernel: str = "expand_kernel") -> int:
    """Launches of a Triton kernel so far, replays included."""
    return trace.read_text().count(f'"triton::{kernel}"')


def with_the_rest_long(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in names]


def on_stacks(*, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    names = [name for name in NAMES if name not in but]
    return pytest.mark.parametrize("stack", names, scope="module")


@pytest.mark.parametrize("stack", with_the_rest_long(NAMES), scope="module")
@pytest.mark.parametrize("mode", with_the_rest_long(MODES))
def test_packed_experts_answer_bit_for_bit_as_expanded_ones(serve: Serve, trace: Path, stack: str, mode: str) -> None:
    options = {**BF16, **MODES[mode]}
    before, of_stock = launches(trace), [launches(trace, kernel) for kernel in OF_9_1]
    expanded, _ = serve(ROUNDS, options=options, variables=EXPANDED)
    assert launches(trace) == before
    packed, _ = serve(ROUNDS, options=options, variables=PACKED)
    assert isinstance(packed[0], list), packed[0]
    steps = 4 * len(ROUNDS)
    assert launches(trace) - before >= LAYERS * 2 * steps, "each layer has two projections, in every step"
    assert packed == expanded
    for kernel, earlier in zip(OF_9_1, of_stock, strict=True):
        assert (launches(trace, kernel) > earlier) == (stack == "9.1"), kernel


def check_same(serve: Serve, **how: Any) -> None:
    expanded, _ = serve(ROUNDS[:1], **how, variables=EXPANDED)
    packed, _ = serve(ROUNDS[:1], **how, variables=PACKED)
    assert isinstance(packed[0], list), packed[0]
    assert packed == expanded


@pytest.mark.long
@on_stacks()
@pytest.mark.parametrize("experts", [False, True], ids=["TP=2", "EP=2"])
@pytest.mark.parametrize("mode", ["eager", "full decode graphs"])
def test_two_devices_share_packed_experts(serve: Serve, mode: str, experts: bool) -> None:
    check_same(serve, options={**BF16, **MODES[mode], "tensor_parallel_size": 2, "enable_expert_parallel": experts})


# 3 groups of 32: a rank of four has 24 columns, of which some begin and some end within a group
THREE_GROUPS = {"intermediate": 96, "kv_heads": 4}


@pytest.mark.long
@on_stacks()
@pytest.mark.parametrize("mode", ["eager", "full decode graphs"])
def test_four_devices_cut_packed_experts_within_a_group_of_32(serve, stack, tmp_path, mode) -> None:
    """Each rank's own columns equal the expanded ones, and the others add exact zeros to its sums. So the bits are the
    same unless a longer sum is added up in another order: not here, and a card has to show it."""
    model = tmp_path / "three-groups"
    write_random_checkpoint(model, vocab_size=VOCABULARY, layers=LAYERS, mxfp4=True, **THREE_GROUPS)
    # vLLM 0.11 sets 4 GiB of the host aside for each device
    options = {**BF16, **MODES[mode], "tensor_parallel_size": 4, **({"swap_space": 0} if stack == "8.3" else {})}
    check_same(serve, options=options, model=model)


# of a layer's experts in BF16: 12.6 MB; everything else takes 0.3
DEEP, SIZES = 4, {"hidden": 512, "intermediate": 512, "experts": 8}


@pytest.fixture(scope="module")
def mostly_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GptOssConfig]:
    path = tmp_path_factory.mktemp("packed") / "experts"
    return path, write_random_checkpoint(path, vocab_size=VOCABULARY, layers=DEEP, mxfp4=True, **SIZES)


def is_a_quarter(config: GptOssConfig, packed: str, expanded: str) -> bool:
    """Compares two engines' allocations: experts take 4.25 bits of 16 and one layer's room."""
    part, saved = Part.of(config), allocated(expanded) - allocated(packed)
    room = room_bytes(config, part)
    foretold = weight_bytes(config, part) - weight_bytes(config, part, packed=True) - room
    kept = DEEP * room - saved - room
    return saved == pytest.approx(foretold, rel=0.02) and kept == pytest.approx(DEEP * room * 4.25 / 16, rel=0.03)


@pytest.mark.long
@on_stacks(but=("9.1",))
def test_packed_experts_take_a_quarter_of_the_card(with_triton, mostly_experts, tmp_path) -> None:
    """They are chosen where BF16 does not fit; a build that keeps the BF16, too, is seen."""
    model, config = mostly_experts
    serve = asking(with_triton, model, tmp_path)
    how = {"options": {**BF16, **EAGER}}
    information = {"VLLM_LOGGING_LEVEL": "INFO"}
    # 2 GiB are reserved for activations, so 4 GiB have no room for these weights; a 910B3 has
    packed, small = serve(ROUNDS[:1], **how, variables=information)
    expanded, large = serve(ROUNDS[:1], **how, variables={**information, "ASCEND_EMULATOR_MEMORY": str(CARD)})
    assert small.count("experts stay packed in MXFP4 (expanded they do not fit: ") == 1
    assert large.count("experts are expanded to BF16, which fits: ") == 1
    assert packed == expanded
    assert is_a_quarter(config, small, large)
    spoilt, both = serve(ROUNDS[:1], **how, variables=information, spoil="packed_beside_bf16")
    assert spoilt == packed, "right answers: only the memory differs"
    assert not is_a_quarter(config, both, large)


@pytest.mark.long
@on_stacks()
def test_a_checkpoint_in_bf16_cannot_be_kept_packed(serve: Serve, checkpoint: Path) -> None:
    with pytest.raises(AssertionError, match=r"EXPERT_WEIGHTS=packed: these experts are not in MXFP4; take the offici"):
        serve(ROUNDS[:1], options={**BF16, **EAGER}, variables=PACKED, model=checkpoint)

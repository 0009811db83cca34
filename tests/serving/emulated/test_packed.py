"""Experts that stay in MXFP4 on an emulated card with Triton-Ascend: the bits of the expanded ones, in every mode."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.launch import Machine

from emulator.tests.test_triton import PACKAGES
from npu_gptoss.doctor.memory import CARD
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.device_memory import VARIABLE, Part, room_bytes, weight_bytes
from tests.checkpoints import write_random_checkpoint
from tests.serving.emulated.conftest import asking, importing
from tests.serving.emulated.rounds import EAGER, FULL, THREE_IN_A_BUCKET_OF_FOUR, VOCABULARY, WORKSPACE, turn

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.ascend_compiler,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="the compiler is not set up: make setup-ascend-compiler"),
]

ROUNDS = [turn((300, 7), tokens=4), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2, tokens=4)]
BF16 = {"dtype": "bfloat16"}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"options": {**BF16, **EAGER}},
    "piecewise": {"options": BF16},
    "full decode graphs": {"options": {**BF16, **FULL}, "machine": WORKSPACE},
}
EXPANDED, PACKED = {VARIABLE: "expanded"}, {VARIABLE: "packed"}
Serve = Callable[..., tuple[list[Any], str]]


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "mxfp4"
    write_random_checkpoint(path, vocab_size=VOCABULARY, layers=2, mxfp4=True)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.touch()
    return path


@pytest.fixture(scope="module")
def with_triton(trace: Path) -> Iterator[subprocess.Popen[str]]:
    with importing(Machine(devices=2, triton=PACKAGES, trace=trace)) as process:
        yield process


def allocated(printed: str) -> int:
    """Bytes of the device when the engine had started."""
    return int(printed.partition("ALLOCATED ")[2].split()[0])


def expansions(trace: Path) -> int:
    """Launches of our kernel so far, those of replays too."""
    return trace.read_text().count('"triton::expand_kernel"')


@pytest.fixture
def serve(with_triton: subprocess.Popen[str], mxfp4: Path, tmp_path: Path) -> Serve:
    return asking(with_triton, mxfp4, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_packed_experts_answer_bit_for_bit_as_expanded_ones(serve: Serve, trace: Path, mode: str) -> None:
    before = expansions(trace)
    expanded, _ = serve(ROUNDS, **MODES[mode], variables=EXPANDED)
    assert expansions(trace) == before
    packed, _ = serve(ROUNDS, **MODES[mode], variables=PACKED)
    assert isinstance(packed[0], list), packed[0]
    steps = 4 * len(ROUNDS)
    assert expansions(trace) - before >= 2 * 2 * steps, "two layers with two projections each, in every step"
    assert packed == expanded


@pytest.mark.parametrize("experts", [False, True], ids=["TP=2", "EP=2"])
def test_two_devices_share_packed_experts(serve: Serve, experts: bool) -> None:
    options = {**BF16, **EAGER, "tensor_parallel_size": 2, "enable_expert_parallel": experts}
    expanded, _ = serve(ROUNDS[:1], options=options, variables=EXPANDED)
    packed, _ = serve(ROUNDS[:1], options=options, variables=PACKED)
    assert isinstance(packed[0], list), packed[0]
    assert packed == expanded


# of a layer's experts in BF16: 12.6 MB, beside 0.3 of everything else
LAYERS, SIZES = 4, {"hidden": 512, "intermediate": 512, "experts": 8}


@pytest.fixture(scope="module")
def mostly_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GptOssConfig]:
    path = tmp_path_factory.mktemp("packed") / "experts"
    return path, write_random_checkpoint(path, vocab_size=VOCABULARY, layers=LAYERS, mxfp4=True, **SIZES)


def test_packed_experts_take_a_quarter_of_the_card_and_are_chosen_where_bf16_does_not_fit(
    with_triton: subprocess.Popen[str], mostly_experts: tuple[Path, GptOssConfig], tmp_path: Path
) -> None:
    """Who kept the BF16 beside them would take more than without packing."""
    model, config = mostly_experts
    serve = asking(with_triton, model, tmp_path)
    how = {"options": {**BF16, **EAGER}}
    information = {"VLLM_LOGGING_LEVEL": "INFO"}
    # 4 GiB have no room for weights beside the 2 GiB that are left for activations; a 910B3 has
    packed, small = serve(ROUNDS[:1], **how, variables=information)
    expanded, large = serve(ROUNDS[:1], **how, variables={**information, "ASCEND_EMULATOR_MEMORY": str(CARD)})
    assert small.count("experts stay packed in MXFP4 (expanded they do not fit: ") == 1
    assert large.count("experts are expanded to BF16, which fits: ") == 1
    assert packed == expanded
    part, saved = Part.of(config), allocated(large) - allocated(small)
    room = room_bytes(config, part)
    assert saved == pytest.approx(weight_bytes(config, part) - weight_bytes(config, part, packed=True) - room, rel=0.02)
    kept = LAYERS * room - saved - room
    assert kept == pytest.approx(LAYERS * room * 4.25 / 16, rel=0.03)


def test_a_checkpoint_in_bf16_cannot_be_kept_packed(serve: Serve, checkpoint: Path) -> None:
    with pytest.raises(AssertionError, match=r"EXPERT_WEIGHTS=packed: these experts are not in MXFP4; take the offici"):
        serve(ROUNDS[:1], options={**BF16, **EAGER}, variables=PACKED, model=checkpoint)

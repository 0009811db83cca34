"""The files in requirements/ agree with each other, with pyproject.toml, and with vLLM's requirements."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from scripts.setup.environments import read_pins

ROOT = Path(__file__).resolve().parent.parent
LOCK = read_pins(ROOT / "requirements" / "cpu.txt")
TOOLS = read_pins(ROOT / "requirements" / "dev.txt") | read_pins(ROOT / "requirements" / "triton.txt")
LOOSE = [
    Requirement(line)
    for text in (ROOT / "requirements" / "cpu.in").read_text().splitlines()
    if (line := text.split("#")[0].strip())
]
# required by a package of the lock, and left out of it with the reason given there
LEFT_OUT = {"triton"}
NOT_IN_LOCK = {"torch", "vllm", "npu-gptoss"}  # installed by steps of their own


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_is_allowed_by_the_loose_requirements() -> None:
    wrong = [str(r) for r in LOOSE if not r.specifier.contains(LOCK.get(canonical(r.name), "0"), prereleases=True)]
    assert wrong == []


def test_the_tools_equal_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    wanted = [
        Requirement(item) for item in re.findall(r'"([^"]+)"', re.search(r"^dev = \[(.*?)\]$", text, re.M | re.S)[1])
    ]
    assert {r.name for r in wanted} >= {"pytest", "ruff", "codespell"}
    assert [str(r) for r in wanted if not r.specifier.contains(TOOLS.get(canonical(r.name), "0"))] == []


def test_the_extra_for_a_card_equals_the_images_stack() -> None:
    extra = re.search(r"^ascend = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    image = read_pins(ROOT / "requirements/910b-8.3.txt")
    wanted = [Requirement(item) for item in re.findall(r'"([^"]+)"', extra)]
    assert {r.name for r in wanted} == {"torch", "torch-npu", "vllm-ascend", "fastapi"}
    assert [str(r) for r in wanted if not r.specifier.contains(image[r.name])] == []


def test_pip_install_into_vllm_0_33_overwrites_none_of_its_files() -> None:
    """vLLM 0.33 has openai_harmony from oss-harmony; openai-harmony would overwrite it with an older release."""
    project = (ROOT / "pyproject.toml").read_text()
    asked = re.search(r"^dependencies = \[(.*?)^\]$", project, re.M | re.S)[1]
    wanted = [Requirement(item) for item in re.findall(r'"([^"]+)"', asked)]
    brought = read_pins(ROOT / "requirements" / "cuda.txt")
    assert {r.name for r in wanted} >= {"torch", "tokenizers"}
    assert [str(r) for r in wanted if not r.specifier.contains(brought.get(canonical(r.name), "0"))] == []


@pytest.mark.serving
def test_the_lock_holds_all_requirements_of_vllm() -> None:
    """The set-up installs the lock without a resolver, so a missing package would fail only at import."""
    if find_spec("vllm") is None:  # importing it would take seconds
        pytest.skip("vLLM is not installed")
    missing, seen, todo = [], set(), [("vllm", ""), ("npu-gptoss", ""), ("torch", "")]
    while todo:
        name, extra = todo.pop()
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            environment = {**default_environment(), "extra": extra}
            wanted = canonical(requirement.name)
            if requirement.marker and not requirement.marker.evaluate(environment):
                continue
            if wanted in LEFT_OUT or (name == "torch" and wanted.startswith(("nvidia-", "cuda-"))):
                continue
            if wanted not in LOCK and wanted not in NOT_IN_LOCK:
                missing.append(f"{wanted}, asked for by {name}")
                continue
            if wanted in LOCK and not requirement.specifier.contains(LOCK[wanted], prereleases=True):
                missing.append(f"{text}, asked for by {name}, is not {LOCK[wanted]}")
            for next_extra in ("", *requirement.extras):
                if (wanted, next_extra) not in seen:
                    seen.add((wanted, next_extra))
                    todo.append((wanted, next_extra))
    assert missing == []

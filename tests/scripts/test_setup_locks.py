"""The locks in requirements/: exact, complete, with a hash for each file where scripts/setup/lock.py writes them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from npu_gptoss.kernels.platform import HOPPER, Platform
from npu_gptoss.serving.lines import LINES
from scripts.setup.environments import ASCEND_STACKS, CLIENTS, ENVIRONMENTS, REQUIREMENTS
from scripts.setup.lock import NEEDED_ON_A_CARD, ONLY_FOR_TESTS, Lock, LockError, locks, render, resolve
from scripts.setup.machine import ROOT, read_pins

HASHED = locks()
IMAGES = [name for name in HASHED if "torch" in HASHED[name].pins]
EXACT = ["cpu", "dev", "evalscope", *(f"clients-{year}" for year in CLIENTS)]
A, B = "a" * 64, "b" * 64
# what evalscope asks for and only other benchmarks import, and two programs of the command line
LEFT_OUT = {"jieba", "nltk", "rouge-chinese", "rouge-score", "sacrebleu", "zhconv", "typer", "hf-xet"}
# what vLLM 0.33 asks for and gpt-oss does not import, as the lock says, and what quack-kernels asks for besides
LEFT_OUT_ON_CUDA = {
    *("fastsafetensors", "flashinfer-python", "instanttensor", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
    *("opencv-python-headless", "pynvvideocodec", "tilelang", "tokenspeed-mla", "torch-c-dlpack-ext"),
    *("torchaudio", "torchcodec"),
}
# clients' versions beyond what a package asks for, as the lock says: (what is asked too little, by whom)
BEYOND = {("openai", "litellm"), ("jiter", "instructor")}


def read(name: str) -> list[tuple[str, str, str, list[str]]]:
    """(name, version, marker, hashes) of each requirement."""
    text = (REQUIREMENTS / f"{name}.txt").read_text().replace("\\\n", " ")
    found = []
    for line in (line for line in text.splitlines() if line and not line.startswith("#")):
        match = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; (\S+ == \S+))?((?: +--hash=sha256:[0-9a-f]{64})+)", line.rstrip())
        assert match, line
        found.append((match[1], match[2], match[3] or "", match[4].split()))
    return found


@pytest.mark.parametrize("name", HASHED)
def test_a_hashed_lock_has_the_versions_that_the_tests_ran_with(name: str) -> None:
    lock, written = HASHED[name], read(name)
    versions = {name: version.partition("+")[0] for name, version, _, _ in written}
    assert {name: versions.get(name) for name in lock.pins} == dict(lock.pins)
    if lock.bounds is None:
        assert set(versions) == set(lock.pins)


@pytest.mark.parametrize("name", IMAGES)
def test_torch_is_the_build_without_cuda_unless_cuda_is_wanted(name: str) -> None:
    lock, torch = HASHED[name], HASHED[name].pins["torch"]
    entries = [(version, marker) for name, version, marker, _ in read(name) if name == "torch"]
    builds = [(torch, 'platform_machine == "aarch64"'), (f"{torch}+cpu", 'platform_machine == "x86_64"')]
    assert entries == (builds if lock.cpu_build else [(torch, "")])
    assert any(name.startswith("nvidia-") for name, *_ in read(name)) != lock.cpu_build


@pytest.mark.parametrize("stack", ASCEND_STACKS)
def test_the_emulated_910b_and_the_image_differ_in_nothing_but_tests_and_the_wheels(stack: str) -> None:
    emulated = set(read_pins(REQUIREMENTS / f"{ASCEND_STACKS[stack].lock}.txt"))
    image = {name for name, *_ in read(f"910b-{stack}")}
    assert emulated - image == ONLY_FOR_TESTS
    assert image - emulated == {"torch", "torch-npu", "vllm-ascend", *NEEDED_ON_A_CARD[stack]}


def test_an_image_of_a_line_that_needs_triton_on_a_card_has_the_one_that_kernels_are_compiled_with_here() -> None:
    """Without it vLLM 0.23's `_compute_slot_mapping_kernel` is a plain function, and the first step a TypeError.

    It wants a C++ compiler beside it, and no package that takes its module name.
    """
    images = {stack: {name: version for name, version, *_ in read(f"910b-{stack}")} for stack in ASCEND_STACKS}
    compiler = read_pins(REQUIREMENTS / "ascend-compiler.txt")["triton-ascend"]
    assert {stack: image.get("triton-ascend") for stack, image in images.items()} == {"8.3": None, "9.1": compiler}
    assert not any("triton" in image for image in images.values())
    stage = (ROOT / "docker/910b.Dockerfile").read_text().partition("AS cann-9.1\n")[2].partition("FROM")[0]
    assert re.search(r"apt-get install .*\bg\+\+", stage)


@pytest.mark.parametrize("name", EXACT)
def test_every_version_is_exact_and_listed_once(name: str) -> None:
    path = REQUIREMENTS / f"{name}.txt"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len(read_pins(path)) == len(lines)


def test_no_giant_came_back_to_evalscope() -> None:
    pins = set(read_pins(REQUIREMENTS / "evalscope.txt"))
    assert pins.isdisjoint({"torch", "triton", "vllm", "scipy", "tensorflow"} | LEFT_OUT)
    assert not [name for name in pins if name.startswith("nvidia")]


def test_the_years_have_the_same_clients_in_other_versions() -> None:
    old, new = (read_pins(REQUIREMENTS / f"clients-{year}.txt") for year in CLIENTS)
    for client in ("openai", "openai-agents", "langchain-openai", "pydantic-ai-slim", "litellm", "instructor"):
        assert old[client] != new[client]


@pytest.mark.parametrize("folder", [*(f"js/{year}" for year in CLIENTS), "agents"])
def test_a_lock_of_npm_is_of_its_list_and_names_no_host(folder: str) -> None:
    here = ROOT / "tests/clients" / folder
    listed = json.loads((here / "package.json").read_text())
    wanted = listed["dependencies"] | listed.get("optionalDependencies", {})
    packages = json.loads((here / "package-lock.json").read_text())["packages"]
    assert packages[""]["dependencies"] | packages[""].get("optionalDependencies", {}) == wanted
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert not [name for name, package in packages.items() if name and not package.get("integrity")]


def pip_says(name: str) -> tuple[Path, str]:
    """The environment, and what `pip check` says of it."""
    venv = ROOT / ENVIRONMENTS[name].folder
    if not (venv / "bin/python").exists():
        pytest.skip(f"{venv.name} is not set up")
    check = [str(venv / "bin/python"), "-m", "pip", "check"]
    return venv, subprocess.run(check, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("docs", marks=pytest.mark.docs),
        pytest.param("evalscope", marks=pytest.mark.evalscope),
        *(pytest.param(f"clients-{year}", marks=pytest.mark.clients) for year in CLIENTS),
    ],
)
def test_nothing_is_missing_and_versions_fit(name: str) -> None:
    """The locks are installed without a resolver, so pip has to be asked whether they are complete."""
    venv, said = pip_says(name)
    missing = set(re.findall(r"requires ([\w-]+), which is not installed", said))
    unlocked = (venv / ".npu-gptoss/unlocked").exists()  # by the resolver, which left nothing out
    assert missing == (LEFT_OUT if name == "evalscope" and not unlocked else set()), said
    unfit = {(asked, by) for by, asked in re.findall(r"^(\S+) \S+ has requirement (\w+)", said, re.M)}
    assert unfit <= (BEYOND if name.startswith("clients") else set()), said


def test_the_environment_for_a_gpu_lacks_nothing_but_what_its_lock_names() -> None:
    _, said = pip_says("cuda")
    assert set(re.findall(r"requires ([\w-]+), which is not installed", said)) == LEFT_OUT_ON_CUDA, said
    assert set(re.findall(r"has requirement (\w+)", said)) <= {"torch", "torchvision", "certifi"}, said


def test_the_lock_for_a_gpu_is_of_the_vllm_that_serves_there_and_of_the_triton_of_our_kernels() -> None:
    pins = read_pins(REQUIREMENTS / "cuda.txt")
    (line,) = (line for line in LINES if "cuda" in line.devices)
    assert pins["vllm"] == line.vllm.recommended
    assert HOPPER.reasons_against(Platform("cuda", frozenset({"triton"}), (9, 0), (("triton", pins["triton"]),))) == []
    assert not {"oss-harmony", "openai-harmony"} <= set(pins), "they have the same files"


def test_one_wheel_for_all_places_has_one_hash_and_others_have_each_their_own() -> None:
    x86_64 = {"p": ("1", A), "q": ("2", A), "t": ("3+cpu", A)}
    aarch64 = {"p": ("1", A), "q": ("2", B), "t": ("3", B)}
    lines = render(HASHED["910b-8.3"], {("3.11", "x86_64"): x86_64, ("3.11", "aarch64"): aarch64}).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "p==1 \\",
        f"    --hash=sha256:{A}",
        "q==2 \\",
        f"    --hash=sha256:{A} \\",
        f"    --hash=sha256:{B}",
        't==3 ; platform_machine == "aarch64" \\',
        f"    --hash=sha256:{B}",
        't==3+cpu ; platform_machine == "x86_64" \\',
        f"    --hash=sha256:{A}",
    ]


def test_the_oldest_python_decides_the_versions_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def wheels(lock: Lock, place: tuple[str, str], pins: dict[str, str], *options: str) -> dict:
        asked.append((place, dict(pins), options[0]))
        return {"mkdocs": ("1.6.1", A), "built": (f"2.{len(asked)}", A)}

    monkeypatch.setattr("scripts.setup.lock.wheels", wheels)
    places = resolve(HASHED["docs"])
    assert len(places) == 6
    assert asked[0] == (("3.10", "x86_64"), dict(HASHED["docs"].pins), "--constraint")
    assert asked[1:] == [(place, {"mkdocs": "1.6.1", "built": "2.1"}, "--no-deps") for place in places]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip looks."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # a machine's constraints may name another torch
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_a_version_that_the_index_lacks_is_an_error_with_pips_words(index: Path) -> None:
    with pytest.raises(LockError, match=r"x on Python 3\.11, aarch64 cannot be resolved(.*\n)*.*numpy==0\.0\.1"):
        resolve(Lock("x", "x", {"numpy": "0.0.1"}, machines=("aarch64",)))


def test_a_cpu_build_that_pip_finds_here_does_not_get_into_the_cuda_image(index: Path) -> None:
    for version in ("9.0", "9.0+cpu"):
        name = f"torch-{version}.dist-info"
        with zipfile.ZipFile(index / f"torch-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            archive.writestr(f"{name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{name}/RECORD", "")
    lock = Lock("x", "x", {"torch": "9.0"}, machines=("x86_64",), cpu_build=False, bounds={})
    assert {version for found in resolve(lock).values() for version, _ in found.values()} == {"9.0"}

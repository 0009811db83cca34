"""The locks in requirements/: complete, and in agreement with each other. uv refuses a version without a hash."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gptoss.kernels.platform import HOPPER, Platform
from npu_gptoss.serving.releases import RELEASES
from scripts.setup.environments import ASCEND_STACKS, CLIENTS, ENVIRONMENTS, REQUIREMENTS, ROOT, UV, read_pins

ONLY_FOR_TESTS = {"pytest", "pluggy", "iniconfig"}
# vLLM 0.23's steps on a card need it: a kernel that makes slots is a plain function without it
ON_A_CARD = {"8.3": set(), "9.1": {"triton-ascend"}}
# packages that only other benchmarks of evalscope import, and two programs of the command line
LEFT_OUT = {"jieba", "nltk", "rouge-chinese", "rouge-score", "sacrebleu", "zhconv", "typer", "hf-xet"}
# packages that vLLM 0.33 and quack-kernels ask for and gpt-oss does not import
LEFT_OUT_ON_CUDA = {
    *("fastsafetensors", "flashinfer-python", "instanttensor", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
    *("opencv-python-headless", "pynvvideocodec", "tilelang", "tokenspeed-mla", "torch-c-dlpack-ext"),
    *("torchaudio", "torchcodec"),
}
# versions beyond a package's bound, as the lock's comment says: (package, the one that asks for less)
BEYOND = {("openai", "litellm"), ("jiter", "instructor")}


def pins(name: str) -> dict[str, str]:
    return read_pins(REQUIREMENTS / f"{name}.txt")


def test_pip_alone_takes_the_locks_as_the_page_says(tmp_path: Path) -> None:
    """It reads every line, and then misses the files of an empty folder."""
    page = (ROOT / "docs/installation.md").read_text()
    (line,) = re.findall(r"^python -m (pip install .*--find-links) FOLDER (-r .*cpu\.txt)$", page, re.M)
    words = [*line[0].split(), str(tmp_path), *line[1].split(), "--dry-run", "--ignore-installed"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"No matching distribution found for [\w-]+==", done.stderr), done.stderr


@pytest.mark.parametrize("stack", ASCEND_STACKS)
def test_the_image_for_a_910b_has_what_its_emulation_was_tested_with(stack: str) -> None:
    emulated, image = pins(ASCEND_STACKS[stack]), pins(f"910b-{stack}")
    assert set(emulated) - set(image) == ONLY_FOR_TESTS
    assert set(image) - set(emulated) == ON_A_CARD[stack]
    versions = {name: version.partition("+")[0] for name, version in image.items()}
    assert {name: versions[name] for name in set(image) & set(emulated)} == {
        name: emulated[name] for name in set(image) & set(emulated)
    }


def test_910b_image_has_the_triton_that_compiles_kernels() -> None:
    """It needs a C++ compiler beside it, and no package that takes its module name."""
    images = {stack: pins(f"910b-{stack}") for stack in ASCEND_STACKS}
    compiler = pins("ascend-compiler")["triton-ascend"]
    assert {stack: image.get("triton-ascend") for stack, image in images.items()} == {"8.3": None, "9.1": compiler}
    assert not any("triton" in image for image in images.values())
    stage = (ROOT / "docker/910b.Dockerfile").read_text().partition("AS cann-9.1\n")[2].partition("FROM")[0]
    assert re.search(r"apt-get install .*\bg\+\+", stage)


def test_torch_is_the_build_without_cuda_unless_cuda_is_wanted() -> None:
    for name in ("torch-cpu", *(f"910b-{stack}" for stack in ASCEND_STACKS)):
        builds = re.findall(
            r"^torch==([\d.]+)(\+cpu)? ; platform_machine == \"(\w+)\"",
            (REQUIREMENTS / f"{name}.txt").read_text(),
            re.M,
        )
        assert [(build, machine) for _, build, machine in builds] == [("", "aarch64"), ("+cpu", "x86_64")]
        assert not any(package.startswith("nvidia-") for package in pins(name))
    assert pins("torch-cuda")["torch"] == pins("torch-cpu")["torch"].partition("+")[0]


def test_vllm_0_33_is_tested_with_the_versions_that_serve_on_a_gpu() -> None:
    tested, served = pins("vllm033"), pins("cuda")
    assert {"transformers", "oss-harmony", "xgrammar", "pydantic", "triton"} <= tested.keys() & served.keys()
    assert {name for name in tested.keys() & served.keys() if tested[name] != served[name]} == set()
    assert not any(name.startswith(("nvidia-", "cuda-", "torch", "vllm")) for name in tested)


def test_no_giant_came_back_to_evalscope() -> None:
    assert set(pins("evalscope")).isdisjoint({"torch", "triton", "vllm", "scipy", "tensorflow"} | LEFT_OUT)
    assert not [name for name in pins("evalscope") if name.startswith("nvidia")]


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


def uv_says(name: str) -> tuple[Path, str]:
    """The environment, and the output of `uv pip check` there."""
    venv = ROOT / ENVIRONMENTS[name].folder
    if not (venv / "bin/python").exists():
        pytest.skip(f"{venv.name} is not set up")
    check = [str(UV), "pip", "check", "--python", str(venv / "bin/python")]
    return venv, subprocess.run(check, capture_output=True, text=True, check=False).stderr


def missing(said: str) -> set[str]:
    return set(re.findall(r"requires `([\w-]+).*?`, but it's not installed", said))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("docs", marks=pytest.mark.docs),
        pytest.param("evalscope", marks=pytest.mark.evalscope),
        *(pytest.param(f"clients-{year}", marks=pytest.mark.clients) for year in CLIENTS),
    ],
)
def test_nothing_is_missing_and_versions_fit(name: str) -> None:
    """The locks are installed without a resolver, so uv has to be asked whether they are complete."""
    venv, said = uv_says(name)
    unlocked = ".in" in (venv / ".npu-gptoss/done").read_text()  # by the resolver, which left nothing out
    assert missing(said) == (LEFT_OUT if name == "evalscope" and not unlocked else set()), said
    unfit = set(re.findall(r"`([\w-]+)` requires `([\w-]+)[^`]*`, but `", said))
    assert {(asked, by) for by, asked in unfit} <= (BEYOND if name.startswith("clients") else set()), said


def test_the_environment_for_a_gpu_lacks_nothing_but_what_its_lock_names() -> None:
    _, said = uv_says("cuda")
    assert missing(said) == LEFT_OUT_ON_CUDA, said
    unfit = re.findall(r"requires `([\w-]+)[^`]*`, but `", said)
    assert set(unfit) <= {"torch", "torchvision", "certifi"}, said


def test_the_lock_for_a_gpu_has_the_vllm_and_the_triton_that_serve_there() -> None:
    (row,) = (row for row in RELEASES if "cuda" in row.devices)
    cuda = pins("cuda")
    assert cuda["vllm"] == row.vllm.recommended
    assert HOPPER.reasons_against(Platform("cuda", frozenset({"triton"}), (9, 0), (("triton", cuda["triton"]),))) == []
    assert not {"oss-harmony", "openai-harmony"} <= set(cuda), "they have the same files"

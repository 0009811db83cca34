"""Docker builds the images and runs them: on stand-in bases, with a daemon of the tests' own (`engine.py`)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ascend_emulator.launch import Machine
from ascend_emulator.stacks import NAMES, named

from emulator.tests.machine import venv
from npu_gptoss.serving.releases import ASCEND_RELEASES
from scripts.serve_here import tiny_checkpoint
from tests.docker import engine
from tests.docker.test_images import COMPOSE, copied
from tests.serving.server import wait_for

REASON = engine.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=f"no image is built: {REASON}")]
QUESTION, ANSWER = "What is 3 + 4?", "3 + 4 = 7."


@pytest.fixture(scope="module")
def docker() -> Iterator[engine.Engine]:
    with engine.started() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def debian(docker: engine.Engine) -> Path:
    root = engine.debian(docker.folder)
    docker.import_base(engine.PYTHON, root)
    return root


@pytest.mark.usefixtures("debian")
def test_cpu_image_answers_confined_as_in_compose(docker: engine.Engine) -> None:
    """Unmodified, on a Debian in the place of Docker Hub's image: healthy, no root, no capability, a right answer."""
    service = COMPOSE["server-cpu"]
    confined = [f"--cap-drop={name}" for name in service["cap_drop"]] + ["--read-only"] * service["read_only"]
    confined += [f"--security-opt={name}" for name in service["security_opt"]]
    confined += [f"--tmpfs={folder}" for folder in service["tmpfs"]]
    docker("run", "--detach", "--init", "--name", "cpu", *confined, docker.build("cpu"))
    docker.wait_until_healthy("cpu")
    assert docker("exec", "cpu", "id", "-u") == "1000"
    assert docker.chat("cpu", QUESTION) == ANSWER
    docker("stop", "--time", "60", "cpu")
    assert docker.state("cpu")["ExitCode"] in (0, 143), "SIGTERM ended it, not the SIGKILL that follows"


@pytest.mark.long
@pytest.mark.emulated
@pytest.mark.parametrize("stack", NAMES)
def test_910b_image_answers_through_run_910b_sh(stack, docker, debian, tmp_path) -> None:
    answers_through_run_910b_sh(docker, image_of_910b(docker, debian, stack, tmp_path / "context"), tmp_path)


# vllm-ascend's images hold both packages editable in /vllm-workspace, run as root and have no user for the driver
LIKE_THE_OFFICIAL_IMAGE = """
FROM npu-gptoss:910b
USER root
RUN python3 -m pip uninstall --quiet --yes npu-gptoss bpe-openai && userdel --remove HwHiAiUser \\
    && rm -rf /opt/npu-gptoss && cd "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \\
    && for name in vllm vllm_ascend; do \\
        mkdir -p /vllm-workspace/$name && mv $name /vllm-workspace/$name/ \\
        && echo /vllm-workspace/$name > __editable__.$name.pth || exit 1; \\
    done
ENV TIKTOKEN_ENCODINGS_BASE= VLLM_WORKER_MULTIPROC_METHOD=
ENTRYPOINT []
HEALTHCHECK NONE
"""


@pytest.mark.long
@pytest.mark.emulated
def test_official_image_with_this_package_answers(docker: engine.Engine, debian: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    image_of_910b(docker, debian, NAMES[-1], context)
    (tmp_path / "Dockerfile").write_text(LIKE_THE_OFFICIAL_IMAGE)
    base = "official.invalid/vllm-ascend:test"
    command = ("build", "--network", "host", "--tag", base, "-f", str(tmp_path / "Dockerfile"), str(tmp_path))
    docker(*command, client=docker.builder, timeout=600)
    for source in ("docker/official.Dockerfile", "requirements/910b-9.1.txt"):
        shutil.copy(engine.ROOT / source, context / source)
    image = docker.build("official", context, IMAGE=base.partition(":")[0], TAG="test")
    answers_through_run_910b_sh(docker, image, tmp_path)


def image_of_910b(docker: engine.Engine, debian: Path, stack: str, context: Path) -> str:
    """The image's CANN is the emulated one, its torch the package index's; the other stack's base cannot be pulled."""
    row = ASCEND_RELEASES[NAMES.index(stack)]
    cann = next(version for version in named(stack).cann if version in row.image)
    engine.add_emulated_cann(debian, venv(Machine(cann=cann)), cann)
    docker.import_base(f"{engine.CANN}:{row.image}", debian, f"ENV LD_LIBRARY_PATH={engine.LIBRARIES}")
    engine.exchange_torch(context, [*copied("910b"), "docker/910b.Dockerfile"], debian)
    return docker.build("910b", context, STACK=stack, CANN_IMAGE=engine.CANN)


def answers_through_run_910b_sh(docker: engine.Engine, image: str, folder: Path) -> None:
    """Healthy, as the driver's user with its devices alone, preflight sees CANN and driver, a right answer, ends."""
    model = tiny_checkpoint(folder / "gpt-oss-tiny")
    script = [engine.ROOT / "docker/run-910b.sh", "--model", model, "--devices", "1", "--image", image]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(docker.on_the_host(*script), env=docker.variables, stdout=log, stderr=log)
    assert wait_for(lambda: server.poll() is not None or "npu-gptoss" in docker("ps"), 60)
    assert server.poll() is None, (folder / "log").read_text()
    docker.wait_until_healthy("npu-gptoss")
    assert "ready after" in (folder / "log").read_text()
    assert docker.chat("npu-gptoss", QUESTION) == ANSWER

    inside = "id -un; ls /dev | grep -E 'davinci|devmm|hisi' | xargs; test -w /dev/davinci1; grep CapEff /proc/1/status"
    seen = docker("exec", "npu-gptoss", "sh", "-ec", inside).split("\n")
    assert seen == ["HwHiAiUser", "davinci1 davinci_manager devmm_svm hisi_hdc", "CapEff:\t0000000000000000"]
    preflight = docker("exec", "npu-gptoss", "sh", "-c", "python3 /opt/npu-gptoss/docker/preflight.py 2>&1 || true")
    assert " cann: " in preflight, "the shell of exec has not sourced CANN's set_env.sh"
    assert " driver: " not in preflight
    assert " device-files: " not in preflight
    server.terminate()
    assert server.wait(60) in (0, 143)


@pytest.mark.long
@pytest.mark.usefixtures("debian")
def test_cuda_image_holds_gluon_and_server_tests(docker: engine.Engine) -> None:
    """Both need the versions that are served on GPUs: without them they were skipped, and the run was green."""
    image = docker.build("cuda")
    collect = "python3 -m pytest -m cuda --collect-only -q -p no:cacheprovider"
    found = docker("run", "--rm", image, "sh", "-c", f"{collect} 2>&1", timeout=300)
    assert "gluon" in found
    assert "tests/serving/cuda/test_serve.py" in found
    assert "no NVIDIA GPU" in docker("run", "--rm", image, "sh", "-c", "make test-cuda PYTHON=python3 2>&1 || true")

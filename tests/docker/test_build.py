"""Docker builds the images and runs them: on stand-in bases, with a daemon of the tests' own (`engine.py`)."""

from __future__ import annotations

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
def test_910b_image_answers_through_run_910b_sh(
    stack: str, docker: engine.Engine, debian: Path, tmp_path: Path
) -> None:
    """The image's CANN is the emulated one, its torch the package index's; the other stack's base cannot be pulled."""
    row = ASCEND_RELEASES[NAMES.index(stack)]
    cann = next(version for version in named(stack).cann if version in row.image)
    engine.add_emulated_cann(debian, venv(Machine(cann=cann)), cann)
    docker.import_base(f"{engine.CANN}:{row.image}", debian, f"ENV LD_LIBRARY_PATH={engine.LIBRARIES}")
    engine.exchange_torch(tmp_path, [*copied("910b"), "docker/910b.Dockerfile"], debian)
    image = docker.build("910b", tmp_path, STACK=stack, CANN_IMAGE=engine.CANN)

    model = tiny_checkpoint(tmp_path / "gpt-oss-tiny")
    script = [engine.ROOT / "docker/run-910b.sh", "--model", model, "--devices", "1", "--image", image]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(docker.on_the_host(*script), env=docker.variables, stdout=log, stderr=log)
    assert engine.wait(lambda: server.poll() is not None or "npu-gptoss" in docker("ps"), 60)
    assert server.poll() is None, (tmp_path / "log").read_text()
    docker.wait_until_healthy("npu-gptoss")
    assert "ready after" in (tmp_path / "log").read_text()
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

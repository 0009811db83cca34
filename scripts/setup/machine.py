"""Brings a virtual environment up to date by a list of steps: each runs once, resumed where it was interrupted.

A finished step leaves a stamp in `.npu-gptoss` of the environment, a hash of everything the step depends on. The step
runs again when that changes, when one of its packages is gone, or when the environment is broken or was moved. All
packages come through the user's own pip configuration. Standard library only; Python 3.8 or newer.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.setup import uv

ROOT = Path(__file__).resolve().parents[2]
UV = ROOT / ".venv-uv"  # for all environments
UV_LOCK = ROOT / "requirements/uv.txt"
FREE_GB_NEEDED = 3.0
STATE = ".npu-gptoss"
PLACE = "place"  # its content: where the environment was made; environments of older set-ups lack it
# PYTHONPATH and --user would leak the machine's packages into the environment; compiled imports belong there
DROPPED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONDONTWRITEBYTECODE")

AGAIN = "run the same command again: what is finished is not done twice."
# what pip writes into its log -> what it means
LIKELY = (
    (
        ("No space left on device", "Disk quota exceeded"),
        f"the disk is full: of this folder, of TMPDIR (or /tmp), or of pip's cache. Make space and {AGAIN}",
    ),
    (
        (
            *("NewConnectionError", "ConnectTimeoutError", "Failed to resolve", "NameResolutionError", "ProxyError"),
            *("Temporary failure in name resolution", "Connection refused", "Network is unreachable"),
        ),
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


def read_pins(path: Path) -> dict[str, str]:
    """name -> version of a requirements file that holds `name==version` lines, with hashes or without, and comments."""
    lines = (line.split("#")[0].strip(" \\") for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("--hash="))
    return {re.sub(r"[-_.]+", "-", name.strip()).lower(): version.strip() for name, version in pairs}


def clean_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        # what uv shall do is what pip is configured to do; but the place of its cache is the user's
        if name not in DROPPED_VARIABLES and (not name.startswith("UV_") or name == "UV_CACHE_DIR")
    }
    pip = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return {**kept, **pip, "PYTHONNOUSERSITE": "1"}


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True)


@dataclass
class Environment:
    """A virtual environment. `packages`: name -> version, of completely installed ones.

    uv: its variables, once it is known whether it can be used here; None where pip installs.
    """

    path: Path
    free_gb: float = FREE_GB_NEEDED  # before it is made
    packages: dict[str, str] = field(default_factory=dict)
    index_reached: bool = False
    uv: Mapping[str, str] | None = None
    uv_tried: bool = False

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def state(self) -> Path:
        return self.path / STATE

    def inspect(self) -> str | None:
        """Reads the packages; returns why the environment cannot be used, or None."""
        place = self.state / PLACE
        if not self.python.exists():
            return "it has no bin/python"
        if not place.exists():
            return "its creation was interrupted, or an older set-up made it"
        if place.read_text() != str(self.path):
            return f"it was made as {place.read_text()} and moved, so the first lines of its commands are wrong"
        run = ask(str(self.python), "-c", INSPECT)
        if run.returncode:
            return "its Python does not start or has no pip: " + (run.stderr.strip().splitlines() or ["no output"])[-1]
        self.packages = json.loads(run.stdout)
        return None


class Run:
    """One step in an environment: its commands write into a log, and it shows that time passes."""

    def __init__(self, env: Environment, name: str, label: str) -> None:
        self.env, self.log, self.label, self.start = env, env.state / f"{name}.log", label, time.monotonic()
        self.live = sys.stdout.isatty()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        print(label, end="" if self.live else "\n", flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def attempt(self, *command: str, **variables: str) -> bool:
        """True when the command succeeded. A Ctrl-C ends the command too (it is in the same process group)."""
        with self.log.open("a") as log:
            log.write("$ " + " ".join(command) + "\n")
            log.flush()
            environment = {**clean_environment(), **variables}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
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

    def _tick(self, printed: float) -> float:
        if self.live:
            print(f"\r{self.label} {self.seconds():.0f} s", end="", flush=True)
        elif self.seconds() - printed >= 15:
            lines = [line.strip() for line in self.logged().splitlines() if not line.startswith("WARNING")]
            last = next((line[:90] for line in reversed(lines) if line), "")
            print(f"      … {self.seconds():.0f} s: {last}", flush=True)
            return self.seconds()
        return printed

    def must(self, *command: str) -> None:
        self._must(self.attempt(*command))

    def _must(self, done: bool) -> None:
        if not done:
            raise self.likely() or self.failure("this step failed", f"Mend what it names and {AGAIN}")

    def must_install(self, *arguments: str) -> None:
        self._must(self.install(*arguments))

    def install(self, *arguments: str) -> bool:
        """What `pip install` does with these arguments: by uv, and by pip where there is none or it fails."""
        self.reach_index()
        if not self.env.uv_tried:
            self.env.uv, self.env.uv_tried = self._get_uv(), True
        if self.env.uv is not None:
            command = (str(UV / "bin/uv"), *uv.INSTALL, str(self.env.python), *arguments)
            if self.attempt(*command, **self.env.uv):
                return True
            said = self.logged().strip().splitlines()
            print(f"\n      uv could not, so pip tries: {said[-1].strip()[:150]}", flush=True)
            self.log.write_text("")  # why pip fails is what it says itself
        return self.attempt(*self.pip(*arguments))

    def _get_uv(self) -> Mapping[str, str] | None:
        variables = uv.variables_for(ask(str(self.env.python), "-c", uv.ASK_PIP).stdout)
        if variables is None:
            return None
        stamp, lock = UV / "made-for", UV_LOCK.read_text()
        with held(UV_LOCK):  # set-ups run side by side
            if stamp.is_file() and stamp.read_text() == lock:
                return variables
            shutil.rmtree(UV, ignore_errors=True)
            hashed = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
            if self.attempt(*self.pip(*hashed, "--target", str(UV), "-r", str(UV_LOCK))):
                stamp.write_text(lock)
                return variables
        print("\n      uv cannot be had here: pip installs, which takes longer", flush=True)
        self.log.write_text("")
        return None

    def pip(self, *arguments: str) -> tuple[str, ...]:
        # --no-compile: most of it is never imported, and compiling all of it takes longer than installing it
        options = ("--no-compile", "--progress-bar", "off")
        return (str(self.env.python), "-m", "pip", "install", *options, *arguments)

    def reach_index(self) -> None:
        """One small question to where pip looks, once: SetupError, after seconds, when there is no network.

        Otherwise pip asks for each package six times, and a network that is away looks like a version that is.
        """
        if self.env.index_reached:
            return
        question = ["pip", "download", "-vv", "--no-deps", "--retries", "0", "--timeout", "15"]
        reached = self.attempt(str(self.env.python), "-m", *question, "--dest", str(self.env.state / "asked"), "wheel")
        if not reached and (why := self.likely()):
            raise why
        self.env.index_reached = True
        self.log.write_text("")  # a second index that is away is no reason for what fails later

    def likely(self) -> SetupError | None:
        """Why a command failed that a user could not know from its log's many lines; None when nothing tells."""
        text = self.logged()
        for signs, sentence in LIKELY:
            if any(sign in text for sign in signs):
                return SetupError(f"{sentence} The whole log: {self.log}")
        return None

    def failure(self, what: str, remedy: str) -> SetupError:
        tail = "\n".join("    " + line for line in self.logged().splitlines()[-15:])
        return SetupError(f"{what}; the end of its log ({self.log}):\n{tail}\n{remedy}")

    def done(self, note: str) -> None:
        end = f"{self.seconds():.0f} s" + (f", {note}" if note else "")
        print(f"\r{self.label} {end}" if self.live else f"      {end}", flush=True)


@dataclass(frozen=True)
class Step:
    """What `action` returns is said behind the time that it took. `inputs`: what the stamp hashes.

    pins: packages without which the step runs again. after: steps whose running makes this one run again.
    """

    name: str
    purpose: str
    action: Callable[[Run], str | None]
    inputs: Sequence[str] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    after: Sequence[str] = ()

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join([self.name, str(ROOT), *self.inputs]).encode()).hexdigest()

    def is_done(self, env: Environment) -> bool:
        stamp = env.state / self.name
        if not stamp.is_file() or stamp.read_text() != self.key:
            return False
        if self.name == "packages" and (env.state / "unlocked").exists():
            return True  # the resolver chose the versions
        return all(name in env.packages and version in ("", env.packages[name]) for name, version in self.pins.items())


def lock_step(purpose: str, lock: Path, loose: Sequence[str] = (), options: Sequence[str] = ()) -> Step:
    """Installs what a lock names, without a resolver; where a version cannot be had, what pip makes of `loose`.

    options: of pip, for the lock. A file with another hash than the lock's is an error: `loose` would take it all the
    same.
    """

    def install(run: Run) -> str | None:
        unlocked = run.env.state / "unlocked"
        unlocked.unlink(missing_ok=True)
        from_lock = ("--no-deps", *options, "-r", str(lock))
        if not loose:
            return run.must_install(*from_lock)
        if run.install(*from_lock):
            return None
        if why := run.likely():
            raise why
        if "DO NOT MATCH THE HASHES" in run.logged():
            raise run.failure(
                f"a file has another hash than {lock.name} says, and is not installed",
                "It is damaged, or somebody has replaced it: ask your registry, or take another one.",
            )
        unlocked.touch()
        run.must(*run.pip(*loose))
        taken = " and ".join(word for word in loose if word != "-r")
        return f"not all versions of {lock.name} can be had here: took what {taken} allows"

    files = [lock, *(ROOT / word for word in loose if (ROOT / word).is_file())]
    return Step("packages", purpose, install, [*(file.read_text() for file in files), *loose], read_pins(lock))


def choose_python(wanted: str, versions: Sequence[str]) -> str:
    """The interpreter for the environment: `wanted`, or the first suitable one. Raises with all the reasons."""
    probe = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    reasons = []
    names = [wanted] if wanted else [*(f"python{version}" for version in versions), "python3", sys.executable]
    for name in names:
        path = shutil.which(name)
        if path is None:
            reasons.append(f"{name} is not there")
            continue
        run = ask(path, "-c", probe)
        if run.returncode and "ensurepip" in run.stderr:
            package = f"{Path(name).name}-venv"
            reasons.append(f"{name} cannot make environments (on Debian and Ubuntu: apt install {package})")
        elif run.returncode:
            reasons.append(f"{name} does not start")
        elif run.stdout.strip() not in versions:
            reasons.append(f"{name} is Python {run.stdout.strip()}")
        else:
            return path
    others = f" ({' and '.join(versions[1:])} work too)" if versions[1:] else ""
    raise SetupError(
        f"Python {versions[0]} is needed{others}, and none was found: " + "; ".join(dict.fromkeys(reasons)) + ". "
        f"Install one, or name it: make serve PYTHON=/path/to/python{versions[0]}"
    )


def make_environment(run: Run, python: str) -> str:
    env = run.env
    free = shutil.disk_usage(env.path.parent).free / 1e9
    if free < env.free_gb:
        raise SetupError(f"{free:.1f} GB are free in {env.path.parent}, the environment needs about {env.free_gb:.0f}")
    run.must(python, "-m", "venv", str(env.path))
    (env.state / PLACE).write_text(str(env.path))
    return ask(str(env.python), "-V").stdout.strip()


def prepare(env: Environment, python: str) -> None:
    """Removes an environment that cannot be used, or is of another Python than `python`; never one made elsewhere."""
    if not env.path.exists():
        return
    if not env.state.is_dir():
        raise SetupError(
            f"{env.path} exists and was not made by this set-up. Move it away, then run the same command again."
        )
    problem = env.inspect()
    if problem is None and python:
        wanted, own = (ask(name, "-V").stdout.strip() for name in (python, str(env.python)))
        if wanted != own:
            problem = f"it holds {own}, and {python} is {wanted}"
    if problem:
        print(f"set-up: {env.path} is made anew: {problem}", flush=True)
        shutil.rmtree(env.path)


def bring_up_to_date(env: Environment, table: Sequence[Step], size: str) -> None:
    """Every step that is not done, in order. Raises SetupError when one fails or the result is of no use."""
    to_do: list[Step] = []
    for step in table:
        if not step.is_done(env) or any(other.name in step.after for other in to_do):
            to_do.append(step)
    if not to_do:
        print(f"set-up: {env.path.name} is up to date", flush=True)
        return
    start = time.monotonic()
    print(f"set-up: {len(to_do)} of {len(table)} steps to do in {env.path} (about {size} when complete)", flush=True)
    env.state.mkdir(parents=True, exist_ok=True)
    for info in env.path.glob("lib/python*/site-packages/*.dist-info"):
        if not (info / "RECORD").exists():  # half installed: pip can neither use nor replace it
            shutil.rmtree(info)
    for step in to_do:  # all of them first: what comes `after` an interrupted step is still to do
        (env.state / step.name).unlink(missing_ok=True)
    for step in to_do:
        number = f"[{table.index(step) + 1}/{len(table)}]"
        run = Run(env, step.name, f"{number} {step.name + ':':<12} {step.purpose} …")
        run.done(step.action(run) or "")
        (env.state / step.name).write_text(step.key)
    if problem := env.inspect():
        raise SetupError(f"{env.path} was set up but cannot be used: {problem}. Remove the folder and run again.")
    print(f"set-up: complete after {time.monotonic() - start:.0f} s", flush=True)


def in_words(error: OSError, folder: Path) -> str:
    """What the file system refused below `folder`, and what to do."""
    what = f"{error.filename or folder}: {error.strerror or error}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} The disk is full; an environment needs {FREE_GB_NEEDED:.0f} GB or more. Make space and {AGAIN}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                what += f" {folder} belongs to the user {folder.stat().st_uid}, and this is {os.getuid()}."
        return f"{what} The set-up writes into this folder; use a checkout of your own: git clone '{ROOT}'"
    return f"{what} Mend it and {AGAIN}"


@contextlib.contextmanager
def held(path: Path, waiting: str = "") -> Iterator[None]:
    """While no other process holds the file or folder; `waiting` is said where one does."""
    lock = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, end="", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def alone_in(place: Path, work: Callable[[], None]) -> int:
    """The exit status of `work`, done while no other set-up is at this environment: 0, 1 with a sentence, 130."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    lock = place.with_name(f"{place.name}.lock")  # beside it: the environment may be made anew
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        with held(lock, f"set-up: another one is at work in {place.name}; waiting for it\n"):
            work()
    except (SetupError, OSError) as error:
        print(f"\nset-up: {in_words(error, place.parent) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted. Run the same command again: finished steps are skipped.", file=sys.stderr)
        return 130
    return 0

"""Write the locks with hashes: those of the images, cuda.txt, docs.txt and uv.txt in requirements/.

The images' versions come from the locks that the tests run on (emulated*.txt, cpu.txt, dev.txt); the site's are
what pip resolves once; those of cuda.txt are written there by hand. For each version the package index is asked,
through pip, for the wheel of each Python and machine; the hashes are those that the index publishes. A version without
a wheel for one of them is an error. `--check` writes nothing and says whether the files are right.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.files import write_atomically
from scripts.setup.environments import ASCEND_STACKS, REQUIREMENTS, TORCH, TORCH_ON_ASCEND
from scripts.setup.machine import read_pins

MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 35  # Ubuntu 22.04's; Debian 12 has a newer one
# PyTorch's builds for CPUs on x86_64 are on its own index only (on aarch64 the package index's build is one):
# SHA-256 of <name>-<version>-cp311-cp311-manylinux_2_28_x86_64.whl.
CPU_BUILDS = {
    ("torch", f"{TORCH_ON_ASCEND}+cpu"): "a1684793e352f03fa14f78857e55d65de4ada8405ded1da2bf4f452179c4b779",
    ("torch", f"{TORCH}+cpu"): "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    ("torch", "2.10.0+cpu"): "b7cb1ec66cefb90fd7b676eac72cfda3b8d4e4d0cacd7a531963bc2e0a9710ab",
    ("torchvision", "0.25.0+cpu"): "aa016ab73e06a886f72edc8929ed2ed4c85aaaa6e10500ecdef921b03129b19e",
}
BUILT_FOR_CPUS = ("torch", "torchvision")
LEFT_OUT = {
    "8.3": "torchvision, cmake and triton, which gpt-oss does not import.",
    "9.1": "cmake, and triton, whose module name is triton-ascend's.",
}
# Without it each step of vLLM 0.23 on Ascend ends: a kernel that makes slots is a plain function then. vllm-ascend
# asks for 3.2.2, which the package index does not have; this release is what the tests compile its kernels with.
NEEDED_ON_A_CARD = {"8.3": (), "9.1": ("triton-ascend",)}
ONLY_FOR_TESTS = {"pytest", "pluggy", "iniconfig"}
ON_CUDA_SERVED = """\
The environment of `make serve` on an NVIDIA GPU: vLLM 0.33.0 with the torch and the Triton with which it
# has served on H200s and H100s, one and two. vLLM asks for torch 2.14, which has served on two H200s and gains nothing,
# and for a certifi that is not published. Left out on purpose, since a start does not import it (a test asks
# vLLM's own modules): audio and video (opencv, torchaudio, torchcodec, pynvvideocodec), others' kernels and
# loaders (flashinfer, cutlass-dsl, cudnn-frontend, tilelang, tokenspeed-mla, fastsafetensors, instanttensor).
# To change a version, write it here without its hashes, and run `lock.py cuda`."""

Place = tuple[str, str]  # Python, machine
Wheels = Mapping[str, tuple[str, str]]  # name -> version, SHA-256


class LockError(Exception):
    """What was expected, what was got, what to do."""


@dataclass(frozen=True)
class Lock:
    """`pins`: name -> version. `cpu_build`: on x86_64, torch and torchvision are PyTorch's builds for CPUs.

    bounds: None where the pins lack nothing, so that nothing is resolved; else what limits the versions of the rest.
    """

    name: str
    title: str
    pins: Mapping[str, str]
    machines: tuple[str, ...] = MACHINES
    pythons: tuple[str, ...] = ("3.11",)
    cpu_build: bool = True
    bounds: Mapping[str, str] | None = None

    @property
    def path(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    @property
    def places(self) -> list[Place]:
        return [(python, machine) for python in self.pythons for machine in self.machines]


def on_ascend(name: str) -> Lock:
    """Of a stack's image: what its tests ran on, without the tests, and with what they have from elsewhere."""
    stack = ASCEND_STACKS[name]
    pins = read_pins(REQUIREMENTS / f"{stack.lock}.txt")
    pins = {name: version for name, version in pins.items() if name not in ONLY_FOR_TESTS}
    title = (
        f"docker/910b.Dockerfile: the emulated 910B's packages with torch and the Ascend wheels; vLLM comes from\n"
        f"# its source release. Left out on purpose: {LEFT_OUT[name]}"
    )
    own = {"torch": stack.torch, "torch-npu": stack.torch_npu, "vllm-ascend": stack.vllm_ascend}
    compiler = read_pins(REQUIREMENTS / "ascend-compiler.txt")
    return Lock(f"910b-{name}", title, pins | own | {needed: compiler[needed] for needed in NEEDED_ON_A_CARD[name]})


def locks() -> dict[str, Lock]:
    cpu, tools = (read_pins(REQUIREMENTS / f"{name}.txt") for name in ("cpu", "dev"))
    found = (
        *(on_ascend(name) for name in ASCEND_STACKS),
        Lock(
            "cpu-image",
            "docker/cpu.Dockerfile: cpu.txt with torch; vLLM comes from its source release.",
            cpu | {"torch": TORCH},
        ),
        Lock(
            "cuda-image",
            "docker/cuda.Dockerfile: what runs its tests, beside cuda.txt.",
            {name: tools[name] for name in ("pytest", "pytest-xdist", "pluggy", "iniconfig", "execnet")},
            machines=("x86_64",),
            cpu_build=False,
        ),
        Lock(
            "cuda",
            ON_CUDA_SERVED,
            read_pins(REQUIREMENTS / "cuda.txt"),
            machines=("x86_64",),
            pythons=("3.11", "3.12"),
            cpu_build=False,
        ),
        Lock("uv", "What installs the environments in pip's place.", {"uv": "0.13.9"}, cpu_build=False),
        Lock(
            "docs",
            "The environment of `make docs`: MkDocs with its theme.",
            {"mkdocs": "1.6.1", "mkdocs-material": "9.7.7"},
            pythons=("3.10", "3.11", "3.12"),  # the oldest decides which versions all get
            bounds={},
        ),
    )
    return {lock.name: lock for lock in found}


def platform_flags(python: str, machine: str) -> list[str]:
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 4, -1)]
    tags += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    flags = ["--python-version", python, "--implementation", "cp"]
    for tag in tags:
        flags += ["--platform", tag]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        flags += ["--abi", abi]
    return flags


def wheels(lock: Lock, place: Place, pins: Mapping[str, str], *options: str) -> dict[str, tuple[str, str]]:
    """name -> (version, SHA-256) of the wheels that pip would install there for these pins. Raises LockError."""
    # `==` would also take torch's +cpu build, where pip is configured to find one
    wanted = [f"{name}{'===' if name == 'torch' else '=='}{version}" for name, version in pins.items()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--no-cache-dir", "--only-binary", ":all:", "--report", str(report)]
        command += ["--target", str(Path(folder) / "nowhere")]
        run = subprocess.run([*command, *platform_flags(*place), *options, *wanted], capture_output=True, text=True)
        if run.returncode:
            where = f"{lock.name} on Python {place[0]}, {place[1]}"
            raise LockError(f"{where} cannot be resolved. pip says:\n{run.stdout}{run.stderr}")
        installs = json.loads(report.read_text())["install"]
    found = {}
    for item in installs:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise LockError(f"the index names no SHA-256 for {name}; ask another one (pip config list)")
        found[name] = (item["metadata"]["version"], digest)
    return found


def resolve(lock: Lock) -> dict[Place, Wheels]:
    """The wheels of every place. Raises LockError."""
    pins = dict(lock.pins)
    if lock.bounds is not None:
        with tempfile.TemporaryDirectory() as folder:
            bounds = Path(folder) / "bounds.txt"
            bounds.write_text("".join(f"{name}=={version}\n" for name, version in lock.bounds.items()))
            resolved = wheels(lock, lock.places[0], pins, "--constraint", str(bounds))
        pins = {name: version for name, (version, _) in resolved.items()}
    found: dict[Place, Wheels] = {}
    for place in lock.places:
        own, external = dict(pins), {}
        if lock.cpu_build and place[1] == "x86_64":
            builds = {name: f"{own.pop(name)}+cpu" for name in BUILT_FOR_CPUS if name in pins}
            external = {name: (build, CPU_BUILDS[name, build]) for name, build in builds.items()}
        found[place] = wheels(lock, place, own, "--no-deps") | external
    return found


def render(lock: Lock, resolved: Mapping[Place, Wheels]) -> str:
    pythons = " to ".join(dict.fromkeys((lock.pythons[0], lock.pythons[-1])))
    lines = [
        f"# {lock.title}",
        f"# Written by scripts/setup/lock.py for Python {pythons}; install it with --require-hashes.",
    ]
    for name in sorted({name for found in resolved.values() for name in found}):
        here = {place: found[name] for place, found in resolved.items() if name in found}
        for version in sorted({version for version, _ in here.values()}):
            holders = [place for place in here if here[place][0] == version]
            digests = dict.fromkeys(here[place][1] for place in holders)
            marker = "" if len(holders) == len(resolved) else f' ; platform_machine == "{holders[0][1]}"'
            lines.append(" \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{d}" for d in digests)]))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    known = locks()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; without any, all of them")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the files are right")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such lock: {', '.join(unknown)}; there are {', '.join(known)}")
    wrong = []
    try:
        for lock in (known[name] for name in options.names or known):
            text = render(lock, resolve(lock))
            print(f"requirements/{lock.path.name}: {text.count('==')} requirements", flush=True)
            if options.check:
                wrong += [] if lock.path.is_file() and lock.path.read_text() == text else [lock.path.name]
                continue
            write_atomically(lock.path, text.encode())
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    if wrong:
        print(f"lock: not as the index and the locks say: {', '.join(wrong)}. Write anew without --check.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

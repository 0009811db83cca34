"""Write requirements/910b.txt, cpu-image.txt and cuda-image.txt: what docker/'s images install, pinned and hashed.

Versions come from the locks that the tests run on (emulated.txt, cpu.txt, dev.txt). For each the package index is
asked, through pip, which wheel it has for Python 3.11 on Linux x86_64 and aarch64; the hashes are those that the index
publishes. A version without a wheel for one of the two is an error. `--check` writes nothing and says whether the files
are right.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/setup"))  # imported by a test, it finds its siblings as they find each other

from setup_emulated import TORCH as TORCH_ON_ASCEND  # noqa: E402
from setup_emulated import TORCH_NPU, VLLM_ASCEND  # noqa: E402
from setup_venv import TORCH, read_pins  # noqa: E402

REQUIREMENTS = ROOT / "requirements"
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 35  # Ubuntu 22.04's; Debian 12 has a newer one
# PyTorch's builds for CPUs on x86_64 are on its own index only (on aarch64 the package index's build is one):
# SHA-256 of torch-<version>-cp311-cp311-manylinux_2_28_x86_64.whl.
CPU_BUILDS = {
    f"{TORCH_ON_ASCEND}+cpu": "a1684793e352f03fa14f78857e55d65de4ada8405ded1da2bf4f452179c4b779",
    f"{TORCH}+cpu": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
}
ONLY_FOR_TESTS = {"pytest", "pluggy", "iniconfig"}
# what the tests on an NVIDIA GPU import, besides torch and what make check needs
ON_CUDA = ("numpy", "safetensors", "tokenizers", "openai-harmony", "tqdm", "bpe-openai", "transformers", "jinja2")


class LockError(Exception):
    """What was expected, what was got, what to do."""


@dataclass(frozen=True)
class Image:
    """`pins`: name -> version, without torch. `torch`: its version. `closed`: the pins lack nothing, so no resolver."""

    name: str
    title: str
    pins: Mapping[str, str]
    torch: str
    machines: tuple[str, ...] = MACHINES
    cpu_build: bool = True
    closed: bool = True

    @property
    def path(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"


def images() -> tuple[Image, ...]:
    emulated, cpu, tools = (read_pins(REQUIREMENTS / f"{name}.txt") for name in ("emulated", "cpu", "dev"))
    ascend = {name: version for name, version in emulated.items() if name not in ONLY_FOR_TESTS}
    return (
        Image(
            "910b",
            "docker/910b.Dockerfile: the emulated 910B's packages with torch and the Ascend wheels; vLLM comes from\n"
            "# its source release. Left out on purpose: torchvision, cmake and triton, which gpt-oss does not import.",
            ascend | {"torch-npu": TORCH_NPU, "vllm-ascend": VLLM_ASCEND},
            TORCH_ON_ASCEND,
        ),
        Image(
            "cpu-image",
            "docker/cpu.Dockerfile: cpu.txt with torch; vLLM comes from its source release.",
            cpu,
            TORCH,
        ),
        Image(
            "cuda-image",
            "docker/cuda.Dockerfile: what make test-cuda runs on, with torch's CUDA build and what that asks for.",
            {name: (cpu | tools)[name] for name in (*ON_CUDA, *tools)},
            TORCH,
            machines=("x86_64",),
            cpu_build=False,
            closed=False,
        ),
    )


def platform_flags(machine: str, python: str = "3.11") -> list[str]:
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 4, -1)]
    tags += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    flags = ["--python-version", python, "--implementation", "cp"]
    for tag in tags:
        flags += ["--platform", tag]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        flags += ["--abi", abi]
    return flags


def wheels(title: str, *arguments: str) -> dict[str, tuple[str, str]]:
    """name -> (version, SHA-256) of the wheels that pip would install with these arguments.

    Raises LockError, which names `title` and has pip's words.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--no-cache-dir", "--only-binary", ":all:", "--report", str(report)]
        command += ["--target", str(Path(folder) / "nowhere")]
        run = subprocess.run([*command, *arguments], capture_output=True, text=True)
        if run.returncode:
            raise LockError(f"{title} cannot be resolved. pip says:\n{run.stdout}{run.stderr}")
        installs = json.loads(report.read_text())["install"]
    found = {}
    for item in installs:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise LockError(f"the index names no SHA-256 for {name}; ask another one (pip config list)")
        found[name] = (item["metadata"]["version"], digest)
    return found


def resolve(image: Image, machine: str) -> dict[str, tuple[str, str]]:
    """name -> (version, SHA-256) of the wheels that pip would install on this machine. Raises LockError."""
    external = f"{image.torch}+cpu" if image.cpu_build and machine == "x86_64" else ""
    wanted = [f"{name}=={version}" for name, version in image.pins.items()]
    # `==` would also take torch's +cpu build, where pip is configured to find one
    wanted += [] if external else [f"torch==={image.torch}"]
    with tempfile.TemporaryDirectory() as folder:
        bounds = Path(folder) / "bounds.txt"
        others = read_pins(REQUIREMENTS / "cpu.txt") | read_pins(REQUIREMENTS / "dev.txt")
        bounds.write_text("".join(f"{name}=={version}\n" for name, version in others.items()))
        alone = ["--no-deps"] if image.closed else ["--constraint", str(bounds)]
        found = wheels(f"{image.name} on {machine}", *alone, *platform_flags(machine), *wanted)
    return found | ({"torch": (external, CPU_BUILDS[external])} if external else {})


def render(image: Image, resolved: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    """`resolved`: machine -> name -> (version, SHA-256)."""
    lines = [
        f"# {image.title}",
        "# Written by scripts/setup/lock_images.py for Python 3.11; install it with --require-hashes.",
    ]
    for name in sorted({name for found in resolved.values() for name in found}):
        per_machine = {machine: found[name] for machine, found in resolved.items() if name in found}
        versions = {version for version, _ in per_machine.values()}
        for version in sorted(versions):
            holders = [machine for machine in per_machine if per_machine[machine][0] == version]
            digests = dict.fromkeys(per_machine[machine][1] for machine in holders)
            everywhere = len(holders) == len(resolved)
            marker = "" if everywhere else f' ; platform_machine == "{holders[0]}"'
            lines.append(" \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{d}" for d in digests)]))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say whether the files are what they should be"
    )
    options = parser.parse_args(arguments)
    wrong = []
    try:
        for image in images():
            text = render(image, {machine: resolve(image, machine) for machine in image.machines})
            print(f"{image.path.relative_to(ROOT)}: {text.count('==')} requirements", flush=True)
            if options.check:
                wrong += [] if image.path.is_file() and image.path.read_text() == text else [image.path.name]
                continue
            half = image.path.with_suffix(".part")
            half.write_text(text)
            half.replace(image.path)
    except LockError as error:
        print(f"lock_images: {error}", file=sys.stderr)
        return 1
    if wrong:
        print(f"lock_images: not as the index and the locks say: {', '.join(wrong)}. Write anew without --check.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

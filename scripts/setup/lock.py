"""Write the hashes of the locks in requirements/: `lock.py`, or `lock.py cpu docs` for some of them.

A lock names each package with its exact version. To renew one, write versions without hashes and run this: uv asks the
package index for the files of each version, and the lock keeps the hashes of wheels for Linux on x86_64 and aarch64 and
for the lock's Pythons. Builds with a local version (`+cpu`) are on another index; they stay as they are written.
`--check` writes nothing and names the locks that are not as the index says. Needs Python 3.11, and `make setup`'s uv.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import tomllib

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.setup.environments import ENVIRONMENTS, REQUIREMENTS, UV

PYTHONS = {
    name: set(recipe.pythons) - set(recipe.unlocked) for recipe in ENVIRONMENTS.values() for name in recipe.locks
}
PYTHONS |= {"dev": {"3.10", "3.11", "3.12"}, "triton": {"3.10", "3.11", "3.12"}, "torch-cpu": {"3.11", "3.12"}}


def lock_names() -> list[str]:
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt") if not path.stem.startswith("vllm-"))


def fits(file: str, pythons: set[str]) -> bool:
    """True for a wheel that one of these Pythons takes on Linux."""
    interpreter, abi, places = file.removesuffix(".whl").split("-")[-3:]
    if not re.search(r"^any$|manylinux\S*_(x86_64|aarch64)", places):
        return False
    numbers = {tuple(map(int, python.split("."))) for python in pythons}
    tags = [(int(tag[2]), int(tag[3:] or 0)) for tag in interpreter.split(".") if re.match(r"(cp|py)3", tag)]
    exact = abi.startswith("cp")
    return any((number in tags) if exact else any(tag <= number for tag in tags) for number in numbers)


def render(path: Path) -> str:
    """The lock with the hashes of today's index. Raises CalledProcessError, in uv's words."""
    text = path.read_text().replace("\\\n", " ")
    comments = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    elsewhere = [" \\\n".join(re.sub(r" +(--hash)", r"\n    \1", line).split("\n")) for line in entries if "+" in line]
    asked = [line.partition(" --hash")[0].strip() for line in entries if "+" not in line]
    pythons = PYTHONS.get(path.stem, {"3.11"})
    oldest = min(pythons, key=lambda python: int(python.split(".")[1]))
    command = [UV, "pip", "compile", "--universal", "--no-deps", "--quiet", "--python-version", oldest]
    run = subprocess.run(
        [*command, "--format", "pylock.toml", "-"], input="\n".join(asked), capture_output=True, text=True, check=True
    )
    markers = {line.partition("==")[0].lower().replace("_", "-"): line.partition(" ; ")[2] for line in asked}
    for package in tomllib.loads(run.stdout)["packages"]:
        wheels = package.get("wheels", [])
        named = {wheel.get("name") or wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in wheels}
        digests = [digest for name, digest in named.items() if fits(name, pythons)] or [
            package["sdist"]["hashes"]["sha256"]
        ]
        marker = markers[package["name"]]
        entry = f"{package['name']}=={package['version']}" + (f" ; {marker}" if marker else "")
        elsewhere.append(" \\\n".join([entry, *(f"    --hash=sha256:{digest}" for digest in sorted(set(digests)))]))
    return comments + "\n".join(sorted(elsewhere)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(lock_names())}; without any, all")
    parser.add_argument("--check", action="store_true", help="write nothing; name the locks that would change")
    options = parser.parse_args()
    changed = []
    for path in (REQUIREMENTS / f"{name}.txt" for name in options.names or lock_names()):
        try:
            text = render(path)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"lock: {path.name}: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
            return 1
        if text != path.read_text():
            changed.append(path.name)
            if not options.check:
                path.write_text(text)
    print(f"lock: {', '.join(changed) or 'nothing'} {'differs' if options.check else 'changed'}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())

"""Write requirements/docs.txt: MkDocs, its theme and what they ask for, pinned and hashed.

pip resolves WANTED once; then the package index is asked, through pip, for the wheels of these versions for each Python
and machine on which `make docs` may run. The hashes are those that the index publishes. A version without a wheel for
one of them is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/setup"))  # imported by a test, it finds its siblings as they find each other

from lock_images import MACHINES, LockError, platform_flags, wheels  # noqa: E402

LOCK = ROOT / "requirements/docs.txt"
WANTED = ("mkdocs==1.6.1", "mkdocs-material==9.7.7")
PYTHONS = ("3.10", "3.11", "3.12")


def resolve(python: str, machine: str, *requirements: str) -> dict[str, tuple[str, str]]:
    """name -> (version, SHA-256) of the wheels that pip would install there. Raises LockError."""
    return wheels(f"docs on Python {python}, {machine}", *platform_flags(machine, python), *requirements)


def render() -> str:
    """The file. Every Python and machine gets the versions that the oldest Python resolves to."""
    versions = {name: version for name, (version, _) in resolve(PYTHONS[0], MACHINES[0], *WANTED).items()}
    pins = [f"{name}=={version}" for name, version in versions.items()]
    digests: dict[str, dict[str, None]] = {name: {} for name in versions}
    for python in PYTHONS:
        for machine in MACHINES:
            for name, (_, digest) in resolve(python, machine, "--no-deps", *pins).items():
                digests[name][digest] = None
    lines = [
        "# The environment of `make docs`: MkDocs with its theme, for Python 3.10 to 3.12 on x86_64 and aarch64.",
        "# Written by scripts/setup/lock_docs.py; scripts/setup/setup_docs.py installs it with --require-hashes.",
    ]
    for name in sorted(versions):
        hashes = [f"    --hash=sha256:{digest}" for digest in digests[name]]
        lines.append(" \\\n".join([f"{name}=={versions[name]}", *hashes]))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the file is what it should be")
    options = parser.parse_args(arguments)
    try:
        text = render()
    except LockError as error:
        print(f"lock_docs: {error}", file=sys.stderr)
        return 1
    if options.check:
        right = LOCK.is_file() and LOCK.read_text() == text
        print(f"lock_docs: {LOCK.name} is {'right' if right else 'not as the index says; write anew without --check'}")
        return int(not right)
    half = LOCK.with_suffix(".part")
    half.write_text(text)
    half.replace(LOCK)
    print(f"requirements/{LOCK.name}: {text.count('==')} requirements")
    return 0


if __name__ == "__main__":
    sys.exit(main())

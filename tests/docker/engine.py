"""A Docker daemon for the tests, on base images that debootstrap makes: no image registry, no other daemon is asked.

The daemon keeps its images in a temporary folder. It runs in a mount namespace that shows the devices and the driver of
an Ascend host. It needs root, and Debian's packages docker.io and debootstrap.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator.launch import Machine, environment
from ascend_emulator.prepare import HOOK, PTH

from tests.serving.server import wait_for

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = f"{os.environ['PATH']}:/usr/sbin:/sbin"
DEBIAN = ("debootstrap", "--variant=minbase", "--include=python3,python3-pip,ca-certificates", "bookworm")
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
PYTHON = "python:3.11-slim-bookworm"
CANN = "cann.invalid/cann"  # in the place of quay.io/ascend/cann: a base image that is not made here cannot be pulled
TOOLKIT, LIBRARIES = "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/emulator/lib"
DEVICES = ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc")
DRIVER = {
    "etc/ascend_install.info": "",
    "usr/local/bin/npu-smi": "#!/bin/sh\n",
    "usr/local/dcmi/libdcmi.so": "",
    "usr/local/Ascend/driver/lib64/libascend_hal.so": "",
    "usr/local/Ascend/driver/version.info": "package_version=25.3.rc1\n",
}
# The images lie in one sparse file, which is removed at once; thousands of files take minutes.
SHOW_ASCEND_HOST = """
set -e
mkdir data
truncate --size 60G disk
mkfs.ext4 -q disk
mount -o loop disk data
for folder in dev etc usr/local; do
    mkdir -p "host/$folder" "work/$folder"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=host/$folder,workdir=work/$folder" "/$folder"
done
exec dockerd --data-root "$PWD/data" --exec-root "$PWD/exec" --pidfile "$PWD/pid" --host "unix://$PWD/socket" \\
    --bridge none --iptables=false --ip6tables=false >daemon.log 2>&1
"""
ASK = """
import json, sys, urllib.request
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", sys.argv[1].encode())
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


def why_not() -> str:
    """Return the reason why no daemon can run here; empty where it can."""
    if os.geteuid() != 0:
        return "a Docker daemon and debootstrap need root"
    needed = {"dockerd": "docker.io", "debootstrap": "debootstrap"}
    missing = [package for program, package in needed.items() if not shutil.which(program, path=SEARCHED)]
    return f"not installed, on Debian: apt-get install {' '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Engine:
    """A running daemon. `builder`: a Docker client that has BuildKit."""

    folder: Path
    daemon: subprocess.Popen[bytes]
    builder: str

    @property
    def variables(self) -> dict[str, str]:
        return {**os.environ, "PATH": SEARCHED, "DOCKER_HOST": f"unix://{self.folder}/socket", "DOCKER_BUILDKIT": "1"}

    def __call__(self, *words: str, client: str = "docker", timeout: float = 120) -> str:
        """Return the output of a command of the Docker client. Raises AssertionError with its errors."""
        ran = subprocess.run(
            [client, *words], env=self.variables, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert ran.returncode == 0, f"docker {' '.join(words)}\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
        return ran.stdout.strip()

    def on_the_host(self, *command: str | Path) -> list[str]:
        """Return the command that runs `command` where the Ascend host is shown."""
        return ["nsenter", "--mount", "--target", str(self.daemon.pid), "--wd=/", *map(str, command)]

    def import_base(self, image: str, root: Path, *changes: str) -> None:
        archive = self.folder / "base.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        self("import", *(word for change in changes for word in ("--change", change)), str(archive), image)
        archive.unlink()

    def build(self, image: str, context: Path = ROOT, **arguments: str) -> str:
        """Build docker/<image>.Dockerfile; return the new image's tag."""
        if image in ("910b", "cpu"):
            arguments["UV_SYSTEM_CERTS"] = "1"  # as pip
        if image == "910b" or "find-links" in (self.folder / "debian/etc/pip.conf").read_text():
            arguments["PYTORCH_INDEX"] = ""  # pip has torch's CPU build from this machine's own wheels
        arguments |= {name: value for name, value in os.environ.items() if name in ("http_proxy", "https_proxy")}
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        file, tag = str(context / f"docker/{image}.Dockerfile"), f"npu-gptoss:{image}"
        command = ("build", "--network", "host", "--progress", "plain", *given, "-f", file, "-t", tag, str(context))
        self(*command, client=self.builder, timeout=1800)
        return tag

    def state(self, container: str) -> dict[str, object]:
        return json.loads(self("inspect", "--format", "{{json .State}}", container))

    def wait_until_healthy(self, container: str, seconds: float = 400) -> None:
        def settled() -> bool:
            found = self.state(container)
            return not found["Running"] or found["Health"]["Status"] == "healthy"

        wait_for(settled, seconds)
        state = self.state(container)
        said = subprocess.run(["docker", "logs", container], env=self.variables, capture_output=True, text=True)
        assert (state["Running"], state["Health"]["Status"]) == (True, "healthy"), f"{said.stdout}{said.stderr}"[-6000:]

    def chat(self, container: str, question: str) -> str:
        """Return the answer of the server in a container."""
        body = {"model": "gpt-oss-tiny", "temperature": 0, "messages": [{"role": "user", "content": question}]}
        answer = self("exec", container, "python3", "-c", ASK, json.dumps(body), timeout=150)
        return json.loads(answer)["choices"][0]["message"]["content"]


@contextlib.contextmanager
def started() -> Iterator[Engine]:
    """Start the daemon, on a host with two stand-in NPUs; end it with its images and containers."""
    folder = Path(tempfile.mkdtemp(prefix="docker-of-tests-"))
    for name, text in DRIVER.items():
        (folder / "host" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "host" / name).write_text(text)
    (folder / "host/usr/local/bin/npu-smi").chmod(0o755)
    for name in ("resolv.conf", "hosts"):  # mounts below /etc do not show through an overlay
        shutil.copy(f"/etc/{name}", folder / "host/etc" / name)
    (folder / "host/dev").mkdir()
    for name in DEVICES:  # like the driver's: 0660, 1000:1000
        device = folder / "host/dev" / name
        os.mknod(device, stat.S_IFCHR, Path("/dev/null").stat().st_rdev)
        device.chmod(0o660)
        os.chown(device, 1000, 1000)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SHOW_ASCEND_HOST]
    daemon = subprocess.Popen(command, cwd=folder, env={**os.environ, "PATH": SEARCHED})
    engine = Engine(folder, daemon, builder())
    try:
        wait_for(lambda: daemon.poll() is not None or (folder / "socket").exists(), 30)
        assert daemon.poll() is None, (folder / "daemon.log").read_text()[-2000:]
        yield engine
        if containers := engine("ps", "--all", "--quiet").split():
            engine("rm", "--force", *containers)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        shutil.rmtree(folder)


def builder() -> str:
    """Return the first Docker client in PATH with a working BuildKit; later clients want a plugin for it."""
    variables = {**os.environ, "DOCKER_BUILDKIT": "1"}
    for folder in SEARCHED.split(":"):
        client = f"{folder}/docker"
        if (
            os.access(client, os.X_OK)
            and not subprocess.run(
                [client, "build", "--help"], env=variables, capture_output=True, check=False
            ).returncode
        ):
            return client
    raise AssertionError("no Docker client here has BuildKit; on Debian: apt-get install docker.io (or docker-buildx)")


def debian(folder: Path) -> Path:
    """Make a Debian with Python 3.11; its pip finds packages as pip does here."""
    root = folder / "debian"
    subprocess.run([*DEBIAN, root], env={**os.environ, "PATH": SEARCHED}, check=True, stdout=subprocess.DEVNULL)
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    if Path(f"/{CERTIFICATES}").is_file():
        shutil.copy(f"/{CERTIFICATES}", root / CERTIFICATES)
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = {
        key.rpartition(".")[2]: [word for word in ast.literal_eval(value).split() if not word.startswith("file:")]
        for key, _, value in (line.partition("=") for line in listed.splitlines())
    }
    lines = ["[global]"]
    for name in ("index-url", "extra-index-url", "trusted-host", "find-links"):
        words = settings.get(name, [])
        lines += [f"{name} = {' '.join(words)}"] if words else []
        for wheels in (word for word in words if Path(word).is_dir()):
            shutil.copytree(wheels, f"{root}{wheels}")
    (root / "etc/pip.conf").write_text("\n".join(lines) + "\n")
    return root


def add_emulated_cann(root: Path, venv: Path, cann: str) -> None:
    """Put the emulated CANN into a root file system as CANN's installer and its base image lay theirs out."""
    places = {str(venv / "ascend-emulator/cann" / cann): TOOLKIT, str(venv / "ascend-emulator/lib"): LIBRARIES}
    exports = ""
    for name, value in environment(Machine(cann=cann), venv, {}).items():
        if name.startswith(("ASCEND_", "LD_", "CUDA_", "TASK_QUEUE", "MALLOC_")):
            for here, there in places.items():
                value = value.replace(here, there)
            exports += f"export {name}='{value}'\n"
    shutil.rmtree(root / "usr/local/Ascend", ignore_errors=True)
    for here, there in places.items():
        shutil.copytree(here, f"{root}{there}", ignore=shutil.ignore_patterns("*.cpp"))
    (root / f"{TOOLKIT}/../set_env.sh".lstrip("/")).write_text(exports)
    packages = root / "usr/lib/python3/dist-packages"
    shutil.copytree(ROOT / "emulator/ascend_emulator", packages / "ascend_emulator", dirs_exist_ok=True)
    (packages / PTH).write_text(HOOK)


def exchange_torch(context: Path, sources: Sequence[str], root: Path) -> None:
    """Copy a build context and exchange torch's CPU build for the package index's, as the emulated 910B has it.

    PyTorch's own index, which alone has the CPU build, is not within reach everywhere.
    """

    def of_the_index(found: re.Match[str]) -> str:
        pip = ("python3", "-m", "pip", "--quiet", "install", "--dry-run", "--ignore-installed", "--no-deps")
        command = ["chroot", root, *pip, "--report", "-", f"{found[1]}==={found[2]}"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        digest = json.loads(said)["install"][0]["download_info"]["archive_info"]["hash"].partition("=")[2]
        return f"{found[1]}=={found[2]} ; {found[3]} \\\n    --hash=sha256:{digest}\n"

    for source in sources:
        (context / source).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, context / source)
    for lock in (context / "requirements").iterdir():
        # without Triton-Ascend, which needs a compiler, the emulator computes the one Triton kernel of a step itself
        text = re.sub(r"^triton-ascend==.*\n(    --hash.*\n?)+", "", lock.read_text(), flags=re.M)
        lock.write_text(re.sub(r"^(\S+)==(\S+)\+cpu ; (.*) \\\n.*\n", of_the_index, text, flags=re.M))

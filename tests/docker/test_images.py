"""The Dockerfiles copy files that exist, install packages by hash and leave root; the entry point starts its programs.

`test_build.py` builds and runs the images where Docker can.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from docker import healthcheck, preflight
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.releases import ASCEND_RELEASES
from scripts.serve_here import serving_environment
from scripts.setup import environments
from tests.scripts.shell import run as run_script
from tests.scripts.test_serve_sh import checkpoint

ROOT = Path(__file__).resolve().parents[2]
dockerfile_parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is missing: make setup")

IMAGES = ("910b", "official", "cpu", "cuda")
SERVERS = ("910b", "official", "cpu")
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]


def steps(image: str) -> list[tuple[str, str]]:
    parser = dockerfile_parse.DockerfileParser(path=str(ROOT / f"docker/{image}.Dockerfile"))
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def all_of(image: str, instruction: str) -> list[str]:
    return [value for name, value in steps(image) if name == instruction]


def copied(image: str) -> list[str]:
    return [source for value in all_of(image, "COPY") for source in re.sub(r"--\S+ ", "", value).split()[:-1]]


@pytest.mark.parametrize("image", IMAGES)
def test_copied_files_are_in_the_repository(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = copied(image)
    assert sources
    assert [source for source in sources if not (ROOT / source).exists() or source in ignored] == []


@pytest.mark.parametrize("image", IMAGES)
def test_packages_are_installed_by_hash(image: str) -> None:
    """Only this package is installed without a hash, from the repository."""
    installs = [value for value in all_of(image, "RUN") if "pip install" in value]
    listed = [value for value in installs if " -r " in value]
    assert listed
    for value in listed:
        assert value.count("--require-hashes") == value.count("--no-deps") == value.count("pip install")
    others = [value for value in installs if value not in listed]
    assert all(re.search(r"--no-build-isolation (--editable )?\.( |$)", value) for value in others)


@pytest.mark.parametrize("image", IMAGES)
def test_last_user_is_not_root(image: str) -> None:
    assert all_of(image, "USER")[-1] == "1000:1000"
    names = [name for name, _ in steps(image)]
    assert "RUN" not in names[len(names) - 1 - names[::-1].index("USER") :]


@pytest.mark.parametrize("image", ["910b", "official"])
def test_image_has_the_user_of_the_driver(image: str) -> None:
    """Device files are 0660 HwHiAiUser:HwHiAiUser, 1000:1000, and HCCL wants an entry in /etc/passwd."""
    made = next(value for value in all_of(image, "RUN") if "useradd" in value)
    assert "groupadd --gid 1000 HwHiAiUser" in made
    assert "useradd --uid 1000 --gid 1000" in made


@pytest.mark.parametrize("image", SERVERS)
def test_health_check_and_entry_point_are_copied(image: str) -> None:
    for instruction in ("HEALTHCHECK", "ENTRYPOINT"):
        (path,) = re.findall(r"/opt/npu-gptoss/([\w/.-]+)", all_of(image, instruction)[-1])
        assert path in copied(image)
    assert "TIKTOKEN_ENCODINGS_BASE=/opt/npu-gptoss/vocabulary" in all_of(image, "ENV")[-1]


def test_each_stack_has_its_base_image_and_lock() -> None:
    arguments = dict(value.partition("=")[::2] for value in all_of("910b", "ARG"))
    stages = [value.partition(" AS ") for value in all_of("910b", "FROM")]
    names = [name.removeprefix("cann-") for _, _, name in stages if name]
    assert f"\nARG STACK={names[0]}\n" in dockerfile("910b"), "the first by default"
    assert names == list(environments.ASCEND_STACKS)
    for row, name, (source, _, _) in zip(ASCEND_RELEASES, names, stages, strict=False):
        assert source == f"${{CANN_IMAGE}}:${{CANN_{name.replace('.', '_')}}}"
        tag = arguments[f"CANN_{name.replace('.', '_')}"]
        assert tag == row.image
        release, *rest = tag.split("-")
        assert release.upper() == row.cann.recommended
        assert rest[:2] == ["910b", "ubuntu22.04"]
        assert rest[2].removeprefix("py") in row.python_on_ascend
        assert f"requirements/910b-{name}.txt" in copied("910b")
    assert [value for value, _, name in stages if not name] == ["cann-${STACK}"]


def dockerfile(image: str) -> str:
    return (ROOT / f"docker/{image}.Dockerfile").read_text()


def test_compose_builds_images_and_mounts_files_that_exist() -> None:
    built = {service["build"]["dockerfile"] for service in COMPOSE.values() if "build" in service}
    assert built == {f"docker/{image}.Dockerfile" for image in SERVERS if image != "official"}
    mounts = [mount for service in COMPOSE.values() for mount in service.get("volumes", ())]
    short = [mount.split(":")[0] for mount in mounts if isinstance(mount, str)]
    assert [source for source in short if source.startswith("./") and not (ROOT / "docker" / source).exists()] == []
    written_out = [mount for mount in mounts if not isinstance(mount, str)]
    assert {mount["target"] for mount in written_out} == {"/model"}
    assert all(mount["bind"] == {"create_host_path": False} and mount["read_only"] for mount in written_out)
    target = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    networks = [service.get("networks", {}).get("default", {}) for service in COMPOSE.values()]
    aliases = {alias for network in networks for alias in network.get("aliases", ())}
    assert {where.partition(":")[0] for where in target["targets"]} == aliases


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_confines_services_and_publishes_on_localhost(name: str) -> None:
    service = COMPOSE[name]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert "privileged" not in service
    assert "build" in service or re.search(r":v?[\d.]+@sha256:[0-9a-f]{64}$", service["image"])


def test_grafana_has_no_default_password_and_no_anonymous_user() -> None:
    grafana = COMPOSE["grafana"]["environment"]
    assert re.match(r"\$\{GRAFANA_PASSWORD:\?.+\}$", grafana["GF_SECURITY_ADMIN_PASSWORD"]), "compose refuses to start"
    assert grafana["GF_AUTH_ANONYMOUS_ENABLED"] == "${GRAFANA_ANONYMOUS:-false}"


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Make a copy of /opt/npu-gptoss with programs that print their command lines."""
    printing = '#!/bin/sh\necho {} "$@"\n[ "$2" != fail ] && [ -z "$FAIL" ]\n'
    files = {
        "docker/entrypoint.sh": (ROOT / "docker/entrypoint.sh").read_text(),
        "docker/preflight.py": "",
        "scripts/serve_here.py": "",
        "scripts/serve.sh": '#!/bin/sh\necho serve.sh "$@" CANN=$CANN_SET\n',
        "serve.log": "",
        **{f"bin/{name}": printing.format(name) for name in ("npu-gptoss", "python3", "program")},
        "ascend/ascend-toolkit/set_env.sh": "export CANN_SET=1\n",
        "ascend/nnal/atb/set_env.sh": 'export CANN_SET="$CANN_SET$UNSET_VARIABLE"2\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{folder}/bin:{os.defpath}",
        "ASCEND_TOOLKIT_HOME": f"{folder}/ascend/ascend-toolkit/latest",
        **variables,
    }
    command = ["bash", str(folder / "docker/entrypoint.sh"), *arguments]
    out = folder / "out.txt"
    with out.open("w") as file:  # not a pipe: the log's follower holds it a moment longer
        code = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=20).returncode
    return subprocess.CompletedProcess(command, code, out.read_text(), "")


def test_910b_checks_run_before_the_server_and_both_see_cann(image_folder: Path) -> None:
    said = start(image_folder, "serve", "--model", "/model", "--cards", "4")
    assert said.stdout.splitlines() == [
        f"python3 {image_folder}/docker/preflight.py",
        "serve.sh --host 127.0.0.1 --port 8000 --model /model --cards 4 CANN=12",
    ]
    assert "--host 0.0.0.0 --port 9000" in start(image_folder, "serve", PORT="9000", HOST="0.0.0.0").stdout
    failed = start(image_folder, "serve", FAIL="1")
    assert failed.returncode == 1
    assert "serve.sh" not in failed.stdout


def test_cpu_entry_point_starts_serve_here(image_folder: Path) -> None:
    said = start(image_folder, "serve", "--model", "/m", NPU_GPTOSS_PLATFORM="cpu").stdout
    called = rf"python3 {image_folder}/scripts/serve_here\.py --log \S+/serve\.\w+"
    assert re.fullmatch(rf"{called} --host 127\.0\.0\.1 --port 8000 --model /m\n", said)


def test_options_without_the_word_serve_are_no_command_of_ours(image_folder: Path) -> None:
    said = start(image_folder, "--model", "/a b", NPU_GPTOSS_PLATFORM="cpu").stdout
    assert said.endswith("--port 8000 --model /a b\n")
    assert start(image_folder, "--version").stdout == "npu-gptoss --version\n"


def test_entry_point_runs_programs_and_our_commands(image_folder: Path) -> None:
    assert start(image_folder, "doctor", "--json").stdout == "npu-gptoss doctor --json\n"
    assert start(image_folder, "program", "a b").stdout == "program a b\n"


def test_serve_sh_takes_the_options_of_the_entry_point(tmp_path: Path) -> None:
    given = f"--host 0.0.0.0 --port 8000 --model {checkpoint(tmp_path / 'model', 36)} --name n --cards 4 --dry-run"
    dry = run_script("serve.sh", *given.split())
    assert dry.returncode == 0
    assert "--port 8000 --tensor-parallel-size 4" in dry.stdout


def test_preflight_names_missing_parts_and_ends_the_start(tmp_path: Path, capsys: Any) -> None:
    versions = {"vllm": "0.11.0+empty", "vllm-ascend": "0.11.0", "torch": "2.7.1", "torch-npu": "2.7.1"}
    bare = Machine(root=tmp_path, environ={}, python=(3, 11, 13), version=versions.get, entry_points=lambda group: [])
    assert preflight.main(bare) == 1
    said = capsys.readouterr().err
    assert "CANN" in said
    assert "/dev/davinci" in said
    assert int(re.search(r"(\d+) ok, ", said)[1]) > 3


def test_preflight_imports_no_torch() -> None:
    code = "import sys; from docker import preflight; preflight.main(); print({'torch', 'vllm'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == "set()", said.stderr


def test_health_check_fails_without_a_server(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PORT", "1")
    assert healthcheck.main(Machine(tmp_path)) == 1
    assert "http://127.0.0.1:1/health" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheme", "flags"),
    [
        ("http", None),
        ("https", None),
        ("http", "--host 0.0.0.0 --port 1 --port {}"),
        ("http", "--host ::1 --port={}"),
        ("http", "--port {}"),
    ],
)
def test_health_check_misses_a_healthy_server(tmp_path: Path, scheme: str, flags: str | None) -> None:
    """Behind the user's proxy, with `--ssl-certfile`, at another address than PORT says, or beside another server."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if flags and "::1" in flags else socket.AF_INET

    shown = "[::1]" if flags and "::1" in flags else "127.0.0.1"
    with Server((shown.strip("[]"), 0), Healthy) as server:
        if scheme == "https":
            if not (openssl := shutil.which("openssl")):
                pytest.skip("openssl is not installed")
            files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
            make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=elsewhere"]
            subprocess.run([*make, *files], check=True, capture_output=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        environment |= {"PORT": "1" if flags else str(server.server_port), "PYTHONPATH": str(ROOT)}
        commands = {"7": flags.format(server.server_port)} if flags else {}  # the container's processes
        if flags == "--port {}":
            commands["6"], environment["PORT"] = "--port 2", str(server.server_port)
        for process, words in commands.items():
            command = ["/usr/bin/vllm", "serve", "/model", *words.split()]
            (tmp_path / "proc" / process).mkdir(parents=True)
            (tmp_path / "proc" / process / "cmdline").write_bytes("\0".join([*command, ""]).encode())
        environment |= {"http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
        code = "from pathlib import Path; from docker.healthcheck import *; sys.exit(main(Machine(Path(sys.argv[1]))))"
        check = [sys.executable, "-c", code, str(tmp_path)]
        said = subprocess.run(check, env=environment, capture_output=True, text=True, timeout=20)
        server.shutdown()
    assert said.returncode == 0, said
    assert said.stdout.endswith(f"{scheme}://{shown}:{server.server_port}/health: healthy\n"), said


def test_cpu_image_sets_only_variables_of_make_serve() -> None:
    names = {pair.partition("=")[0] for pair in all_of("cpu", "ENV")[-1].split()}
    assert names - {"PORT"} <= set(serving_environment(ROOT, ROOT, {}))

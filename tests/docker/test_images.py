"""The Dockerfiles name what exists, install what has a hash, and leave root; the entry point starts what it says."""

from __future__ import annotations

import json
import os
import re
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
from npu_gptoss.serving.lines import here
from scripts.serve_cpu import cpu_environment

ROOT = Path(__file__).resolve().parents[2]
dockerfile_parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is missing: make setup")

IMAGES = ("910b", "cpu", "cuda")
SERVERS = ("910b", "cpu")
ENTRYPOINT = ROOT / "docker/entrypoint.sh"


def steps(image: str) -> list[tuple[str, str]]:
    parser = dockerfile_parse.DockerfileParser(path=str(ROOT / f"docker/{image}.Dockerfile"))
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def last(image: str, instruction: str) -> str:
    return [value for name, value in steps(image) if name == instruction][-1]


@pytest.mark.parametrize("image", IMAGES)
def test_everything_that_is_copied_is_in_the_repository(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [s for name, value in steps(image) if name == "COPY" for s in re.sub(r"--\S+ ", "", value).split()[:-1]]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists() or source in ignored] == []


@pytest.mark.parametrize("image", IMAGES)
def test_every_package_comes_with_its_hash(image: str) -> None:
    """A package without one is built from the repository, or from vLLM's source release, whose SHA-256 is checked."""
    installs = [value for name, value in steps(image) if name == "RUN" and "pip install" in value]
    lists = [value for value in installs if " -r " in value]
    assert len(lists) == 1
    assert "--require-hashes" in lists[0]
    assert "--no-deps" in lists[0]
    assert [
        value for value in installs if " -r " not in value and not re.search(r"--no-build-isolation \. ", value)
    ] == []


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_runs_as_root(image: str) -> None:
    assert last(image, "USER") == "1000:1000"
    after = [name for name, _ in steps(image)]
    last_user = len(after) - 1 - after[::-1].index("USER")
    assert "RUN" not in after[last_user:]


def test_the_user_of_the_910b_image_is_the_drivers() -> None:
    """Device files are 0660 HwHiAiUser:HwHiAiUser, 1000:1000, and HCCL wants an entry in /etc/passwd."""
    made = next(value for name, value in steps("910b") if name == "RUN" and "useradd" in value)
    assert "groupadd --gid 1000 HwHiAiUser" in made
    assert "useradd --uid 1000 --gid 1000" in made


@pytest.mark.parametrize("image", SERVERS)
def test_a_server_has_a_health_check_and_an_entry_point_that_were_copied(image: str) -> None:
    copied = {s for name, value in steps(image) if name == "COPY" for s in value.split()[:-1]}
    for words in (last(image, "HEALTHCHECK"), last(image, "ENTRYPOINT")):
        (path,) = re.findall(r"/opt/npu-gptoss/([\w/.-]+)", words)
        assert path in copied, path
    assert "TIKTOKEN_ENCODINGS_BASE=/opt/npu-gptoss/vocabulary" in last(image, "ENV")


def test_the_base_image_has_a_cann_that_is_supported() -> None:
    tag = next(value for name, value in steps("910b") if name == "ARG" and value.startswith("CANN_TAG="))
    release, chip, system, python = tag.partition("=")[2].split("-")
    assert release.upper() == here().cann.recommended
    assert (chip, system, python) == ("910b", "ubuntu22.04", "py3.11")


def test_compose_builds_the_images_and_mounts_files_that_exist() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    services = compose["services"]
    assert {services[name]["build"]["dockerfile"] for name in services if "build" in services[name]} == {
        f"docker/{image}.Dockerfile" for image in SERVERS
    }
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert not source.startswith("./") or (ROOT / "docker" / source).exists(), mount
    target = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    aliases = {
        alias for s in services.values() for alias in s.get("networks", {}).get("default", {}).get("aliases", ())
    }
    assert {where.partition(":")[0] for where in target["targets"]} == aliases


def test_no_service_is_reached_from_outside_gains_a_privilege_or_writes_into_its_image() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert len(services) >= 5
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "build" in service or re.search(r":v?[\d.]+@sha256:[0-9a-f]{64}$", service["image"]), name


def test_grafana_has_no_password_that_everybody_knows_and_shows_nothing_unasked() -> None:
    grafana = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["grafana"]["environment"]
    assert re.match(r"\$\{GRAFANA_PASSWORD:\?.+\}$", grafana["GF_SECURITY_ADMIN_PASSWORD"]), "compose refuses to start"
    assert grafana["GF_AUTH_ANONYMOUS_ENABLED"] == "${GRAFANA_ANONYMOUS:-false}"


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """/opt/npu-gptoss with programs that print how they were called."""
    for name in (
        "docker/entrypoint.sh",
        "docker/preflight.py",
        "scripts/serve_cpu.py",
        "scripts/serve.sh",
        "serve.log",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "docker/entrypoint.sh").write_text(ENTRYPOINT.read_text())
    (tmp_path / "scripts/serve.sh").write_text('#!/bin/sh\necho serve.sh "$@" CANN=$CANN_SET\n')
    (tmp_path / "bin").mkdir()
    for name in ("npu-gptoss", "python3", "program"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@"\n[ "$2" != fail ] && [ -z "$FAIL" ]\n')
        (tmp_path / "bin" / name).chmod(0o755)
    for folder, text in (("ascend-toolkit", "CANN_SET=1"), ("nnal/atb", 'CANN_SET="$CANN_SET$UNSET_VARIABLE"2')):
        (tmp_path / "ascend" / folder).mkdir(parents=True)
        (tmp_path / "ascend" / folder / "set_env.sh").write_text(f"export {text}\n")
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


def test_on_a_910b_the_checks_come_before_the_server_and_both_see_cann(image_folder: Path) -> None:
    told = start(image_folder, "serve", "--model", "/model", "--cards", "4")
    assert told.stdout.splitlines() == [
        f"python3 {image_folder}/docker/preflight.py",
        "serve.sh --host 127.0.0.1 --port 8000 --model /model --cards 4 CANN=12",
    ]
    assert "--port 9000" in start(image_folder, "serve", PORT="9000").stdout
    assert "--host 0.0.0.0" in start(image_folder, "serve", HOST="0.0.0.0").stdout


def test_a_failed_check_keeps_the_server_from_starting(image_folder: Path) -> None:
    told = start(image_folder, "serve", FAIL="1")
    assert told.returncode == 1
    assert "serve.sh" not in told.stdout


def test_on_a_cpu_it_does_what_make_serve_does(image_folder: Path) -> None:
    told = start(image_folder, "serve", "--model", "/m", NPU_GPTOSS_PLATFORM="cpu").stdout
    called = rf"python3 {image_folder}/scripts/serve_cpu\.py --log \S+/serve\.\w+"
    assert re.fullmatch(rf"{called} --host 127\.0\.0\.1 --port 8000 --model /m\n", told)


def test_commands_of_npu_gptoss_and_programs_are_told_apart(image_folder: Path) -> None:
    assert start(image_folder, "doctor", "--json").stdout == "npu-gptoss doctor --json\n"
    assert start(image_folder, "program", "a b").stdout == "program a b\n"


def test_the_real_serve_script_takes_what_the_entry_point_gives_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 36}))
    (tmp_path / "model.safetensors").touch()
    options = [
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--model",
        str(tmp_path),
        "--name",
        "n",
        "--cards",
        "4",
        "--dry-run",
    ]
    dry = subprocess.run([str(ROOT / "scripts/serve.sh"), *options], capture_output=True, text=True, timeout=20)
    assert dry.returncode == 0, dry.stderr
    assert "--tensor-parallel-size 4" in dry.stdout
    assert "--port 8000" in dry.stdout


def test_the_preflight_says_what_is_missing_and_ends_the_start(tmp_path: Path, capsys: Any) -> None:
    versions = {"vllm": "0.11.0+empty", "vllm-ascend": "0.11.0", "torch": "2.7.1", "torch-npu": "2.7.1"}
    here = Machine(root=tmp_path, environ={}, python=(3, 11, 13), version=versions.get, entry_points=lambda group: [])
    assert preflight.main(here) == 1
    told = capsys.readouterr().err
    assert "CANN" in told
    assert "/dev/davinci" in told
    assert "The server is not started." in told


def test_the_preflight_opens_no_device_and_imports_no_torch() -> None:
    code = "import sys; from docker import preflight; preflight.main(); print({'torch', 'vllm'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert told.stdout.strip() == "set()", told.stderr


def test_a_server_that_is_not_there_is_not_healthy(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PORT", "1")
    assert healthcheck.main() == 1
    assert "http://127.0.0.1:1/health" in capsys.readouterr().out


def test_a_proxy_of_the_user_s_is_not_asked_for_the_server_in_the_container() -> None:
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        environment |= {"PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:1"}
        check = [sys.executable, str(ROOT / "docker/healthcheck.py")]
        told = subprocess.run(check, env=environment, capture_output=True, text=True, timeout=20)
        server.shutdown()
    assert (told.returncode, told.stdout) == (0, f"http://127.0.0.1:{server.server_port}/health: healthy\n"), told


def test_the_cpu_image_sets_what_make_serve_would_look_for() -> None:
    names = {pair.partition("=")[0] for pair in last("cpu", "ENV").split()}
    assert names - {"PORT"} <= set(cpu_environment(ROOT, ROOT, {}))

"""A server that others reach, a key that can be bypassed, and a variable that nothing reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gptoss.doctor import exposure
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.compat import patches
from tests.doctor.machines import CPU_PACKAGES, in_words, machine, only

SECRET = "k3y-of-a-test"
OLD, NEW = ({**CPU_PACKAGES, "starlette": release} for release in ("0.50.0", "1.10.0"))


def running(here: Machine, *flags: str, pid: int = 7, program: tuple[str, ...] = ("vllm",), **environ: str) -> Machine:
    """The machine with one more process, as Linux shows it."""
    folder = here.root / f"proc/{pid}"
    folder.mkdir(parents=True)
    words = (*program, "serve", "DIR", *flags)
    (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (folder / "environ").write_bytes("\0".join(f"{name}={value}" for name, value in environ.items()).encode())
    return here


def test_the_guards_name_is_a_patch() -> None:
    assert exposure.GUARD in {patch.name for patch in patches()}


@pytest.mark.parametrize(
    "program", [("vllm",), ("/x/bin/python3.11", "/x/bin/vllm"), ("python", "-m", "vllm.entrypoints.cli.main")]
)
@pytest.mark.parametrize("flags", [(), ("--host", "0.0.0.0"), ("--host=::",)])
def test_a_server_that_others_reach_without_a_key_is_a_warning(tmp_path, program, flags) -> None:
    here = running(machine(tmp_path), *flags, "--port", "8123", program=program)
    only(exposure.exposure(here), "warning", "port 8123 (process 7)", "asks for no key", "VLLM_API_KEY")


@pytest.mark.parametrize(("flags", "environ"), [(("--api-key", SECRET), {}), ((), {"VLLM_API_KEY": SECRET})])
def test_key_alone_is_a_warning_and_is_never_printed(tmp_path, flags, environ) -> None:
    found = list(exposure.exposure(running(machine(tmp_path, NEW), "--host", "0.0.0.0", *flags, **environ)))
    only(found, "warning", "with a key", "proxy")
    assert SECRET not in in_words(found, {"x": [""]})


def test_a_server_for_this_machine_alone_is_well(tmp_path: Path) -> None:
    here = running(machine(tmp_path, NEW), "--host", "0.0.0.0", "--host", "127.0.0.1")
    only(exposure.exposure(here), "ok", "this machine alone")


def test_options_of_a_config_file_count_and_the_command_outweighs_them(tmp_path: Path) -> None:
    here = running(machine(tmp_path, NEW), "--config", "serve.yaml")
    (folder := tmp_path / "proc/7/cwd").mkdir()
    (folder / "serve.yaml").write_text(f"# ours\nhost: '127.0.0.1' # here\nport: 8123\napi-key:\n  - {SECRET}\n")
    only(exposure.exposure(here), "ok", "127.0.0.1 port 8123")
    here = running(machine(tmp_path / "b", NEW), "--config=/serve.yaml", "--host", "0.0.0.0")
    only(exposure.exposure(here), "warning", "asks for no key")  # its file is not there
    (tmp_path / "b/serve.yaml").write_text(f"host: 127.0.0.1\napi_key: {SECRET}\nssl_certfile: c.pem\n")
    found = list(exposure.exposure(here))
    only(found, "warning", "0.0.0.0 port 8000", "with a key. vLLM")
    assert SECRET not in in_words(found, {"x": [""]})


def test_a_node_without_a_port_and_a_socket_of_this_machine_reach_nobody(tmp_path: Path) -> None:
    only(exposure.exposure(running(machine(tmp_path / "a", NEW), "--headless")), "ok", "No server runs here")
    only(
        exposure.exposure(running(machine(tmp_path / "b", NEW), "--uds", "/run/x")),
        "ok",
        "/run/x (process 7)",
        "machine alone",
    )


def test_server_is_reported_once_and_programs_that_name_one_are_not(tmp_path: Path) -> None:
    (tmp_path / "proc/9").mkdir(parents=True)
    here = running(machine(tmp_path), program=("env", "A=1", "vllm"))
    running(here, program=("grep", "vllm"), pid=8)
    only(exposure.exposure(here), "ok", "No server runs here")
    running(running(here, "--port", "8123", pid=10), "--port", "8123", pid=11)
    only(exposure.exposure(here), "warning", "process 10")


@pytest.mark.parametrize("left_out", [{"NPU_GPTOSS_SKIP_PATCHES": "a,admission"}, {"VLLM_PLUGINS": "ascend"}])
@pytest.mark.parametrize(("packages", "state"), [(OLD, "failed"), (NEW, "warning")])
def test_key_that_can_be_bypassed_is_reported(tmp_path, left_out, packages, state) -> None:
    """CVE-2026-48746 with an old starlette; with a new one, /invocations and others are open."""
    here = running(machine(tmp_path, packages), "--host", "127.0.0.1", VLLM_API_KEY=SECRET, **left_out)
    only(exposure.exposure(here), state, *left_out, "CVE-2026-48746" if state == "failed" else "/v1 alone")
    shell = machine(tmp_path / "other", packages, VLLM_API_KEY=SECRET, **left_out)
    only(exposure.exposure(shell), state, "in this shell")
    only(exposure.exposure(machine(tmp_path / "other", packages, VLLM_API_KEY=SECRET)), "ok")


def test_misspelt_variable_is_reported(tmp_path: Path) -> None:
    only(exposure.variables(machine(tmp_path, NPU_GPTOSS_PLATFORM="cpu")), "ok")
    here = machine(tmp_path, NPU_GPTOSS_PLATFROM="cpu")
    only(exposure.variables(here), "warning", "NPU_GPTOSS_PLATFROM", "NPU_GPTOSS_PLATFORM may be meant")


def test_value_that_ends_a_server_is_no_healthy_machine(tmp_path: Path) -> None:
    here = machine(tmp_path, NPU_GPTOSS_RESTART_WAIT_SECONDS="soon")
    only(exposure.variables(here), "failed", "NPU_GPTOSS_RESTART_WAIT_SECONDS")


def test_variables_of_a_service_called_npu_gptoss_are_no_mistakes(tmp_path: Path) -> None:
    port = "NPU_GPTOSS_PORT_8000_TCP"
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT")
    names = (*(f"NPU_GPTOSS_{name}" for name in names), port, f"{port}_PROTO", f"{port}_ADDR")
    only(exposure.variables(machine(tmp_path, **dict.fromkeys(names, "tcp://10.0.0.1:8000"))), "ok")

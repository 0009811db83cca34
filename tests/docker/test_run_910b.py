"""docker/run-910b.sh passes the devices and mounts that a 910B needs and no others; it names each wrong option."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MANAGERS = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
DRIVER = [
    *("/usr/local/Ascend/driver/lib64", "/usr/local/Ascend/driver/version.info", "/usr/local/dcmi"),
    *("/usr/local/bin/npu-smi", "/etc/ascend_install.info"),
]
KEY = "k3y-of-a-test"


def call(*arguments: str, key: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "docker/run-910b.sh"), *arguments]
    environment = {**os.environ, "VLLM_API_KEY": key}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, **more)


def dry(*arguments: str, **more: Any) -> list[str]:
    printed = call("--dry-run", *arguments, **more)
    assert printed.returncode == 0, printed.stderr
    return shlex.split(printed.stdout)


def values(words: list[str], flag: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == flag]


@pytest.mark.parametrize("numbers", ["0", "3", "4,5,6,7", "0,1,2,3,4,5,6,7"])
def test_container_gets_only_the_named_devices_and_managers(numbers: str) -> None:
    words = dry("--model", "/models/gpt-oss-120b", "--devices", numbers)
    assert values(words, "--device") == [f"/dev/davinci{number}" for number in numbers.split(",")] + MANAGERS
    assert "no-new-privileges" in values(words, "--security-opt")
    assert values(words, "--cap-drop") == ["ALL"]
    assert {"--cap-add", "--network", "--pid", "--ipc", "--privileged"}.isdisjoint(words)
    assert values(words, "--cards") == [str(len(numbers.split(",")))]


def test_mounts_are_read_only_and_only_memory_is_written() -> None:
    """Compiled kernels are loaded from these folders, and docker mounts them noexec by default."""
    words = dry("--model", "/models/gpt-oss-20b/", "--port", "9000")
    assert values(words, "--volume") == ["/models/gpt-oss-20b:/model:ro", *(f"{path}:{path}:ro" for path in DRIVER)]
    assert values(words, "--publish") == ["127.0.0.1:9000:8000"]
    command = "npu-gptoss:910b serve --model /model --name gpt-oss-20b --cards 1"
    assert " ".join(words).endswith(f" {command}")
    assert "--read-only" in words
    places = dict(value.partition(":")[::2] for value in values(words, "--tmpfs"))
    assert set(places) == {"/tmp", "/home/HwHiAiUser"}
    assert all({"rw", "exec", "nosuid", "nodev"} <= set(options.split(",")) for options in places.values())


def test_key_is_passed_by_name_and_never_printed() -> None:
    printed = call("--model", "/m", "--host", "0.0.0.0", "--dry-run", key=KEY)
    shown = call("--model", "/m", "--dry-run", "--", "--", "--api-key", KEY)
    assert KEY not in printed.stdout + printed.stderr + shown.stdout + shown.stderr
    words = shlex.split(printed.stdout)
    assert values(words, "--env") == ["HOST=0.0.0.0", "VLLM_API_KEY"]
    assert values(words, "--publish") == ["0.0.0.0:8000:8000"]
    assert printed.stderr == ""
    assert "VLLM_API_KEY" not in values(dry("--model", "/m"), "--env")


def test_packed_experts_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """120b fits on two cards with them alone."""
    monkeypatch.setenv("NPU_GPTOSS_EXPERT_WEIGHTS", "packed")
    assert values(dry("--model", "/m", "--devices", "0,1"), "--env") == ["HOST=0.0.0.0", "NPU_GPTOSS_EXPERT_WEIGHTS"]


def test_public_address_without_a_key_prints_a_warning() -> None:
    assert call("--model", "/m", "--dry-run").stderr == ""
    said = call("--model", "/m", "--host", "::", "--dry-run")
    assert "VLLM_API_KEY" in said.stderr
    assert values(shlex.split(said.stdout), "--publish") == ["[::]:8000:8000"]


def test_printed_command_survives_a_shell(tmp_path: Path) -> None:
    words = dry("--model", "it's my model", "--", "--mode", "full", "--", "--seed", "0", cwd=tmp_path)
    assert f"{tmp_path}/it's my model:/model:ro" in words
    assert words[-5:] == ["--mode", "full", "--", "--seed", "0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model"),
        (["--model"], "--model"),
        (["--model", "m", "--devices", "0,,1"], "--devices wants numbers of NPUs such as 0,1,2,3, got '0,,1'"),
        (["--model", "m", "--devices", "all"], "'all'"),
        (["--model", "m", "--devices", "2,2"], "twice"),
        (["--model", "m", "--devices", "0,1,2"], "1, 2, 4 or 8 NPUs, got 3"),
        *((["--model", "m", "--port", wrong], "65535") for wrong in ("http", "9" * 20, "70000")),
        (["--model", "m", "--host", "my host"], "--host"),
        (["--model", "a:b"], "':'"),
        (["--gpus", "all"], "--gpus"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: list[str], words: str) -> None:
    refused = call("--dry-run", *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr


def test_missing_checkpoint_or_npu_starts_nothing(tmp_path: Path) -> None:
    assert "config.json" in call("--model", str(tmp_path)).stderr
    (tmp_path / "config.json").write_text("{}")
    started = call("--model", str(tmp_path), "--devices", "99999")
    assert started.returncode == 2
    assert "/dev/davinci99999" in started.stderr


def test_files_of_a_hubs_cache_are_links_to_nothing_in_the_container(tmp_path: Path) -> None:
    cache, other = tmp_path / "models--openai--gpt-oss-20b", tmp_path / "other"
    model = cache / "snapshots/abc"
    for folder in (model, cache / "blobs", other):
        folder.mkdir(parents=True)
    (cache / "blobs/1").write_text("{}")
    for place in (model / "config.json", other / "config.json"):
        place.symlink_to(cache / "blobs/1")
    words = dry("--model", str(model))
    assert values(words, "--volume")[0] == f"{cache}:/model:ro"
    assert (*values(words, "--model"), values(words, "--name")[-1]) == ("/model/snapshots/abc", "gpt-oss-20b")
    assert "/dev/davinci99999" in call("--model", str(model), "--devices", "99999").stderr
    assert "cp -rL" in call("--model", str(other), "--devices", "99999").stderr


def test_a_second_server_of_one_host_has_the_name_of_the_first() -> None:
    names = [values(dry("--model", "/m", *more), "--name")[0] for more in ((), ("--devices", "1", "--port", "8001"))]
    assert names == ["npu-gptoss", "npu-gptoss-8001"]


@pytest.mark.parametrize(("name", "numbers"), [("server-910b", "0"), ("server-910b-4", "0,1,2,3")])
def test_compose_mounts_the_same_as_the_script(name: str, numbers: str) -> None:
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"][name]
    words = dry("--model", "/x", "--devices", numbers)
    assert service["devices"] == values(words, "--device")
    assert sorted(service["volumes"][1:]) == sorted(values(words, "--volume")[1:])
    assert [service["shm_size"]] == values(words, "--shm-size")
    assert sorted(service["tmpfs"]) == sorted(values(words, "--tmpfs"))
    passed_on = ["VLLM_API_KEY", "NPU_GPTOSS_EXPERT_WEIGHTS"]
    assert service["environment"] == ["HOST=0.0.0.0", "NPU_GPTOSS_OPEN_METRICS=1", *passed_on]

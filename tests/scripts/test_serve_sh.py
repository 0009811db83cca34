"""serve.sh gives stock vLLM the Ascend article's flags, fits cards to the model, and refuses in words."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.emulator.machine import emulate
from tests.scripts.shell import ROOT, following, printed_command, run

GRAPH_FLAG = "--compilation-config"


def checkpoint(folder: Path, layers: int) -> Path:
    """As much of a checkpoint as serve.sh looks at."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}, indent=2))
    (folder / "model.safetensors").touch()
    return folder


def serve(*options: str | Path, **variables: str) -> tuple[dict[str, str], list[str]]:
    return printed_command(run("serve.sh", "--dry-run", *options, **variables))


def test_the_defaults_are_the_flags_of_the_ascend_article() -> None:
    variables, words = serve("--model", "openai/gpt-oss-20b")
    assert words[:3] == ["vllm", "serve", "openai/gpt-oss-20b"]
    article = {
        "--served-model-name": "gpt-oss-20b",
        "--gpu-memory-utilization": "0.95",
        "--tensor-parallel-size": "1",
        "--host": "127.0.0.1",
        "--port": "8085",
        "--max-model-len": "16384",
        "--max-num-batched-tokens": "4096",
        "--max-num-seqs": "16",
    }
    assert {flag: following(words, flag) for flag in article} == article
    assert "--enable-log-requests" in words, "the article's --no-disable-log-requests, as vLLM 0.11.0 calls it"
    graphs = json.loads(following(words, GRAPH_FLAG))
    assert graphs == {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [16, 10, 4, 2, 1]}
    assert "--enforce-eager" not in words
    assert "ASCEND_RT_VISIBLE_DEVICES" not in variables


@pytest.mark.parametrize(
    ("layers", "options", "cards"),
    [(24, (), "1"), (36, (), "4"), (36, ("--cards", "8"), "8"), (24, ("--devices", "9,10"), "2"), (4, (), "1")],
)
def test_cards_fit_the_model(layers: int, options: tuple[str, ...], cards: str, tmp_path: Path) -> None:
    _, words = serve("--model", checkpoint(tmp_path / "model", layers), *options)
    assert following(words, "--tensor-parallel-size") == cards


def test_devices_are_made_visible_and_a_folder_needs_no_hub(tmp_path: Path) -> None:
    variables, words = serve("--model", checkpoint(tmp_path / "my-20b", 24), "--devices", "4")
    assert variables["ASCEND_RT_VISIBLE_DEVICES"] == "4"
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert following(words, "--served-model-name") == "my-20b"


def test_modes_are_vllms() -> None:
    _, eager = serve("--model", "openai/gpt-oss-20b", "--mode", "eager")
    assert "--enforce-eager" in eager
    assert GRAPH_FLAG not in eager
    _, full = serve("--model", "openai/gpt-oss-20b", "--mode", "full", "--capture-sizes", "8,1")
    graphs = json.loads(following(full, GRAPH_FLAG))
    assert graphs == {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 1]}


def test_flags_of_the_user_come_last() -> None:
    _, words = serve("--model", "openai/gpt-oss-20b", "--", "--max-num-seqs", "64", "--seed", "7")
    assert words[-4:] == ["--max-num-seqs", "64", "--seed", "7"]


BINDING = '{"enable_cpu_binding": true}'


def programs(folder: Path, *names: str) -> str:
    """A PATH on which these stand, too."""
    for name in names:
        (folder / name).symlink_to("/bin/true")
    return f"{folder}:/usr/bin:/bin"


def test_workers_are_bound_to_the_cores_beside_their_cards(tmp_path: Path) -> None:
    path = programs(tmp_path, "npu-smi", "lspci", "lscpu")
    _, words = serve("--model", "openai/gpt-oss-20b", PATH=path)
    assert following(words, "--additional-config") == BINDING
    for where in ("cpu", "emulated"):
        _, words = serve("--model", "openai/gpt-oss-20b", "--on", where, PATH=path)
        assert "--additional-config" not in words, "a fake npu-smi binds nobody"


def test_a_machine_that_cannot_tell_the_cores_is_served_without_binding(tmp_path: Path) -> None:
    """vllm-ascend leaves the binding out and gives no reason when one of the programs is missing."""
    done = run("serve.sh", "--dry-run", "--model", "openai/gpt-oss-20b", PATH=programs(tmp_path, "lspci"))
    assert "--additional-config" not in printed_command(done)[1]
    assert "not bound to the cores beside their cards, for want of npu-smi." in done.stderr


TOLD = {  # by the programs of a machine with one card, beside core 0
    "npu-smi": """case "$*" in
"info -m") echo "NPU ID  Chip ID  Chip Logic ID  Chip Name"; echo "0 0 0 Ascend 910B3" ;;
*) echo "PCIe Bus Info : 0000:C1:00.0" ;;
esac""",
    "lspci": 'echo "NUMA node: 0"',
    "lscpu": 'echo "NUMA node0 CPU(s): 0-0"',
}
BIND = """
import os, sys
import psutil, torch_npu
from vllm_ascend import cpu_binding

folder, everywhere = sys.argv[1], psutil.Process().cpu_affinity()
os.environ["PATH"] = folder
for missing in (*os.listdir(folder), None):
    psutil.Process().cpu_affinity(everywhere)
    if missing:
        os.rename(f"{folder}/{missing}", f"{folder}/away")
    try:
        cpu_binding.bind_cpus(0, ratio=1.0)
        print("BOUND", missing, psutil.Process().cpu_affinity())
    except OSError as error:  # the worker says "Skip binding cpu." and goes on
        print("BOUND", missing, error.filename, psutil.Process().cpu_affinity() == everywhere)
    if missing:
        os.rename(f"{folder}/away", f"{folder}/{missing}")
"""


@pytest.mark.emulated
def test_vllm_ascend_binds_with_the_three_programs_and_not_without_one_of_them(tmp_path: Path) -> None:
    for name, text in TOLD.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = emulate("-c", BIND, str(tmp_path))
    said = sorted(line.removeprefix("BOUND ") for line in done.stdout.splitlines() if line.startswith("BOUND "))
    assert said == ["None [0]", *(f"{name} {name} True" for name in sorted(TOLD))], done.stderr[-3000:]


@pytest.mark.parametrize(
    "flag", ["--additional-config={}", "--additional_config.enable_cpu_binding=0", "--config=a.yaml"]
)
def test_an_additional_config_of_the_user_is_not_replaced(flag: str, tmp_path: Path) -> None:
    """vLLM takes the last one whole, and flags before those of a file that --config names."""
    path = programs(tmp_path, "npu-smi", "lspci", "lscpu")
    _, words = serve("--model", "openai/gpt-oss-20b", "--", flag, PATH=path)
    assert words[-1] == flag
    assert BINDING not in words


AIV = "HCCL_OP_EXPANSION_MODE"


@pytest.mark.parametrize(
    ("options", "set_"),
    [
        (("--cards", "1"), False),
        (("--cards", "2"), True),
        (("--on", "emulated", "--cards", "2"), True),
        (("--cards", "2", "--", "--data-parallel-size", "2"), False),
        (("--cards", "2", "--", "-dp=2"), False),
        (("--cards", "2", "--", "--config", "a.yaml"), False),
    ],
)
def test_collectives_run_on_vector_cores_for_several_cards_and_never_beside_data_parallelism(
    options: tuple[str, ...], set_: bool
) -> None:
    variables, _ = serve("--model", "openai/gpt-oss-20b", *options)
    assert variables.get(AIV) == ("AIV" if set_ else None)


@pytest.mark.parametrize("value", ["", "HOST"])
def test_a_mode_of_collectives_that_the_user_has_set_stays(value: str) -> None:
    variables, _ = serve("--model", "openai/gpt-oss-20b", "--cards", "2", **{AIV: value})
    assert AIV not in variables


def test_vector_core_collectives_of_the_user_beside_data_parallelism_are_told() -> None:
    options = ("--dry-run", "--model", "openai/gpt-oss-20b", "--cards", "2", "--")
    assert "AIV can hang with data parallelism" in run("serve.sh", *options, "-dp", "2", **{AIV: "AIV"}).stderr
    assert "AIV" not in run("serve.sh", *options, "-dp", "2", **{AIV: "HOST"}).stderr
    assert "AIV" not in run("serve.sh", *options, "--config", "a.yaml", **{AIV: "AIV"}).stderr


def test_on_a_cpu_there_are_no_graphs_and_what_the_user_set_stays(tmp_path: Path) -> None:
    options = ("--model", checkpoint(tmp_path / "model", 4), "--on", "cpu")
    variables, words = serve(*options)
    assert words[0].endswith("vllm")
    assert "--enforce-eager" in words
    assert "--gpu-memory-utilization" not in words
    wanted = {"NPU_GPTOSS_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert wanted.items() <= variables.items()
    variables, _ = serve(*options, OMP_NUM_THREADS="3")
    assert "OMP_NUM_THREADS" not in variables


def test_on_the_emulated_910b_it_runs_inside_the_emulator(tmp_path: Path) -> None:
    options = ("--model", checkpoint(tmp_path / "model", 4), "--on", "emulated", "--cards", "2")
    _, words = serve(*options, NPU_GPTOSS_EMULATED_VENV="/some/where")
    assert words[:7] == ["/some/where/bin/npu-gptoss", "emulate", "--devices", "2", "--", "vllm", "serve"]
    _, words = serve(*options)
    assert words[0] == str(ROOT / ".venv-emulated/bin/npu-gptoss")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--model is missing"),
        (("--model", "nowhere"), "neither a folder nor a name on the hub"),
        (("--model", "/no/such/folder"), "is not a folder"),
        (("--model", "openai/gpt-oss-120b", "--cards", "2"), "120b takes 234 GB as BF16, and 2 of 64 GB have 128"),
        (("--model", "openai/gpt-oss-20b", "--cards", "3"), "1, 2, 4 or 8, got 3"),
        (("--model", "openai/gpt-oss-20b", "--cards", "2", "--devices", "0"), "names 1 NPUs and --cards says 2"),
        (("--model", "openai/gpt-oss-20b", "--mode", "fast"), "eager, piecewise or full, got 'fast'"),
        (("--model", "openai/gpt-oss-20b", "--on", "gpu"), "npu, cpu or emulated, got 'gpu'"),
        (("--model", "openai/gpt-oss-20b", "--on", "cpu", "--mode", "full"), "no graphs on a CPU"),
        (("--model", "openai/gpt-oss-20b", "--on", "cpu", "--cards", "2"), "on a CPU there is one card"),
        (("--model", "openai/gpt-oss-20b", "--port", "70000"), "not between 1 and 65535"),
        (("--model", "openai/gpt-oss-20b", "--port", "9" * 20), "--port wants a whole number above 0, got '999"),
        (("--model", "openai/gpt-oss-20b", "--max-len", "16k"), "--max-len wants a whole number above 0, got '16k'"),
        (("--model", "openai/gpt-oss-20b", "--capture-sizes", "16,,1"), "commas between them, got '16,,1'"),
        (("--model", "openai/gpt-oss-20b", "--devices", "npu0"), "numbers of NPUs such as 0,1, got 'npu0'"),
        (("--model", "openai/gpt-oss-20b", "--devices", "1,0"), "each NPU once, in ascending order, got '1,0'"),
        (("--model", "openai/gpt-oss-20b", "--devices", "10,9"), "in ascending order, got '10,9'"),
        (("--model", "openai/gpt-oss-20b", "--devices", "4,4"), "in ascending order, got '4,4'"),
        (("--model", "openai/gpt-oss-20b", "--memory", "95"), "a fraction such as 0.95, got '95'"),
        (("--model", "openai/gpt-oss-20b", "--memory", "0.9GB"), "a fraction such as 0.95, got '0.9GB'"),
        (("--model", "openai/gpt-oss-20b", "--memory", "0.00"), "a fraction such as 0.95, got '0.00'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(options: tuple[str, ...], words: str) -> None:
    done = run("serve.sh", *options, "--dry-run")
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("missing", "words"), [("config.json", "holds no config.json"), ("model.safetensors", "not a complete")]
)
def test_an_incomplete_checkpoint_is_refused(missing: str, words: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 24)
    (model / missing).unlink()
    done = run("serve.sh", "--model", model, "--dry-run")
    assert done.returncode == 2
    assert words in done.stderr


def test_a_taken_port_is_told_before_vllm_starts(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "vllm").write_text("#!/bin/sh\necho started\n")
    (fake / "vllm").chmod(0o755)
    model = checkpoint(tmp_path / "model", 24)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--model", model, "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
        path = f"{fake}:/usr/local/bin:/usr/bin:/bin"
        done = run("serve.sh", *options, PATH=path)
        assert done.returncode == 2
        assert "choose another with --port" in done.stderr
        assert "started" not in done.stdout
    done = run("serve.sh", *options, PATH=path)
    assert done.stdout.splitlines()[-1] == "started", "the port is free now"


def test_without_vllm_it_says_where_to_get_it(tmp_path: Path) -> None:
    done = run("serve.sh", "--model", checkpoint(tmp_path / "model", 24), PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert "vllm is not there" in done.stderr


SECRET = "k3y-of-a-test"


@pytest.mark.parametrize(
    ("options", "variables", "told"),
    [
        ((), {}, False),
        (("--host", "127.0.0.2"), {}, False),
        (("--host", "0.0.0.0"), {}, True),
        (("--host", "0.0.0.0"), {"VLLM_API_KEY": SECRET}, False),
        (("--", "--host", "::"), {}, True),
        (("--", "--host=10.0.0.1", "--seed", "1"), {}, True),
        (("--host", "0.0.0.0", "--", "--host", "localhost"), {}, False),
    ],
)
def test_an_address_that_others_reach_is_told_when_no_key_is_asked_for(
    options: tuple[str, ...], variables: dict[str, str], told: bool
) -> None:
    done = run("serve.sh", "--dry-run", "--model", "openai/gpt-oss-20b", *options, **variables)
    assert ("it asks for no key" in done.stderr) is told
    assert ("docs/exposing-the-server.md" in done.stderr) is told
    said = [line for line in done.stderr.splitlines() if "not bound to the cores" not in line]
    assert len(said) == (2 if told else 0)


@pytest.mark.parametrize(
    "flags",
    [("--api-key", SECRET), (f"--api-key={SECRET}",), ("--api_key", SECRET, f"{SECRET}2"), ("--hf-token", SECRET)],
)
def test_a_key_is_not_printed(flags: tuple[str, ...]) -> None:
    """The command that it prints goes into logs."""
    done = run(
        "serve.sh", "--dry-run", "--model", "openai/gpt-oss-20b", "--host", "0.0.0.0", "--", *flags, "--seed", "7"
    )
    assert SECRET not in done.stdout + done.stderr
    assert printed_command(done)[1][-2:] == ["--seed", "7"]
    assert ("VLLM_API_KEY instead" in done.stderr) is ("api" in flags[0])
    assert SECRET not in run("serve.sh", "--dry-run", "--model", "openai/gpt-oss-20b", VLLM_API_KEY=SECRET).stdout

"""serve.sh gives stock vLLM the Ascend article's flags, fits cards to the model, and refuses wrong options."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.scripts.shell import ROOT, SCRIPTS, environment, following, printed_command, run, write_program
from tests.serving.server import free_port, wait_for

GRAPHS, BINDING, AIV = "--compilation-config", "--additional-config", "HCCL_OP_EXPANSION_MODE"
HUB = ("--model", "openai/gpt-oss-20b")
SECRET = "k3y-of-a-test"


def checkpoint(folder: Path, layers: int) -> Path:
    """As much of a checkpoint as serve.sh looks at."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}, indent=2))
    (folder / "model.safetensors").touch()
    return folder


def serve(*options: str | Path, **variables: str) -> tuple[dict[str, str], list[str]]:
    return printed_command(run("serve.sh", "--dry-run", *options, **variables))


def graphs(words: list[str]) -> dict[str, object]:
    return json.loads(following(words, GRAPHS))


def test_the_defaults_are_the_flags_of_the_ascend_article() -> None:
    variables, words = serve(*HUB)
    article = "--tensor-parallel-size 1 --max-model-len 16384 --max-num-seqs 16 --max-num-batched-tokens 4096"
    ours = "--served-model-name gpt-oss-20b --host 127.0.0.1 --port 8085"
    for flag, value in zip(*[iter(f"{article} {ours} --gpu-memory-utilization 0.95".split())] * 2, strict=True):
        assert following(words, flag) == value, flag
    assert words[:3] == ["vllm", "serve", "openai/gpt-oss-20b"]
    assert "--enable-log-requests" in words, "the article's --no-disable-log-requests, as vLLM 0.11.0 calls it"
    assert graphs(words) == {"cudagraph_capture_sizes": [16, 10, 4, 2, 1]}, "the mode is the stack's"
    assert "--enforce-eager" not in words
    assert "ASCEND_RT_VISIBLE_DEVICES" not in variables


@pytest.mark.parametrize(
    ("layers", "options", "cards"),
    [(24, (), "1"), (36, (), "4"), (36, ("--cards", "8"), "8"), (24, ("--devices", "9,10"), "2"), (4, (), "1")],
)
def test_cards_fit_the_model(layers: int, options: tuple[str, ...], cards: str, tmp_path: Path) -> None:
    _, words = serve("--model", checkpoint(tmp_path / "model", layers), *options)
    assert following(words, "--tensor-parallel-size") == cards


def test_120b_is_refused_on_two_cards_though_it_fits_packed(tmp_path: Path) -> None:
    options = ("--model", checkpoint(tmp_path / "model", 36), "--cards", "2")
    _, words = serve(*options, NPU_GPTOSS_EXPERT_WEIGHTS="packed")
    assert following(words, "--tensor-parallel-size") == "2"
    for cards, weights in (("2", "auto"), ("1", "packed")):
        done = run("serve.sh", *options[:3], cards, "--dry-run", NPU_GPTOSS_EXPERT_WEIGHTS=weights)
        assert (done.returncode, "NPU_GPTOSS_EXPERT_WEIGHTS=packed" in done.stderr) == (2, True)


def test_a_ready_server_offers_no_request_to_try(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web/health").touch()
    port = free_port()
    server = f"sleep 1; exec python3 -m http.server --directory {tmp_path}/web --bind 127.0.0.1 {port}"
    write_program(tmp_path / "vllm", server)
    command = ["sh", str(SCRIPTS / "serve.sh"), "--model", str(checkpoint(tmp_path / "gpt-oss-20b", 24))]
    path = f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], env=environment(PATH=path), stdout=out)
    try:
        assert wait_for(lambda: "ready after" in (tmp_path / "out").read_text(), 30)
    finally:
        process.terminate()
        process.wait(30)
    said = (tmp_path / "out").read_text()
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in said
    assert '"model": "gpt-oss-20b"' in said


def test_devices_are_made_visible_and_a_folder_needs_no_hub(tmp_path: Path) -> None:
    variables, words = serve("--model", checkpoint(tmp_path / "my-20b", 24), "--devices", "4")
    assert (variables["ASCEND_RT_VISIBLE_DEVICES"], variables["HF_HUB_OFFLINE"]) == ("4", "1")
    assert following(words, "--served-model-name") == "my-20b"
    cached = tmp_path / "models--openai--gpt-oss-20b/snapshots"
    cached.mkdir(parents=True)
    assert following(serve("--model", checkpoint(cached / "6cee5e8", 24))[1], "--served-model-name") == "gpt-oss-20b"


def test_modes_are_vllms_and_flags_of_the_user_come_last() -> None:
    _, eager = serve(*HUB, "--mode", "eager", "--", "--max-num-seqs", "64", "--seed", "7")
    assert "--enforce-eager" in eager
    assert GRAPHS not in eager
    assert eager[-4:] == ["--max-num-seqs", "64", "--seed", "7"]
    _, full = serve(*HUB, "--mode", "full", "--capture-sizes", "8,1")
    assert graphs(full) == {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 1]}
    _, pieces = serve(*HUB, "--mode", "piecewise")
    assert graphs(pieces)["cudagraph_mode"] == "PIECEWISE"


def test_sizes_for_16_rows_are_not_those_of_larger_steps() -> None:
    """A step larger than every captured size runs without a graph."""
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    for larger in (("--max-seqs", "17"), ("--", *drafts), ("--", "--speculative_config=x"), ("--", "-sc", "x")):
        assert GRAPHS not in serve(*HUB, *larger)[1]
        assert graphs(serve(*HUB, "--mode", "full", *larger)[1]) == {"cudagraph_mode": "FULL_DECODE_ONLY"}
        assert graphs(serve(*HUB, "--capture-sizes", "8", *larger)[1]) == {"cudagraph_capture_sizes": [8]}


def programs(folder: Path, *names: str) -> str:
    """A PATH on which these stand, too."""
    for name in names:
        (folder / name).symlink_to("/bin/true")
    return f"{folder}:/usr/bin:/bin"


def test_workers_are_pinned_to_the_cores_near_their_cards(tmp_path: Path) -> None:
    path = programs(tmp_path, "npu-smi", "lspci", "lscpu")
    _, words = serve(*HUB, PATH=path)
    assert json.loads(following(words, BINDING)) == {"enable_cpu_binding": True}
    for where in ("cpu", "emulated"):
        assert BINDING not in serve(*HUB, "--on", where, PATH=path)[1], "a fake npu-smi binds nobody"
    # vLLM takes the last config whole, and flags before those of a file that --config names
    for flag in ("--additional-config={}", "--additional_config.enable_cpu_binding=0", "--config=a.yaml"):
        words = serve(*HUB, "--", flag, PATH=path)[1]
        assert words[-1] == flag
        assert BINDING not in words, "the user's is not replaced"


def test_a_machine_that_cannot_tell_the_cores_is_served_without_binding(tmp_path: Path) -> None:
    """vllm-ascend leaves the binding out and gives no reason when one of the programs is missing."""
    done = run("serve.sh", "--dry-run", *HUB, PATH=programs(tmp_path, "lspci"))
    assert BINDING not in printed_command(done)[1]
    assert "npu-smi" in done.stderr


@pytest.mark.parametrize(
    ("options", "set_by_user", "expected", "told"),
    [
        ("--cards 1", None, None, False),
        ("--cards 2", None, "AIV", False),
        ("--on emulated --cards 2", None, "AIV", False),
        ("--cards 2 -- --data-parallel-size 2", None, None, False),
        ("--cards 2 -- -dp=2", None, None, False),
        ("--cards 2 -- --enable-expert-parallel", None, None, False),
        ("--cards 4 -- -pp 2", None, None, False),
        ("--cards 2 -- -ep", "AIV", None, True),
        ("--cards 2 -- --config a.yaml", None, None, False),
        ("--cards 2", "", None, False),
        ("--cards 2", "HOST", None, False),
        ("--cards 2 -- -dp 2", "AIV", None, True),
        ("--cards 2 -- -dp 2", "HOST", None, False),
        ("--cards 2 -- --config a.yaml", "AIV", None, False),
    ],
)
def test_vector_cores_do_not_run_collectives_of_several_groups(options, set_by_user, expected, told) -> None:
    variables = {} if set_by_user is None else {AIV: set_by_user}
    done = run("serve.sh", "--dry-run", *HUB, *options.split(), **variables)
    assert printed_command(done)[0].get(AIV) == expected
    assert (AIV in done.stderr) is told


def test_on_a_cpu_there_are_no_graphs_and_the_users_variables_stay(tmp_path: Path) -> None:
    options = ("--model", checkpoint(tmp_path / "model", 4), "--on", "cpu")
    variables, words = serve(*options)
    assert words[0].endswith("vllm")
    assert "--enforce-eager" in words
    assert "--gpu-memory-utilization" not in words
    wanted = {"NPU_GPTOSS_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert wanted.items() <= variables.items()
    assert "OMP_NUM_THREADS" not in serve(*options, OMP_NUM_THREADS="3")[0]


def test_on_the_emulated_910b_it_runs_inside_the_emulator(tmp_path: Path) -> None:
    options = ("--model", checkpoint(tmp_path / "model", 4), "--on", "emulated", "--cards", "2")
    _, words = serve(*options, ASCEND_EMULATOR_VENV="/some/where")
    assert words[:7] == ["/some/where/bin/npu-gptoss", "emulate", "--devices", "2", "--", "vllm", "serve"]
    assert serve(*options)[1][0] == str(ROOT / ".venv-emulated/bin/npu-gptoss")
    second = [option if option != "emulated" else "emulated-9.1" for option in options]
    assert serve(*second)[1][0] == str(ROOT / ".venv-emulated-9.1/bin/npu-gptoss")


@pytest.mark.parametrize(
    ("installed", "set_by_user", "expected"),
    [
        ("0.23.0+empty", None, "0.23.0"),
        ("0.11.0+empty", None, None),
        ("0.23.0", None, None),
        ("0.23.0+empty", "x", None),
    ],
)
def test_vllm_ascend_gets_the_version_of_its_vllm(installed, set_by_user, expected, tmp_path) -> None:
    write_program(tmp_path / "python3", f"echo {installed}")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **({"VLLM_VERSION": set_by_user} if set_by_user else {})}
    assert serve(*HUB, **variables)[0].get("VLLM_VERSION") == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--model"),
        ("--model nowhere", "hub"),
        ("--model /no/such/folder", "not a folder"),
        ("--model openai/gpt-oss-120b --cards 2", "234 GB"),
        ("HUB --cards 3", "got 3"),
        ("HUB --cards 2 --devices 0", "1 NPUs and --cards says 2"),
        ("HUB --mode fast", "'fast'"),
        ("HUB --on gpu", "'gpu'"),
        ("HUB --on cpu --mode full", "--mode full"),
        ("HUB --on cpu --cards 2", "--cards"),
        ("HUB --port 70000", "65535"),
        *((f"HUB -- {word} x", f"{word} stands behind --") for word in ("--port", "--host=::", "--served-model-name")),
        (f"HUB --port {'9' * 20}", "--port wants a whole number"),
        ("HUB --max-len 16k", "--max-len wants a whole number above 0, got '16k'"),
        ("HUB --capture-sizes 16,,1", "'16,,1'"),
        ("HUB --devices npu0", "'npu0'"),
        *((f"HUB --devices {wrong}", f"ascending order, got '{wrong}'") for wrong in ("1,0", "10,9", "4,4")),
        *((f"HUB --memory {wrong}", f"0.95, got '{wrong}'") for wrong in ("95", "0.9GB", "0.00")),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: str, words: str) -> None:
    done = run("serve.sh", *options.replace("HUB", " ".join(HUB)).split(), "--dry-run")
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(("missing", "words"), [("config.json", "config.json"), ("model.safetensors", "*.safetensors")])
def test_an_incomplete_checkpoint_is_refused(missing: str, words: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 24)
    (model / missing).unlink()
    done = run("serve.sh", "--model", model, "--dry-run")
    assert done.returncode == 2
    assert words in done.stderr


def test_a_taken_port_is_reported_before_vllm_starts(tmp_path: Path) -> None:
    write_program(tmp_path / "vllm", "echo started")
    path = f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--model", checkpoint(tmp_path / "model", 24), "--port", str(taken.getsockname()[1]))
        done = run("serve.sh", *options, PATH=path)
        assert done.returncode == 2
        assert "--port" in done.stderr
        assert "started" not in done.stdout
    assert run("serve.sh", *options, PATH=path).stdout.splitlines()[-1] == "started", "the port is free now"


def test_without_vllm_it_says_where_to_get_it(tmp_path: Path) -> None:
    done = run("serve.sh", "--model", checkpoint(tmp_path / "model", 24), PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert "make setup" in done.stderr


@pytest.mark.parametrize(
    ("options", "key", "told"),
    [
        ("", "", False),
        ("--host 127.0.0.2", "", False),
        ("--host 0.0.0.0", "", True),
        ("--host 0.0.0.0", SECRET, False),
        ("-- --host ::", "", True),
        ("-- --host=10.0.0.1 --seed 1", "", True),
        ("--host 0.0.0.0 -- --host localhost", "", False),
    ],
)
def test_a_public_address_without_a_key_is_warned_of(options: str, key: str, told: bool) -> None:
    done = run("serve.sh", "--dry-run", *HUB, *options.split(), **({"VLLM_API_KEY": key} if key else {}))
    assert ("docs/exposing-the-server.md" in done.stderr) is told
    assert ("VLLM_API_KEY" in done.stderr) is told
    assert SECRET not in done.stdout + done.stderr


def test_in_a_container_the_hint_is_to_listen_where_nobody_reaches_it() -> None:
    done = run("serve.sh", "--dry-run", *HUB, "--host", "0.0.0.0", container="docker")
    assert "Publish the port on 127.0.0.1" in done.stderr
    assert "listen on" not in done.stderr


@pytest.mark.parametrize(
    "flags",
    [("--api-key", SECRET), (f"--api-key={SECRET}",), ("--api_key", SECRET, f"{SECRET}2"), ("--hf-token", SECRET)],
)
def test_a_key_is_not_printed(flags: tuple[str, ...]) -> None:
    """The command that it prints goes into logs."""
    done = run("serve.sh", "--dry-run", *HUB, "--host", "0.0.0.0", "--", *flags, "--seed", "7")
    assert SECRET not in done.stdout + done.stderr
    assert printed_command(done)[1][-2:] == ["--seed", "7"]
    assert ("VLLM_API_KEY instead" in done.stderr) is ("api" in flags[0])

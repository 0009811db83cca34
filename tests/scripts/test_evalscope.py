"""The real evalscope against a real server: serve.sh, perf.sh and eval.sh as users run them, on the trained tiny model.

The score is a right model's, and falls to chance when the sinks are lost.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from research import tiny_mmlu
from scripts import serve_here
from tests.scripts.shell import EVALSCOPE, SCRIPTS, environment, needs_evalscope, report, run
from tests.scripts.test_eval_sh import SIZES
from tests.serving.server import START_LIMIT, Server, free_port

pytestmark = [pytest.mark.evalscope, pytest.mark.serving, pytest.mark.slow, needs_evalscope]
QUESTIONS = 24
LIMIT = 240  # seconds for one run of a script; 10 to 25 on two idle cores


@contextlib.contextmanager
def serve_sh(model: Path, log: Path) -> Iterator[Server]:
    """A server started by the command of the documentation; gone with everything it started afterwards."""
    port = free_port()
    what = ("--model", str(model), "--name", "gpt-oss-tiny", "--on", "cpu")
    where = ("--host", "127.0.0.1", "--port", str(port))
    process = serve_here.start(["sh", str(SCRIPTS / "serve.sh"), *what, *where], environment(), log)
    try:
        serve_here.wait_until_ready(process, f"http://127.0.0.1:{port}", log, timeout=START_LIMIT)
        yield Server(f"http://127.0.0.1:{port}", "gpt-oss-tiny", log)
        assert process.poll() is None, f"the server died during the tests; its log is {log}"
    finally:
        serve_here.stop(process)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("evalscope")
    write_tiny(folder / "model", trained=True)
    tiny_mmlu.write(folder / "mmlu", QUESTIONS)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve_sh(folder / "model", folder / "server.log") as running:
        yield running


def mmlu(server: Server, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """mmlu.sh on the tiny set. evalscope's cache stays in the test's folder."""
    where = ("--url", server.url, "--data", folder / "mmlu", "--out", folder / "right")
    how = ("--few-shot", "0", "--max-tokens", "80")
    return run("mmlu.sh", *where, *how, *options, timeout=LIMIT, HF_HOME=str(folder / "cache"))


def score(printed: str) -> tuple[float, int]:
    """The percentage and the count of right answers in a report."""
    found = re.search(r"mean over questions: ([\d.]+) \(.*?\) %\*\*, (\d+) right", printed)
    assert found, printed
    return float(found[1]), int(found[2])


@pytest.mark.long
def test_gpqa_is_asked_with_shuffled_choices_and_answered(server: Server, folder: Path) -> None:
    """The tiny model's own questions in the layout of GPQA's file, where the right answer has a separate column."""
    names = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    (folder / "gpqa").mkdir()
    with (folder / "gpqa/gpqa_diamond.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ("Question", "Correct Answer", *names))
        table.writeheader()
        for row in tiny_mmlu.draw("gpqa", QUESTIONS // 4):
            right = row["choices"].pop(row["answer"])
            wrong = dict(zip(names, row["choices"], strict=True))
            table.writerow({"Question": row["question"], "Correct Answer": right, **wrong})
    where = ("--url", server.url, "--data", folder / "gpqa", "--out", folder / "gpqa-run")
    done = run("eval.sh", "gpqa", *where, "--max-tokens", "80", timeout=LIMIT, HF_HOME=str(folder / "cache"))
    assert done.returncode == 0
    assert f"{QUESTIONS} questions: a part of GPQA Diamond's 198" in done.stdout
    assert score(done.stdout)[0] > 80, "chance is 25"


@pytest.fixture(scope="module")
def finished(server: Server, folder: Path) -> str:
    """The report of a whole run, in folder/"right"."""
    done = mmlu(server, folder)
    assert done.returncode == 0
    return done.stdout


def test_the_score_is_far_above_chance_and_evalscopes_own(finished: str, folder: Path) -> None:
    percent, right = score(finished)
    assert percent > 90, "chance is 25"
    for words in (f"{QUESTIONS} questions of 4 subjects", "few_shot_num 0", "reasoning_effort medium"):
        assert words in finished
    report = json.loads((folder / "right/reports/gpt-oss-tiny/mmlu.json").read_text())
    assert report["metrics"][0]["score"] * QUESTIONS == pytest.approx(right, abs=0.01)


def test_an_interrupted_run_asks_the_missing_questions_only(server: Server, folder: Path, finished: str) -> None:
    lost = 0
    for path in (folder / "right/predictions/gpt-oss-tiny").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        lost += len(lines) // 2
        path.write_text("".join(lines[len(lines) // 2 :]))
    (folder / "right/reports/gpt-oss-tiny/mmlu.json").unlink()
    before = server.metric("vllm:request_success_total")
    done = mmlu(server, folder)
    assert done.returncode == 0
    assert server.metric("vllm:request_success_total") - before == lost == QUESTIONS // 2
    assert score(done.stdout) == score(finished)


@pytest.mark.long
def test_other_settings_do_not_mix_into_a_run(server: Server, folder: Path, finished: str) -> None:
    before = server.metric("vllm:request_success_total")
    done = mmlu(server, folder, "--effort", "low")
    assert done.returncode == 2
    assert "holds a run with other settings" in done.stderr
    assert server.metric("vllm:request_success_total") == before


def test_the_plot_is_drawn(folder: Path, finished: str) -> None:
    target = folder / "plot.svg"
    report(folder / "right", "--plot", target)
    drawn = target.read_text()
    assert "<svg" in drawn
    assert len(re.findall("high school statistics", drawn)) == 1, "each subject is labelled, in a comment of the SVG"
    assert not list(folder.glob(".*plot*")), "nothing half-written is left"


def test_perf_measures_every_request_and_the_server_saw_them(server: Server, folder: Path) -> None:
    before = server.metric("vllm:generation_tokens_total")
    asked = {"--parallel": "1,10", "--number": "2,10", "--output": "24", "--out": folder / "perf"}
    options = [word for pair in asked.items() for word in pair]
    no_pause = ("--", "--sleep-interval", "0")  # between the two runs
    done = run("perf.sh", "--url", server.url, *options, *no_pause, timeout=LIMIT, HF_HOME=str(folder / "cache"))
    assert done.returncode == 0
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if line[:1] == "|"
    ]
    assert [row[:2] for row in rows[-2:]] == [["1", "0 / 2"], ["10", "0 / 10"]]
    for row in rows[-2:]:
        latency, first, each = float(row[2]), float(row[3]) / 1000, float(row[4]) / 1000
        assert latency == pytest.approx(first + 23 * each, rel=0.05, abs=0.02), "24 tokens: the first and 23 more"
    assert server.metric("vllm:generation_tokens_total") - before >= 12 * 24


@pytest.mark.long
def test_evalscope_draws_a_thousand_questions_for_the_gate() -> None:
    part = re.search(r"^PART=(\S+)$", (SCRIPTS / "eval.sh").read_text(), re.M)[1]
    code = (
        "from evalscope.api.dataset.dataset import resolve_dataset_limit as limit; "
        f"print(sum(limit({part}, size) for size in {SIZES}))"
    )
    done = subprocess.run([str(EVALSCOPE), "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"

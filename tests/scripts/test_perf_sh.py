"""perf.sh runs the Ascend article's loads, asks the server for its model, and says when times mean something else."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from scripts import perf_report
from scripts.perf_report import ReportError
from tests.scripts.fake_server import fake_server
from tests.scripts.shell import beside_a_fake_evalscope, following, printed_command, run

ARTICLE = """perf --model gpt-oss-20b --url http://127.0.0.1:8085/v1/chat/completions --api openai --dataset random
--parallel 1 10 --number 10 20 --prefix-length 0 --min-prompt-length 128 --max-prompt-length 128 --min-tokens 128
--max-tokens 128 --extra-args"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    return beside_a_fake_evalscope(tmp_path / "repository", status=9)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def test_the_defaults_are_the_articles(scripts: Path) -> None:
    done = run("perf.sh", "--model", "gpt-oss-20b", "--tokenizer", "/models/20b", "--dry-run", scripts=scripts)
    variables, words = printed_command(done)
    assert variables == {"HF_HUB_OFFLINE": "1"}
    article = ARTICLE.split()
    assert words[1 : len(article) + 1] == article
    assert json.loads(following(words, "--extra-args")) == {"ignore_eos": True}
    assert following(words, "--tokenizer-path") == "/models/20b"
    assert following(words, "--outputs-dir").startswith("outputs/perf-gpt-oss-20b-")


def test_name_and_tokenizer_come_from_the_server(scripts: Path, tokenizer: Path) -> None:
    with fake_server({"served": str(tokenizer)}) as url:
        _, words = printed_command(run("perf.sh", "--url", f"{url}/v1/", "--dry-run", scripts=scripts))
    assert following(words, "--model") == "served"
    assert following(words, "--tokenizer-path") == str(tokenizer)
    assert following(words, "--url") == f"{url}/v1/chat/completions"


@pytest.mark.parametrize(
    ("served", "options", "status", "words"),
    [
        ("/on/another/machine", "", 2, "--tokenizer"),
        ("", "--parallel 1,2,3 --number 10,20", 2, "1,2,3"),
        ("", "--out .", 2, "--out"),
        ("", "--input 16300", 2, "--max-model-len"),
        ("", "--out new", 9, ""),  # evalscope's own failure
    ],
)
def test_an_impossible_measurement_ends_the_script(served, options, status, words, scripts, tokenizer) -> None:
    with fake_server({"served": served or str(tokenizer)}) as url:
        done = run("perf.sh", "--url", url, *options.split(), scripts=scripts)
    assert done.returncode == status
    assert words in done.stderr


def test_evalscope_is_quiet_but_for_its_progress_until_it_fails(tmp_path: Path, capsys) -> None:
    bars = [f"Processing[parallel_10_number_20]:  {5 * n}%|██  | {n}/20 [00:0{n}<00:09" for n in (1, 20, 20)]
    said = ["Spec. Accept Rate 29%", *bars, "| Steady | 52869.82 tok/s |"]
    assert perf_report.follow([*said, "exit 0"], tmp_path / "log", terminal=False) == 0
    assert "".join(capsys.readouterr()) == "perf.sh: 10 at a time: 20 of 20 requests\n"
    assert (tmp_path / "log").read_text().splitlines() == said
    assert perf_report.follow([*said, "exit 3"], tmp_path / "log", terminal=True) == 3
    assert "52869.82" in capsys.readouterr().err, "the end of the log says why"
    assert perf_report.follow(said, tmp_path / "log", terminal=True) == 1, "killed"
    assert list(perf_report.lines(io.BytesIO(b"a\rb\nc"))) == ["a", "b", "c"]


def summary(folder: Path, parallel: int, failed: int = 0, tokens: float = 128.0, model: str = "gpt-oss-20b") -> None:
    path = folder / model / f"parallel_{parallel}_number_20" / "benchmark_summary.json"
    path.parent.mkdir(parents=True)
    times = {"Avg Latency (s)": 2.7251, "Avg TTFT (ms)": 217.4, "Avg TPOT (ms)": 19.75}
    rates = {"Output Throughput (tok/s)": 469.7, "Avg Input Tokens": 126.0, "Avg Output Tokens": tokens}
    counts = {"Concurrency": parallel, "Total Requests": 20, "Failed Requests": failed}
    path.write_text(json.dumps({**counts, **times, **rates}))


def columns(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_row_for_each_run_and_the_articles_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    summary(tmp_path, 10)
    summary(tmp_path, 1)
    assert perf_report.main([str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert columns(lines[2]) == ["1", "0 / 20", "2.73", "217", "19.8", "469.7", "126"]
    assert columns(lines[3])[0] == "10"
    assert columns(lines[5])[2:5] == ["2.72", "217", "20.0"]


def test_another_model_is_not_compared_with_the_article(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    summary(tmp_path, 1, model="gpt-oss-tiny")
    assert perf_report.main([str(tmp_path)]) == 0
    assert "article" not in capsys.readouterr().out


@pytest.mark.parametrize(("options", "words"), [({"failed": 3}, "3 of 20"), ({"tokens": 97.5}, "97.5 tokens at 10")])
def test_times_of_something_else_are_not_comparable(options, words, tmp_path, capsys) -> None:
    summary(tmp_path, 10, **options)
    assert perf_report.main([str(tmp_path)]) == 1
    assert f"NOT COMPARABLE: {words}" in capsys.readouterr().out.replace("answers have ", "")


def test_a_run_without_an_answer_has_no_times(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    summary(tmp_path, 10, failed=20)
    assert perf_report.main([str(tmp_path)]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "20 / 20" in line]
    assert not any(character.isdigit() for cell in columns(row)[2:] for character in cell)


def test_no_results_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no benchmark_summary\.json"):
        perf_report.read_runs(tmp_path)
    summary(tmp_path, 1)
    path = next(tmp_path.rglob("benchmark_summary.json"))
    path.write_text('{"Concurrency": 1}')
    with pytest.raises(ReportError, match="KeyError"):
        perf_report.read_runs(tmp_path)

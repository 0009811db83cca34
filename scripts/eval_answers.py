"""The answers of a run of scripts/eval.sh, read from the files that evalscope 1.14 writes. Standard library only.

A work directory holds `reviews/MODEL/BENCHMARK_PART.jsonl` (one line for each answer: the prompt, the right answer,
the answer found in the reply, its score), `predictions/…` (the reply with the reason for its end),
`reports/MODEL/BENCHMARK.json` (written once all is answered) and `configs/task_config.yaml`. The parts of MMLU are its
subjects; the others have one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ReportError(Exception):
    """The sentence names the expected value, the found value and the remedy."""


@dataclass(frozen=True)
class Benchmark:
    """One that scripts/eval.sh asks. `name`: evalscope's; `questions` and `subjects`: of its test split.

    `chance`: per cent that guessing gets right.
    """

    name: str
    title: str
    questions: int
    subjects: int = 1
    chance: int = 0


BENCHMARKS = (
    Benchmark("mmlu", "MMLU", 14_042, subjects=57, chance=25),
    Benchmark("gsm8k", "GSM8K", 1_319),
    Benchmark("gpqa_diamond", "GPQA Diamond", 198, chance=25),
    Benchmark("aime25", "AIME 2025", 30),
)


@dataclass(frozen=True)
class Answer:
    """One question's outcome. `found`: the answer that evalscope took from the reply, "" when there was none.

    `prompt`: the whole question, worked examples included; two runs are compared question by question on it.
    `ended` is why the reply ended: "stop", "max_tokens", … `scored`: False where evalscope gave up on comparing, and
    leaves the question out of its mean.
    """

    subject: str
    prompt: str
    target: str
    found: str
    right: bool
    ended: str
    scored: bool = True

    @property
    def cut(self) -> bool:
        """True when a token limit ended the reply."""
        return self.ended == "max_tokens"


@dataclass(frozen=True)
class EvalRun:
    """A finished run. `settings`: from evalscope's configuration, for questions and decoding."""

    folder: Path
    benchmark: Benchmark
    model: str
    answers: tuple[Answer, ...]
    settings: dict[str, str]

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(sorted({answer.subject for answer in self.answers}))

    def of(self, subject: str) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.subject == subject)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; the last one may be cut off where a run was interrupted, and evalscope does it anew."""
    for line in path.read_bytes().split(b"\n"):  # Unicode has other ends of lines, which may stand in a text
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _only_run(folder: Path) -> tuple[Benchmark, str]:
    """The benchmark and the model."""
    runs = [
        (benchmark, path.parent.name)
        for benchmark in BENCHMARKS
        for part in ("predictions", "reviews")
        for path in folder.glob(f"{part}/*/{benchmark.name}_*.jsonl")
    ]
    if not runs:
        raise ReportError(
            f"{folder} holds no answers: expected predictions/MODEL/BENCHMARK_*.jsonl, as scripts/eval.sh writes, "
            f"with BENCHMARK one of {', '.join(benchmark.name for benchmark in BENCHMARKS)}"
        )
    for kind, names in (
        ("benchmarks", {benchmark.title for benchmark, _ in runs}),
        ("models", {model for _, model in runs}),
    ):
        if len(names) > 1:
            raise ReportError(
                f"{folder} holds runs of several {kind} ({', '.join(sorted(names))}); each wants a folder of its own"
            )
    return runs[0]


def _prompt(row: dict[str, Any]) -> str:
    """The messages before the reply, as one text."""
    asked = [message for message in row["messages"] if message["role"] != "assistant"]
    return "\n".join(message["content"] if isinstance(message["content"], str) else "" for message in asked)


def _read_part(benchmark: Benchmark, path: Path, predictions: Path) -> Iterator[Answer]:
    subject = path.stem.removeprefix(f"{benchmark.name}_")
    ended = {}
    if (predictions / path.name).is_file():
        for row in _rows(predictions / path.name):
            choices = (row.get("model_output") or {}).get("choices") or [{}]
            ended[row["index"]] = choices[0].get("stop_reason") or "unknown"
    latest = {row["index"]: row for row in _rows(path)}  # a question that was scored again counts once
    for index, row in sorted(latest.items()):
        score = row["sample_score"]["score"]
        name = score["main_score_name"] or "acc"  # AIME's adapter leaves it out
        found = score.get("extracted_prediction") or ""
        scored = bool(score["value"])
        right = scored and score["value"][name] == 1
        yield Answer(subject, _prompt(row), row["target"][0], found, right, ended.get(index, "unknown"), scored)


def _settings(path: Path) -> dict[str, str]:
    """Settings of questions and decoding, from a few plain lines of evalscope's YAML."""
    wanted = ("evalscope_version", "reasoning_effort", "temperature", "max_tokens", "few_shot_num", "shuffle", "limit")
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        key, colon, value = line.strip().partition(":")
        if colon and key in wanted and value.strip():
            found.setdefault(key, value.strip())
    return found


def read_run(folder: Path) -> EvalRun:
    """All answers of a finished run.

    Raises ReportError when there are none, when the run is not finished, or when its report and its answers differ.
    """
    benchmark, model = _only_run(folder)
    try:
        return _finished(folder, benchmark, model)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ReportError(
            f"{folder} is not what evalscope 1.14 writes ({type(error).__name__}: {error}); "
            "the environment that was tested is made by: make setup-evalscope"
        ) from None


def _finished(folder: Path, benchmark: Benchmark, model: str) -> EvalRun:
    again = "run the same scripts/eval.sh command again: it goes on where it stopped"
    predictions, parts = folder / "predictions" / model, f"{benchmark.name}_*.jsonl"
    try:
        report = json.loads((folder / "reports" / model / f"{benchmark.name}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        count = sum(len({row["index"] for row in _rows(path)}) for path in predictions.glob(parts))
        raise ReportError(f"{folder} is not finished: {count} questions are answered; {again}") from None
    questions, score = (report["metrics"][0][name] for name in ("num", "score"))
    answers = tuple(
        answer
        for path in sorted((folder / "reviews" / model).glob(parts))
        for answer in _read_part(benchmark, path, predictions)
    )
    if not answers:
        raise ReportError(f"{folder} has a report and no scored answers; {again}")
    right, scored = (sum(getattr(answer, what) for answer in answers) for what in ("right", "scored"))
    if questions != scored or abs(score - right / scored) > 1e-4:
        raise ReportError(
            f"{folder}: the report has {questions} questions with a score of {score}, the reviews "
            f"{scored} with {right} right; {again}"
        )
    return EvalRun(folder, benchmark, model, answers, _settings(folder / "configs" / "task_config.yaml"))

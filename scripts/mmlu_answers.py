"""The answers of an MMLU run, read from the files that evalscope 1.14 writes. Standard library only.

A work directory holds `reviews/MODEL/mmlu_SUBJECT.jsonl` (one line for each answer: the prompt, the right letter, the
letter found in the reply, its score), `predictions/…` beside it (the reply with the reason for its end),
`reports/MODEL/mmlu.json` (written once all is answered) and `configs/task_config.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "mmlu_"


class ReportError(Exception):
    """What was expected, what was found, what to do."""


@dataclass(frozen=True)
class Answer:
    """One question's outcome. `letter` is what evalscope found in the reply, "" when there was none.

    `prompt` is everything that was asked, worked examples included; two runs are compared question by question on it.
    `ended` is why the reply ended: "stop", "max_tokens", …
    """

    subject: str
    prompt: str
    target: str
    letter: str
    right: bool
    ended: str


@dataclass(frozen=True)
class MmluRun:
    """A finished run. `settings`: those of evalscope's configuration that decide what was asked and how."""

    folder: Path
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


def _only_model(folder: Path) -> str:
    files = [path for part in ("predictions", "reviews") for path in folder.glob(f"{part}/*/{PREFIX}*.jsonl")]
    models = sorted({path.parent.name for path in files})
    if not models:
        raise ReportError(
            f"{folder} holds no answers to MMLU: expected predictions/MODEL/{PREFIX}*.jsonl, as scripts/mmlu.sh writes"
        )
    if len(models) > 1:
        raise ReportError(
            f"{folder} holds runs of several models ({', '.join(models)}); each wants a folder of its own"
        )
    return models[0]


def _prompt(row: dict[str, Any]) -> str:
    """The messages before the reply, as one text."""
    asked = [message for message in row["messages"] if message["role"] != "assistant"]
    return "\n".join(message["content"] if isinstance(message["content"], str) else "" for message in asked)


def _read_subject(path: Path, predictions: Path) -> Iterator[Answer]:
    subject = path.stem.removeprefix(PREFIX)
    ended = {}
    if (predictions / path.name).is_file():
        for row in _rows(predictions / path.name):
            choices = (row.get("model_output") or {}).get("choices") or [{}]
            ended[row["index"]] = choices[0].get("stop_reason") or "unknown"
    latest = {row["index"]: row for row in _rows(path)}  # a question that was scored again counts once
    for index, row in sorted(latest.items()):
        score = row["sample_score"]["score"]
        value = score["value"][score["main_score_name"]]
        letter = score.get("extracted_prediction") or ""
        yield Answer(subject, _prompt(row), row["target"][0], letter, value == 1, ended.get(index, "unknown"))


def _settings(path: Path) -> dict[str, str]:
    """What decides the questions and the decoding, from evalscope's YAML, of which a few plain lines are enough."""
    wanted = ("evalscope_version", "reasoning_effort", "temperature", "max_tokens", "few_shot_num", "shuffle", "limit")
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        key, colon, value = line.strip().partition(":")
        if colon and key in wanted and value.strip():
            found.setdefault(key, value.strip())
    return found


def read_run(folder: Path) -> MmluRun:
    """All answers of a finished run.

    Raises ReportError when there are none, when the run is not finished, or when its report and its answers differ.
    """
    model = _only_model(folder)
    try:
        return _finished(folder, model)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ReportError(
            f"{folder} is not what evalscope 1.14 writes ({type(error).__name__}: {error}); "
            "the environment that was tested is made by: make setup-evalscope"
        ) from None


def _finished(folder: Path, model: str) -> MmluRun:
    again = "run the same scripts/mmlu.sh command again: it goes on where it stopped"
    predictions = folder / "predictions" / model
    try:
        report = json.loads((folder / "reports" / model / "mmlu.json").read_bytes())
    except (FileNotFoundError, ValueError):
        count = sum(len({row["index"] for row in _rows(path)}) for path in predictions.glob(f"{PREFIX}*.jsonl"))
        raise ReportError(f"{folder} is not finished: {count} questions are answered; {again}") from None
    questions, score = (report["metrics"][0][name] for name in ("num", "score"))
    answers = tuple(
        answer
        for path in sorted((folder / "reviews" / model).glob(f"{PREFIX}*.jsonl"))
        for answer in _read_subject(path, predictions)
    )
    if not answers:
        raise ReportError(f"{folder} has a report and no scored answers; {again}")
    right = sum(answer.right for answer in answers)
    if questions != len(answers) or abs(score - right / len(answers)) > 1e-4:
        raise ReportError(
            f"{folder}: the report has {questions} questions with a score of {score}, the reviews "
            f"{len(answers)} with {right} right; {again}"
        )
    return MmluRun(folder, model, answers, _settings(folder / "configs" / "task_config.yaml"))

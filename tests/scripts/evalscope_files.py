"""Work directories as evalscope 1.14 writes them, with outcomes that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

CONFIG = """\
dataset_args:
  mmlu:
    few_shot_num: 5
evalscope_version: 1.14.1
generation_config:
  max_tokens: {max_tokens}
  reasoning_effort: {effort}
  temperature: 0.0
limit: null
"""


def review(subject: str, index: int, right: bool, letter: str = "A", prompt: str = "") -> dict[str, object]:
    score = {
        "value": {"accuracy": float(right)},
        "extracted_prediction": letter,
        "main_score_name": "accuracy",
        "status": "success",
    }
    messages = [
        {"role": "user", "content": prompt or f"question {index} of {subject}"},
        {"role": "assistant", "content": [{"type": "text", "text": f"ANSWER: {letter}"}]},
    ]
    return {"index": index, "target": ["A"], "messages": messages, "sample_score": {"score": score}}


def ends(*reasons: str) -> list[dict[str, object]]:
    """Predictions of replies that ended for these reasons."""
    return [{"index": i, "model_output": {"choices": [{"stop_reason": end}]}} for i, end in enumerate(reasons)]


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_run(
    folder: Path,
    outcomes: Mapping[str, Sequence[bool]],
    model: str = "gpt-oss-20b",
    benchmark: str = "mmlu",
    effort: str = "medium",
    max_tokens: int | None = None,
) -> Path:
    """A finished run: subject -> True for each question with a right answer."""
    for subject, rights in outcomes.items():
        reviews = [review(subject, index, right, "A" if right else "B") for index, right in enumerate(rights)]
        write_lines(folder / "reviews" / model / f"{benchmark}_{subject}.jsonl", reviews)
        write_lines(folder / "predictions" / model / f"{benchmark}_{subject}.jsonl", ends(*["stop"] * len(rights)))
    everything = [right for rights in outcomes.values() for right in rights]
    report = {"metrics": [{"num": len(everything), "score": round(sum(everything) / len(everything), 4)}]}
    write_lines(folder / "reports" / model / f"{benchmark}.json", [report])
    (folder / "configs").mkdir()
    (folder / "configs" / "task_config.yaml").write_text(CONFIG.format(effort=effort, max_tokens=max_tokens or "null"))
    return folder

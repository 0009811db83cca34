"""Writes questions that the tiny trained checkpoint can answer, in MMLU's layout, for mmlu.sh --data.

    tiny_mmlu.py DIR [--questions 60]

Each of four of MMLU's subjects has a kind of question from tiny_data.py, drawn with seeds that training does not use.
The tiny model has learned evalscope's prompt without worked examples: `mmlu.sh --few-shot 0`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from research.tiny_data import CHOICE_COT, LETTERS, make_example

SUBJECTS = {"sum": "elementary_mathematics", "capital": "high_school_geography"}
SUBJECTS |= {"kind": "miscellaneous", "largest": "high_school_statistics"}
DEV = 5  # worked examples of a subject, as in MMLU
README = """\
---
configs:
- config_name: all
  data_files:
  - split: test
    path: all/test.jsonl
  - split: dev
    path: all/dev.jsonl
---
Questions for the tiny trained checkpoint of npu-gptoss in the layout of MMLU, written by research/tiny_mmlu.py.
"""


def rows(seed: str) -> Iterator[dict[str, Any]]:
    """Yields questions without end or repetition: `question`, `subject`, `choices` (four texts), `answer` (0 to 3)."""
    generator, seen = random.Random(seed), set()
    head, question_mark, _ = CHOICE_COT.partition("{question}")
    assert question_mark
    while True:
        example = make_example(generator, "choice")
        if len(example.messages) != 1 or example.tools or not example.messages[0]["content"].startswith(head):
            continue  # with earlier turns, instructions or filler text: MMLU has none of these
        text = example.messages[0]["content"].removeprefix(head)
        if text in seen:
            continue
        seen.add(text)
        question, _, options = text.partition("\n\n")
        choices = [line.partition(") ")[2] for line in options.splitlines()]
        yield {
            "question": question,
            "subject": SUBJECTS[example.kind],
            "choices": choices,
            "answer": LETTERS.index(example.answer),
        }


def draw(seed: str, each: int) -> list[dict[str, Any]]:
    """Draws `each` questions of every subject, subject by subject."""
    by_subject: dict[str, list[dict[str, Any]]] = {subject: [] for subject in SUBJECTS.values()}
    for row in rows(seed):
        questions = by_subject[row["subject"]]
        if len(questions) < each:
            questions.append(row)
        if all(len(questions) == each for questions in by_subject.values()):
            return [row for questions in by_subject.values() for row in questions]
    raise AssertionError("rows() has no end")


def write(folder: Path, questions: int) -> None:
    """Raises FileExistsError where the folder exists."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; name another folder, or remove it")
    (folder / "all").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for split, each in (("test", -(-questions // len(SUBJECTS))), ("dev", DEV)):
        lines = [json.dumps(row) for row in draw(f"mmlu {split}", each)]
        (folder / "all" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=60, help="how many, up to 400; rounded up to four subjects")
    options = parser.parse_args(arguments)
    if not 1 <= options.questions <= 400:
        parser.error(f"--questions {options.questions}: from 1 to 400")
    try:
        write(options.folder, options.questions)
    except OSError as error:
        print(f"tiny_mmlu.py: {error}.", file=sys.stderr)
        return 2
    print(f"{options.folder}: {4 * -(-options.questions // 4)} questions of {len(SUBJECTS)} subjects")
    return 0


if __name__ == "__main__":
    sys.exit(main())

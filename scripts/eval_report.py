"""The report of a run of scripts/eval.sh: the score, its interval, cut replies, published scores, a paired run.

    eval_report.py RUN [--against RUN] [--size 20b|120b] [--plot FILE.svg]

RUN is a work directory of evalscope (eval.sh's --out). docs/accuracy.md explains the figures. Standard library only;
--plot needs matplotlib, which evalscope's environment has (.venv-evalscope/bin/python).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eval_answers import Answer, EvalRun, ReportError, read_run
from eval_statistics import Paired, mean_interval, pair, wilson

OPENAI, ASCEND = "OpenAI's figure, as the Ascend article quotes it", "the Ascend article, on 910B3"
VLLM = "vLLM's recipe, gpt_oss.evals at temperature 1"
# Benchmark and effort -> size -> who has it and what. The Ascend article's (evalscope, temperature 0, all subjects) and
# those it quotes from OpenAI; those of vLLM's recipe for gpt-oss (OpenAI/GPT-OSS.md of vllm-project/recipes): on NVIDIA
# GPUs, no tools, OpenAI's own programs, whose default is the mean of 8 runs.
PUBLISHED = {
    ("mmlu", "medium"): {"20b": ((OPENAI, 84.0), (ASCEND, 83.41)), "120b": ((OPENAI, 88.0), (ASCEND, 87.55))},
    ("gpqa_diamond", "low"): {"20b": ((VLLM, 56.8),), "120b": ((VLLM, 65.3),)},
    ("gpqa_diamond", "medium"): {"20b": ((VLLM, 67.5),), "120b": ((VLLM, 72.4),)},
    ("gpqa_diamond", "high"): {"20b": ((VLLM, 70.9),), "120b": ((VLLM, 79.4),)},
    ("aime25", "low"): {"20b": ((VLLM, 38.8),), "120b": ((VLLM, 51.2),)},
    ("aime25", "medium"): {"20b": ((VLLM, 75.0),), "120b": ((VLLM, 79.6),)},
    ("aime25", "high"): {"20b": ((VLLM, 85.8),), "120b": ((VLLM, 93.0),)},
}


def percent(right: int, total: int) -> str:
    return f"{100 * right / total:.2f} ({interval(*wilson(right, total))})"


def interval(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"


def count_right(answers: Sequence[Answer]) -> int:
    return sum(answer.right for answer in answers)


def head(run: EvalRun) -> list[str]:
    """Questions, settings, the mean (in MMLU also over its subjects), and replies without an answer."""
    total, right, asked = len(run.answers), count_right(run.answers), run.benchmark
    shown = {name: value for name, value in run.settings.items() if value != "null"}
    several = asked.subjects > 1
    whole = f"{asked.questions} questions" + (f" and {asked.subjects} subjects" if several else "")
    complete = total == asked.questions and len(run.subjects) == asked.subjects
    return [
        f"# {asked.title} of {run.model}",
        "",
        f"{total} questions"
        + (f" of {len(run.subjects)} subjects: " if several else ": ")
        # two blanks: a break in Markdown
        + (f"all of {asked.title}.  " if complete else f"a part of {asked.title}'s {whole}.  "),
        "Settings: " + ", ".join(f"{name} {value}" for name, value in shown.items()) + ".",
        "",
        f"* **mean over questions: {percent(right, total)} %**, {right} right",
        *over_subjects(run),
        cut_off(run),
        f"* no answer found in {sum(not a.found for a in run.answers)} replies; "
        f"{sum(a.ended == 'model_length' for a in run.answers)} refused as too long, "
        f"{sum(not a.scored for a in run.answers)} that evalscope could not compare: all of these count as wrong",
        "",
        "In brackets: Wilson's interval of 95 %.",
    ]


def over_subjects(run: EvalRun) -> list[str]:
    """The mean in which each of MMLU's subjects weighs the same."""
    if run.benchmark.subjects == 1:
        return []
    # the subjects are given, the questions in them are the sample
    scores = [(count_right(run.of(subject)), len(run.of(subject))) for subject in run.subjects]
    mean = sum(right / total for right, total in scores) / len(scores)
    return [f"* mean over subjects: {100 * mean:.2f} ({interval(*mean_interval(scores))}) %"]


def cut_off(run: EvalRun) -> str:
    """The number of replies that a token limit ended, and the bounds of the score without it."""
    total, right = len(run.answers), count_right(run.answers)
    cut = [answer for answer in run.answers if answer.cut]
    if not cut:
        return "* no reply was cut off at a token limit"
    limit = run.settings.get("max_tokens", "null")
    remedy = "the server's: raise its --max-model-len" if limit == "null" else f"{limit}: leave --max-tokens out"
    lost = len(cut) - count_right(cut)
    least, most = (f"{100 * count / total:.2f}" for count in (right, right + lost))
    return (
        f"* **{len(cut)} of {total} replies were cut off at the token limit** ({remedy}). {lost} of them count as "
        f"wrong, so without the limit the score is between {least} and {most} %"
    )


def published(run: EvalRun, figures: Sequence[tuple[str, float]]) -> list[str]:
    """Side by side with the published figures of that benchmark, effort and size."""
    total, right = len(run.answers), count_right(run.answers)
    titles = "| | % | this run less that, points | in this run's interval |"
    lines = ["", "## Beside published figures", "", titles, "|---|---|---|---|"]
    for name, figure in figures:
        low, high = wilson(right, total)
        inside = "yes" if low <= figure / 100 <= high else "no"
        lines.append(f"| {name} | {figure:g} | {100 * right / total - figure:+.2f} | {inside} |")
    lines.append(f"| **this run** | **{percent(right, total)}** | | |")
    if total != run.benchmark.questions:
        lines += [
            "",
            f"The figures are of all {run.benchmark.questions} questions; this run asked {total} of them, and its "
            "interval is for so many.",
        ]
    return lines


def by_subject(run: EvalRun) -> list[str]:
    if run.benchmark.subjects == 1:
        return []
    lines = ["", "## By subject", "", "| subject | questions | right | % |", "|---|---|---|---|"]
    for subject in run.subjects:
        answers = run.of(subject)
        right = count_right(answers)
        lines.append(f"| {subject} | {len(answers)} | {right} | {percent(right, len(answers))} |")
    return lines


def verdict(paired: Paired) -> str:
    better = "first" if paired.only_first > paired.only_second else "second"
    apart = paired.p < 0.05
    told = f"The {better} run is better" if apart else "The runs cannot be told apart"
    cases = f"{'only ' if apart else ''}{100 * paired.p:.3g} % of cases"
    return f"{told}: two equally good ones would differ this unevenly, or more so, in {cases}."


def against(run: EvalRun, other: EvalRun) -> list[str]:
    """Both runs on the same questions, by McNemar's exact test."""
    try:
        paired = pair(run.answers, other.answers)
    except ValueError:
        raise ReportError(
            f"{run.folder} and {other.folder} were not asked the same: no prompt is in both. Compare runs on the same "
            "questions with the same --few-shot"
        ) from None
    return [
        "",
        f"## Against {other.model} ({other.folder})",
        "",
        "| | second right | second wrong |",
        "|---|---|---|",
        f"| **first right** | {paired.both_right} | {paired.only_first} |",
        f"| **first wrong** | {paired.only_second} | {paired.both_wrong} |",
        "",
        f"First: {run.folder}. Second: {other.folder}. {paired.pairs} questions in both"
        + (f", {paired.unpaired} in only one and left out." if paired.unpaired else "."),
        "",
        f"* difference on these: {100 * paired.difference:+.2f} ± {100 * paired.difference_sigma:.2f} points",
        f"* McNemar's exact test on the {paired.only_first + paired.only_second} that differ: p = {paired.p:.4g}",
        "",
        verdict(paired),
    ]


def plot(run: EvalRun, path: Path) -> None:
    """A bar for each subject with its interval, the mean as a line. PNG, SVG, … by the name's ending; appears whole."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError(
            "--plot needs matplotlib; run this with .venv-evalscope/bin/python (make setup-evalscope)"
        ) from None
    scores = sorted((count_right(run.of(s)) / len(run.of(s)), s) for s in run.subjects)
    ends = [wilson(count_right(run.of(s)), len(run.of(s))) for _, s in scores]
    noise = [[100 * abs(end[side] - share) for (share, _), end in zip(scores, ends, strict=True)] for side in (0, 1)]
    mean = 100 * count_right(run.answers) / len(run.answers)
    figure = Figure(figsize=(8, 1.5 + 0.2 * len(scores)), layout="constrained")
    axes = figure.subplots()
    names = [subject.replace("_", " ") for _, subject in scores]
    axes.barh(names, [100 * share for share, _ in scores], xerr=noise, color="#4c78a8", ecolor="#555555", capsize=2)
    axes.axvline(mean, color="#e45756", label=f"mean over questions: {mean:.2f} %")
    axes.axvline(run.benchmark.chance, color="#999999", linestyle=":", label="chance")
    title = f"{run.benchmark.title} of {run.model}"
    axes.set(xlim=(0, 100), xlabel="% right, with Wilson's interval of 95 %", title=title, ylim=(-1, len(scores)))
    figure.legend(loc="outside lower center", ncols=2)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        figure.savefig(temporary)
        temporary.replace(path)
    except (OSError, ValueError) as error:
        temporary.unlink(missing_ok=True)
        raise ReportError(f"the plot cannot be written to {path}: {error}") from None


def report(run: EvalRun, other: EvalRun | None, size: str) -> str:
    lines = head(run)
    figures = PUBLISHED.get((run.benchmark.name, run.settings.get("reasoning_effort", "")), {}).get(size)
    lines += published(run, figures) if figures else []
    lines += against(run, other) if other else []
    return "\n".join([*lines, *by_subject(run)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="work directory of a finished run (eval.sh's --out)")
    parser.add_argument("--against", type=Path, help="another run on the same questions, compared in pairs")
    parser.add_argument("--size", choices=("120b", "20b"), help="whose published figures; default by the model's name")
    parser.add_argument("--plot", type=Path, help="also draw the subjects: a file ending in .svg, .png or .pdf")
    options = parser.parse_args(arguments)
    try:
        run = read_run(options.run)
        other = read_run(options.against) if options.against else None
        named = next((size for size in ("120b", "20b") if size in run.model.lower()), "")
        text = report(run, other, options.size or named)
        if options.plot:
            plot(run, options.plot)
    except ReportError as error:
        print(f"eval_report.py: {error}.", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the report | head
        sys.stderr.close()

"""Findings, the guard around each check, and the report in words and as JSON."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from npu_gptoss.doctor.machine import ASCEND, Machine

OK, WARNING, FAILED, NOT_APPLICABLE = "ok", "warning", "failed", "not applicable"
STATES = (OK, WARNING, FAILED, NOT_APPLICABLE)

SCHEMA = 1  # of the JSON report; raised when a field changes its meaning or goes away
WIDTH = 112
_INDENT = 18


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    sentence: the fact. remedy: the next action; every warning and failure has one. details: further lines with reasons.
    subject: one of several things, such as an operation; mostly empty. check: its name in `checks.GROUPS`, set by
    `guarded`.
    """

    state: str
    sentence: str
    remedy: str = ""
    details: tuple[str, ...] = ()
    subject: str = ""
    check: str = ""


Found = Finding | Iterable[Finding]


def ok(sentence: str, **more: Any) -> Finding:
    return Finding(OK, sentence, **more)


def warning(sentence: str, remedy: str, **more: Any) -> Finding:
    return Finding(WARNING, sentence, remedy, **more)


def failed(sentence: str, remedy: str, **more: Any) -> Finding:
    return Finding(FAILED, sentence, remedy, **more)


def not_applicable(sentence: str, **more: Any) -> Finding:
    return Finding(NOT_APPLICABLE, sentence, **more)


def guarded(check: str, function: Callable[..., Found], *arguments: Any) -> Iterator[Finding]:
    """The function's findings as they come, under the name of the check. An exception becomes one more finding."""
    try:
        result = function(*arguments)
        for finding in [result] if isinstance(result, Finding) else result:
            yield replace(finding, check=finding.check or check)
    except Exception as error:
        sentence = f"This check itself broke, so its result is unknown: {type(error).__name__}: {one_line(error)}"
        report = "please report it with the output of `npu-gptoss doctor --json`."
        yield failed(sentence, f"This is a defect of npu-gptoss, not of your machine: {report}", check=check)


def on_ascend(what: str, emulated: bool = True) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """Decorates a check of something that only Ascend machines have. emulated: the emulated 910B has it too."""

    def decorated(function: Callable[..., Found]) -> Callable[..., Found]:
        @functools.wraps(function)
        def check(here: Machine, *arguments: Any) -> Found:
            if here.platform()[0] != ASCEND:
                return [not_applicable(f"Only an Ascend machine has {what}.")]
            if here.emulated and not emulated:
                return [not_applicable(f"The emulated 910B has no {what}.")]
            return function(here, *arguments)

        return check

    return decorated


def one_line(error: object) -> str:
    """Returns the text in one line of at most 400 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:398] + " …"


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when anything failed; warnings do not count."""
    return int(any(finding.state == FAILED for finding in findings))


def as_json(findings: Sequence[Finding], version: str, platform: str) -> dict[str, Any]:
    """The report of `--json`. schema: its version. ok: the exit code is 0."""
    return {
        "schema": SCHEMA,
        "npu_gptoss": version,
        "platform": platform,
        "ok": exit_code(findings) == 0,
        "counts": {state: sum(finding.state == state for finding in findings) for state in STATES},
        "findings": [{**asdict(finding), "details": list(finding.details)} for finding in findings],
    }


class Words:
    """Prints findings for people at once: groups of checks, remedies after an arrow, the verdict at the end.

    brief: only warnings, failures and the verdict.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], brief: bool, write: Callable[[str], object]) -> None:
        self._groups, self._brief, self._write = groups, brief, write
        self._title = ""
        self._seen: list[Finding] = []

    def add(self, finding: Finding) -> None:
        self._seen.append(finding)
        if self._brief and finding.state not in (WARNING, FAILED):
            return
        title = next((title for title, checks in self._groups.items() if finding.check in checks), "")
        lines = ["", title] if title != self._title else []
        self._title = title
        lines += _wrapped(f"  {finding.state:<14}  ", f"{_name(finding)}: {finding.sentence}")
        lines += [line for text in finding.details for line in _wrapped(" " * _INDENT + "  ", text)]
        if finding.remedy:
            lines += _wrapped(" " * _INDENT + "→ ", finding.remedy)
        self._write("\n".join(lines))

    def end(self) -> None:
        """Prints the counts, and the verdict with the names of the failed checks or warnings."""
        counts = as_json(self._seen, "", "")["counts"]
        several = {WARNING: "s" * (counts[WARNING] != 1), FAILED: "s" * (counts[FAILED] != 1)}
        bad = {state: ", ".join(dict.fromkeys(_name(f) for f in self._seen if f.state == state)) for state in several}
        verdict = "All is well."
        if counts[FAILED]:
            verdict = f"Not ready. Repair first: {bad[FAILED]}."
        elif counts[WARNING]:
            verdict = f"Ready, with warnings: {bad[WARNING]}."
        warnings, failures = (
            f"{counts[s]} {word}{several[s]}" for s, word in ((WARNING, "warning"), (FAILED, "failure"))
        )
        rest = f"{counts[NOT_APPLICABLE]} not applicable"
        self._write(f"\n{counts[OK]} ok, {warnings}, {failures}, {rest}\n{verdict}")


def _name(finding: Finding) -> str:
    return f"{finding.check} {finding.subject}".rstrip()


def _wrapped(start: str, text: str) -> list[str]:
    indents = {"initial_indent": start, "subsequent_indent": " " * max(_INDENT, len(start))}
    return textwrap.wrap(text, WIDTH, **indents, break_long_words=False, break_on_hyphens=False)

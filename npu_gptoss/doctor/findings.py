"""A finding, the guard around every check, and the report in words and as JSON."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """What one check found.

    sentence: what is the case. remedy: what to do; every warning and failure has one.
    details: further lines, for the reader who wants to know why.
    subject: which of several things, such as an operation; mostly empty.
    check: its name in `checks.GROUPS`, put in by `guarded`.
    """

    state: str
    sentence: str
    remedy: str = ""
    details: tuple[str, ...] = ()
    subject: str = ""
    check: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"a finding's state is one of {', '.join(STATES)}, got {self.state!r}")
        if not self.sentence or (self.state in (WARNING, FAILED) and not self.remedy):
            raise ValueError(f"{self.sentence or self.check!r} needs a sentence, and a remedy unless all is well")


Found = Finding | Iterable[Finding]


def ok(sentence: str, **more: Any) -> Finding:
    return Finding(OK, sentence, **more)


def warning(sentence: str, remedy: str, **more: Any) -> Finding:
    return Finding(WARNING, sentence, remedy, **more)


def failed(sentence: str, remedy: str, **more: Any) -> Finding:
    return Finding(FAILED, sentence, remedy, **more)


def not_applicable(sentence: str, **more: Any) -> Finding:
    return Finding(NOT_APPLICABLE, sentence, **more)


def guarded(check: str, function: Callable[..., Found], *arguments: Any) -> list[Finding]:
    """The function's findings, under the name of the check; what it raises becomes one more."""
    found: list[Finding] = []
    try:
        result = function(*arguments)
        found.extend([result] if isinstance(result, Finding) else result)
    except Exception as error:
        what = f"This check itself broke, so nothing is known here: {type(error).__name__}: {one_line(error)}"
        report = "please report it with the output of `npu-gptoss doctor --json`."
        found.append(failed(what, f"That is a defect of npu-gptoss, not of your machine: {report}"))
    return [replace(finding, check=finding.check or check) for finding in found]


def on_ascend(what: str, emulated: bool = True) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """For a check of what only Ascend machines have. emulated: whether the emulated 910B has it too."""

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
    """At most 400 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:398] + " …"


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when anything failed; warnings do not count."""
    return int(any(finding.state == FAILED for finding in findings))


def as_json(findings: Sequence[Finding], version: str, platform: str) -> dict[str, Any]:
    """The report of `--json`: `schema` says which, `ok` is what the exit code says."""
    return {
        "schema": SCHEMA,
        "npu_gptoss": version,
        "platform": platform,
        "ok": exit_code(findings) == 0,
        "counts": {state: sum(finding.state == state for finding in findings) for state in STATES},
        "findings": [{**asdict(finding), "details": list(finding.details)} for finding in findings],
    }


def from_json(values: dict[str, Any]) -> Finding:
    return Finding(**{**values, "details": tuple(values["details"])})


def in_words(findings: Sequence[Finding], groups: Mapping[str, Sequence[str]]) -> str:
    """The report for people: groups of checks, one line each, remedies behind an arrow."""
    lines: list[str] = []
    for title, checks in groups.items():
        members = [finding for finding in findings if finding.check in checks]
        if members:
            lines += ["", title]
        for finding in members:
            name = f"{finding.check} {finding.subject}".rstrip()
            lines += _wrapped(f"  {finding.state:<14}  ", f"{name}: {finding.sentence}")
            lines += [line for text in finding.details for line in _wrapped(" " * _INDENT + "  ", text)]
            if finding.remedy:
                lines += _wrapped(" " * _INDENT + "→ ", finding.remedy)
    counts = as_json(findings, "", "")["counts"]
    failures = "failure" if counts[FAILED] == 1 else "failures"
    warnings = "warning" if counts[WARNING] == 1 else "warnings"
    lines += [
        "",
        f"{counts[OK]} ok, {counts[WARNING]} {warnings}, {counts[FAILED]} {failures}, "
        f"{counts[NOT_APPLICABLE]} not applicable",
    ]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * max(_INDENT, len(start)),
        break_long_words=False,
        break_on_hyphens=False,
    )

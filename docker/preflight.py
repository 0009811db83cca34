"""Runs the quick checks of `npu-gptoss doctor` that open no device, before a server starts on a 910B.

Prints each failure with its remedy, and exits with 1 if there is one.
"""

from __future__ import annotations

import functools
import sys

from npu_gptoss.doctor import checks
from npu_gptoss.doctor.findings import FAILED, WARNING, Words, exit_code, guarded
from npu_gptoss.doctor.machine import Machine


def main(here: Machine | None = None) -> int:
    here = here or Machine()
    findings = [finding for check, function in checks.QUICK.items() for finding in guarded(check, function, here)]
    if any(finding.state in (WARNING, FAILED) for finding in findings):
        report = Words(checks.GROUPS, brief=True, write=functools.partial(print, file=sys.stderr))
        for finding in findings:
            report.add(finding)
        report.end()
    if exit_code(findings):
        print("\nThe server is not started. More: run the image with `doctor`.", file=sys.stderr)
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the quick checks of `npu-gptoss doctor` that open no device, before a server starts on a 910B.

Prints each failure with its remedy, and exits with 1 if there is one.
"""

from __future__ import annotations

import sys

from npu_gptoss.doctor import checks
from npu_gptoss.doctor.findings import FAILED, WARNING, exit_code, guarded, in_words
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.doctor.quick import QUICK


def main(here: Machine | None = None) -> int:
    here = here or Machine()
    findings = [finding for check, function in QUICK.items() for finding in guarded(check, function, here)]
    wrong = [finding for finding in findings if finding.state in (WARNING, FAILED)]
    if wrong:
        print(in_words(findings, checks.GROUPS, brief=True), file=sys.stderr)
    if exit_code(findings):
        print("\nThe server is not started. More: run the image with `doctor`.", file=sys.stderr)
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())

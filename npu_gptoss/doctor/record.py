"""Stores self-test results per CANN release, so that a server can report them at its start."""

from __future__ import annotations

from collections.abc import Sequence

from npu_gptoss.doctor.checks import SELF_TESTS
from npu_gptoss.doctor.findings import NOT_APPLICABLE, OK, STATES, Finding, ok, on_ascend, warning
from npu_gptoss.doctor.machine import Device, Machine
from npu_gptoss.verify.self_test import record


@on_ascend("releases of CANN to remember")
def remembered(here: Machine, found: Sequence[Finding], devices: Sequence[Device] = ()) -> Finding:
    """found: the findings of the other checks. devices: the one that was opened, or none. Stores the self-tests if all
    of them ran to an end."""
    card = devices[0].name if devices else "no card"
    name, file = record.stack(card, here.environ, here.root), record.file(here.environ)
    ran: dict[str, str] = {}
    for finding in found:
        if finding.check in SELF_TESTS:  # which may have several findings
            ran[finding.check] = max(ran.get(finding.check, OK), finding.state, key=STATES.index)
    complete = set(ran) == set(SELF_TESTS) and NOT_APPLICABLE not in ran.values()
    if complete and (objection := record.remember(name, ran, here.environ)):
        remedy = "Name a writable folder with XDG_CACHE_HOME, or servers will say that it was never tested."
        return warning(f"{name} was tested, but {file} cannot be written: {objection}.", remedy)
    known = record.read(here.environ).get(name)
    if known is None:
        remedy = "Run `npu-gptoss doctor` where the card is, and once more after each change of CANN."
        return warning(f"{name} was never tested whole here.", remedy)
    sentence = f"{name} was tested whole on {known.when}: {{}}; {file} remembers it."
    if known.wrong:
        return warning(sentence.format(f"wrong are {', '.join(known.wrong)}"), "Do as the self-tests above say.")
    right = sum(state == OK for state in known.tests.values())
    return ok(sentence.format(f"all right ({right} self-tests)"))

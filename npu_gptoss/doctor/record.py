"""Stores self-test results per CANN release, so that a server can report them at its start."""

from __future__ import annotations

from collections.abc import Sequence

from npu_gptoss.doctor.checks import SELF_TESTS
from npu_gptoss.doctor.findings import NOT_APPLICABLE, OK, STATES, Finding, ok, on_ascend, warning
from npu_gptoss.doctor.machine import Device, Machine
from npu_gptoss.verify.self_test.record import Record, Seen, stack, today


@on_ascend("releases of CANN to remember")
def remembered(here: Machine, found: Sequence[Finding], devices: Sequence[Device] = ()) -> Finding:
    """found: the findings of the other checks. devices: the one that was opened, or none. Stores the self-tests if all
    of them ran to an end."""
    card = devices[0].name if devices else "no card"
    record, name = Record.of(here.environ), stack(card, here.environ, here.root)
    ran: dict[str, str] = {}
    for finding in found:
        if finding.check in SELF_TESTS:  # which may have several findings
            ran[finding.check] = max(ran.get(finding.check, OK), finding.state, key=STATES.index)
    complete = set(ran) == set(SELF_TESTS) and NOT_APPLICABLE not in ran.values()
    objection = record.remember(name, tests=ran, when=today()) if complete else ""
    seen = record.read()
    known = seen.get(name, Seen())
    details = [f"servers: {known.way_round}"] if known.way_round else []
    details += [
        f"seen before: {other}, on {entry.when}, {_judgement(entry)}"
        for other, entry in seen.items()
        if other != name and entry.tests
    ]
    more = {"details": tuple(details)}
    if objection:
        remedy = "Name a writable folder with XDG_CACHE_HOME, or servers will say that it was never tested."
        return warning(f"{name} was tested, but {record.path} cannot be written: {objection}.", remedy, **more)
    if not known.tests:
        remedy = "Run `npu-gptoss doctor` where the card is, and once more after each change of CANN."
        return warning(f"{name} was never tested whole here.", remedy, **more)
    sentence = f"{name} was tested whole on {known.when}: {_judgement(known)}; {record.path} remembers it."
    if known.wrong:
        return warning(sentence, "Do as the self-tests above say.", **more)
    return ok(sentence, **more)


def _judgement(seen: Seen) -> str:
    if seen.wrong:
        return f"wrong are {', '.join(seen.wrong)}"
    return f"all right ({sum(state == OK for state in seen.tests.values())} self-tests)"

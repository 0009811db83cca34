"""Check this machine for gpt-oss: packages, driver, plugins, memory and kernels, each finding with its remedy.

Findings are printed at once. It takes ten to thirty seconds on a CPU and about a minute on a card. The exit code is 1
when a check failed, and 0 when all is well or there are warnings only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from npu_gptoss import __version__
from npu_gptoss.doctor import checks, exposure, memory, plugins, probe, record, stack, vocabulary
from npu_gptoss.doctor.findings import Finding, Words, as_json, exit_code, guarded
from npu_gptoss.doctor.machine import GIB, Device, Machine
from npu_gptoss.model.device_memory import AUTO, VARIABLE, buffsize
from npu_gptoss.nominal import MEMORY


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _card(text: str) -> int:
    """Bytes of a card's memory, by the card's name or in GiB."""
    if (name := text.removeprefix("Ascend")) in MEMORY:
        return MEMORY[name]
    try:
        return _positive(text) * GIB
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(MEMORY)} or GiB, got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    counted = {"type": _positive, "metavar": "N"}
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object (docs/doctor.md)")
    form.add_argument("--brief", action="store_true", help="print only warnings, failures and the verdict")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint to look at, and to fit into memory")
    parser.add_argument("--max-model-len", **counted, default=16384, help="tokens of context to fit (default 16384)")
    parser.add_argument("--tensor-parallel-size", **counted, default=1, help="cards for the model (default 1)")
    parser.add_argument("--max-num-seqs", **counted, default=256, help="requests at once, for graphs (default 256)")
    cards = f"reckon memory for cards that are not here: {', '.join(MEMORY)}, or GiB"
    parser.add_argument("--card-memory", type=_card, metavar="CARD", help=cards)


def diagnose(here: Machine, args: argparse.Namespace) -> Iterator[Finding]:
    """Yields every finding at once, in the order of `checks.CHECKS`. A check that raises becomes a finding."""
    found: list[Finding] = []
    devices: list[Device] = []
    model, ranks = args.model, args.tensor_parallel_size

    def fit() -> Iterator[Finding]:  # called when the probe has seen the device
        device = devices[0] if devices else None
        where = (device, args.card_memory, buffsize(here.environ), here.version("triton-ascend") is not None)
        in_flight = memory.IN_FLIGHT if here.release.window_groups else None
        return memory.memory(model, args.max_model_len, ranks, *where, here.environ.get(VARIABLE) or AUTO, in_flight)

    functions = {name: partial(check, here) for name, check in checks.QUICK.items()} | {
        "machine": partial(stack.machine, here),
        "plugin-order": partial(plugins.order, here),
        "registration": partial(plugins.registration, here),
        "variables": partial(exposure.variables, here),
        "exposure": partial(exposure.exposure, here),
        "vocabulary": partial(vocabulary.vocabulary, here, model),
        "memory": fit,
        "expert-buffer": lambda: memory.expert_buffer(here, model, ranks, args.max_num_seqs, devices),
        "graphs": partial(memory.graphs, here, model, ranks, args.max_num_seqs),
        "self-test-record": partial(record.remembered, here, found, devices),
    }

    def all_findings() -> Iterator[Finding]:
        probed = groupby(guarded(probe.ALL[0], probe.probe, here, model, devices), key=lambda finding: finding.check)
        name, group = "", iter(())
        for check in checks.CHECKS:
            if check in functions:
                yield from guarded(check, functions[check])
                continue
            if not name:  # starts the probe
                name, group = next(probed, ("none", group))
            if check == name:
                yield from group
                name, group = next(probed, ("none", group))

    for finding in all_findings():
        found.append(finding)
        yield finding


def run(args: argparse.Namespace) -> int:
    here, findings = Machine(), []
    words = None if args.json else Words(checks.GROUPS, args.brief, partial(print, flush=True))
    if words:
        print(f"npu-gptoss doctor {__version__}", flush=True)
    for finding in diagnose(here, args):
        findings.append(finding)
        if words:
            words.add(finding)
    if words:
        words.end()
    else:
        print(json.dumps(as_json(findings, __version__, here.platform()[0]), indent=1))
    return exit_code(findings)

"""Check every kernel that can run here against the fp32 definition, third-party kernels included.

Each kernel gets the calls that its signatures and traits promise: edge shapes and seeded random ones. Exit code 0: all
is right; 1: something is wrong, or a kernel could not be verified; 2: the command cannot use its input.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.engine.device import AUTO, kernels_for, one_thread, resolve_device
from npu_gptoss.errors import InputError
from npu_gptoss.files import check_place, write_atomically
from npu_gptoss.kernels import current_platform, load_kernels
from npu_gptoss.kernels.registry import BUILT_IN
from npu_gptoss.verify import compiled, replay, runner
from npu_gptoss.verify.compare import KNOWN, PASSED
from npu_gptoss.verify.runner import Report, targets

SHOWN = 3  # failing calls of a kernel that are printed in full; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("filter", nargs="?", metavar="FILTER", help="part of a kernel's or package's name")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random calls (default: 0)")
    parser.add_argument("--cases", type=int, default=4, metavar="N", help="random calls each (default: 4)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share kernels (default: 1)")
    parser.add_argument("--mutate", action="store_true", help="show that each known mistake would have been caught")
    parser.add_argument("--compile", action="store_true", help="Ascend's Triton kernels by Huawei's compiler, here")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="compute a call that NPU_GPTOSS_DUMP wrote again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--device", default=AUTO, metavar="auto|cpu|cuda|npu", help="where kernels run (default: auto)")


def run(args: argparse.Namespace) -> int:
    if args.cases < 0:
        raise InputError(f"--cases must be 0 or more, got {args.cases}")
    if args.jobs < 1:
        raise InputError(f"--jobs must be 1 or more, got {args.jobs}")
    if args.replay is not None and (args.filter or args.mutate or args.compile or args.json):
        raise InputError("verify --replay computes one call: leave out FILTER, --mutate, --compile and --json")
    if args.json is not None:
        check_place(args.json)
    if args.compile and (args.jobs > 1 or args.device not in (AUTO, "cpu")):
        raise InputError("verify --compile is one process on the CPU: leave out --jobs and --device")
    load_kernels()
    device = resolve_device("cpu" if args.compile else args.device)
    if args.replay is not None:
        return run_replay(args.replay, device)
    with kernels_for(device), torch.inference_mode(), one_thread():
        options = {"seed": args.seed, "cases": args.cases, "mutate": args.mutate}
        if args.compile:  # on a made-up platform
            found, elsewhere = compiled.ascend_kernels(args.filter), {}
            made = (compiled.verify_compiled(target, **options) for target in found)
        else:
            found, elsewhere = targets(device, args.filter)
            made = runner.reports(found, device, args.jobs, **options)
        print(f"{len(found)} kernels on {device.type} ({current_platform().kind}), seed {args.seed}", flush=True)
        reports, started = [], time.monotonic()
        for report in made:
            reports.append(report)
            print("\n".join(lines(report, args)), flush=True)
        if args.json is not None:
            text = json.dumps(record(args, device, reports, elsewhere), indent=1, allow_nan=False)
            write_atomically(args.json.absolute(), f"{text}\n".encode())
    print(summary(reports, elsewhere, time.monotonic() - started))
    return 0 if all(report.ok for report in reports) else 1


def run_replay(path: Path, device: torch.device) -> int:
    """`--replay`: one line for each kernel of the operation. Exit code 1 if one of them differs from the definition."""
    dumped, wrong = replay.read(path), []
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in dumped.inputs.items() if isinstance(t, torch.Tensor))
    print(f"{dumped.operation} ({shapes}), chosen was {dumped.kernel} of npu-gptoss {dumped.release}")
    with kernels_for(device), torch.inference_mode(), one_thread():
        for found in replay.results(dumped, device):
            if isinstance(found, tuple):
                print(f"--   {found[0]}: {found[1]}")
                continue
            chosen = " (chosen)" if found.call == dumped.kernel else ""
            size = f"{found.error:.2g} of the tolerance" if isfinite(found.error) else "no number to compare"
            print(f"{'FAIL' if found.wrong else 'ok':<4} {found.call}{chosen}: {size}")
            print("".join(f"       {line}\n" for line in found.lines), end="", flush=True)
            wrong += [found.call] if found.wrong else []
    print(f"wrong: {', '.join(wrong)}" if wrong else "all right")
    return 1 if wrong else 0


def lines(report: Report, args: argparse.Namespace) -> list[str]:
    """One line for a right kernel; for a wrong one the worst elements and the command that shows them again."""
    target, calls = report.target, report.calls
    head = f"{'ok' if report.ok else 'FAIL':<4} {target.name}"
    if target.origin != BUILT_IN:
        head += f" [{target.origin}]"
    passed = [call for call in calls if call.state == PASSED]
    if passed:
        worst = max(passed, key=lambda call: call.error)
        head += f": {len(passed)} calls, at worst {worst.error:.2g} of the tolerance ({worst.call})"
    known = sum(call.state == KNOWN for call in calls)
    text = [head + (f", {known} known failures" if known else "")]
    text += [f"       {reason}" for reason in (*report.reasons, *report.notes)]
    bad = [call for call in calls if call.wrong]
    for call in bad[:SHOWN]:
        text.append(f"     {call.state}: {call.call} ({call.dtypes})")
        text += [f"       {line}" for line in call.lines]
    if len(bad) > SHOWN:
        text.append(f"     and {len(bad) - SHOWN} more calls; --json FILE has them all")
    if bad:
        compiling = " --compile" if args.compile else ""
        text.append(f"     again: npu-gptoss verify{compiling} {target.name} --seed {args.seed} --cases {args.cases}")
    return text + _mistake_lines(report)


def _mistake_lines(report: Report) -> list[str]:
    if not report.mutations:
        return []
    caught = {m.name for m in report.mutations if m.caught_by}
    missed = [m for m in report.mutations if not m.ok]
    never = sorted({m.name for m in report.mutations} - caught - {m.name for m in missed})
    # mutations of a source are many, and their names are lines of it
    text = [f"       {len(caught)} mistakes caught" + ("" if report.details else f": {', '.join(sorted(caught))}")]
    text += [f"       not for this kernel: {', '.join(never)}"] if never else []
    text += [
        f"     NOT CAUGHT: {m.name} ({m.dtypes}): at most {m.error:.2g} of the tolerance in any call" for m in missed
    ]
    return text


def summary(reports: Sequence[Report], elsewhere: dict[str, str], seconds: float) -> str:
    calls = sum(len(report.calls) for report in reports)
    wrong = [report.target.name for report in reports if not report.ok]
    text = f"{calls} calls of {len(reports)} kernels in {seconds:.0f} s"
    mistakes = [mistake for report in reports for mistake in report.mutations]
    if mistakes:
        text += f", {sum(bool(m.caught_by) for m in mistakes)} of {sum(m.shown for m in mistakes)} mistakes caught"
    text += f"; {len(elsewhere)} others cannot run here or are the definition (--json says why)" if elsewhere else ""
    return text + (f"\nwrong: {', '.join(wrong)}" if wrong else "\nall right")


def record(
    args: argparse.Namespace, device: torch.device, reports: Sequence[Report], elsewhere: dict[str, str]
) -> dict[str, Any]:
    return {
        "device": str(device),
        "platform": current_platform().kind,
        "torch": torch.__version__,
        "seed": args.seed,
        "cases": args.cases,
        "kernels": [
            {
                "kernel": report.target.name,
                "origin": report.target.origin,
                "ok": report.ok,
                "calls": [_finite(asdict(call)) for call in report.calls],
                "mistakes": [_finite(asdict(mistake)) for mistake in report.mutations],
                "objections": report.reasons,
                "notes": report.notes,
                **report.details,
            }
            for report in reports
        ],
        "left_out": elsewhere,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an error that no tolerance measures is null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}

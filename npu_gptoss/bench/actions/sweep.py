"""`bench sweep`: decode and prefill over ways to share the model among GPUs, with the two tables of cost and speed."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import decode, plots, prefill, records, sweep
from npu_gptoss.bench.actions import engine, shared
from npu_gptoss.engine.device import resolve_device
from npu_gptoss.errors import InputError

SUMMARY = "decode and prefill, batch by parallel layout: tables of speed and cost"
DEFINITIONS = {"prefill": prefill.DEFINITIONS, "decode": decode.DEFINITIONS}
TABLES = "tables.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_points(parser)
    parser.add_argument(
        "--layouts",
        nargs="+",
        type=sweep.layout,
        default=[sweep.layout(name) for name in sweep.DEFAULT_LAYOUTS],
        metavar="tpN|epN",
        help="GPUs that share the model: each expert cut (tp) or dealt out whole (ep); "
        f"default: {' '.join(sweep.DEFAULT_LAYOUTS)}, of which those run that this machine has the GPUs for",
    )


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when a layout that has its GPUs failed."""
    shared.check_price(args.gpu_price)
    records.check_folder(args.out, *(f"{kind}.json" for kind in DEFINITIONS), TABLES)
    device = resolve_device(args.device)
    if device.index is not None:
        raise InputError(f"each rank takes a device of its own: give the type only, got {args.device!r}")
    count = None if device.type == "cpu" else torch.get_device_module(device.type).device_count()
    layouts, skipped = sweep.split_by_devices(args.layouts, device, count)
    for name, reason in skipped.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if not layouts:
        raise InputError("this machine has the GPUs for none of these layouts; name smaller ones with --layouts")
    print("\n".join(f"  {name}: {meaning}" for kind in DEFINITIONS.values() for name, meaning in kind.items()))
    options = {name: value for name, value in vars(args).items() if name not in ("action", "layouts", "out")}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in DEFINITIONS}
    missing, status = dict(skipped), 0
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(layouts, 1):
            print(f"[{number}/{len(layouts)}] {each.name}", flush=True)
            reason: str | None = "was ended before all of it was measured"
            try:
                reason = sweep.run_layout(each, options, Path(folder) / each.name)
            finally:  # what has been measured is kept, also of a layout that is ended
                if reason is not None:
                    missing[each.name] = reason
                for kind, documents in found.items():
                    file = Path(folder) / each.name / f"{kind}.json"
                    if file.is_file():
                        documents.append(json.loads(file.read_text(encoding="utf-8")))
                page = _write(args, found, missing)  # now, because the next layout may take long and be ended
            if reason is not None:
                status = 1
                print(f"{each.name}: {reason}; what it said stands above", file=sys.stderr)
    if not page:
        raise InputError("no layout could be measured; what each said stands above")
    print(page, end="")
    _draw(args.out)
    print(f"{args.out}: {', '.join(sorted(path.name for path in args.out.iterdir()))}")
    return status


def _draw(folder: Path) -> None:
    """The pictures of what was written. Hours of measuring do not fail for a library that draws."""
    try:
        for kind in DEFINITIONS:
            file = folder / f"{kind}.json"
            if file.is_file():
                plots.save(plots.figures(records.read(file)), folder)
    except plots.NoMatplotlib as error:
        print(f"{error}; then `npu-gptoss bench plot` draws these files", file=sys.stderr)


def _write(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]], missing: dict[str, str]) -> str:
    """The records so far, a file a kind, and their tables, which are returned; nothing while there are none."""
    # paths belong to one machine
    settings = {name: value for name, value in vars(args).items() if name not in ("action", "model", "out")}
    settings["layouts"] = [each.name for each in args.layouts]
    written = []
    for kind, documents in found.items():
        if documents:
            written.append(sweep.merged(documents, settings) | {"not_measured": missing})
            records.write(args.out / f"{kind}.json", written[-1])
    page = "\n".join(sweep.page(written, missing)) + "\n" if written else ""
    if page:
        (args.out / TABLES).write_text(page, encoding="utf-8")
    return page

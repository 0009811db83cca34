"""`bench sweep`: decode and prefill of one model for each way to share it among GPUs: records and tables.

Each layout is measured by a separate `bench engine` process, under torchrun if it has several ranks. So a layout leaves
nothing in a GPU's memory for the next one, and a layout that fails ends no other.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import engine, records, session, tables
from npu_gptoss.bench.records import Document
from npu_gptoss.engine.device import resolve_device
from npu_gptoss.errors import InputError
from npu_gptoss.files import read_json, write_atomically
from npu_gptoss.model.sharding import EXPERT, TENSOR

# on four GPUs MXFP4 cannot be cut: a quarter of an expert is no whole number of scales
DEFAULT_LAYOUTS = ("tp1", "tp2", "ep2", "ep4", "ep8")
FILES, PAGE = ("prefill", "decode"), "tables.md"  # in the order of the page


@dataclass(frozen=True)
class Layout:
    """How many GPUs share a model. experts: TENSOR cuts each one, EXPERT deals them out whole."""

    gpus: int
    experts: str

    @property
    def name(self) -> str:
        return f"{'ep' if self.experts == EXPERT else 'tp'}{self.gpus}"


def layout(name: str) -> Layout:
    """From `tp2` or `ep2`; for argparse, which prints the sentence."""
    match = re.fullmatch(r"(tp|ep)([1-9]\d*)", name)
    if match is None:
        raise argparse.ArgumentTypeError(f"a layout is tpN or epN with N GPUs, for example tp2 or ep4, got {name!r}")
    if name == "ep1":
        raise argparse.ArgumentTypeError("on one GPU there are no others to deal experts to: name it tp1")
    return Layout(int(match[2]), EXPERT if match[1] == "ep" else TENSOR)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_points(parser)
    default, shown = [layout(name) for name in DEFAULT_LAYOUTS], " ".join(DEFAULT_LAYOUTS)
    how = {"nargs": "+", "type": layout, "metavar": "tpN|epN", "default": default}
    parser.add_argument("--layouts", **how, help=f"GPUs with each expert cut (tp) or dealt out (ep); default: {shown}")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when a layout that has its GPUs failed."""
    session.check_output(args)
    records.check_folder(args.out, *engine.FILES, PAGE)
    device = resolve_device(args.device)
    if device.index is not None:
        raise InputError(f"each rank takes a device of its own: give the type only, got {args.device!r}")
    count = None if device.type == "cpu" else torch.get_device_module(device.type).device_count()
    layouts, missing = split_by_devices(args.layouts, device, count)
    for name, reason in missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if not layouts:
        raise InputError("this machine has the GPUs for none of these layouts; name smaller ones with --layouts")
    for kind in engine.KINDS:
        print("\n".join(f"  {name}: {meaning}" for name, meaning in kind.definitions.items()))
    options = {name: value for name, value in vars(args).items() if name not in ("action", "layouts", "out")}
    settings = {**options, "layouts": [each.name for each in args.layouts]}
    del settings["model"]  # paths belong to one machine
    found: dict[str, Document] = {}
    failures: list[str] = []
    for number, each in enumerate(layouts, 1):
        print(f"[{number}/{len(layouts)}] {each.name}", flush=True)
        reason: str | None = "was ended before all of it was measured"
        with tempfile.TemporaryDirectory() as folder:
            try:
                reason = run_layout(each, options, Path(folder))
            finally:  # keep the measurements, also of a layout that is ended
                if reason is not None:
                    missing[each.name] = reason
                for what in FILES:
                    file = Path(folder, f"{what}.json")
                    if file.is_file():
                        add(found, read_json(file))
                page = write(args.out, found, settings, missing)
        if reason is not None:
            failures.append(each.name)
            print(f"{each.name}: {reason}; its own output is above", file=sys.stderr)
    if not found:
        raise InputError("no layout could be measured; the output of each is above")
    print(page, end="")
    print(f"{args.out}: {', '.join(sorted(path.name for path in args.out.iterdir()))}")
    return 1 if failures else 0


def split_by_devices(
    layouts: Sequence[Layout], device: torch.device, count: int | None
) -> tuple[list[Layout], dict[str, str]]:
    """The layouts that this machine has the devices for, once each; and a sentence for each other.

    count: devices of that type; None on a CPU, where ranks are processes and any number of them starts.
    """
    can: list[Layout] = []
    skipped: dict[str, str] = {}
    for each in layouts:
        if count is not None and each.gpus > count:
            have = f"{count} {device.type} device{'s' if count != 1 else ''}"
            skipped[each.name] = f"needs {each.gpus} GPUs, this machine has {have}: not measured"
        elif each not in can:
            can.append(each)
    return can, skipped


def command(each: Layout, options: Mapping[str, Any], out: Path) -> list[str]:
    """The command that measures one layout. options: of `bench engine`, by their names in the namespace."""
    words = [sys.executable]
    if each.gpus > 1:
        ranks = ["--nproc-per-node", str(each.gpus), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        # the machine's name need not lead anywhere
        words += ["-m", "torch.distributed.run", *ranks, "--local-addr", "127.0.0.1"]
    words += ["-m", "npu_gptoss.cli", "bench", "engine"]
    for name, value in {**options, "share_experts": each.experts, "out": out}.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else map(str, value if isinstance(value, list) else [value])
    return words


def run_layout(each: Layout, options: Mapping[str, Any], out: Path) -> str | None:
    """Measures one layout and shows its output; None, or the reason why there are no records."""
    # a sweep that a batch system or Ctrl-C ends must leave no ranks on the GPUs
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(command(each, options, out))
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()  # torchrun ends its ranks; a finished process is not affected
        process.wait()
    return None if status == 0 else f"failed with exit status {status}"


def add(found: dict[str, Document], layout: Document) -> None:
    """Adds a layout's rows and ceilings to the file of their kind; rows differ by `layout`."""
    whole = found.setdefault(layout["what"], {**layout, "records": [], "ceilings": {}})
    whole["records"] += layout["records"]
    whole["ceilings"] |= layout["ceilings"]


def write(folder: Path, found: Mapping[str, Document], settings: Document, missing: Mapping[str, str]) -> str:
    """Writes the records so far, a file a kind, and their tables, which it returns; nothing while there are none."""
    if not found:
        return ""
    for what, content in found.items():
        content |= {"settings": settings, "not_measured": dict(missing)}
        records.write(content, folder / f"{what}.json")
    page = "\n".join(tables.page([found[what] for what in FILES if what in found])) + "\n"
    write_atomically(folder / PAGE, page.encode())
    return page

"""Decode and prefill of one model over ways to share it among GPUs: which can run here, and one set of records of all.

Each layout is measured by processes of its own, `bench engine`, alone or under torchrun: what a layout leaves behind in
a GPU's memory is gone before the next one starts, and one that fails takes none of the others with it.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench.tables import decode_tables, prefill_tables
from npu_gptoss.errors import InputError
from npu_gptoss.model.sharding import EXPERT, TENSOR

# on four GPUs MXFP4 cannot be cut: a quarter of an expert is no whole number of scales
DEFAULT_LAYOUTS = ("tp1", "tp2", "ep2", "ep4", "ep8")
TABLES = {"prefill": prefill_tables, "decode": decode_tables}


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
    kind, gpus = match[1], int(match[2])
    if kind == "ep" and gpus == 1:
        raise argparse.ArgumentTypeError("on one GPU there are no others to deal experts to: name it tp1")
    return Layout(gpus, EXPERT if kind == "ep" else TENSOR)


def split_by_devices(
    layouts: Sequence[Layout], device: torch.device, count: int | None
) -> tuple[list[Layout], dict[str, str]]:
    """Those that this machine has the devices for, once each; and a sentence for each other.

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
    """What measures one layout. options: of `bench engine`, by their names in the namespace."""
    start = [sys.executable]
    if each.gpus > 1:
        ranks = ["--nproc-per-node", str(each.gpus), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        # the machine's name need not lead anywhere
        start += ["-m", "torch.distributed.run", *ranks, "--local-addr", "127.0.0.1"]
    own = {**options, "share_experts": each.experts, "out": out}
    return [*start, "-m", "npu_gptoss.cli", "bench", "engine", *_words(own)]


def run_layout(each: Layout, options: Mapping[str, Any], out: Path) -> str | None:
    """Measures one layout, its output beside ours; None or why there are no records."""
    # a sweep that is ended (by a batch system, by Ctrl-C) must leave no ranks behind on the GPUs
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(command(each, options, out))
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()  # torchrun ends its ranks; nothing happens to what has ended
        process.wait()
    return None if status == 0 else f"failed with exit status {status}"


def merged(documents: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """One file's content of several of the same kind, in which `layout` tells the records apart.

    settings: of the sweep. Everything else is the first's, with the ceilings of all.
    """
    kinds = {document["what"] for document in documents}
    if len(kinds) != 1:
        raise InputError(f"only files of one kind make one, got {', '.join(sorted(kinds)) or 'none'}")
    return {
        **documents[0],
        "settings": dict(settings),
        "ceilings": {name: value for document in documents for name, value in document["ceilings"].items()},
        "records": [record for document in documents for record in document["records"]],
    }


def page(documents: Sequence[Mapping[str, Any]], skipped: Mapping[str, str]) -> list[str]:
    """The two tables, with what they were measured on and what is not in them; lines of Markdown."""
    lines: list[str] = []
    for document in documents:
        head = _measured_on(document)
        if head not in lines:
            lines += [head, ""]
        lines += TABLES[document["what"]](document["records"])
    for name, reason in skipped.items():
        lines += [f"{name}: {reason}.", ""]
    return lines[:-1]


def _measured_on(document: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    price = document.get("dollars_per_gpu_hour")
    said = "" if price is None else f"; a GPU hour at ${price:.2f}"
    return f"{document['engine']} on {document['machine']['device']}, {document['date'][:10]}, {versions}{said}."


def _words(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
    return words

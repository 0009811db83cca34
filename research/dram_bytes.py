"""Read the bytes of a decode step from a GPU's DRAM counters, and set them beside those that the roofline counts.

python research/dram_bytes.py --size 20b --batch 1 8

Runs `npu-gptoss bench decode` under Nsight Compute (`ncu`), which counts the replays of whole graphs: with full graphs,
which a GPU gets by itself, each is one step. Needs an NVIDIA GPU whose counters may be read.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.tables import markdown

METRIC, STEPS = "dram__bytes_read.sum", 8
NCU = ("ncu", "--profile-from-start", "off", "--graph-profiling", "graph", "--metrics", METRIC)


class Counters:
    """In the place of torch's profiler: says to ncu when it counts."""

    def start(self) -> None:
        import torch

        torch.cuda.cudart().cudaProfilerStart()

    def stop(self) -> None:
        import torch

        torch.cuda.cudart().cudaProfilerStop()


def measure(arguments: Sequence[str]) -> int:
    """`bench decode`, whose profiled steps ncu counts instead."""
    from npu_gptoss.bench import decode
    from npu_gptoss.cli import main as cli

    decode.recording = lambda device: Counters()
    decode.kernels_of = lambda recorded, device, repeats: []
    return cli(["bench", "decode", "--profile", "--steps", str(STEPS), *arguments])


def replays(text: str) -> list[int]:
    """Bytes read by each replay of a graph, from ncu's CSV."""
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    return [int(row["Metric Value"].replace(",", "")) for row in rows if row["Kernel Name"] == "graph"]


def table(records: Sequence[dict], read: Sequence[int]) -> list[str]:
    """Raises ValueError where a point has not exactly as many replays as steps."""
    if len(read) != len(records) * STEPS:
        raise ValueError(f"expected {STEPS} replays for each of {len(records)} points, ncu counted {len(read)}")
    rows = []
    for place, record in enumerate(records):
        mine = [count / 1e9 for count in read[place * STEPS : (place + 1) * STEPS]]
        found = f"{sum(mine) / STEPS:.3f}", f"{min(mine):.3f} to {max(mine):.3f}"
        rows.append((record["batch"], record["distinct_experts"], f"{record['bytes'] / 1e9:.3f}", *found))
    head = ("batch", "experts a layer", "GB counted", f"GB read, mean of {STEPS} steps", "least to most")
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("20b", "120b"), default="20b", help="random weights of a published shape")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="requests of a step (default: 1 8)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--in-ncu", metavar="FILE", help=argparse.SUPPRESS)  # this script, run by ncu
    args = parser.parse_args(arguments)
    words = ["--size", args.size, "--context", str(args.context), "--batch", *map(str, args.batch)]
    if args.in_ncu:
        return measure([*words, "--json", args.in_ncu])
    with tempfile.TemporaryDirectory() as folder:
        log, found = Path(folder, "ncu.csv"), Path(folder, "decode.json")
        output = ("--csv", "--print-units", "base", "--log-file", str(log))
        subprocess.run([*NCU, *output, sys.executable, __file__, *words, "--in-ncu", str(found)], check=True)
        print("\n".join(table(json.loads(found.read_text())["records"], replays(log.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

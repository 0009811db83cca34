"""One table from the results of scripts/perf.sh, with the meaning of each column; for a 20b the article's numbers too.

    perf_report.py DIR [--output 128]
    { evalscope perf …; echo "exit $?"; } 2>&1 | perf_report.py LOG --follow

Reads the `benchmark_summary.json` that evalscope perf wrote for each run. Standard library only. Exit status 1 when a
request failed or an answer is shorter than was asked for: then the times mean something else. With --follow it writes
what evalscope prints to LOG, shows its progress, and exits with its status.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SUMMARY = "benchmark_summary.json"
PROGRESS = re.compile(r"Processing\[parallel_(\d+)_number_\d+\].*?(\d+)/(\d+)")
LAST_LINES = 25
# The Ascend article's results for gpt-oss-20b, ten requests at a time, 128/128, on one 910B3. It prints the first row;
# the second follows from the percentages that it gives (-84.57 %, -31.97 %, -85.29 %).
ARTICLE = (
    ("article: small operators", 17.61, 319.0, 136.0),
    ("article: fused, PIECEWISE", 2.72, 217.0, 20.0),
)
HEADER = ("requests at a time", "failed / all", "latency s", "TTFT ms", "TPOT ms", "answer tok/s", "prompt tok")
DEFINITIONS = """\
latency: from sending a request to its last token. TTFT: from sending it to its first token. TPOT: (latency - TTFT) /
(tokens of the answer - 1). All three are means over the requests, measured by the client. answer tok/s: tokens of all
answers over the time of the run. prompt tok: tokens of a prompt as the server counts them, mean."""


class ReportError(Exception):
    """The sentence names the expected value, the found value and the remedy."""


@dataclass(frozen=True)
class Run:
    """One run of evalscope perf. Times are means: `latency` in s, `ttft` and `tpot` in ms; tokens are means too."""

    model: str
    parallel: int
    requests: int
    failed: int
    latency: float
    ttft: float
    tpot: float
    output_rate: float
    input_tokens: float
    output_tokens: float

    def row(self) -> tuple[str, ...]:
        numbers = f"{self.latency:.2f}", f"{self.ttft:.0f}", f"{self.tpot:.1f}", f"{self.output_rate:.1f}"
        told = (*numbers, f"{self.input_tokens:.0f}")
        if self.failed == self.requests:  # evalscope writes -1
            told = ("–",) * len(told)
        return (str(self.parallel), f"{self.failed} / {self.requests}", *told)


def read_run(path: Path) -> Run:
    try:
        values = json.loads(path.read_text())
        return Run(
            path.parent.parent.name,  # DIR/MODEL/parallel_10_number_20/benchmark_summary.json
            int(values["Concurrency"]),
            int(values["Total Requests"]),
            int(values["Failed Requests"]),
            *(float(values[name]) for name in ("Avg Latency (s)", "Avg TTFT (ms)", "Avg TPOT (ms)")),
            *(float(values[name]) for name in ("Output Throughput (tok/s)", "Avg Input Tokens", "Avg Output Tokens")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path} is not a summary of evalscope perf 1.14 ({type(error).__name__}: {error})") from None


def read_runs(folder: Path) -> list[Run]:
    """All runs below `folder`, by requests at a time."""
    found = sorted(folder.rglob(SUMMARY))
    if not found:
        raise ReportError(f"there is no {SUMMARY} below {folder}: evalscope perf has finished no run there")
    return sorted((read_run(path) for path in found), key=lambda run: run.parallel)


def objections(runs: Sequence[Run], output: int) -> list[str]:
    """Reasons why the times are not for `output` tokens of every request."""
    found = [
        f"{run.failed} of {run.requests} requests failed at {run.parallel} at a time" for run in runs if run.failed
    ]
    return found + [
        f"answers have {run.output_tokens:.1f} tokens at {run.parallel} at a time, {output} were asked for"
        for run in runs
        if not run.failed and abs(run.output_tokens - output) > 0.01
    ]


def table(runs: Sequence[Run], with_article: bool) -> str:
    rows = [HEADER, *(run.row() for run in runs)]
    for name, latency, ttft, tpot in ARTICLE if with_article else ():
        rows.append((name, "", f"{latency:.2f}", f"{ttft:.0f}", f"{tpot:.1f}", "", "128"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def lines(stream: BinaryIO) -> Iterator[str]:
    """Ends with a carriage return, too: a bar of tqdm is drawn over itself."""
    rest = b""
    while chunk := stream.read1(65536):
        *whole, rest = re.split(rb"[\r\n]", rest + chunk)
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def follow(printed: Iterable[str], log: Path, terminal: bool) -> int:
    """Returns evalscope's exit status. terminal: the progress is drawn over itself; else a line for each run."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    status, shown = 1, ""
    with log.open("w") as file:
        for line in printed:
            if ended := re.fullmatch(r"exit (\d+)", line):
                status = int(ended[1])
                continue
            file.write(line + "\n")
            file.flush()
            if line.strip():
                last.append(line)
            if found := PROGRESS.search(line):
                parallel, done, total = found.groups()
                said = f"perf.sh: {parallel} at a time: {done} of {total} requests"
                if said != shown and (terminal or done == total):
                    shown = said
                    start, end = ("\r", "\n" if done == total else "") if terminal else ("", "\n")
                    print(f"{start}{said}", end=end, file=sys.stderr, flush=True)
    if status:
        print(
            "\n".join(("", *last, f"perf.sh: evalscope ended with status {status}; all it said: {log}")),
            file=sys.stderr,
        )
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what scripts/perf.sh got as --out")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer that were asked for (default 128)")
    parser.add_argument("--follow", action="store_true", help="write standard input to this file, show the progress")
    options = parser.parse_args(arguments)
    if options.follow:
        return follow(lines(sys.stdin.buffer), options.folder, sys.stderr.isatty())
    try:
        runs = read_runs(options.folder)
    except ReportError as error:
        print(f"perf_report.py: {error}.", file=sys.stderr)
        return 2
    with_article = any("20b" in run.model.lower() for run in runs)
    print(f"\n{table(runs, with_article)}\n\n{DEFINITIONS}")
    if with_article:
        print("The article's rows: gpt-oss-20b in BF16 on one 910B3, ten requests at a time, 128 tokens in, 128 out.")
    wrong = objections(runs, options.output)
    for sentence in wrong:
        print(f"NOT COMPARABLE: {sentence}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the report | head
        sys.stderr.close()
    except KeyboardInterrupt:
        sys.exit(130)

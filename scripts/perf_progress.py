"""Write the output of evalscope perf to a log and show its progress: the quiet part of scripts/perf.sh.

    { evalscope perf …; echo "exit $?"; } 2>&1 | perf_progress.py LOG

Exits with evalscope's status, from the last line, and prints the end of the log when it is not 0.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

PROGRESS = re.compile(r"Processing\[parallel_(\d+)_number_\d+\].*?(\d+)/(\d+)")
LAST_LINES = 25


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


if __name__ == "__main__":
    try:
        sys.exit(follow(lines(sys.stdin.buffer), Path(sys.argv[1]), sys.stderr.isatty()))
    except KeyboardInterrupt:
        sys.exit(130)

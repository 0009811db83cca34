"""Wait until a starting server answers, then print a request to try: the last part of serve.sh.

    python -m scripts.when_ready PID HOST PORT NAME KEYED

Ends without a word when the process PID ends first. KEYED is not empty where the server asks for a key.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from scripts.serve_here import DIRECT, OWN_QUESTION, TINY_NAME, TINY_QUESTION, example_request, local_url


def alive(pid: str) -> bool:
    """False also for a process that has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(pid: str, host: str, port: str, name: str, keyed: str) -> None:
    url, begin = local_url(host, int(port)), time.monotonic()
    while alive(pid):
        try:
            with DIRECT.open(f"{url}/health", timeout=5):
                question = TINY_QUESTION if name == TINY_NAME else OWN_QUESTION
                request = example_request(url, name, question, bool(keyed))
                seconds = time.monotonic() - begin
                print(f"\nready after {seconds:.0f} s: {name} at {url}/v1. Try, in another terminal:\n\n  {request}\n")
                return
        except OSError:
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

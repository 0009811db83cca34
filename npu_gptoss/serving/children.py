"""Engines and workers of vLLM end with their parent, and leave Ctrl-C to it.

An engine outlives a server that was killed, and a worker that hangs in an operation keeps its device. Ctrl-C in a
terminal reaches all processes of a server, but the requests in flight still need theirs: the parent ends them first.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import util

NAMES = ("EngineCore", "VllmWorker")  # of vLLM's processes that must not outlive their parent
LAST_WILL = 5.0  # seconds that such a process gets between SIGTERM and SIGKILL


def install() -> None:
    """Called in each process of vLLM that loads plugins; a forked process loads none again."""
    util.register_after_fork(sys.modules[__name__], lambda _: become_child())
    become_child()


def become_child() -> None:
    """Does nothing in other processes. SIGINT is blocked, because vLLM sets a handler later."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(NAMES):
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        _watch(os.getpid())


@functools.cache
def _watch(pid: int) -> None:
    """Watches the parent, once in the process `pid`; a forked process has its own pid and its own watch."""
    parent = multiprocessing.parent_process()

    def outlive() -> None:
        parent.join()
        os.kill(pid, signal.SIGTERM)
        time.sleep(LAST_WILL)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=outlive, name="npu-gptoss parent", daemon=True).start()

"""Runs a function that may hang, exhaust memory or crash, in a separate process for each call.

The server forks a single-threaded *keeper* process once, with everything loaded that the function needs. For each
question the keeper forks a child in milliseconds. The child has limits on time and memory, answers and exits; a crash
counts as an answer. If the keeper dies, the server forks another.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

AT_ONCE = 2  # questions in flight; further questions wait
PATIENCE = 120.0  # seconds to wait for a keeper that is still loading
_PR_SET_PDEATHSIG = 1
_BEGUN = b"+"


class Died(Exception):
    """The child process gave no answer; the message says how it ended."""


class Busy(Died):
    """No process has started on the question, so the caller may ask again."""


class Bounded:
    """Answers questions by `work(question) -> answer`, in processes with limits."""

    def __init__(
        self,
        work: Callable[[bytes], bytes],
        prepare: Callable[[], None] = lambda: None,
        seconds: float = 5.0,
        memory: int = 2 << 30,
    ) -> None:
        """`prepare` runs once in the keeper; `memory` is in bytes, in addition to the keeper's."""
        self.work, self.prepare, self.seconds, self.memory = work, prepare, seconds, memory
        self._control: socket.socket | None = None
        self.keeper: int | None = None  # its process id; None before the first question and after `stop`
        self._turn = asyncio.Semaphore(AT_ONCE)

    def start(self) -> None:
        """Forks the keeper if it is not running."""
        if self.keeper is not None:
            return
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the keeper takes none of their locks
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _keep(self, theirs, parent)
                status = 0
            except BaseException:
                traceback.print_exc()  # into the server's log
            finally:
                os._exit(status)  # skip the server's atexit handlers, finally blocks and event loop
        theirs.close()
        self._control, self.keeper = ours, pid

    def stop(self) -> None:
        """Ends the keeper and its child processes."""
        if self.keeper is None:
            return
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.keeper, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.keeper, 0)
        self._control = self.keeper = None

    async def ask(self, question: bytes) -> bytes:
        """Returns the answer. Raises Died if the child gave none, Busy if no child started."""
        async with self._turn:
            for _ in range(2):
                self.start()
                with contextlib.suppress(_KeeperDied):
                    return await self._ask(question)
                self.stop()
            raise Busy("the process that checks it cannot be started")

    async def _ask(self, question: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        try:
            try:
                socket.send_fds(self._control, [_BEGUN], [theirs.fileno()])
            finally:
                theirs.close()
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            ours.close()
            raise _KeeperDied from error
        try:
            try:
                begun = await asyncio.wait_for(reader.read(1), PATIENCE)
            except (TimeoutError, asyncio.TimeoutError):
                raise Busy(f"the process that checks it is not ready after {PATIENCE:g} s") from None
            except OSError:
                begun = b""
            if begun != _BEGUN:
                raise _KeeperDied
            since = time.monotonic()
            writer.write(len(question).to_bytes(8, "big") + question)
            # the child ends on its own timer; the extra seconds are for a busy machine
            answer = await asyncio.wait_for(reader.read(-1), self.seconds + 5)
        except (TimeoutError, asyncio.TimeoutError):
            raise Died(f"it took longer than {self.seconds:g} s") from None
        except OSError:
            answer, since = b"", time.monotonic()
        finally:
            writer.close()
        if not answer:
            late = time.monotonic() - since >= self.seconds * 0.95
            raise Died(f"it took longer than {self.seconds:g} s" if late else "it crashed the process that checked it")
        return answer


class _KeeperDied(Exception):
    pass


def _dies_with(parent: int) -> None:
    """Ends this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _keep(bounded: Bounded, control: socket.socket, parent: int) -> None:
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    _dies_with(parent)
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    # close the server's connections and its listening socket
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bounded.prepare()
    gc.collect()
    gc.freeze()  # a collection would otherwise copy the shared pages
    us = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            if os.fork() == 0:
                status = 1
                try:
                    control.close()
                    _dies_with(us)
                    _answer(bounded, socket.socket(fileno=descriptor))
                    status = 0
                finally:
                    os._exit(status)
            os.close(descriptor)


def _answer(bounded: Bounded, connection: socket.socket) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)  # keep output of libraries about a client's text out of the log
    connection.sendall(_BEGUN)
    with connection.makefile("rb") as stream:
        question = stream.read(int.from_bytes(stream.read(8), "big"))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + bounded.memory,) * 2)
    signal.setitimer(signal.ITIMER_REAL, bounded.seconds)  # SIGALRM ends the process even inside native code
    connection.sendall(bounded.work(question))

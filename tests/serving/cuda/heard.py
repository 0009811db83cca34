"""Runs `vllm`; its processes write the events of `answers.listen` to the file of HEARD, a line each.

`python -m tests.serving.cuda.heard serve …`. A process that vLLM spawns imports this module anew, a forked one has it.
"""

from __future__ import annotations

import os

from tests.serving.cuda.answers import listen

HEARD = "TEST_HEARD"


def _listen() -> None:
    file = os.open(os.environ[HEARD], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    listen(lambda *words: os.write(file, f"{words}\n".encode()))


if HEARD in os.environ:
    _listen()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()

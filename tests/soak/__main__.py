"""The soak: thousands of honest, hostile and rude requests against one server on this machine (`make soak`).

    python -m tests.soak --requests 10000 --seconds 3600
    python -m tests.soak --stack emulated --mode full --requests 3000
    python -m tests.soak --stack emulated-9.1 --requests 1000
    python -m tests.soak --stack cuda --requests 5000
    python -m tests.soak --table outputs/soak

Writes a record of each run and exits with 1 when a promise is broken. Runs of several seeds are added up by --table,
so a long soak can be cut into slices, and on a GPU several run at once. There an answer may be another than
alone where fp32 on the CPU shows a near-tie (tests/near_ties.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from npu_gptoss.engine import Engine
from npu_gptoss.errors import InputError
from scripts import serve_here
from tests.serving.server import Server, wait_for
from tests.soak import report
from tests.soak.honest import VARIANTS
from tests.soak.run import PARTED, Findings, Soak
from tests.soak.server import DEFAULTS, EMULATED, MODES, ROOT, STACKS, Stack, Watch, key_value_use, start

OUT = ROOT / "outputs/soak"
DEATH = 20  # seconds in which a dying server ends
REST = 20  # seconds in which a server forgets those who left


def at_rest(server: Server) -> dict[str, float]:
    """Nothing of a server that does not answer: its record is still to be written."""
    try:
        wait_for(lambda: not any(key_value_use(server).values()), REST)
        return key_value_use(server)
    except OSError:
        return {}


def soak(
    stack: Stack,
    model: Path,
    server: Server,
    process: Popen[bytes],
    *,
    requests: int,
    seconds: float,
    seed: int,
    variants: int = VARIANTS,
    progress: bool = False,
) -> report.Record:
    """One run against a server of `model` that is ready."""
    said = time.monotonic()

    def show(findings: Findings) -> None:
        nonlocal said
        if progress and time.monotonic() - said > 15:
            said = time.monotonic()
            parted = findings.number("honest", PARTED)
            wrong = findings.number("honest") - findings.number("honest", "equal") - parted
            print(
                f"  … {findings.done} of {requests} after {said - begin:.0f} s; of the honest ones {wrong} wrong, "
                f"{parted} differ, to be judged",
                flush=True,
            )

    async def run() -> None:
        await work.take_answers(variants)
        nonlocal begin
        begin = time.monotonic()
        watch.open()
        await work.run(requests, seconds, process, watch, variants=variants, progress=show)

    begin = time.monotonic()
    work = Soak(server.url, seed, priorities=stack.policy == "priority", rounds=stack.rounds, at_a_time=stack.at_a_time)
    watch = Watch(server.url, process.pid, on_gpu=stack.stack == "cuda")
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        print("soak: interrupted; what is known:", file=sys.stderr)
    finally:
        took = time.monotonic() - begin
        watch.close()
    if work.findings.number("honest") - work.findings.number("honest", "equal"):
        with contextlib.suppress(TimeoutExpired):  # dead, or just wrong?
            process.wait(DEATH if not alive(server) else 0)
    died = process.poll()
    resting = at_rest(server) if died is None else {}
    if work.findings.parted:
        work.findings.judge(Engine(model, device="cpu", dtype="float32"))
    return report.Record(
        stack=str(stack),
        seed=seed,
        seconds=took,
        requests=work.findings.done,
        exit_status=died,
        at_rest=resting,
        health=report.health(watch.health),
        slowest=work.findings.slowest,
        counts=report.counted(work.findings),
        thirds=report.thirds(watch.samples),
        words=work.findings.words,
        in_flight=sorted(work.findings.in_flight - type(work.findings.in_flight)()),
        begun=work.findings.begun,
        log=[] if died is None else serve_here.tail(server.log, 30),
        regrets=work.findings.regrets,
    )


def alive(server: Server) -> bool:
    try:
        return server.is_alive()
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stack", choices=STACKS, default="cpu")
    parser.add_argument("--mode", choices=tuple(MODES), help="the emulated 910B's graphs (default the stack's)")
    parser.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600, help="end after that, however many were asked")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="(default: of the time)")
    parser.add_argument("--health-limit", type=float, default=report.HEALTH_LIMIT, help="seconds (default %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="where records go (default outputs/soak)")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the records there, ask nobody")
    options = parser.parse_args(arguments)
    if options.table:
        print(report.table(report.load(options.table)))
        return 0
    if options.mode and options.stack not in EMULATED:
        parser.error("--mode is of the emulated 910B")
    mode = options.mode or DEFAULTS.get(options.stack, "")
    stack = Stack(options.stack, mode, options.policy)
    print(
        f"soak: {stack}, {options.requests} requests, at most {options.seconds:.0f} s, seed {options.seed}", flush=True
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        try:
            model, log = serve_here.tiny_checkpoint(), Path(folder) / "server.log"
            with start(stack, model, log) as (server, process):
                record = soak(
                    stack,
                    model,
                    server,
                    process,
                    requests=options.requests,
                    seconds=options.seconds,
                    seed=options.seed,
                    progress=True,
                )
        except InputError as error:
            print(f"\nsoak: {error}", file=sys.stderr)
            return 2
    print(report.printed(record, options.health_limit))
    print(f"record: {report.save(record, options.out)}")
    return int(not all(kept for _, kept, _ in report.verdicts(record, options.health_limit)))


if __name__ == "__main__":
    sys.exit(main())

"""Endurance runs: one scenario for minutes or hours against one server on this machine (`make endure`).

    python -m tests.endure mix --minutes 150
    python -m tests.endure tools --stack emulated-9.1 --minutes 20
    python -m tests.endure mix --stack emulated --mode full --requests 3000
    python -m tests.endure --list
    python -m tests.endure --table outputs/endure --picture

Writes a record of each run. The exit status is 1 when a promise is broken, 3 when the run was too short to judge one.
On a GPU an answer may be another than alone where fp32 on the CPU shows a near-tie (tests/near_ties.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired

from npu_gptoss.engine import Engine
from npu_gptoss.errors import InputError
from npu_gptoss.files import write_atomically
from scripts import serve_here
from tests.endure import judge
from tests.endure.loop import AHEAD, IN_FLIGHT, PATIENCE, RESTART_EVERY, Findings, Loop
from tests.endure.scenarios import SCENARIOS
from tests.endure.server import (
    ASK_EVERY,
    DRAFTERS,
    EMULATED,
    MODES,
    NAME,
    ROOT,
    STACKS,
    Served,
    Stack,
    Watch,
    key_value_use,
)
from tests.serving.server import Server, wait_for

OUT = ROOT / "outputs/endure"
DEATH = 20  # seconds in which a dying server ends
REST = 30  # seconds in which a server forgets those who left


def endure(
    served: Served,
    name: str,
    *,
    minutes: float,
    requests: float = float("inf"),
    seed: int = 1,
    in_flight: int = IN_FLIGHT,
    ahead: int = AHEAD,
    patience: float = PATIENCE,
    every: float = ASK_EVERY,
    progress: bool = False,
) -> judge.Record:
    """One run of a scenario against a server that is ready."""
    scenario, shown, leftovers = SCENARIOS[name], time.monotonic(), []
    stack = served.stack
    loop = Loop(served.url, seed, patience=patience, priorities=stack.policy == "priority", rounds=stack.rounds)
    watch = Watch(served.url, lambda: -1 if loop.outage else served.process.pid, stack.card, every)

    def show(findings: Findings) -> None:
        nonlocal shown
        if progress and time.monotonic() - shown > 15:
            shown = time.monotonic()
            wrong = [outcome for _, _, outcome in findings.counts if outcome in ("wrong", "different", "stuck")]
            print(
                f"  … {findings.done} requests after {shown - loop.begin:.0f} s; {len(wrong)} kinds wrong", flush=True
            )

    async def run() -> None:
        await loop.take_answers(scenario, ahead)
        watch.begin = time.monotonic()
        operators = {
            "changes": lambda: loop.change_again_and_again(stack.sleeps),
            "restarts": lambda: loop.restart_again_and_again(served, leftovers, min(RESTART_EVERY, minutes * 30)),
        }
        operator = asyncio.create_task(operators[scenario.does]()) if scenario.does in operators else None
        with watch:
            await loop.run(
                scenario,
                minutes * 60,
                requests=requests,
                in_flight=in_flight,
                alive=lambda: served.process.poll() is None,
                progress=show,
            )
            if operator:
                while loop.outage:
                    await asyncio.sleep(0.5)
                operator.cancel()
        nonlocal took
        took = time.monotonic() - watch.begin  # not that of the answers alone
        if served.process.poll() is None:
            await loop.take_later()

    took = 0.0
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        took = time.monotonic() - watch.begin
        print("endure: interrupted; what is known:", file=sys.stderr)
    findings, server = loop.findings, Server(served.url, NAME, served.log)
    if findings.number("honest") - findings.number("honest", "equal"):
        with contextlib.suppress(TimeoutExpired):  # dead, or just wrong?
            served.process.wait(0 if is_alive(server) else DEATH)
    resting = {} if served.process.poll() is not None else at_rest(server)
    if findings.parted:
        findings.judge(Engine(served.model, device="cpu", dtype="float32"))
    died, series = served.process.poll(), judge.series(watch.samples, findings)
    return judge.Record(
        stack=str(stack),
        scenario=name,
        seed=seed,
        seconds=round(took, 1),
        requests=findings.done,
        exit_status=died,
        at_rest=resting,
        leftovers=leftovers,
        health=judge.health(watch.health),
        backwards=watch.backwards,
        counts=judge.counted(findings),
        slopes=judge.slopes(series),
        series=series,
        load=round(os.getloadavg()[2], 1),
        words=findings.words,
        changes=findings.changes,
        in_flight=sorted(+findings.in_flight),
        log=[] if died is None else serve_here.tail(served.log, 30),
        regrets=findings.regrets,
        pools=judge.pools(),
    )


def at_rest(server: Server) -> dict[str, float]:
    """Nothing of a server that does not answer: its record is still to be written."""
    try:
        wait_for(lambda: not any(key_value_use(server).values()), REST)
        return key_value_use(server)
    except OSError:
        return {}


def is_alive(server: Server) -> bool:
    try:
        return server.is_alive()
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.endure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="?", default="mix", choices=[*SCENARIOS, "all"])
    parser.add_argument("--stack", choices=STACKS, default="cpu")
    parser.add_argument("--mode", choices=tuple(MODES), help="the emulated 910B's graphs (default the release's)")
    proposed = "n-grams propose tokens, or an EAGLE3 head of random weights (not vLLM 0.11)"
    parser.add_argument("--drafts", nargs="?", choices=tuple(DRAFTERS), const="ngrams", default="", help=proposed)
    parser.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--requests", type=float, default=float("inf"), help="end after so many")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--ahead", type=int, default=AHEAD, help="requests asked alone before (default %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="(default: of the time)")
    parser.add_argument("--out", type=Path, default=OUT, help="where records go (default outputs/endure)")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the records there")
    parser.add_argument("--picture", action="store_true", help="with --table: write an SVG beside each record")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:14} {scenario.about}" for name, scenario in SCENARIOS.items()))
        return 0
    if options.table:
        records = judge.load(options.table)
        for record in records if options.picture else ():
            path = options.table / f"endure-{record.stack}-{record.scenario}-{record.seed}.svg"
            write_atomically(path, judge.picture(record).encode())
        print(judge.table(records))
        return 0
    if options.mode and options.stack not in EMULATED:
        parser.error("--mode is of the emulated 910B")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stack, worst = Stack(options.stack, options.mode or "", options.policy, drafts=options.drafts), 0
    for name in SCENARIOS if options.scenario == "all" else (options.scenario,):
        print(f"endure {name}: {stack}, {options.minutes:g} min, seed {options.seed}", flush=True)
        with tempfile.TemporaryDirectory(prefix="endure") as folder:
            try:
                develop = stack.changes() if SCENARIOS[name].does == "changes" else {}
                model, log = serve_here.tiny_checkpoint(), Path(folder) / "server.log"
                served = Served(stack, model, log, **develop).start()
            except InputError as error:
                print(f"\nendure: {error}", file=sys.stderr)
                return 2
            try:
                record = endure(
                    served,
                    name,
                    minutes=options.minutes,
                    requests=options.requests,
                    seed=options.seed,
                    in_flight=options.in_flight,
                    ahead=options.ahead,
                    progress=True,
                )
            finally:
                left = served.stop()
        record.leftovers = [*(record.leftovers or ()), *left]
        print(judge.printed(record))
        print(f"record: {judge.save(record, options.out)}", flush=True)
        worst = max(worst, judge.status(record), key=(0, 3, 1).index)
    return worst


if __name__ == "__main__":
    sys.exit(main())

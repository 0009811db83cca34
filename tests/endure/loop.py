"""The closed loop of an endurance run: each request is compared with what is due, and an operator works beside them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from npu_gptoss.engine import Engine
from npu_gptoss.errors import InputError
from tests.endure.clients import Stuck, name
from tests.endure.honest_requests import MESSAGES, TOKEN_IDS, Answer, Honest, Said, Wrong, said
from tests.endure.scenarios import Item, Scenario
from tests.endure.server import Served
from tests.near_ties import NEAR, regrets
from tests.serving.hostile import CHAT, COMPLETIONS, RESPONSES, Hostile

IN_FLIGHT = 16
PATIENCE = 120.0  # seconds for an honest request; the server is meant to be busy
HOSTILE_PATIENCE = 30.0  # seconds; a refusal computes nothing, but waits its turn
DIFFERENT, NEAR_TIE, PARTED, UNSERVED = "different", "near-tie", "parted", "told of the end"
KEPT = 40  # findings with their words; the rest is counted
AHEAD = 400  # items of a scenario whose answers alone are taken before it
RESTART_EVERY, CHANGE_EVERY = 60.0, 3.0  # seconds
LACKING = "not on this stack"
SLEEP, WAKE_UP = "/sleep?level=1", "/wake_up"
# of a server with VLLM_SERVER_DEV_MODE=1
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/reset_prefix_cache", {}),
    ("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "/nowhere"}),
    ("/collective_rpc", {"method": "reload_weights"}),
    (SLEEP, {}),
    (WAKE_UP, {}),
)


@dataclass
class Findings:
    """Counts by (group, kind, outcome), the words of the first findings, the times of the streams."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    words: list[str] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)
    # (seconds into the run, to the first piece, median between two pieces)
    streams: list[tuple[float, float, float]] = field(default_factory=list)
    # (kind, what was said alone, what was said now, in words) of answers that are other tokens than those alone
    parted: Counter[tuple[str, Said, Said, str]] = field(default_factory=Counter)
    regrets: list[float] = field(default_factory=list)  # of the near-ties among them
    changes: list[str] = field(default_factory=list)  # what the operator did, in words
    errors: list[tuple[float, str]] = field(default_factory=list)  # when, and what an honest client saw instead

    def note(self, group: str, kind: str, outcome: str, words: str = "") -> None:
        self.counts[group, kind, outcome] += 1
        if words and len(self.words) < KEPT:
            self.words.append(f"{kind}: {outcome}: {words[:400]}")

    def judge(self, exact: Engine) -> None:
        """Makes of each answer that parted a near-tie by fp32, or a different one."""
        answers = [
            (now.prompt, now.tokens, alone.tokens if now.prompt == alone.prompt else ())
            for _, alone, now, _ in self.parted
        ]
        for ((kind, _, _, words), times), lost in zip(self.parted.items(), regrets(exact, answers), strict=True):
            near = lost is not None and lost < NEAR
            self.regrets += [lost] * near
            self.counts["honest", kind, PARTED] -= times
            self.counts["honest", kind, NEAR_TIE if near else DIFFERENT] += times
            if not near and len(self.words) < KEPT:
                self.words.append(f"{kind}: fp32 prefers one by {lost}: {words[:400]}")
        self.counts = +self.counts
        self.parted.clear()

    @property
    def done(self) -> int:
        return sum(self.counts.values())

    def number(self, group: str, outcome: str = "") -> int:
        return sum(n for (g, _, o), n in self.counts.items() if g == group and outcome in ("", o))


def refuse_other_machines(url: str) -> None:
    """Raises InputError unless `url` is on this machine: hostile requests must not hit foreign servers."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise InputError(f"`make endure` asks servers on loopback addresses only (127.0.0.1, [::1]), not {host or url!r}.")


# --- one request ---


async def _events(response: aiohttp.ClientResponse, heard: list[float]) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            heard.append(time.monotonic())
            yield line[6:].decode().strip()


async def pieces_of(
    session: aiohttp.ClientSession, url: str, request: Honest, extra: dict[str, Any], heard: list[float]
) -> list[Any]:
    """The reply as it came: one object, or a stream's, which has to have its end. heard: when its pieces came."""
    async with session.post(url + request.route, json={**request.body, **extra}) as response:
        if response.status != 200:
            told = (await response.text())[:300]
            raise Wrong(f"answered {response.status}: {told}", unserved=response.status == 503)
        if not request.is_streamed:
            return [json.loads(await response.text())]
        events = [event async for event in _events(response, heard)]
    ended = events[-1:] == ["[DONE]"]
    found = [json.loads(event) for event in events[: len(events) - ended]]
    if broken := [piece for piece in found if piece.get("error") or piece.get("type") == "response.failed"]:
        raise Wrong(f"an error within the stream: {broken[0]}", unserved=True)
    if not found:
        raise Wrong("an empty stream")
    if request.route in (CHAT, COMPLETIONS) and not ended:
        raise Wrong(f"the stream ended without [DONE] after {len(events)} events, the last: {events[-1:]!r}")
    return found


class Loop:
    """The state of one run.

    patience: seconds for an honest request. priorities: honest ones name a priority, as a server with that policy
    allows. rounds: the server's arithmetic may turn a near-tie, so tokens are asked for, by which `Findings.judge`
    separates it from a wrong answer.
    """

    def __init__(
        self, url: str, seed: int, *, patience: float = PATIENCE, priorities: bool = False, rounds: bool = False
    ) -> None:
        refuse_other_machines(url)
        self.url, self.patience, self.priorities, self.rounds = url, patience, priorities, rounds
        self.rng = random.Random(seed)
        self.alone: dict[str, tuple[Answer, Said | None]] = {}
        self.later: list[tuple[Honest, Answer, Said | None]] = []  # answers whose request was not asked alone before
        self.findings = Findings()
        self.begin = time.monotonic()
        self.outage = 0  # 1 while the operator ends and starts the server, or it sleeps
        self.outages = 0  # how many there were

    def session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers)

    async def ask(
        self, session: aiohttp.ClientSession, request: Honest, extra: dict[str, Any], heard: list[float]
    ) -> tuple[Answer, Said | None]:
        """The answer, and its tokens where they were asked for. Raises Wrong."""
        try:
            pieces = await asyncio.wait_for(pieces_of(session, self.url, request, extra, heard), self.patience)
            return request.answer(pieces), said(pieces)
        except asyncio.TimeoutError:
            raise Wrong(f"no answer within {self.patience:g} s") from None
        except aiohttp.ClientError as error:
            unserved = isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError)
            raise Wrong(f"no answer: {type(error).__name__} {error}", unserved) from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Wrong(f"the reply has another shape: {type(error).__name__} {error}") from None

    def _tokens(self, request: Honest) -> dict[str, Any]:
        return TOKEN_IDS if self.rounds and request.route not in (RESPONSES, MESSAGES) else {}

    async def take_alone(self, session: aiohttp.ClientSession, request: Honest) -> None:
        """A request that fails alone is a finding, too: no other answer can equal it."""
        try:
            self.alone[request.key] = await self.ask(session, request.whole, self._tokens(request), [])
        except Wrong as error:
            self.alone[request.key] = {}, None
            self.findings.note("alone", request.kind, "wrong", str(error))

    async def take_answers(self, scenario: Scenario, ahead: int = AHEAD) -> None:
        """The answers of the first items, one after the other."""
        items = scenario.items(random.Random(0))
        wanted = {item.key: item for _ in range(ahead) for item in next(items) if isinstance(item, Honest)}
        async with self.session() as session:
            for request in wanted.values():
                await self.take_alone(session, request)

    async def take_later(self) -> None:
        """The answers alone of requests that no item before the run had, and their comparison."""
        async with self.session() as session:
            for request, got, tokens in self.later:
                if request.key not in self.alone:
                    await self.take_alone(session, request)
                self._compare(request, got, tokens)
        self.later.clear()

    def _compare(self, request: Honest, got: Answer, tokens: Said | None) -> None:
        wanted, alone = self.alone[request.key]
        outcome, words = "equal", ""
        if got != wanted:
            outcome, words = DIFFERENT, f"{str(request.body)[:200]}: alone {wanted}, now {got}"
            if tokens and alone and tokens != alone:
                self.findings.parted[request.kind, alone, tokens, words] += 1
                outcome, words = PARTED, ""
        self.findings.note("honest", request.kind, outcome, words)

    async def honest(self, session: aiohttp.ClientSession, request: Honest) -> None:
        extra = self._tokens(request) | ({"priority": self.rng.randint(-3, 3)} if self.priorities else {})
        outages, out, begin, heard = self.outages, self.outage, time.monotonic(), []
        try:
            got, tokens = await self.ask(session, request, extra, heard)
        except Wrong as error:
            self.findings.errors.append((time.monotonic(), str(error)))
            if error.unserved and (out or self.outage or self.outages > outages):
                self.findings.note("honest", request.kind, UNSERVED)
                await asyncio.sleep(0.5)
            else:
                self.findings.note("honest", request.kind, "wrong", str(error))
            return
        if len(heard) > 2:
            gaps = [after - before for before, after in itertools.pairwise(heard)]
            self.findings.streams.append((begin - self.begin, heard[0] - begin, statistics.median(gaps)))
        if request.key in self.alone:
            self._compare(request, got, tokens)
        else:
            self.later.append((request, got, tokens))

    async def hostile(self, session: aiohttp.ClientSession, item: Hostile) -> None:
        words = ""
        try:
            status, told = await asyncio.wait_for(self._status(session, item), HOSTILE_PATIENCE)
            outcome = "answered" if due(item, status) else f"status {status}"
            words = "" if outcome == "answered" else f"{item.status} was due: {told[:200]}"
        except asyncio.TimeoutError:
            outcome, words = "no answer", f"within {HOSTILE_PATIENCE:g} s"
        except aiohttp.ClientError as error:
            outcome, words = "no answer", f"{type(error).__name__} {error}"
        self.findings.note("hostile", item.name, outcome, words)

    async def _status(self, session: aiohttp.ClientSession, item: Hostile) -> tuple[int, str]:
        async with session.post(self.url + item.route, data=item.body) as response:
            return response.status, await response.text(errors="replace")

    async def item(self, session: aiohttp.ClientSession, item: Item) -> None:
        what = item.kind if isinstance(item, Honest) else item.name if isinstance(item, Hostile) else name(item)
        self.findings.in_flight[what] += 1
        try:
            if isinstance(item, Honest):
                await self.honest(session, item)
            elif isinstance(item, Hostile):
                await self.hostile(session, item)
            else:
                outcome, words = "done", ""
                try:
                    await item(self.url, self.rng)
                except (Stuck, asyncio.TimeoutError) as error:
                    outcome, words = "stuck", str(error) or "nothing came"
                except OSError as error:
                    outcome, words = "no connection", str(error)
                self.findings.note("rude", what, outcome, words)
        finally:
            self.findings.in_flight[what] -= 1

    async def run(
        self,
        scenario: Scenario,
        seconds: float,
        *,
        requests: float = float("inf"),
        in_flight: int = IN_FLIGHT,
        alive: Callable[[], bool] = lambda: True,
        progress: Callable[[Findings], None] = lambda findings: None,
    ) -> None:
        """Until `seconds` have passed, `requests` are begun, or the server is gone."""
        self.begin = time.monotonic()
        items, left = scenario.items(self.rng), requests

        async def worker() -> None:
            nonlocal left
            while left > 0 and time.monotonic() < self.begin + seconds and (self.outage or alive()):
                some = next(items)
                left -= len(some)
                await asyncio.gather(*(self.item(session, item) for item in some))
                progress(self.findings)

        async with self.session() as session:
            await asyncio.gather(*(worker() for _ in range(in_flight)))

    async def change_again_and_again(self, sleeps: bool = False, every: float = CHANGE_EVERY) -> None:
        """The operator of `changes`: asks for one after the other; what a stack lacks, it has to refuse.

        sleeps: the server has to; until it is awake, requests wait or are told so.
        """
        try:
            async with self.session() as session:
                for route, body in itertools.cycle(CHANGES):
                    await asyncio.sleep(every)
                    due = sleeps and route in (SLEEP, WAKE_UP)
                    if due and route == SLEEP:
                        self.outage, self.outages = 1, self.outages + 1
                    async with session.post(self.url + route, json=body) as response:
                        status, told = response.status, (await response.text())[:100]
                    if route == WAKE_UP:
                        self.outage = 0
                    outcome = "done" if status == 200 else f"status {status}" if due else LACKING
                    self.findings.note("operator", route, outcome)
                    words = f"{route}: {'done' if status == 200 else f'{status} {told}'}"
                    self.findings.changes += [words] * (words not in self.findings.changes)
        finally:
            self.outage = 0  # of a server that died asleep

    async def restart_again_and_again(self, served: Served, leftovers: list[str], every: float = RESTART_EVERY) -> None:
        """The operator of `restarts`: SIGTERM under load, and a start at the same address."""
        while True:
            await asyncio.sleep(every)
            self.outage, self.outages, begin = 1, self.outages + 1, time.monotonic()
            leftovers += await asyncio.to_thread(served.stop)
            status, ended = served.process.poll(), time.monotonic()
            if status:
                self.findings.note("operator", "SIGTERM", f"exit status {status}", f"exit status {status}")
            await asyncio.to_thread(served.start)
            self.outage = 0
            self.findings.note("operator", "restart", "done")
            self.findings.changes.append(
                f"ended in {ended - begin:.1f} s, ready after {time.monotonic() - ended:.1f} s"
            )


def due(item: Hostile, status: int) -> bool:
    """A refusal is any 4xx. Some only look hostile and are served; xgrammar alone may refuse a structure."""
    refused = 400 <= status < 500
    if item.status >= 400:
        return refused
    return status == item.status or (refused and item.needs == "compiler")

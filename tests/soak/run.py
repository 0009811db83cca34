"""The soak itself: the mixture, its workers, and their findings.

Every honest request's answer is taken first, without other load. Then `requests` of them, hostile ones
(tests/serving/hostile.py, each at least once where there is room) and rude clients come at once, `at_a_time` of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from subprocess import Popen
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from npu_gptoss.engine import Engine
from npu_gptoss.errors import InputError
from tests.near_ties import NEAR, regrets
from tests.serving.hostile import HOSTILE, RESPONSES, Hostile
from tests.soak.honest import KINDS, TOKEN_IDS, VARIANTS, Answer, Honest, Said, Wrong, said
from tests.soak.rude import RUDE, Rude, Stuck, name
from tests.soak.server import Watch

SHARES = {"honest": 0.72, "hostile": 0.16, "rude": 0.12}
PATIENCE = 120  # seconds for an honest request; the server is meant to be busy
HOSTILE_PATIENCE = 30  # seconds; a refusal computes nothing, but waits its turn
DIFFERENT, NEAR_TIE, PARTED = "different", "near-tie", "parted"
KEPT = 40  # findings with their words; the rest is counted


@dataclass
class Findings:
    """Counts by (group, kind, outcome), the words of the first findings, the slowest of each group."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    words: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    in_flight: Counter[str] = field(default_factory=Counter)
    begun: list[str] = field(default_factory=list)  # the last ones, for a death's reason
    # (kind, what was said alone, what was said now, in words) of answers that are other tokens than those alone
    parted: Counter[tuple[str, Said, Said, str]] = field(default_factory=Counter)
    regrets: list[float] = field(default_factory=list)  # of the near-ties among them

    def note(self, group: str, kind: str, outcome: str, seconds: float, words: str = "") -> None:
        self.counts[group, kind, outcome] += 1
        self.slowest[group] = max(self.slowest.get(group, 0.0), seconds)
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
    """Raises InputError unless `url` is on this machine: a soak must not hit foreign servers."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise InputError(f"the soak asks servers on loopback addresses only (127.0.0.1, [::1]), not {host or url!r}.")


# --- one request ---


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


async def pieces_of(session: aiohttp.ClientSession, url: str, request: Honest, extra: dict[str, Any]) -> list[Any]:
    """The reply as it came: one object, or a stream's, which has to have its end."""
    async with session.post(url + request.route, json={**request.body, **extra}) as response:
        if response.status != 200:
            raise Wrong(f"answered {response.status}: {(await response.text())[:300]}")
        if not request.streamed:
            return [json.loads(await response.text())]
        said = [event async for event in _events(response)]
    if said[-1:] == ["[DONE]"]:
        said.pop()
    elif "responses" not in request.route:
        raise Wrong(f"the stream ended without [DONE] after {len(said)} events, the last: {said[-1:]!r}")
    found = [json.loads(event) for event in said]
    if broken := [piece for piece in found if "error" in piece and not piece.get("type", "").startswith("response.")]:
        raise Wrong(f"an error within the stream: {broken[0]}")
    if not found:
        raise Wrong("an empty stream")
    return found


async def ask(
    session: aiohttp.ClientSession, url: str, request: Honest, extra: dict[str, Any]
) -> tuple[Answer, Said | None]:
    """The answer, and its tokens where they were asked for. Raises Wrong."""
    try:
        pieces = await asyncio.wait_for(pieces_of(session, url, request, extra), PATIENCE)
        return request.read(pieces), said(pieces)
    except asyncio.TimeoutError:
        raise Wrong(f"no answer within {PATIENCE} s") from None
    except aiohttp.ClientError as error:
        raise Wrong(f"no answer: {type(error).__name__} {error}") from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Wrong(f"the reply has another shape: {type(error).__name__} {error}") from None


async def reply_to(session: aiohttp.ClientSession, url: str, item: Hostile) -> tuple[int, str]:
    async with session.post(url + item.route, data=item.body) as response:
        return response.status, await response.text(errors="replace")


def due(item: Hostile, status: int) -> bool:
    """A refusal is any 4xx. Some only look hostile and are served; xgrammar alone may refuse a structure."""
    refused = 400 <= status < 500
    if item.status >= 400:
        return refused
    return status == item.status or (refused and item.needs == "compiler")


class Soak:
    """The state of one run.

    priorities: honest ones name a priority, as a server with that policy allows. rounds: the server's arithmetic may
    turn a near-tie, so tokens are asked for, by which `Findings.judge` separates it from a wrong answer.
    """

    def __init__(
        self, url: str, seed: int, *, priorities: bool = False, rounds: bool = False, at_a_time: int = 32
    ) -> None:
        refuse_other_machines(url)
        self.url, self.priorities, self.rounds, self.at_a_time = url, priorities, rounds, at_a_time
        self.rng = random.Random(seed)
        self.alone: dict[str, tuple[Answer, Said | None]] = {}
        self.findings = Findings()
        self.hostile: list[Hostile] = []

    def session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers={"Content-Type": "application/json"})

    async def take_answers(self, variants: int = VARIANTS) -> None:
        """The answer of every honest request, one after the other. An unstreamed twin comes first in KINDS.

        A request that fails alone is a finding, too: no later answer can equal it.
        """
        async with self.session() as session:
            for _, make in KINDS:
                for seed in range(variants):
                    request = make(seed)
                    if request.key in self.alone:
                        continue
                    try:
                        self.alone[request.key] = await ask(session, self.url, request, self._tokens(request))
                    except Wrong as error:
                        self.alone[request.key] = {}, None
                        self.findings.note("alone", request.kind, "wrong", 0, str(error))

    def _tokens(self, request: Honest) -> dict[str, Any]:
        return TOKEN_IDS if self.rounds and request.route != RESPONSES else {}

    async def honest(self, session: aiohttp.ClientSession, make: Callable[[int], Honest], variants: int) -> None:
        request, begin = make(self.rng.randrange(variants)), time.monotonic()
        extra = self._tokens(request) | ({"priority": self.rng.randint(-3, 3)} if self.priorities else {})
        outcome, words = "equal", ""
        with self._flight(f"honest {request.kind}"):
            try:
                (got, tokens), (wanted, alone) = await ask(session, self.url, request, extra), self.alone[request.key]
                if got != wanted:
                    outcome, words = DIFFERENT, f"{request.key}: alone {wanted}, now {got}"
                    if tokens and alone and tokens != alone:
                        self.findings.parted[request.kind, alone, tokens, words] += 1
                        outcome, words = PARTED, ""
            except Wrong as error:
                outcome, words = "wrong", str(error)
        self.findings.note("honest", request.kind, outcome, time.monotonic() - begin, words)

    async def _hostile(self, session: aiohttp.ClientSession) -> None:
        if not self.hostile:
            self.hostile = self.rng.sample(HOSTILE, len(HOSTILE))
        item, begin, words = self.hostile.pop(), time.monotonic(), ""
        with self._flight(f"hostile {item.name}"):
            try:
                status, said = await asyncio.wait_for(reply_to(session, self.url, item), HOSTILE_PATIENCE)
                outcome = "answered" if due(item, status) else f"status {status}"
                words = "" if outcome == "answered" else f"{item.status} was due: {said[:200]}"
            except asyncio.TimeoutError:
                outcome, words = "no answer", f"within {HOSTILE_PATIENCE} s"
            except aiohttp.ClientError as error:
                outcome, words = "no answer", f"{type(error).__name__} {error}"
        self.findings.note("hostile", item.name, outcome, time.monotonic() - begin, words)

    async def _rude(self) -> None:
        rude: Rude = self.rng.choices([rude for _, rude in RUDE], [weight for weight, _ in RUDE])[0]
        begin, outcome, words = time.monotonic(), "done", ""
        with self._flight(f"rude {name(rude)}"):
            try:
                await rude(self.url, self.rng)
            except (Stuck, asyncio.TimeoutError) as error:
                outcome, words = "stuck", str(error) or f"nothing came for {PATIENCE} s"
            except OSError as error:
                outcome, words = "no connection", str(error)
        self.findings.note("rude", name(rude), outcome, time.monotonic() - begin, words)

    @contextlib.contextmanager
    def _flight(self, what: str):
        self.findings.begun = [*self.findings.begun[-19:], what]
        self.findings.in_flight[what] += 1
        try:
            yield
        finally:
            self.findings.in_flight[what] -= 1

    async def run(
        self,
        requests: int,
        seconds: float,
        process: Popen[bytes],
        watch: Watch,
        *,
        variants: int = VARIANTS,
        progress: Callable[[Findings], None] = lambda findings: None,
    ) -> None:
        """Until `requests` are done, `seconds` have passed, or the server is gone."""
        deadline, left = time.monotonic() + seconds, requests
        groups, weights, kinds = list(SHARES), list(SHARES.values()), [kind for _, kind in KINDS]

        async def worker() -> None:
            nonlocal left
            while left > 0 and time.monotonic() < deadline and process.poll() is None:
                left -= 1
                group = self.rng.choices(groups, weights)[0]
                if group == "honest":
                    await self.honest(session, self.rng.choices(kinds, [weight for weight, _ in KINDS])[0], variants)
                elif group == "hostile":
                    await self._hostile(session)
                else:
                    await self._rude()
                watch.done = self.findings.done
                progress(self.findings)

        async with self.session() as session:
            await asyncio.gather(*(worker() for _ in range(self.at_a_time)))

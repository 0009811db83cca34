"""Random prompts for a server, and the order in which they are sent: so many at a time, or so many a second."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from npu_gptoss.errors import InputError
from npu_gptoss.harmony.vocabulary import NUM_RANKS

Prompt = list[int] | str
Item, Result = TypeVar("Item"), TypeVar("Result")

VOCABULARY = NUM_RANKS  # gpt-oss's ordinary tokens: the special ones come after them
WORD = re.compile(r"Ġ[a-z]{3,}")  # a byte-level tokenizer's name of a word with its space: it stays one token anywhere


def random_ids(count: int, length: int, vocabulary: int, seed: int) -> list[Prompt]:
    """`count` prompts of `length` token ids below `vocabulary`, the same for the same arguments."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


class Words:
    """Texts of exactly so many tokens: words that the tokenizer of a checkpoint keeps whole."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise InputError(f"{file} cannot be used as a tokenizer ({error}); name a checkpoint's folder") from None
        vocabulary = self._tokenizer.get_vocab()
        self._words = sorted(" " + name[1:] for name in vocabulary if WORD.fullmatch(name))
        if not self._words:
            raise InputError(f"{file} has no words of its own to make prompts of: expected a byte-level BPE")

    def prompts(self, count: int, length: int, seed: int) -> list[Prompt]:
        """`count` texts of `length` tokens; the same for the same arguments."""
        draw, found = random.Random(seed), []
        for _ in range(count):
            text = "".join(draw.choice(self._words) for _ in range(length))
            tokens = len(self._tokenizer.encode(text, add_special_tokens=False).ids)
            if tokens != length:
                raise InputError(f"this tokenizer makes {tokens} tokens of {length} words: prompts need another one")
            found.append(text)
        return found


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: a Poisson process of `rate` a second; inf: all at once."""
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += 0.0 if math.isinf(rate) else draw.expovariate(rate)
    return times


async def so_many_at_a_time(
    send: Callable[[Item], Awaitable[Result]], items: Sequence[Item], concurrency: int
) -> list[Result]:
    """Results in the order of the items; the next item is sent when one of `concurrency` has its answer."""
    waiting = iter(enumerate(items))
    results: dict[int, Result] = {}

    async def worker() -> None:
        for number, item in waiting:
            results[number] = await send(item)

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(items)))))
    return [results[number] for number in range(len(items))]


async def at_these_times(
    send: Callable[[Item], Awaitable[Result]],
    items: Sequence[Item],
    times: Sequence[float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] | None = None,
) -> list[Result]:
    """Results in the order of the items; each is sent at its time, whatever the others do."""
    clock = clock or asyncio.get_running_loop().time
    start, tasks = clock(), []
    for item, time in zip(items, times, strict=True):
        await sleep(max(0.0, start + time - clock()))
        tasks.append(asyncio.ensure_future(send(item)))
    return await asyncio.gather(*tasks)

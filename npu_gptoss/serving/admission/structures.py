"""Compiles schemas, expressions and grammars once, in a process with limits, before the engine receives them.

The verdict names the backend that compiled the structure, and the structure in the form which that backend reads.
Verdicts are cached, so a client's schema, or an attack, costs one compilation.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_gptoss.serving.admission.bounded import Bounded, Busy, Died

REMEMBERED = 1024
HELD = 64 << 20  # characters of cached structures: vLLM 0.33 writes each tool's schema twelve times


@dataclass(frozen=True)
class Verdict:
    """`error` says why a structure is refused; otherwise `backend` takes the structure's `fields`."""

    error: str | None = None
    backend: str | None = None
    automatic: bool = False  # the backend was chosen here, not requested
    fields: Mapping[str, Any] | None = None
    lasting: bool = True  # False: it was not compiled, and may be asked again


def key_of(fields: Mapping[str, Any]) -> str:
    """Returns a cache key: the structure's fields that are set."""
    return json.dumps({name: value for name, value in fields.items() if value is not None}, sort_keys=True)


class Structures:
    def __init__(self, bounded: Bounded) -> None:
        self.bounded = bounded
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._held = 0

    def known(self, fields: Mapping[str, Any]) -> Verdict | None:
        return self._verdicts.get(key_of(fields))

    async def verdict(self, fields: Mapping[str, Any]) -> Verdict:
        key = key_of(fields)
        found = self._verdicts.get(key)
        if found is None:
            try:
                found = Verdict(**json.loads(await self.bounded.ask(key.encode())))
            except Busy as error:
                return Verdict(error=str(error), lasting=False)
            except Died as error:
                found = Verdict(error=str(error))
            self._remember(key, found)
            if found.fields is not None:  # prompts that share a request ask again, in the backend's form
                self._remember(key_of(found.fields), found)
        else:
            self._verdicts.move_to_end(key)
        return found

    def _remember(self, key: str, verdict: Verdict) -> None:
        """Adds to the cache. The last two entries always stay: a structure and its form for the backend."""
        self._held += len(key) if key not in self._verdicts else 0
        self._verdicts[key] = verdict
        while len(self._verdicts) > REMEMBERED or (self._held > HELD and len(self._verdicts) > 2):
            self._held -= len(self._verdicts.popitem(last=False)[0])

"""Schemas, expressions and grammars: compiled once in a bounded process before the engine sees them.

What comes back is the verdict: the backend for which the structure was compiled, and the structure as that backend
reads it. Verdicts are remembered, so that a client's schema costs one compilation, and an attack one, too.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_gptoss.serving.admission.bounded import Bounded, Busy, Died

REMEMBERED = 1024
HELD = 64 << 20  # characters of remembered structures: vLLM 0.33 writes each tool's schema twelve times


@dataclass(frozen=True)
class Verdict:
    """`error` says why a structure is refused; otherwise `backend` takes the structure's `fields`."""

    error: str | None = None
    backend: str | None = None
    automatic: bool = False  # the backend was chosen, not asked for
    fields: Mapping[str, Any] | None = None
    lasting: bool = True  # False: it was not looked at, and may be asked again


def key_of(fields: Mapping[str, Any]) -> str:
    """One text for one structure: its fields that say anything."""
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
            if found.fields is not None:  # what the backend reads is asked for again where prompts share a request
                self._remember(key_of(found.fields), found)
        else:
            self._verdicts.move_to_end(key)
        return found

    def _remember(self, key: str, verdict: Verdict) -> None:
        """The last two stay in any case: a structure, and what its backend reads."""
        self._held += len(key) if key not in self._verdicts else 0
        self._verdicts[key] = verdict
        while len(self._verdicts) > REMEMBERED or (self._held > HELD and len(self._verdicts) > 2):
            self._held -= len(self._verdicts.popitem(last=False)[0])

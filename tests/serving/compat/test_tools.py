"""Tool calls in whole answers: with or without the server's flags."""

from __future__ import annotations

import pytest

from tests.serving.compat.conftest import TELLING
from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, of_chat
from tests.serving.compat.test_reading import CALL, NEXT, PARIS

pytestmark = pytest.mark.serving


def test_calls_are_found_without_the_servers_flags(patched, tokens):
    generated = tokens(f"<|channel|>analysis<|message|>hm{NEXT}{CALL}")
    with patched():
        found = of_chat(chat(FakeEngine(generated), tool_flags=False, tools=[WEATHER]))
        assert (found[0], *found[2:]) == (PARIS[1], [], "stop")
    with patched(*TELLING):
        for flags in (False, True):
            found = of_chat(chat(FakeEngine(generated), tool_flags=flags, tools=[WEATHER]))
            assert found == (None, "hm", [PARIS], "tool_calls")

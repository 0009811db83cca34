"""The profile of a step: the dearest function first, a step's share of it and not the run's."""

from __future__ import annotations

import cProfile
import json
import time

from research.host_time import functions


def dear() -> None:
    time.sleep(0.002)


def cheap() -> str:
    return json.dumps([])


def test_functions_are_told_by_step_and_the_dearest_comes_first():
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10):
        dear()
        cheap()
        cheap()
    profile.disable()
    found = functions(profile, 10)
    assert "sleep" in found[0]["function"]
    assert found[0]["calls"] == 1
    assert 2000 <= found[0]["own_us"] < 20_000
    (dumps,) = [row for row in found if "dumps" in row["function"]]
    assert dumps["calls"] == 2

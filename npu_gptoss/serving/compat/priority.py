"""--scheduling-policy priority: requests of one arrival, and whom a lack of KV blocks preempts.

vLLM 0.11.0 orders waiting requests by (priority, arrival, Request). The samples of one request with `n` > 1 arrive at
one time, the heap compares two `Request`s, and the engine ends. Here an arrival is a float that never equals another:
equal ones are ordered as they came.

When blocks lack, `schedule()` preempts the running request of the worst (priority, arrival), even when it has been
given tokens in this very step. It forgets to take these back: the worker computes them into blocks that belong to
somebody else by then, and the count of computed tokens is wrong for good. Here the running requests are ordered before
a step, so that the worst is always one that the step has not come to.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import expect_source, repair, replace
from npu_gptoss.serving.compat.targets import SCHEDULER

_numbers = itertools.count()


class Arrival(float):
    """A time, and among equal times the order of coming."""

    def __new__(cls, time: float) -> Arrival:
        self = super().__new__(cls, time)
        self.number = next(_numbers)
        return self

    def _key(self) -> tuple[float, int]:
        return float(self), self.number

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Arrival) else float(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: float) -> bool:
        return self._key() < other._key() if isinstance(other, Arrival) else float(self) < other

    def __gt__(self, other: float) -> bool:
        return self._key() > other._key() if isinstance(other, Arrival) else float(self) > other

    def __le__(self, other: float) -> bool:
        return not self > other

    def __ge__(self, other: float) -> bool:
        return not self < other

    __hash__ = float.__hash__


@repair("priority-order", f"{SCHEDULER}:Scheduler.add_request .schedule", lines=("0.11",))
def install(module: ModuleType) -> None:
    """Under --scheduling-policy priority n > 1 ends the engine, and a preemption may take blocks away from a
    request that is computed in the same step."""
    scheduler, by_priority = module.Scheduler, module.SchedulingPolicy.PRIORITY
    expect_source(
        scheduler.schedule, "key=lambda r: (r.priority, r.arrival_time)", "self.running.remove(preempted_req)"
    )
    expect_source(scheduler.add_request, "self.waiting.add_request(request)")
    original_add, original_schedule = scheduler.add_request, scheduler.schedule

    def add_request(self: Any, request: Any) -> None:
        if self.policy == by_priority:
            request.arrival_time = Arrival(request.arrival_time)
        original_add(self, request)

    def schedule(self: Any) -> Any:
        if self.policy == by_priority:
            self.running.sort(key=lambda request: (request.priority, request.arrival_time))
        return original_schedule(self)

    replace(scheduler, "add_request", add_request)
    replace(scheduler, "schedule", schedule)

"""--scheduling-policy priority: requests of one arrival, and whom a lack of KV blocks preempts.

vLLM 0.11.0 orders waiting requests by (priority, arrival, Request). The samples of one request with `n` > 1 arrive at
one time, the heap compares two `Request`s, and the engine ends. Here no two arrivals are equal: those that were are a
float's last bit apart, in the order in which they came.

When blocks lack, `schedule()` preempts the running request of the worst (priority, arrival), even when it has been
given tokens in this very step. It forgets to take these back: the worker computes them into blocks that belong to
somebody else by then, and the count of computed tokens is wrong for good. Here the running requests are ordered before
a step, so that the worst is always one that the step has not come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_source, repair
from npu_gptoss.serving.compat.targets import SCHEDULER


@repair("priority-order", f"{SCHEDULER}:Scheduler.add_request .schedule", lines=("0.11",), until="0.23")
def install(module: ModuleType) -> None:
    """Under --scheduling-policy priority n > 1 ends the engine, and a preemption may take blocks away from a
    request that is computed in the same step."""
    scheduler, by_priority = module.Scheduler, module.SchedulingPolicy.PRIORITY
    expect_source(
        scheduler.schedule, "key=lambda r: (r.priority, r.arrival_time)", "self.running.remove(preempted_req)"
    )
    expect_source(scheduler.add_request, "self.waiting.add_request(request)")

    @around(scheduler, "add_request")
    def add_request(original: Callable[..., None], self: Any, request: Any) -> None:
        if self.policy == by_priority:
            arrivals = {other.arrival_time for other in self.requests.values()}
            while request.arrival_time in arrivals:
                request.arrival_time = math.nextafter(request.arrival_time, math.inf)
        original(self, request)

    @around(scheduler, "schedule")
    def schedule(original: Callable[..., Any], self: Any) -> Any:
        if self.policy == by_priority:
            self.running.sort(key=lambda request: (request.priority, request.arrival_time))
        return original(self)

"""--scheduling-policy priority: requests of one arrival time, and preemption within a step.

vLLM 0.11.0 orders waiting requests by (priority, arrival, Request). The samples of a request with `n` > 1 arrive at the
same time, so the heap compares two `Request`s, and the engine ends. Here equal arrival times are set apart by a float's
last bit, in the order of arrival.

When blocks run out, `schedule()` preempts the running request of the worst (priority, arrival), even if this step has
already given it tokens. vLLM does not take these tokens back: the worker computes them into blocks that now belong to
another request, and the count of computed tokens stays wrong. Here the running requests are sorted before a step, so
that the worst is always a request that the step has not reached.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import SCHEDULER


@repair("priority-order", f"{SCHEDULER}:Scheduler.add_request .schedule", until="0.23")
def install(module: ModuleType) -> None:
    """With --scheduling-policy priority, n > 1 ends the engine, and a preemption may free the blocks of a request that
    is computed in the same step."""
    scheduler, by_priority = module.Scheduler, module.SchedulingPolicy.PRIORITY
    expect_source(
        scheduler.schedule, "key=lambda r: (r.priority, r.arrival_time)", "self.running.remove(preempted_req)"
    )
    expect_source(scheduler.add_request, "self.waiting.add_request(request)")

    @around(scheduler, "add_request")
    def add_request(original: Original, self: Any, request: Any) -> None:
        if self.policy == by_priority:
            arrivals = {other.arrival_time for other in self.requests.values()}
            while request.arrival_time in arrivals:
                request.arrival_time = math.nextafter(request.arrival_time, math.inf)
        original(self, request)

    @around(scheduler, "schedule")
    def schedule(original: Original, self: Any) -> Any:
        if self.policy == by_priority:
            self.running.sort(key=lambda request: (request.priority, request.arrival_time))
        return original(self)

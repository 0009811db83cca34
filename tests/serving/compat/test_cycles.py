"""A finished request leaves memory at once, without Python's search for cycles."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tests.serving.compat.of_release import OLD

pytestmark = pytest.mark.skipif(not OLD, reason="the repair is for vLLM 0.11")


@pytest.mark.parametrize("repaired", [True, False])
def test_a_request_of_the_prefix_cache_is_freed_with_its_blocks(patched, repaired):
    request = Request("one", [1, 2], SamplingParams(), None, None, block_hasher=lambda request: [b"hash"])
    request.status = RequestStatus.FINISHED_STOPPED
    manager, known = types.SimpleNamespace(free=lambda request: None), weakref.ref(request)
    scheduler = types.SimpleNamespace(kv_cache_manager=manager, requests={"one": request})
    gc.disable()
    try:
        with patched(*["request-cycle"] * repaired):
            Scheduler._free_blocks(scheduler, request)
        del request
        assert (known() is None) is repaired
    finally:
        gc.enable()

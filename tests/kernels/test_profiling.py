from __future__ import annotations

import torch

from npu_gptoss.kernels.profiling import observing
from tests.kernels.toy import kernel, select


def test_a_profile_shows_kernel_name_and_shapes(operation):
    kernel("ours", function=lambda x, scale: x * scale)
    run = select(operation)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(x=torch.ones(3, 4), scale=2.0)
    assert "toy.add.ours x=[3, 4]" in {event.key for event in profile.key_averages()}


def test_no_range_is_opened_without_a_profiler(operation, monkeypatch):
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: 1 / 0)
    kernel("ours")
    assert select(operation)(x=7) == "ours"


def test_an_observer_sees_the_calls_inside_its_block_and_none_after_it(operation):
    kernel("ours")
    run, seen = select(operation), []
    with observing(lambda name, arguments: seen.append((name, dict(arguments)))):
        run(x=7)
    run(x=8)
    assert seen == [("toy.add.ours", {"x": 7})]

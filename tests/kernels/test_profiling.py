from __future__ import annotations

import torch

from npu_gptoss.kernels import ANY, accepts, register_kernel, select_kernel, signature
from npu_gptoss.kernels.profiling import observing


def test_a_profile_shows_kernel_name_and_shapes(operation):
    register_kernel(
        operation,
        solution="ours",
        signatures=(accepts(x="float32"),),
        traits={"size": ANY},
        priority=4,
    )(lambda x, scale: x * scale)
    run = select_kernel(operation, signature(x="float32"), {"size": 1, "rows": 1})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(x=torch.ones(3, 4), scale=2.0)
    assert "toy.add.ours x=[3, 4]" in {event.key for event in profile.key_averages()}


def test_no_range_is_opened_without_a_profiler(operation, monkeypatch):
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: 1 / 0)
    register_kernel(
        operation,
        solution="ours",
        signatures=(accepts(x="float32"),),
        traits={"size": ANY},
        priority=4,
    )(lambda x: x)
    assert select_kernel(operation, signature(x="float32"), {"size": 1, "rows": 1})(x=7) == 7


def test_an_observer_sees_the_calls_inside_its_block_and_none_after_it(operation):
    register_kernel(
        operation,
        solution="ours",
        signatures=(accepts(x="float32"),),
        traits={"size": ANY},
        priority=4,
    )(lambda x: x)
    run, seen = select_kernel(operation, signature(x="float32"), {"size": 1, "rows": 1}), []
    with observing(lambda name, arguments: seen.append((name, dict(arguments)))):
        run(x=7)
    run(x=8)
    assert seen == [("toy.add.ours", {"x": 7})]

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.bench import decode
from npu_gptoss.bench.decode import WARM_UP_STEPS, DecodeRun, SteadySteps, run_decode
from npu_gptoss.bench.roofline import H200
from npu_gptoss.bench.session import Running
from npu_gptoss.engine import SamplingParams
from npu_gptoss.errors import InputError


def requests(*generated: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(num_generated=n, token_ids=[0] * (10 + n)) for n in generated]


def watch(steps: int, monkeypatch: pytest.MonkeyPatch) -> SteadySteps:
    monkeypatch.setattr(decode, "distinct_experts", lambda engine: None)
    clock = iter(range(1000))
    monkeypatch.setattr(decode.time, "perf_counter", lambda: float(next(clock)))
    return SteadySteps(SimpleNamespace(), steps)


def test_steps_that_still_compute_a_prompt_do_not_count(monkeypatch):
    seen = watch(2, monkeypatch)
    for generated in ((0, 0), (1, 0), (2, 0), (3, 1)):  # the second request's prompt takes three steps more
        seen(requests(*generated))
    assert seen.ends == []
    seen(requests(4, 2))
    assert seen.ends == [4.0]


def test_a_preempted_request_starts_the_count_again(monkeypatch):
    seen = watch(2, monkeypatch)
    for generated in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 4)):
        seen(requests(*generated))
    assert seen.ends == [4.0]


def test_the_mean_is_over_the_steps_after_the_warm_up(monkeypatch):
    seen = watch(3, monkeypatch)
    ends = [1.0] * WARM_UP_STEPS + [10.0, 11.0, 13.0, 19.0]
    clock = iter([0.0, *ends])
    monkeypatch.setattr(decode.time, "perf_counter", lambda: next(clock))
    for n in range(1, len(ends) + 1):
        seen(requests(n, n))
    with pytest.raises(decode._Enough):
        seen(requests(n + 1, n + 1))
    run = seen.run()
    assert run.step_s == (1.0, 2.0, 6.0)
    assert run.mean_s == 3.0


def test_a_batch_is_measured_on_the_engine_and_leaves_nothing_behind(engine):
    run = run_decode(engine, batch=3, context=40, steps=5)
    assert len(run.step_s) == 5
    assert all(seconds > 0 for seconds in run.step_s)
    assert run.distinct is not None
    assert len(run.distinct) == engine.config.num_hidden_layers
    assert all(4 <= n <= 8 for n in run.distinct)
    # the middle step: prompts of 40, the tokens of the warm-up and of half the steps, and few that ran ahead
    assert all(40 + WARM_UP_STEPS <= keys <= 40 + WARM_UP_STEPS + 10 for keys in run.contexts)
    assert not engine.scheduler.running
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks


def test_counting_experts_does_not_change_the_tokens(engine):
    prompt, params = [[5, 6, 7] * 9], SamplingParams(max_tokens=8, ignore_eos=True)
    want = engine.generate(prompt, params)[0].token_ids
    seen = []
    got = engine.generate(prompt, params, on_step=lambda r: seen.append(decode.distinct_experts(engine)))
    assert got[0].token_ids == want
    assert seen[:-1] == [(4, 4)] * 7, "one token takes four experts in each of the two layers"
    assert seen[-1] is None, "nothing runs after the last step"


def test_distinct_experts_count_once_and_unwritten_slots_do_not():
    seen = decode.RoutingSeen()
    seen("moe.experts.any", {"topk_ids": torch.tensor([[0, 1], [1, 2], [-1, 9]])})
    seen("moe.route.any", {"topk_ids": torch.tensor([[5]])})
    seen("moe.experts.any", {"hidden": 1})
    assert seen.distinct(8) == (3,)


def test_the_record_holds_the_run_beside_its_floors(engine):
    args = SimpleNamespace(gpu_price=3.6)
    running = Running(args, engine, torch.device("cpu"), "bf16", ceilings=[H200, H200])
    record = decode.record(running, DecodeRun((0.001, 0.003), (41, 42), (5, 6)), 2, 40)
    assert record["tpot_ms"] == record["tpot_median_ms"] == 2.0
    assert (record["tpot_p10_ms"], record["tpot_p90_ms"]) == pytest.approx((1.2, 2.8)), "linear between the ranks"
    assert record["mean_keys"] == 41.5
    assert record["distinct_experts"] == 5.5
    assert record["distinct_source"] == "counted"
    assert record["tokens_per_s"] == 1000.0
    assert record["dollars_per_million_tokens"] == pytest.approx(1.0)
    assert record["floor_ms"] == record["floor_measured_ms"]
    assert record["TBps"] == pytest.approx(record["bytes"] / 2e-3 / 1e12, rel=1e-4)
    unseen = decode.record(replace(running, ceilings=[H200]), DecodeRun((0.001,), (40, 40), None), 2, 40)
    assert unseen["distinct_source"] == "uniform"
    assert unseen["floor_ms"] == unseen["floor_uniform_ms"]
    assert "floor_measured_ms" not in unseen


@pytest.mark.parametrize(
    ("batch", "context", "message"),
    [
        (4, 400, "4 requests of .* need .* blocks of 16, the cache has 60"),
        (5, 10, "the engine runs 4 requests at once, got a batch of 5"),
    ],
)
def test_batch_that_the_engine_would_split_is_refused(engine, batch, context, message):
    with pytest.raises(InputError, match=message):
        run_decode(engine, batch=batch, context=context, steps=2)


def test_a_profile_counts_each_layers_work_once_a_step(engine):
    """On a CPU, torch's operators stand in for the device's kernels."""
    found = {each["name"]: each["calls"] for each in decode.profile_decode(engine, batch=2, context=20, steps=3)}
    assert engine.config.num_hidden_layers in [calls for name, calls in found.items() if "attention.paged" in name]

"""A request that fails in the engine core ends alone: its neighbours keep their tokens, its blocks are freed.

The engine is in `in_process.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import SchedulingPolicy
from vllm.v1.engine import EngineCoreRequestType, core

from npu_gptoss.serving.compat.engine import failed_requests as barrier
from tests.serving.compat.in_process import HONEST, LENGTH, VOCABULARY, core_of, greedy, run, sent
from tests.serving.compat.of_release import OLD

only_0_11 = pytest.mark.skipif(not OLD, reason="the repair is for vLLM 0.11")

BARRIER = ("request-input", "request-steps", "request-outputs")


def test_stop_tokens_outside_of_the_vocabulary_do_not_end_the_engine(engine, patched):
    wild = greedy(min_tokens=3, stop_token_ids=[VOCABULARY, 999999999, -1, 5])
    with patched(*BARRIER):
        tame = greedy(min_tokens=3, stop_token_ids=[5])
        expected = run(engine, (HONEST, greedy()), (HONEST, tame))
        assert run(engine, (HONEST, greedy()), (HONEST, wild)) == expected


WILD = {
    "prompt": ([3, -VOCABULARY - 1], {}),
    "prompt beyond": ([3, VOCABULARY], {}),
    "no prompt": ([], {}),
    "prompt without room": ([3] * LENGTH, {}),
    "logit_bias": (HONEST, {"logit_bias": {VOCABULARY: 1.0}}),
    "allowed_token_ids": (HONEST, {"allowed_token_ids": [3, VOCABULARY]}),
    **({"bad_words": (HONEST, {"_bad_words_token_ids": [[VOCABULARY]]})} if OLD else {}),  # 0.23 drops it
    "bad_words of nothing": (HONEST, {"_bad_words_token_ids": [[]]}),
    **({} if OLD else {"logprob_token_ids": (HONEST, {"logprob_token_ids": [3, VOCABULARY]})}),
    "logprobs": (HONEST, {"logprobs": VOCABULARY + 1}),
    "prompt_logprobs": (HONEST, {"prompt_logprobs": VOCABULARY + 1}),
    "seed": (HONEST, {"seed": 2**64, "temperature": 1.0}),
}


@pytest.mark.parametrize("name", WILD)
def test_invalid_field_ends_only_its_own_request(engine, patched, name):
    prompt, fields = WILD[name]
    sampling = greedy(**{key: value for key, value in fields.items() if not key.startswith("_")})
    for key in fields:
        if key.startswith("_"):
            setattr(sampling, key, fields[key])
    together = (HONEST, greedy()), (prompt, sampling), (HONEST[::-1], greedy())
    with patched():
        alone = run(engine, together[0], together[2])
    with patched(*BARRIER):
        first, reason, last = run(engine, *together)
    assert [first, last] == alone
    assert reason.startswith(barrier.REFUSED)
    assert name.partition(" ")[0] in reason or "prompt" in name


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(engine, patched, field, value):
    with patched(*BARRIER):
        assert field in run(engine, (HONEST, greedy(**{"temperature": 1.0, field: value})))[0]


def test_request_that_fails_as_it_is_queued_leaves_the_queue(engine, patched, monkeypatch):
    the_core = core_of(engine)
    scheduler, queued = the_core.scheduler, the_core.scheduler.add_request

    def add_request(request: Any) -> None:
        queued(request)
        raise RuntimeError("no room")

    with patched(*BARRIER):
        monkeypatch.setattr(scheduler, "add_request", add_request)
        the_core.add_request(*the_core.preprocess_add_request(sent(engine, "x", HONEST)))
        (ended,) = vars(the_core).pop(barrier._UNTOLD)
    assert ended.stop_reason == f"{barrier.REFUSED}RuntimeError: no room"
    assert (len(scheduler.waiting), scheduler.requests) == (0, {})


def test_grammar_that_does_not_compile_ends_only_its_own_request(engine, patched, monkeypatch):
    def compile_grammar(*_: Any) -> None:
        raise RuntimeError("no grammar")

    manager = core_of(engine).structured_output_manager
    monkeypatch.setattr(manager, "executor", ThreadPoolExecutor(1), raising=False)
    monkeypatch.setattr(manager, "backend", SimpleNamespace(compile_grammar=compile_grammar))
    bad = greedy(structured_outputs=StructuredOutputsParams(regex="a"))
    together = (HONEST, greedy()), (HONEST, bad), (HONEST[::-1], greedy())
    with patched():
        alone = run(engine, together[0], together[2])
    with patched(*BARRIER, "grammar-errors"):
        first, reason, last = run(engine, *together)
    assert [first, last] == alone
    assert reason == f"{barrier.REFUSED}its grammar does not compile: RuntimeError: no grammar"


@pytest.mark.skipif(not OLD, reason="vLLM 0.23's runner computes them once")
def test_preempted_prompt_log_probabilities_do_not_end_the_engine(engine, patched):
    """The requests grow until one is preempted and computed again, in chunks that end between prompt and tokens."""
    many = [([3 + i] * 190, greedy(max_tokens=60, prompt_logprobs=1)) for i in range(3)]
    scheduler = core_of(engine).scheduler

    def served() -> list[Any]:
        scheduler.max_num_scheduled_tokens = 49  # four chunks, some with two decodes: 192 to 196 tokens
        try:
            return run(engine, *many)
        finally:
            scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens

    with patched(*BARRIER, "prompt-logprobs"):
        alone = [run(engine, one)[0] for one in many]
        assert served() == alone


def with_priorities(engine: LLM, work: Callable[[], Any]) -> Any:
    scheduler = core_of(engine).scheduler
    before = scheduler.policy, scheduler.waiting
    scheduler.policy, scheduler.waiting = SchedulingPolicy.PRIORITY, create_request_queue(SchedulingPolicy.PRIORITY)
    try:
        return work()
    finally:
        scheduler.policy, scheduler.waiting = before


@only_0_11
def test_samples_of_one_request_are_ordered_with_priorities(engine, patched):
    samples = (HONEST, greedy(n=4, temperature=1.0, seed=1))
    with patched("priority-order"):
        assert list(map(len, with_priorities(engine, lambda: run(engine, samples))[0])) == [8, 8, 8, 8]


@only_0_11
def test_preemption_takes_no_blocks_from_a_request_in_the_same_step(engine, patched, monkeypatch):
    """Low priorities run first, so a step schedules them before it lacks blocks for the others."""
    many = [([3 + i] * (60 + 7 * i), greedy(max_tokens=100)) for i in range(6)]
    llm = engine.llm_engine

    scheduler = core_of(engine).scheduler
    after_schedule = scheduler._update_after_schedule
    robbed = []

    def look(output: Any) -> None:
        """Records the requests that this step computes after it has taken their blocks away."""
        robbed.extend(name for name in output.num_scheduled_tokens if scheduler.requests[name] not in scheduler.running)
        after_schedule(output)

    monkeypatch.setattr(scheduler, "_update_after_schedule", look)

    def served() -> tuple[bool, list[Any]]:
        tokens: dict[str, list[int]] = {}
        for number, (prompt, sampling) in enumerate(many):
            llm.add_request(str(number), {"prompt_token_ids": prompt}, sampling, priority=int(number < 2))
            if number < 2:
                llm.step()
        while llm.has_unfinished_requests():
            tokens |= {o.request_id: list(o.outputs[0].token_ids) for o in llm.step() if o.finished}
        return bool(robbed), [tokens[str(number)] for number in range(len(many))]

    with patched("priority-order"):
        alone = [run(engine, one)[0] for one in many]
        assert with_priorities(engine, served) == (False, alone)


@only_0_11
def test_equal_priorities_keep_the_order_of_arrival(patched):
    def arrived(*times: float) -> list[float]:
        scheduler = SimpleNamespace(policy=SchedulingPolicy.PRIORITY, requests={})
        scheduler.waiting = SimpleNamespace(add_request=lambda request: None)
        scheduler.log_stats = False
        for number, time in enumerate(times):
            scheduler_module.Scheduler.add_request(
                scheduler, SimpleNamespace(request_id=str(number), arrival_time=time)
            )
        return [request.arrival_time for request in scheduler.requests.values()]

    with patched("priority-order"):
        first, later, second, third = arrived(1.0, 2.0, 1.0, 1.0)
    assert 1.0 == first < second < third < 1.001 < later == 2.0


def test_second_request_of_one_id_is_refused_and_the_first_goes_on(engine, patched):
    """Clients of two API servers may send the same X-Request-Id; the engine core keeps requests by it."""
    the_core = core_of(engine)
    llm = engine.llm_engine
    with patched(*BARRIER):
        (alone,) = run(engine, (HONEST, greedy()))
        llm.add_request("0", {"prompt_token_ids": HONEST}, greedy())
        (name,) = the_core.scheduler.requests
        the_core.add_request(*the_core.preprocess_add_request(sent(engine, name, HONEST)))
        (refused,) = vars(the_core).pop(barrier._UNTOLD)
        assert refused.request_id == name
        assert f"'{name}'" in refused.stop_reason
        tokens = []
        while llm.has_unfinished_requests():
            tokens = [list(output.outputs[0].token_ids) for output in llm.step()]
    assert tokens == [alone]


def test_request_that_failed_early_is_refused_when_it_is_added(engine, patched):
    the_core = core_of(engine)
    with patched(*BARRIER):
        request, wave = the_core.preprocess_add_request(sent(engine, "x", HONEST))
        failures = barrier.failures_of(the_core.structured_output_manager)
        barrier.report(failures, request, "the first reason")
        barrier.report(failures, request, "the second reason")
        barrier.end_reported(the_core)
        the_core.add_request(request, wave)
        assert [output.stop_reason for output in vars(the_core).pop(barrier._UNTOLD)] == ["the first reason"]


def test_request_of_a_used_id_is_not_ended_for_the_one_before_it(engine, patched):
    """Its client left before the error was known."""
    the_core = core_of(engine)
    with patched(*BARRIER):
        gone, _ = the_core.preprocess_add_request(sent(engine, "x", HONEST))
        the_core.add_request(*the_core.preprocess_add_request(sent(engine, "x", HONEST)))
        barrier.report(barrier.failures_of(the_core.structured_output_manager), gone, "its own reason")
        barrier.end_reported(the_core)
        assert "x" in the_core.scheduler.requests
        the_core.abort_requests(["x"])


@pytest.mark.skipif(OLD, reason="vLLM 0.11 has no requests whose input comes in parts")
def test_later_part_of_an_input_is_no_second_request(engine, patched):
    the_core = core_of(engine)
    with patched(*BARRIER):
        parts = [sent(engine, "x", HONEST, resumable=resumable) for resumable in (True, True, False)]
        for part in parts:
            the_core.add_request(*the_core.preprocess_add_request(part))
        assert barrier._UNTOLD not in vars(the_core)
        assert len(the_core.scheduler.requests["x"].streaming_queue) == 2
        the_core.abort_requests(["x"])


@pytest.fixture
def sleeper(engine, monkeypatch):
    """The core of an engine that was started to sleep; the CPU's worker ignores it."""
    monkeypatch.setattr(core_of(engine).vllm_config.model_config, "enable_sleep_mode", True)
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    return core_of(engine)


@only_0_11
def test_requests_of_a_sleeping_engine_end_it(engine, patched, sleeper):
    """Stock vLLM 0.11 computes the next step with memory that is not there."""
    with patched(*BARRIER, "engine-sleep"):
        (alone,) = run(engine, (HONEST, greedy()))
        llm = engine.llm_engine
        llm.add_request("running", {"prompt_token_ids": HONEST}, greedy())
        llm.step()
        sleeper.sleep(1)
        (ended,) = [output for output in llm.step() if output.finished]
        assert ended.outputs[0].stop_reason.startswith(barrier.PAUSED)
        assert not llm.has_unfinished_requests()
        (refused,) = run(engine, (HONEST, greedy()))
        assert refused.startswith(barrier.PAUSED)
        assert "/wake_up" in refused
        sleeper.wake_up()
        assert run(engine, (HONEST, greedy())) == [alone]


@pytest.mark.parametrize("level", [0, 2, 3])
def test_an_engine_that_cannot_get_its_weights_back_sleeps(engine, patched, sleeper, monkeypatch, level):
    asked: list[int] = []
    monkeypatch.setattr(sleeper.model_executor, "sleep", asked.append)
    if not OLD:
        monkeypatch.setattr(core.EngineCore, "pause_scheduler", lambda *_, **__: None)
    with patched("engine-sleep"):
        # level 0 only pauses
        with pytest.raises(ValueError, match="level") if level or OLD else nullcontext():
            sleeper.sleep(level)
        sleeper.vllm_config.model_config.enable_sleep_mode = False
        with pytest.raises(ValueError, match="--enable-sleep-mode"):
            sleeper.sleep(1)
    assert asked == []


@pytest.mark.skipif(OLD, reason="vLLM 0.11 cannot pause")
@pytest.mark.parametrize("tags", [["weights"], ["scheduling"], ["other"]])
def test_an_engine_that_is_half_awake_computes_a_step(engine, patched, sleeper, monkeypatch, tags):
    monkeypatch.setattr(sleeper.model_executor, "collective_rpc", lambda *_, **__: None)
    with patched("engine-sleep", "wake-up"):
        sleeper.sleep(1)
        sleeper.wake_up(tags)
        assert sleeper.is_scheduler_paused()
        sleeper.wake_up()
        assert not sleeper.is_scheduler_paused()


def process_of(engine: LLM) -> Any:
    """The engine core as in a separate process."""
    process = object.__new__(core.EngineCoreProc)
    process.__dict__ |= {**vars(core_of(engine)), "input_queue": queue.Queue(), "output_queue": queue.Queue()}
    if not OLD:
        process.tensor_ipc_receiver = process.frontend_stats_publish_address = None
        process.shutdown_state = core.EngineShutdownState.RUNNING
    return process


def test_end_of_a_request_reaches_its_own_server_which_counts_it(engine):
    """A server of several engines counts the requests of each, to share them out."""
    process = process_of(engine)
    barrier.tell(process, barrier.Refused("x", 3, "its reason"))
    server, outputs = process.output_queue.get_nowait()
    assert (server, outputs.finished_requests) == (3, {"x"})
    assert [(output.request_id, output.stop_reason) for output in outputs.outputs] == [("x", "its reason")]


def ask_the_input_thread(engine: LLM, address: str, messages: list[list[bytes]], answers: int) -> list[Any]:
    """Returns up to `answers` messages from vLLM's input thread, waiting at most two seconds for each."""
    process = process_of(engine)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        router.setsockopt(zmq.RCVTIMEO, 20_000)
        thread = threading.Thread(
            target=process.process_input_sockets, args=([address], None, b"core", threading.Event()), daemon=True
        )
        thread.start()
        router.recv_multipart()  # it has connected
        for message in messages:
            router.send_multipart([b"core", *message])
        handed = []
        for _ in range(answers):
            try:
                handed.append(process.input_queue.get(timeout=2))
            except queue.Empty:
                break
        router.setsockopt(zmq.LINGER, 0)
    return handed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_input_thread_ends_the_engine_instead_of_hanging(engine, patched, tmp_path: Path):
    nonsense = [[EngineCoreRequestType.ADD.value, b"\xc1"]]
    with patched(*BARRIER):
        ((kind, _),) = ask_the_input_thread(engine, f"ipc://{tmp_path}/ours", nonsense, 1)
        assert kind == EngineCoreRequestType.EXECUTOR_FAILED

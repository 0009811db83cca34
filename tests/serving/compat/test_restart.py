"""Requests in flight go on in another engine. Real engines are killed in tests/serving/test_outliving.py."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import LogprobsLists

from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.server import restart
from npu_gptoss.serving.compat.server.restart import Outliving, Sent, check, objection

FOR_EVER = 10**9
LONG = {"max_tokens": 24, "ignore_eos": True}
GREEDY = LONG | {"temperature": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy, least tokens": {"max_tokens": 40, "temperature": 0.0, "min_tokens": 18},
    "greedy, log-probabilities": GREEDY | {"logprobs": 1},
    "greedy, penalties": GREEDY | {"presence_penalty": 0.5},
    "seeded": LONG | {"temperature": 1.0, "seed": 5},
    "seeded, log-probabilities": LONG | {"temperature": 1.0, "seed": 5, "logprobs": 1},
    "structured": GREEDY | {"structured_outputs": StructuredOutputsParams(regex="a*")},
}


class Engine:
    """A client of an engine that dies after `lives` outputs. The next token depends on all that a real one's does: the
    tokens, and of this engine's own request the draws of its generator, the penalties' counts, the grammar's state."""

    def __init__(self, lives: int, bite: int = 1, turned: int = 0) -> None:
        self.lives, self.bite, self.turned = lives, bite, turned
        self.resources = SimpleNamespace(engine_manager=None, engine_dead=False)
        self.got: list[Any] = []
        self.running: dict[str, tuple[Any, list[int], random.Random]] = {}
        self.arrived = asyncio.Event()
        self.utility_results: dict[int, Any] = {}

    async def add_request_async(self, request: Any) -> None:
        if not self.lives:
            raise EngineDeadError
        self.got.append(request)
        assert request.request_id not in self.running
        self.running[request.request_id] = (request, [], random.Random(request.sampling_params.seed))
        self.arrived.set()

    async def abort_requests_async(self, names: Sequence[str]) -> None:
        for name in names:
            del self.running[name]

    async def get_output_async(self) -> EngineCoreOutputs:
        while self.lives and not self.running:
            self.arrived.clear()
            await self.arrived.wait()
        if not self.lives:
            raise EngineDeadError
        self.lives -= 1
        return EngineCoreOutputs(outputs=[self._output(*each) for each in list(self.running.values())], timestamp=1.0)

    def _output(self, request: Any, out: list[int], generator: random.Random) -> EngineCoreOutput:
        params, new, reason = request.sampling_params, [], None
        while len(new) < self.bite and reason is None:
            state: tuple[Any, ...] = (*request.prompt_token_ids, *out)
            state += (generator.random(),) if params.temperature else ()
            state += (len(set(out)),) if params.presence_penalty else ()
            state += (len(out) % 3,) if params.structured_outputs else ()
            token = hash(state) % 1000 + self.turned
            if not params.ignore_eos:
                ends = len(out) >= params.min_tokens and token % 4 == 0
                reason = FinishReason.STOP if ends else None
            out.append(token)
            new.append(token)
            if len(out) >= params.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[request.request_id]
        values = np.array([[float(token)] for token in new])
        rest = [None] * (len(LogprobsLists._fields) - 3)
        logprobs = LogprobsLists(values, values, values[:, 0], *rest) if params.logprobs is not None else None
        return EngineCoreOutput(request.request_id, new, new_logprobs=logprobs, finish_reason=reason)

    def shutdown(self) -> None:
        self.resources.engine_dead = True


def asked(name: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> EngineCoreRequest:
    required = EngineCoreRequest.__struct_fields__[: -len(EngineCoreRequest.__struct_defaults__)]
    values = dict.fromkeys(required) | {"request_id": name, "prompt_token_ids": list(prompt), "arrival_time": 0.0}
    return EngineCoreRequest(**values | {"sampling_params": SamplingParams(**fields)})


def over(*engines: Engine, tries: int = 99) -> Outliving:
    """The client over engines of which each follows the one before when it dies."""
    coming = iter(engines)
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    return Outliving(lambda _: next(coming), config, tries)


async def collected(client: Outliving, *requests: Any) -> dict[str, tuple[list[int], list[float], Any]]:
    """What AsyncLLM gets for each request: tokens, log-probabilities, the finish reason."""
    for request in requests:
        await client.add_request_async(request)
    found: dict[str, tuple[list[int], list[float], Any]] = {each.request_id: ([], [], None) for each in requests}
    while any(reason is None for *_, reason in found.values()):
        for output in (await asyncio.wait_for(client.get_output_async(), 30)).outputs:
            tokens, logprobs, reason = found[output.request_id]
            assert reason is None, "an output after the last"
            if output.new_logprobs is not None:
                logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            found[output.request_id] = tokens + output.new_token_ids, logprobs, output.finish_reason
    return found


def pair(fields: dict[str, Any]) -> list[Any]:
    """Two samples of one prompt, as vLLM sends those of `n`."""
    seeds = [{"seed": fields["seed"] + number} if "seed" in fields else {} for number in range(2)]
    return [asked(f"{number}_cmpl", **fields | seed) for number, seed in enumerate(seeds)]


def both(fields: dict[str, Any], lives: Sequence[int], bite: int = 1) -> tuple[Any, Any]:
    """The outputs of an undisturbed run, and of one over engines that die after `lives` outputs."""
    fine = asyncio.run(collected(over(Engine(FOR_EVER, bite)), *pair(fields)))
    engines = [Engine(life, bite) for life in (*lives, FOR_EVER)]
    return fine, asyncio.run(collected(over(*engines), *pair(fields)))


@pytest.mark.parametrize("bite", [1, 3])
@pytest.mark.parametrize("lives", [[0], [1], [2], [5, 3], [7, 0, 2, 9], [18], [1] * 8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_lost_doubled_or_other_after_a_death(kind: str, lives: list[int], bite: int) -> None:
    fine, disturbed = both(KINDS[kind], lives, bite)
    assert disturbed == fine


def forgets_max_tokens(self: Sent, replay: bool, again: Any = Sent.again) -> Any:
    request = again(self, replay)
    request.sampling_params = self.request.sampling_params
    return request


def loses_one(self: Sent, replay: bool, again: Any = Sent.again) -> Any:
    if self.tokens:
        self.tokens.append(hash((*self.request.prompt_token_ids, *self.tokens)) % 1000)
    return again(self, replay)


def doubles_one(self: Sent, replay: bool, again: Any = Sent.again) -> Any:
    del self.tokens[-1:]
    return again(self, replay)


def never_replays(self: Sent, replay: bool, again: Any = Sent.again) -> Any:
    return again(self, False)


MISTAKES = (forgets_max_tokens, loses_one, doubles_one)
WRONG = [(wrong, "greedy", lives) for wrong in MISTAKES for lives in ([1], [5, 3], [18])]
WRONG += [(never_replays, kind, [5]) for kind in ("greedy, penalties", "seeded", "structured")]


@pytest.mark.parametrize(("wrong", "kind", "lives"), WRONG)
def test_wrong_resumption_passes_for_a_right_one(monkeypatch, wrong: Any, kind: str, lives: list[int]) -> None:
    monkeypatch.setattr(Sent, "again", wrong)
    fine, disturbed = both(KINDS[kind], lives)
    assert disturbed != fine


def test_unseeded_sample_is_replayed_or_gets_too_many_tokens() -> None:
    first, second = Engine(5), Engine(FOR_EVER)
    found = asyncio.run(collected(over(first, second), asked("a", **LONG, temperature=1.0)))
    (request,) = second.got
    assert len(found["a"][0]) == LONG["max_tokens"]
    assert request.prompt_token_ids == [1, 2, 3, *found["a"][0][:5]]
    assert (request.sampling_params.seed, request.sampling_params.max_tokens) == (None, 19)


def test_samples_without_a_seed_share_one_or_are_not_repeated() -> None:
    shared = SamplingParams(**LONG, temperature=1.0, presence_penalty=0.5)
    requests = [asked("0_a"), asked("1_a")]
    for request in requests:
        request.sampling_params = shared
    first, second = Engine(5), Engine(FOR_EVER)
    asyncio.run(collected(over(first, second), *requests))
    seeds = [request.sampling_params.seed for request in (*first.got, *second.got)]
    assert seeds[:2] == seeds[2:]
    assert len(set(seeds)) == 2
    assert shared.seed is None


def test_replay_that_rounding_turned_ends_a_free_answer() -> None:
    first, other = Engine(5), Engine(FOR_EVER, turned=1)
    found = asyncio.run(collected(over(first, other), asked("a", **KINDS["seeded"])))
    tokens, _, reason = found["a"]
    assert (len(tokens), reason) == (24, FinishReason.LENGTH)
    replayed, goes_on = other.got
    assert replayed.prompt_token_ids == [1, 2, 3]
    assert goes_on.prompt_token_ids == [1, 2, 3, *tokens[:5]]


def test_turned_replay_under_a_grammar_writes_on_without_its_state() -> None:
    found = asyncio.run(collected(over(Engine(5), Engine(FOR_EVER, turned=1)), asked("a", **KINDS["structured"])))
    tokens, _, reason = found["a"]
    assert len(tokens) == 5
    assert str(reason) in ("error", "abort")


def test_request_that_left_while_no_engine_ran_is_sent_again() -> None:
    second = Engine(FOR_EVER)

    async def leaves() -> None:
        client = over(Engine(3), second)
        await client.add_request_async(asked("stays", **GREEDY))
        await client.add_request_async(asked("leaves", **GREEDY))
        for _ in range(3):
            await client.get_output_async()
        restarting = asyncio.ensure_future(client.get_output_async())
        await asyncio.sleep(0)
        assert client.down
        await client.abort_requests_async(["leaves"])
        await client.add_request_async(asked("comes", **GREEDY))
        await restarting

    asyncio.run(leaves())
    assert [request.request_id.partition("-")[0] for request in second.got] == ["stays", "comes"]


def test_crash_loop_goes_on_for_ever_or_hides_its_cause() -> None:
    client = over(*(Engine(2) for _ in range(9)), tries=3)
    with pytest.raises(EngineDeadError):
        asyncio.run(collected(client, asked("a", **GREEDY)))
    assert client.resources.engine_dead
    assert "3 restarts" in restart.cause_of_death(client)
    with pytest.raises(EngineDeadError):
        asyncio.run(client.add_request_async(asked("b", **GREEDY)))


def test_start_that_fails_is_no_try() -> None:
    engines = [Engine(2)]

    def make(_: Any) -> Engine:
        if not engines:
            raise RuntimeError("no memory")
        return engines.pop()

    client = Outliving(make, SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)), 3)
    with pytest.raises(EngineDeadError):
        asyncio.run(collected(client, asked("a", **GREEDY)))
    assert "no memory" in client.gave_up


def test_server_that_ends_waits_for_the_engine_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data parallel start makes its coordinator first: the engines came after the signal, and loaded for minutes."""
    starts, killed, children = threading.Event(), threading.Event(), []
    monkeypatch.setattr(restart.multiprocessing, "active_children", lambda: list(children))
    none = 2**30  # no process has this number
    engines = [Engine(2)]

    def make(_: Any) -> Engine:
        if engines:
            return engines.pop()
        starts.set()
        time.sleep(0.3)  # the signal comes
        children.append(SimpleNamespace(name="EngineCore_DP0", pid=none, kill=killed.set, join=lambda limit: None))
        assert killed.wait(5), "the start went on"
        raise RuntimeError("Engine core initialization failed")

    async def ends() -> None:
        client = Outliving(make, SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)), 3)
        asking = asyncio.ensure_future(collected(client, asked("a", **GREEDY)))
        await asyncio.to_thread(starts.wait, 5)
        client.shutdown()
        with pytest.raises(EngineDeadError):
            await asking

    asyncio.run(ends())
    assert killed.is_set()


def test_weights_of_an_update_are_replaced_by_the_checkpoints() -> None:
    async def updated() -> None:
        engine = Engine(2)

        async def collective_rpc_async(method: str) -> None: ...

        engine.collective_rpc_async = collective_rpc_async
        client = over(engine, Engine(FOR_EVER))
        await client.collective_rpc_async("reload_weights")
        with pytest.raises(EngineDeadError):
            await collected(client, asked("a", **GREEDY))
        assert "reload_weights" in client.gave_up

    asyncio.run(updated())


def test_call_of_a_dead_engine_waits_for_ever() -> None:
    async def called() -> None:
        engine = Engine(2)
        engine.utility_results[1] = future = asyncio.get_running_loop().create_future()
        await collected(over(engine, Engine(FOR_EVER)), asked("a", **GREEDY))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(future, 1)

    asyncio.run(called())


@pytest.mark.parametrize(("waits", "limit", "comes"), [(True, "5", True), (True, "0.05", False), (False, "5", False)])
def test_new_request_waits_beyond_its_limit(monkeypatch, waits: bool, limit: str, comes: bool) -> None:
    monkeypatch.setenv("NPU_GPTOSS_RESTART_WAIT_SECONDS", limit)

    async def waited() -> None:
        client = over(Engine(FOR_EVER))
        await check(client, waits=waits)
        client.down = "the engine died (its process was ended by SIGKILL) and is being started anew, restart 1 of 3"
        client.up.clear()

        def back() -> None:
            client.down = ""
            client.up.set()

        asyncio.get_running_loop().call_later(0.3, back)
        if comes:
            await check(client, waits=waits)
            return
        with pytest.raises(Refusal, match="SIGKILL") as refused:
            await check(client, waits=waits)
        assert (refused.value.status, refused.value.retry_after) == (HTTPStatus.SERVICE_UNAVAILABLE, 1)

    asyncio.run(waited())


def test_engines_of_other_servers_are_started_anew() -> None:
    parallel = SimpleNamespace(data_parallel_size=2, data_parallel_size_local=2, data_parallel_backend="mp")
    config = SimpleNamespace(parallel_config=parallel)
    assert not objection(config, None)
    assert objection(config, {"input_address": "ipc://a"})
    for name, value in {"data_parallel_size_local": 1, "data_parallel_backend": "ray"}.items():
        other = copy.deepcopy(config)
        setattr(other.parallel_config, name, value)
        assert objection(other, None)

"""In the API server: the error of one request reaches its own client, with a message, and no other client."""

from __future__ import annotations

import asyncio
import types
from typing import Any
from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, async_llm
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.engine.failed_requests import FAILED, PAUSED, REFUSED
from npu_gptoss.serving.compat.server.failed_requests import RequestFailed, RequestRefused
from npu_gptoss.serving.compat.server.shutdown import is_final
from tests.serving.compat.of_release import LINE, OLD


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"detokenize": False, "output_kind": RequestOutputKind.DELTA} | fields)


def request(name: str, params: SamplingParams, prompt: Any = (1, 2)) -> EngineCoreRequest:
    told = {"request_id": name, "prompt_token_ids": list(prompt), "sampling_params": params, "arrival_time": 0.0}
    told |= {"eos_token_id": None} if OLD else {"external_req_id": f"client's {name}"}
    none = dict.fromkeys(EngineCoreRequest.__struct_fields__[:10])
    return EngineCoreRequest(**none | told)


def queue(name: str) -> RequestOutputCollector:
    return RequestOutputCollector(RequestOutputKind.DELTA, *(() if OLD else (name,)))


def parent_of(params: SamplingParams) -> ParentRequest:
    return ParentRequest("p", params) if OLD else ParentRequest(request("p", params))


class Table:
    """An output processor with a queue for each request."""

    def __init__(self, *names: str, queues: bool = True) -> None:
        self.processor = OutputProcessor(tokenizer=None, log_stats=False)
        self.queues: dict[str, Any] = {}
        for name in names:
            self.queues[name] = queue(name) if queues else None
            self.processor.add_request(request(name, sampling()), None, queue=self.queues[name])

    def got(self, name: str) -> Any:
        """Returns the token ids in a request's queue, or its exception."""
        try:
            output = self.queues[name].get_nowait()
        except Exception as error:
            return error
        return None if output is None else list(output.outputs[0].token_ids)


def step(*names: str, **fields: Any) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(name, [7], **fields) for name in names]


def ended(name: str, reason: str | None) -> EngineCoreOutput:
    return EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT, stop_reason=reason)


def spoil(table: Table, name: str) -> None:
    table.processor.request_states[name].detokenizer.update = Mock(side_effect=KeyError("no such token"))


@pytest.mark.parametrize(("kind", "error"), [(REFUSED, RequestRefused), (FAILED, RequestFailed)])
def test_error_from_the_core_reaches_only_its_own_client(patched, kind, error):
    with patched("request-outputs"):
        table = Table("a", "b")
        done = table.processor.process_outputs([*step("b"), ended("a", kind + "a reason")])
        assert table.got("b") == [7]
        got = table.got("a")
        assert type(got) is error
        assert str(got) == kind + "a reason"
        assert done.reqs_to_abort == [], "the core has ended it already"
        assert list(table.processor.request_states) == ["b"]


@pytest.mark.parametrize("reason", [None, f"{PAUSED}: POST /wake_up first."])
def test_an_answer_that_sleep_cut_is_taken_for_a_whole_one(patched, reason):
    """Completions of vLLM 0.23 were answered with 200 and the text so far, those of 0.11 as the client's mistake."""
    with patched("request-outputs"):
        table = Table("a", "b")
        table.processor.process_outputs([*step("b"), ended("a", reason), ended("left", reason)])
        assert is_final(table.got("a"))
        assert table.got("b") == [7]


def test_error_in_one_detokenizer_leaves_the_others_their_tokens(patched):
    with patched("request-outputs"):
        table = Table("a", "b", "c")
        spoil(table, "b")
        done = table.processor.process_outputs(step("a", "b", "c"))
        assert [table.got("a"), table.got("c")] == [[7], [7]]
        assert isinstance(table.got("b"), RequestFailed)
        assert done.reqs_to_abort == ["b"], "else the core goes on with it"


def test_failed_sample_ends_the_other_samples_of_its_request(patched):
    with patched("request-outputs"):
        table = Table("alone")
        params = sampling(n=3)
        parent = parent_of(params)
        table.queues["p"] = queue("p")
        for index in range(3):
            name, child = parent.get_child_info(index)
            table.processor.add_request(request(name, child), None, parent, index, table.queues["p"])
        spoil(table, "1_p")
        done = table.processor.process_outputs(step("0_p", "1_p", "2_p", "alone"))
        assert isinstance(table.got("p"), RequestFailed)
        assert table.got("alone") == [7]
        assert set(done.reqs_to_abort) == {"0_p", "1_p", "2_p"}
        assert list(table.processor.request_states) == ["alone"]
        assert table.processor.parent_requests == {}
        assert OLD or list(table.processor.external_req_ids) == ["client's alone"]


def test_offline_engine_gets_the_error_of_one_request(patched):
    with patched("request-outputs"):
        table = Table("a", "b", queues=False)
        table.processor.process_outputs(step("a"))
        done = table.processor.process_outputs(
            [ended("a", FAILED + "a reason"), *step("b", finish_reason=FinishReason.STOP)]
        )
        told = {output.request_id.removeprefix("client's "): output.outputs[0] for output in done.request_outputs}
        assert (told["a"].finish_reason, told["a"].stop_reason) == ("abort", FAILED + "a reason")
        assert told["b"].finish_reason == "stop"


def test_error_after_the_last_output_is_not_reported(patched, monkeypatch):
    with patched("request-outputs"):
        table = Table("a", "b")
        monkeypatch.setattr(
            table.processor, "_update_stats_from_finished", Mock(side_effect=KeyError("no such number"))
        )
        done = table.processor.process_outputs(step("a", "b", finish_reason=FinishReason.STOP))
        assert [table.got("a"), table.got("b")] == [[7], [7]]
        assert done.reqs_to_abort == []


class Core:
    """An engine core's client that records its calls."""

    resources = types.SimpleNamespace(engine_dead=False)

    def __init__(self) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []

    async def add_request_async(self, request: Any) -> None:
        self.added.append(request.request_id)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def an_engine() -> Any:
    def process_inputs(request_id: str, prompt: Any, params: Any, *_: Any) -> Any:
        return None, request(request_id, params, prompt)

    engine = object.__new__(async_llm.AsyncLLM)
    engine.log_requests = False
    engine.output_handler = None
    engine.output_processor = OutputProcessor(tokenizer=None, log_stats=False)
    engine.processor = types.SimpleNamespace(process_inputs=process_inputs)
    engine.engine_core = Core()
    engine.shutdown = lambda: None  # what __del__ calls
    return engine


def add(engine: Any, name: str, params: SamplingParams) -> Any:
    try:
        return asyncio.run(engine.add_request(name, [1], params))
    except Exception as error:
        return error


@pytest.mark.skipif(not OLD, reason="vLLM 0.23 gives requests ids of its own")
@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_second_request_of_one_id_does_not_end_the_first(patched, first, second):
    """Clients choose ids (X-Request-Id). With different numbers of samples stock vLLM accepts both, and aborts
    either."""
    with patched("request-ids"):
        engine = an_engine()
        assert not isinstance(add(engine, "x", sampling(n=first)), Exception)
        served = list(engine.engine_core.added)
        assert isinstance(add(engine, "x", sampling(n=second)), RequestRefused)
        assert engine.engine_core.added == served
        assert engine.engine_core.aborted == []


def test_unexpected_error_has_a_message(patched):
    with patched("error-words"), pytest.raises(EngineGenerateError) as raised:  # the class that vLLM's endpoints know
        raise async_llm.EngineGenerateError from OverflowError("too\nlarge")
    assert str(raised.value) == "OverflowError: too large"


@pytest.mark.parametrize(("level", "allowed"), [(1, False), (0, False), (2, True), (1, True)])
def test_a_server_that_cannot_sleep_ends_no_request_and_stays_awake(patched, monkeypatch, level, allowed):
    asked = []
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")

    async def nothing() -> None: ...

    async def asleep(*level: Any) -> None:
        asked.append(level)

    engine = object.__new__(async_llm.AsyncLLM)
    model = types.SimpleNamespace(enable_sleep_mode=allowed)
    engine.vllm_config = types.SimpleNamespace(model_config=model, additional_config=None)
    engine.logger_manager = None
    engine.renderer = types.SimpleNamespace(clear_mm_cache_async=nothing, shutdown=lambda: None)
    engine.engine_core = types.SimpleNamespace(
        sleep_async=asleep, reset_prefix_cache_async=nothing, shutdown=lambda **_: None
    )
    more, pauses = (("keep",), level == 0) if LINE == "0.23" else ((), False)
    with patched("sleep"):
        if pauses or (allowed and level == 1):
            asyncio.run(engine.sleep(level, *more))
            assert asked == [(level, *more)]
        else:
            with pytest.raises(Refusal) as refused:
                asyncio.run(engine.sleep(level, *more))
            assert ("--enable-sleep-mode" in refused.value.message) is not allowed
            assert asked == []

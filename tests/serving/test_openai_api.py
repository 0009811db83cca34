"""Stock `vllm serve` with the engine and the trained tiny checkpoint, in bfloat16, asked by the `openai` client.

tests/frontend and tests/serving/openai check the front end with a script as model. The answers here are the model's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import requests

from tests.endure.scenarios import OBJECT, TOOLS
from tests.markdown import ROOT, code_blocks
from tests.serving.server import Server, serve, wait_for

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = [pytest.mark.serving, pytest.mark.slow]

MAX_LEN = 2048


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("openai")
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("openai_api")
    write_tiny(folder / "model", trained=True, mxfp4=True)
    # so small a model loses itself in spaces where a grammar allows any number of them
    compact = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    flags = ("--max-model-len", str(MAX_LEN), "--max-num-seqs", "32", "--structured-outputs-config", compact)
    with serve(folder / "model", folder / "server.log", *flags) as running:
        yield running


def test_a_start_prints_a_warning(server: Server) -> None:
    start, _, rest = server.log.read_text().partition("Application startup complete")
    assert rest, "nothing was looked at"
    assert [line for line in start.splitlines() if "WARNING " in line or "deprecated" in line] == []


def test_the_log_does_not_say_what_serves(server: Server) -> None:
    said = "npu-gptoss computes attention by small_ops and the experts by small_ops; NPU_GPTOSS=0 leaves"
    assert server.log.read_text().count(said) == 1


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client: OpenAI, *messages: dict[str, Any], **options: Any) -> Any:
    settings = {"model": "gpt-oss-tiny", "temperature": 0, "max_tokens": 200, **options}
    return client.chat.completions.create(messages=list(messages), **settings)


def test_chat_answers_in_one_channel_and_thinks_in_another(client: OpenAI) -> None:
    answer = chat(client, user("What is 3 + 4?"))
    (choice,) = answer.choices
    assert choice.message.content == "3 + 4 = 7."
    assert choice.message.reasoning_content == "Let me think. 3 + 4 = 7."
    assert choice.finish_reason == "stop"
    assert "<|" not in answer.model_dump_json(), "harmony's tokens stay inside the server"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_tool_is_called_and_its_result_is_used(client: OpenAI) -> None:
    question = user("What is the weather in Paris?")
    asked = chat(client, question, tools=TOOLS).choices[0]
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    streamed = chat(client, question, tools=TOOLS, stream=True)
    pieces = [call for chunk in streamed for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    answer = chat(client, question, said, result, tools=TOOLS).choices[0]
    assert answer.message.content == "It is 21 degrees in Paris."
    assert answer.finish_reason == "stop"


def test_sixteen_clients_at_once_each_get_their_own_answer(client: OpenAI, server: Server) -> None:
    """A wrong block table, padding row or expert permutation mixes requests up."""
    pairs = [(n, n + 4) for n in range(1, 17)]
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda pair: chat(client, user(f"What is {pair[0]} + {pair[1]}?")), pairs)
        texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [f"{first} + {second} = {first + second}." for first, second in pairs]
    assert server.is_alive()


def test_a_client_that_leaves_frees_its_request(client: OpenAI, server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    stream = chat(client, user("What is 3 + 4?"), stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    assert wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 10), "it is still being generated"
    assert server.metric("vllm:generation_tokens_total") - before < 1900, "it was generated to its end"
    assert chat(client, user("What is 3 + 4?")).choices[0].message.content == "3 + 4 = 7."


def test_a_repeated_prompt_hits_the_prefix_cache(client: OpenAI, server: Server) -> None:
    """300 tokens: more than the window, so that the hit spans blocks that window layers no longer read."""
    facts = " ".join(f"The river code is {n}." for n in range(40))
    question = user(f"The green code is 17. {facts} The red code is 5. What is the red code?")
    first = chat(client, question)
    before = server.metric("vllm:prefix_cache_hits_total")
    second = chat(client, question)
    hits = server.metric("vllm:prefix_cache_hits_total") - before
    assert first.usage.prompt_tokens > 300
    assert hits >= first.usage.prompt_tokens - 32, "all but the last block are known"
    assert second.choices[0].message == first.choices[0].message


def test_a_structure_holds_chats_calls_and_completions(client: OpenAI, server: Server) -> None:
    """vLLM 0.11.0's grammar mask took float32 logits only on a CPU, and the first such request ended the engine."""
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": OBJECT}}
    found = json.loads(chat(client, user("What is 3 + 4?"), response_format=form).choices[0].message.content)
    assert set(found) == {"season", "even"}
    assert found["season"] in ("spring", "autumn")
    assert isinstance(found["even"], bool)
    forced = chat(client, user("What is the weather in Paris?"), tools=TOOLS, tool_choice="required")
    (call,) = forced.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    choice = {"guided_choice": ["spring", "autumn"]}  # the model would say neither
    assert chat(client, user("What is 3 + 4?"), extra_body=choice).choices[0].message.content in choice["guided_choice"]
    settings = {"model": "gpt-oss-tiny", "prompt": "The season is ", "max_tokens": 20, "temperature": 0}
    assert client.completions.create(**settings, extra_body=choice).choices[0].text in choice["guided_choice"]
    assert server.is_alive()


def test_the_client_of_the_page_works(server: Server) -> None:
    (program,) = code_blocks(ROOT / "docs/serving-on-cpu.md", "python")
    assert "http://127.0.0.1:8000" in program
    ported = program.replace("http://127.0.0.1:8000", server.url)
    run = subprocess.run([sys.executable, "-c", ported], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "8 + 9 = 17."


def test_nothing_broke_behind_the_answers(server: Server) -> None:
    """vLLM logs a client's mistakes with a traceback too, so only the engine's count."""
    time.sleep(0.5)
    log = server.log.read_text(errors="replace")
    wrong = r".*EngineCore.*Traceback|.*EngineDeadError|.*Exception in ASGI.*|.*CRITICAL.*|.*AttributeError.*"
    assert re.findall(wrong, log) == []


# one of each kind: the table has them all, and the tests of admission ask for each
HOSTILE_HERE = ("chat-body-list", "completions-prompt--1", "chat-n-100000", "chat-regex-nul", "chat-regex-property",
                "chat-grammar-empty", "chat-format-text", "chat-format-without-schema", "chat-bad-word-blank",
                "responses-schema-nonsense", "tokenize-template", "detokenize--1", "chat-tools-empty-object",
                "invocations-format-text", "completions-streamed-prompt--1",
                "responses-hosted-tool", "responses-hosted-tool-forced")  # fmt: skip


def test_hostile_requests_are_refused_and_the_server_goes_on(client: OpenAI, server: Server) -> None:
    """Each of them ended stock vLLM's engine or its HTTP process, or was answered 500. Behind the test of the log."""
    from tests.serving.hostile import HOSTILE

    headers = {"Content-Type": "application/json"}
    for case in (case for case in HOSTILE if case.name in HOSTILE_HERE):
        reply = requests.post(f"{server.url}{case.route}", case.body, headers=headers, timeout=60)
        assert reply.status_code == case.status, (case.name, reply.text)
        if case.status != 200:
            assert reply.json()["error"]["param"] == case.param, case.name
    assert "7" in chat(client, user("What is 3 + 4?")).choices[0].message.content


# --- metrics

PROMPTS = [[number + 5] * (3 + 7 * number) for number in range(6)]  # none is another's beginning
ANSWER = 9  # tokens


def complete(server: Server, prompt: list[int]) -> None:
    body = {"model": server.name, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.json()["usage"]["completion_tokens"] == ANSWER


def test_every_row_is_counted_as_eager_and_none_as_padding(server: Server) -> None:
    own = {"model_name": server.name, "engine": "0"}

    def counted() -> tuple[float, ...]:
        return (
            server.metric("vllm:prompt_tokens_total"),
            server.metric("npu_gptoss_tokens_total", mode="eager", **own),
            server.metric("npu_gptoss_steps_total", mode="eager", bucket="none", **own),
        )

    before = counted()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    prompts, rows, steps = (now - then for now, then in zip(counted(), before, strict=True))
    assert prompts == sum(map(len, PROMPTS))
    assert rows == prompts + len(PROMPTS) * (ANSWER - 1), "the last token of an answer is never fed again"
    assert ANSWER <= steps <= len(PROMPTS) * ANSWER
    assert server.metric("npu_gptoss_tokens_total") == server.metric("npu_gptoss_tokens_total", mode="eager", **own)
    assert server.metric("npu_gptoss_steps_total") == server.metric("npu_gptoss_steps_total", bucket="none", **own)
    assert server.metric("npu_gptoss_padding_tokens_total") == 0


def test_a_live_server_reports_the_kernel_of_each_operation(server: Server) -> None:
    complete(server, [1, 2, 3])
    operations = ("attention.paged", "attention.write_kv", "moe.experts", "moe.route")
    for operation in operations:
        kernel = f"{operation}.small_ops"
        labels = {"operation": operation, "kernel": kernel, "solution": "small_ops", "engine": "0"}
        assert server.metric("npu_gptoss_kernel_info", **labels) == 1, operation
    assert server.metric("npu_gptoss_kernel_info") == len(operations)


def test_every_series_and_label_of_the_dashboard_is_there(server: Server) -> None:
    pytest.importorskip("promql_parser", reason="promql-parser is missing: make setup")
    from prometheus_client.parser import text_string_to_metric_families

    from tests.docker.dashboard import alerts, missing, queries

    complete(server, [1, 2, 3])
    families = text_string_to_metric_families(requests.get(f"{server.url}/metrics", timeout=30).text)
    exposed: dict[str, set[str]] = {"up": {"job", "instance"}}  # Prometheus's own
    for sample in (sample for family in families for sample in family.samples):
        exposed.setdefault(sample.name, {"instance"}).update(sample.labels)
    asked = [query.expression for query in (*queries(), *alerts())]
    assert {expression: missing(expression, exposed) for expression in asked} == {each: [] for each in asked}


def test_a_refused_request_is_not_counted(server: Server) -> None:
    """The admission refuses before vLLM's counter of answers sees the request."""
    before = server.metric("npu_gptoss_refused_requests_total", status="400")
    for body in (b"no json", b'{"model": "gpt-oss-tiny", "messages": [], "temperature": "hot"}'):
        headers = {"Content-Type": "application/json"}
        assert not requests.post(f"{server.url}/v1/chat/completions", body, headers=headers, timeout=30).ok
    assert server.metric("npu_gptoss_refused_requests_total", status="400") - before == 2

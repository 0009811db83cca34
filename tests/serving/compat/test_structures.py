"""Structures around vLLM's server: the requests that ask for one, and a server that parses none itself."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from npu_gptoss.serving.admission.bounded import Bounded
from npu_gptoss.serving.admission.structures import Structures, Verdict
from npu_gptoss.serving.compat.server import structures
from npu_gptoss.serving.compat.server.structures import StructureCompiler, structure_of
from npu_gptoss.serving.releases import here
from npu_gptoss.serving.releases.vllm import ChatCompletionRequest
from tests.serving.compat import of_release
from tests.serving.compat.of_release import LINE, OLD

newer = pytest.mark.skipif(OLD, reason="needs vLLM 0.23 or 0.33")


def structured(**fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    ("fields", "means"),
    [
        *([({}, {}), ({"whitespace_pattern": " "}, {})] if OLD else []),  # 0.33 cannot construct these
        ({"json_object": False}, {}),
        ({"json_object": True}, {"json_object": True}),
        ({"json": {}}, {"json": {}}),
        ({"regex": ""}, {"regex": ""}),
        ({"choice": ["a"], "disable_any_whitespace": True}, {"choice": ["a"], "disable_any_whitespace": True}),
    ],
)
def test_empty_structure_counts_as_none(fields: dict[str, Any], means: dict[str, Any]) -> None:
    assert structure_of(StructuredOutputsParams(**fields)) == means


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Structures:
    """This process's verdicts, as in a running server; nothing is compiled."""
    found = Structures(None)
    monkeypatch.setattr(structures, "_structures", found)
    return found


def test_admitted_structure_is_not_parsed_in_the_server_again(patched: Any, admitted: Structures) -> None:
    """There a regular expression may crash or block the whole server."""
    admitted._remember('{"regex": "(a"}', Verdict(backend="guidance", automatic=True, fields={"regex": "(b"}))
    config = types.SimpleNamespace(backend="auto")
    model = types.SimpleNamespace(skip_tokenizer_init=False, is_diffusion=False)
    with patched("structure-verdicts"):
        params = structured(regex="(a")
        of_release.validate(params, model, config)
        wanted = params.structured_outputs
        assert (wanted.regex, wanted._backend, wanted._backend_was_auto) == ("(b", "guidance", True)
        with pytest.raises(Exception, match="Grammar error" if OLD else "Failed to transform regex"):
            # vLLM's own, without a verdict; with xgrammar 0.33 does not read the tokenizer
            of_release.validate(
                structured(regex="(c"), model, config if OLD else types.SimpleNamespace(backend="xgrammar")
            )


TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a?){9}"}}


@newer
def test_structural_tag_is_not_parsed_while_a_request_is_read(patched, admitted, monkeypatch) -> None:
    """pydantic's validators would parse it in the server's event loop."""
    from vllm.v1.structured_output import backend_xgrammar

    parsed: list[Any] = []
    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", parsed.append)
    fields = {"messages": [{"role": "user", "content": "hi"}], "response_format": TAG}
    with patched("structure-tags"):
        ChatCompletionRequest(**fields)
        of_release.completion_class()(prompt="a", response_format=TAG)
        assert not parsed
        admitted._remember('{"regex": "a"}', Verdict(backend="guidance", fields={"regex": "a"}))
        if LINE == "0.33":
            from vllm.parser import abstract_parser

            assert not abstract_parser._xgrammar_supports(StructuredOutputsParams(regex="a"))
            assert not parsed


@newer
def test_structure_of_any_route_is_compiled_before_the_engine_gets_it(patched, admitted, monkeypatch) -> None:
    """/inference/v1/generate brings its own SamplingParams. A completion has no reasoning to wait for."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    unavailable = here().module("vllm").unavailable

    class Reached(Exception):
        pass

    class Engine:
        @property
        def errored(self) -> bool:
            raise Reached(sys._getframe(1).f_locals["reasoning_ended"])

    async def verdict(fields: dict[str, Any]) -> Verdict:
        known = {"a": Verdict(backend="xgrammar", fields=fields), "busy": Verdict(error="later", lasting=False)}
        return known.get(fields["regex"], Verdict(error="too long"))

    monkeypatch.setattr(admitted, "verdict", verdict)

    def ask(params: Any, request_id: str = "id") -> None:
        asyncio.run(AsyncLLM.add_request(Engine(), request_id, {}, params))

    with patched("structure-requests"):
        for params, name, ended in (
            (SamplingParams(), "cmpl-1-0", None),
            (structured(regex="a"), "id", None),
            (structured(regex="a"), "cmpl-1-0", True),
        ):
            with pytest.raises(Reached, match=str(ended)):
                ask(params, name)
        with pytest.raises(VLLMValidationError, match="This structure cannot be compiled: too long"):
            ask(structured(regex="b"))
        with pytest.raises(type(unavailable(""))) as later:
            ask(structured(regex="busy"))
        assert vars(later.value)["status_code" if LINE == "0.23" else "http_status"] == 503


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bounded]:
    """vLLM's own validation and backends on the tiny model's tokenizer, in child processes."""
    from vllm.config import ModelConfig, StructuredOutputsConfig

    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("compiler")
    write_tiny(folder, trained=True, mxfp4=LINE != "0.23")  # mxfp4 on an NPU needs our plugin
    config = types.SimpleNamespace(
        model_config=ModelConfig(model=str(folder), max_model_len=256),
        structured_outputs_config=StructuredOutputsConfig(),
        speculative_config=None,
    )
    work = StructureCompiler(config)
    bounded = Bounded(work.work, work.prepare, seconds=4)
    try:
        yield bounded
    finally:
        bounded.stop()


PATTERN = {"json": {"type": "object", "patternProperties": {"a": {"type": "integer"}}}}
# a structure, and the backend that accepts it; None if none does
STRUCTURES: list[tuple[dict[str, Any], str | None]] = [
    ({"json_object": True}, "xgrammar"),
    ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "xgrammar"),
    (PATTERN, "xgrammar" if LINE == "0.33" else "guidance"),  # outlines, which 0.23 takes, is slower than the limit
    ({"choice": ["spring", "autumn"]}, "xgrammar"),
    ({"regex": "[0-9]{3}"}, "xgrammar"),
    ({"grammar": 'root ::= "a" | "b"'}, "xgrammar"),
    ({"choice": []}, None),
    ({"regex": "\x00"}, "guidance" if LINE == "0.23" else None),  # SIGSEGV in xgrammar 0.1.25
    ({"regex": "("}, None),
    ({"grammar": ""}, None),
    ({"grammar": "root ::= nothing"}, None),
    ({"json": "{"}, None),
    ({"json": {"type": "nothing"}}, None),
    ({"structural_tag": "{}"}, None),
    ({"structural_tag": "no json"}, None),
]


def test_refusal_names_the_cause_that_vllm_omits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's message about choices that xgrammar does not support ends in the letters {err}."""

    def compile_badly(self: StructureCompiler, fields: dict[str, Any]) -> None:
        raise ValueError("Failed to transform choices into a grammar: {err}") from RuntimeError("a line break")

    monkeypatch.setattr(StructureCompiler, "compile", compile_badly)
    said = json.loads(StructureCompiler(types.SimpleNamespace()).work(b"{}"))["error"]
    assert said.endswith("grammar: a line break")


@pytest.mark.slow
def test_structures_are_accepted_by_a_backend_or_refused(compiler: Bounded) -> None:
    """A structure that passed validation and failed to compile ended the engine."""
    structures = Structures(compiler)

    async def verdicts() -> list[Verdict]:
        return [await structures.verdict(fields) for fields, _ in STRUCTURES]

    found = asyncio.run(verdicts())
    assert [verdict.backend for verdict in found] == [backend for _, backend in STRUCTURES]
    for verdict in found:
        assert (verdict.error is None) is (verdict.backend is not None)
        assert verdict.error is None or verdict.error.isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["c\nd", 'a"b', "a\\b", "\u00e9\u4e2d", "a\tb", "]", "[^a]", "'", "|"])
def test_choice_of_any_text_is_served(compiler: Bounded, choice: str) -> None:
    verdict = asyncio.run(Structures(compiler).verdict({"choice": [choice, "x"]}))
    assert verdict.backend is not None, verdict.error

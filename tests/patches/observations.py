"""What a client, or a caller, of vLLM sees where a diff of `patches/vllm` repairs something: one function for each.

They run in a process that has imported the released or the repaired package (`in_fork.py`), without our plugin, and
return plain JSON values; what is expected before and after lies in `test_patches.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

OBSERVATIONS: dict[str, Callable[[], Any]] = {}

THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ANSWER = f"{THOUGHT}{FINAL}Four.<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Paris"}<|call|>'
USER = {"role": "user", "content": "Hello"}


def observation(function: Callable[[], Any]) -> Callable[[], Any]:
    OBSERVATIONS[function.__name__] = function
    return function


def tokens(text: str) -> list[int]:
    from vllm.entrypoints.harmony_utils import get_encoding

    return get_encoding().encode(text, allowed_special="all")


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns, or the name of what it raises."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


def answer(text: str, **fields: Any) -> dict[str, Any]:
    """Content, reasoning and calls of a whole chat answer whose tokens are the text's."""
    from tests.serving.compat.fake_engine import FakeEngine, chat

    choice = chat(FakeEngine(tokens(text)), **fields)["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"],
        "reasoning": message["reasoning_content"],
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]],
    }


def streamed(text: str, bite: int = 1, finish: str | None = None, empty_end: bool = False, **fields: Any) -> dict:
    from tests.serving.compat.fake_engine import FakeEngine, stream_chat, told

    told_ = told(stream_chat(FakeEngine(tokens(text), bite, finish, empty_end), **fields))
    return {"content": told_["content"], "reasoning": told_["reasoning"], "calls": told_["calls"]} | (
        {"error": told_["error"]} if told_["error"] else {}
    )


def events(text: str, bite: int = 1, **engine: Any) -> list[Any]:
    from tests.serving.compat.fake_engine import FakeEngine, stream_responses

    return stream_responses(FakeEngine(tokens(text), bite, **engine))


def output_types(text: str) -> Any:
    from tests.serving.compat.fake_engine import FakeEngine, respond

    response = respond(FakeEngine(tokens(text)))
    return response["error"]["message"] if "output" not in response else [item["type"] for item in response["output"]]


def prompt(responses: bool = False, **fields: Any) -> str:
    """The prompt of a request after the system turn's end; or the error's message."""
    from vllm.entrypoints.harmony_utils import get_encoding

    from tests.serving.compat.fake_engine import FakeEngine, chat, respond

    engine = FakeEngine(tokens(f"{FINAL}Hi.<|return|>"))
    told_ = (respond if responses else chat)(engine, **fields)
    if not engine.prompts:
        return told_["error"]["message"]
    return get_encoding().decode(engine.prompts[0]).split("<|end|>", 1)[1]


@observation
def yarn_truncate() -> dict[str, int]:
    """How many of the 32 pairs of cosine and sine of vLLM's gpt-oss differ from transformers' at position 1000."""
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models import gpt_oss

    from tests.model.published import published_config

    gpt_oss.get_tensor_model_parallel_world_size = lambda: 1
    for name in ("QKVParallelLinear", "RowParallelLinear", "Attention"):
        setattr(gpt_oss, name, lambda *args, **kwargs: torch.nn.Identity())

    def wrong(**changes: Any) -> int:
        config = published_config()
        config["rope_scaling"] |= changes
        with set_current_vllm_config(VllmConfig()):
            layer = gpt_oss.OAIAttention(GptOssConfig(**config), prefix="model.layers.0.attn")
        found = layer.rotary_emb.cos_sin_cache[1000].float()
        cos, sin = GptOssRotaryEmbedding(GptOssConfig(**config))(torch.zeros(1), torch.tensor([[1000]]))
        differs = (found - torch.cat((cos[0, 0], sin[0, 0]))).abs() > 1e-4
        return int((differs[:32] | differs[32:]).sum())

    return {"truncate: false": wrong(), "truncate: true": wrong(truncate=True)}


@observation
def cpu_sliding_window() -> dict[str, Any]:
    from vllm.attention import AttentionType
    from vllm.config import ModelConfig
    from vllm.engine import arg_utils
    from vllm.v1.attention.backends.cpu_attn import TorchSDPABackendImpl

    refused: list[str] = []
    arg_utils.current_platform.is_cpu = lambda: True
    arg_utils._raise_or_fallback = lambda feature_name, recommend_to_remove: refused.append(feature_name)
    ModelConfig.is_v1_compatible = True
    config = object.__new__(ModelConfig)
    config.hf_text_config = config.hf_config = types.SimpleNamespace(model_type="gpt_oss", sliding_window=128)
    # a directory that exists: with HF_HUB_OFFLINE=1 vLLM would look any other name up in the hub's cache
    served = arg_utils.EngineArgs(model=str(Path.cwd()))._is_v1_supported_oracle(config)

    def layer(window: int | None, attn_type: str = AttentionType.DECODER) -> int | None:
        return TorchSDPABackendImpl(8, 64, 1.0, 8, None, window, "auto", attn_type=attn_type).sliding_window

    return {
        "V1 serves a model with a window": served,
        "refused": refused,
        "vLLM's own decoder layer with a window": outcome(lambda: layer(128)),
        "without": outcome(lambda: layer(None)),
        "an encoder's with one": outcome(lambda: layer(128, AttentionType.ENCODER_ONLY)),
    }


@observation
def cpu_grammar_bitmask() -> Any:
    import numpy as np
    import torch
    from vllm.v1.structured_output.utils import apply_grammar_bitmask

    mask = np.array([[1 << 3, 1 << 8]], dtype=np.int32)
    step = types.SimpleNamespace(
        grammar_bitmask=mask, scheduled_spec_decode_tokens={}, structured_output_request_ids={"b": 0}
    )
    batch = types.SimpleNamespace(req_id_to_index={"a": 0, "b": 1})

    def allowed(dtype: torch.dtype) -> list[list[int]]:
        logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = logits.clone()
        apply_grammar_bitmask(step, batch, logits, torch.device("cpu"))
        kept = torch.isfinite(logits)
        assert torch.equal(logits[kept], before[kept])
        return [row.nonzero().flatten().tolist() if not row.all() else ["all"] for row in kept]

    return {str(dtype): outcome(lambda d=dtype: allowed(d)) for dtype in (torch.float32, torch.bfloat16)}


@observation
def reasoning_end() -> dict[str, bool]:
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser

    parser = GptOssReasoningParser(types.SimpleNamespace(encode=tokens))
    earlier = f"<|start|>user<|message|>2 + 2?<|end|><|start|>assistant{FINAL}Four.<|end|>"
    turn = f"{earlier}<|start|>user<|message|>As JSON.<|end|><|start|>assistant"
    json_header = "<|start|>assistant<|channel|>final <|constrain|>json"
    texts = {
        "a turn after an answer": turn,
        "its reasoning": turn + THOUGHT,
        "its answer": turn + THOUGHT + FINAL,
        "inside its answer": turn + THOUGHT + FINAL + '{"a"',
        "a header for JSON": json_header + "<|message|>",
        "half a header": json_header,
        "a call": "<|start|>assistant" + CALL,
    }
    return {name: parser.is_reasoning_end(tokens(text)) for name, text in texts.items()}


@observation
def harmony_after_turn() -> dict[str, Any]:
    from openai_harmony import Author, Message, Role
    from vllm.entrypoints.context import StreamingHarmonyContext
    from vllm.outputs import CompletionOutput, RequestOutput

    text = ANSWER + "<|return|> and so on<|start|>robot<|message|>?"
    found = {
        "chat": outcome(lambda: answer(text, ignore_eos=True)["content"]),
        "stream": outcome(lambda: streamed(text, ignore_eos=True)),
        "response": output_types(text),
        "events": outcome(
            lambda: [event.type for event in events(text) if event.type.endswith(("item.done", "completed"))]
        ),
    }
    context = StreamingHarmonyContext([Message.from_role_and_content(Role.USER, "Hello")], ["browser"])

    def generate(part: str) -> None:
        for token in tokens(part):
            context.append_output(
                RequestOutput("r", None, [1], None, [CompletionOutput(0, "", [token], None, None)], False)
            )

    generate("<|channel|>analysis to=browser.search json<|message|>{}<|call|>")
    page = Message.from_author_and_content(Author.new(Role.TOOL, "browser.search"), "a page").with_channel("analysis")
    page = page.with_recipient("assistant")
    context.append_output([page])
    context.messages.append(page)
    context.render_for_completion()
    generate(f"{FINAL}Found.<|return|>")
    found["after a tool of the server"] = [part.content[0].text for part in context.parser.messages]
    return found


@observation
def harmony_channels() -> dict[str, Any]:
    call = '<|channel|>analysis to=functions.get_weather json<|message|>{"city": "Paris"}<|call|>'
    texts = {
        "answer alone": f"{FINAL}Four.<|return|>",
        "cut off": f"{FINAL}Fo",
        "reasoning cut off": "<|channel|>analysis<|message|>h",
        "both": ANSWER,
        "call": THOUGHT + CALL,
    }
    whole = {name: answer(text, tool_flags=False) for name, text in texts.items()}
    return {name: [told["reasoning"], told["content"]] for name, told in whole.items()} | {
        "response with a preamble": output_types(PREAMBLE + call),
        "preamble cut off": output_types("<|channel|>commentary<|message|>Let me"),
    }


@observation
def chat_prompt() -> dict[str, str]:
    from tests.serving.compat.fake_engine import WEATHER

    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"}
    turn = [
        USER,
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "I need it.", "tool_calls": [call]},
        result,
    ]
    system = {"role": "system", "content": "Be brief."}
    return {
        "user": prompt(messages=[USER]),
        "system": prompt(messages=[system, USER]),
        "system and tools": prompt(messages=[system, USER], tools=[WEATHER]).partition("# Tools")[0],
        "earlier answer": prompt(messages=[USER, {"role": "assistant", "content": "Hi."}, USER]),
        "result": prompt(messages=turn),
        "result of no call": prompt(messages=[USER, result]),
    }


@observation
def responses_prompt() -> dict[str, str]:
    call = {"type": "function_call", "call_id": "c", "id": "fc", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "20 degrees"}
    reasoning = {"type": "reasoning", "id": "rs", "summary": []}
    text = reasoning | {"content": [{"type": "reasoning_text", "text": "I need it."}]}
    return {
        "instructions": prompt(True, instructions="Be brief."),
        "system": prompt(True, input=[{"role": "system", "content": "Be brief."}, USER]),
        "result": prompt(True, input=[USER, text, call, output]),
        "reasoning without text": outcome(lambda: prompt(True, input=[USER, reasoning, USER])),
    }


@observation
def chat_stream() -> dict[str, Any]:
    from tests.serving.compat.fake_engine import WEATHER

    tools = [WEATHER]
    analysis_call = '<|channel|>analysis to=functions.get_weather json<|message|>{"city": "Rome"}<|call|>'
    twice = f"{THOUGHT}{CALL}<|start|>assistant{CALL}".replace("<|call|><|start|>", "<|end|><|start|>")
    return {
        "one token an output": streamed(THOUGHT + CALL, tools=tools),
        "all in one output": streamed(ANSWER, 100),
        "call in one output": streamed(THOUGHT + CALL, 100, tools=tools),
        "two calls, three tokens an output": streamed(twice, 3, tools=tools),
        "preamble": streamed(PREAMBLE + CALL, tools=tools),
        "call on the analysis channel": streamed(analysis_call, tools=tools),
        "call cut off": streamed(THOUGHT + CALL.removesuffix('"}<|call|>'), tools=tools),
        "output without tokens": streamed(f"{FINAL}cut off", finish="abort", empty_end=True),
        "reasoning left out": streamed(ANSWER, 2, include_reasoning=False),
    }


@observation
def tool_answers() -> dict[str, Any]:
    from tests.serving.compat.fake_engine import WEATHER

    named = {"type": "function", "function": {"name": "get_weather"}}
    required = '[{"name": "get_weather", "parameters": {"city": "Zürich"}}]'

    def told(text: str, choice: Any = "auto") -> list[Any]:
        found = answer(text, tools=[WEATHER], tool_choice=choice)
        return [found["content"], found["calls"]]

    return {
        "cut off": told(f"{THOUGHT}{FINAL}Fo"),
        "preamble": told(PREAMBLE + CALL),
        "required": told(THOUGHT + FINAL + required + "<|return|>", "required"),
        "required, cut off": told(THOUGHT + FINAL + required[:9], "required"),
        "named": told(THOUGHT + FINAL + '{"city": "Rome"}<|return|>', named),
        "named, called": told(THOUGHT + CALL, named),
        "not forced": told(THOUGHT + FINAL + required + "<|return|>"),
    }


@observation
def tools_without_flags() -> dict[str, Any]:
    from tests.serving.compat.fake_engine import WEATHER

    text = THOUGHT + CALL
    return {
        "whole": answer(text, tools=[WEATHER], tool_flags=False)["calls"],
        "streamed": streamed(text, tools=[WEATHER], tool_flags=False)["calls"],
    }


def delta(events_: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events_ if event.type == f"response.{kind}.delta")


@observation
def responses_stream_tokens() -> dict[str, list[Any]]:
    found = {}
    for bite in (1, 3, 100):
        stream = events(ANSWER, bite)
        found[f"{bite} an output"] = [
            delta(stream, "reasoning_text"),
            delta(stream, "output_text"),
            sum(event.type == "response.output_item.done" for event in stream),
            stream[-1].response.usage.output_tokens == len(tokens(ANSWER)),
        ]
    return found


@observation
def responses_stream_end() -> dict[str, Any]:
    text = f"{FINAL}cut off"

    def aborted() -> list[str]:
        stream = events(text, finish="abort", empty_end=True)
        return [stream[-1].response.status, delta(stream, "output_text")]

    return {
        "whole": events(ANSWER)[-1].response.status,
        "cut off": events(text)[-1].response.status,
        "aborted without a token": outcome(aborted),
    }


@observation
def responses_stream_indices() -> dict[str, Any]:
    from tests.serving.compat.test_streaming import through_the_client

    call = CALL.replace("<|call|>", "<|end|>")  # is no item of a stream
    stream = events(f"{THOUGHT}{call}<|start|>assistant{FINAL}Four.<|return|>")
    return {
        "items": [[e.output_index, e.item.type] for e in stream if e.type == "response.output_item.done"],
        "parts": sorted({e.content_index for e in stream if hasattr(e, "content_index")}),
        "OpenAI's client": outcome(lambda: through_the_client(stream)[-1]),
    }


@observation
def with_our_plugin() -> dict[str, Any]:
    """The package on a vLLM that has all diffs: which of its patches step aside, and that its answers are right."""
    import importlib

    from npu_gptoss.serving import compat

    compat.apply()
    for patch in compat.PATCHES:
        if patch.module.startswith("vllm."):
            importlib.import_module(patch.module)

    def told(text: str) -> dict[str, Any]:
        return {
            "whole": answer(text, ignore_eos=True),
            "streamed": [streamed(text, bite, ignore_eos=True) for bite in (1, 3, 100)],
            "response": output_types(text),
            "items": sum(event.type == "response.output_item.done" for event in events(text)),
        }

    return {
        "steps aside": [entry.patch.name for entry in compat.status() if entry.state == "skipped"],
        "an answer": told(ANSWER),
        "more after the turn": told(f"{ANSWER}<|return|> and so on"),
        "a header that is spelled badly": told(f"{THOUGHT.removesuffix('assistant')}robot{FINAL}Four.<|return|>"),
    }

"""Every runtime patch of foreign code, in one table, and `apply()`, which puts them in.

vLLM 0.11.0 serves gpt-oss with a number of defects that a plugin can only repair from outside. Each repair is one line
of `PATCHES`; the code lies in one file per idea. A patch is put in when the module that it changes is imported: this
package imports neither vLLM nor torch by itself, because `apply()` runs in every vLLM process, most of which never
serve HTTP. A patch whose target is not the code it was written for is left out with one warning that names it.

`NPU_GPTOSS_SKIP_PATCHES=name,name` leaves patches out, `status()` tells what happened to each.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from npu_gptoss import envs
from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.patch import Mismatch, Patch, when_imported
from npu_gptoss.serving.lines import installed_vllm

__all__ = ["PATCHES", "Patch", "PatchError", "PatchStatus", "apply", "require_essential", "status"]

logger = logging.getLogger("vllm.npu_gptoss")  # so that vLLM's handlers and --log-config apply


class PatchError(InputError):
    """gpt-oss cannot be served rightly because a patch could not be put in."""


_ARGUMENTS = "vllm.engine.arg_utils"
_TOKENIZER = "vllm.transformers_utils.tokenizer"
_SERVE = "vllm.entrypoints.cli.serve"
_HARMONY = "vllm.entrypoints.harmony_utils"
_CONTEXT = "vllm.entrypoints.context"
_ENGINE = "vllm.entrypoints.openai.serving_engine"
_CHAT = "vllm.entrypoints.openai.serving_chat"
_API_SERVER = "vllm.entrypoints.openai.api_server"
_PROTOCOL = "vllm.entrypoints.openai.protocol"
_PROCESSOR = "vllm.v1.engine.processor"
_RESPONSES = "vllm.entrypoints.openai.serving_responses"
_TOKENIZATION = "vllm.entrypoints.openai.serving_tokenization"
_REASONING = "vllm.reasoning.gptoss_reasoning_parser"
_TOOLS = "vllm.entrypoints.openai.tool_parsers.openai_tool_parser"
_ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_LOGGERS = "vllm.v1.metrics.loggers"
_LAUNCHER = "vllm.entrypoints.launcher"
_SERVER = "vllm.entrypoints.openai.api_server"
_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.core_client"
_ASYNC = "vllm.v1.engine.async_llm"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_GRAMMARS = "vllm.v1.structured_output"
_BATCH = "vllm.v1.worker.gpu_input_batch"
_ASCEND_BATCH = "vllm_ascend.worker.npu_input_batch"
_SAMPLING = "vllm.v1.sample.ops.topk_topp_sampler"
_OUTPUTS = "vllm.v1.engine.output_processor"

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="checkpoint-check",
        reason="A checkpoint that cannot be served hangs vLLM, or is refused after a minute, by an engine that it has "
        "forked, under tracebacks; a broken config.json by words that do not name it.",
        module=_ARGUMENTS,
        touches=(f"{_ARGUMENTS}:EngineArgs.create_engine_config",),
        installer="checkpoint:install_check",
        upstream="none found",
    ),
    Patch(
        name="tokenizer-check",
        reason="A tokenizer that cannot be read ends vLLM with a traceback, or with a panic that no handler sees; one "
        "with ids beyond the vocabulary ends the engine at the first request that has such a token.",
        module=_TOKENIZER,
        touches=tuple(
            f"{module}:init_tokenizer_from_configs"
            for module in (
                _TOKENIZER,
                "vllm.v1.engine.async_llm",
                "vllm.v1.engine.llm_engine",
                "vllm.v1.structured_output",
            )
        ),
        installer="checkpoint:install_tokenizer",
        upstream="none found",
    ),
    Patch(
        name="refusal-sentence",
        reason="vllm serve ends with a traceback where a sentence says what to do.",
        module=_SERVE,
        touches=(f"{_SERVE}:ServeSubcommand.cmd",),
        installer="checkpoint:install_sentence",
        upstream="none found",
    ),
    Patch(
        name="model-wide-window",
        reason="vLLM refuses any model with a sliding window on CPU, and gives a model whose layers all slide one "
        "window for all; gpt-oss's window is a matter of the layer, and its attention gets it from our model.",
        module="vllm.config.model",
        touches=("vllm.config.model:ModelConfig.get_sliding_window",),
        installer="window:install",
        upstream="vllm issue 23934 (open); no repair found",
        essential=True,
    ),
    Patch(
        name="yarn-truncate",
        reason="vLLM's own gpt-oss rounds the ends of YaRN's ramp although the config says truncate: false, so that "
        "nine of 32 frequencies are wrong; our model fills the cache by itself.",
        module="vllm.model_executor.models.gpt_oss",
        touches=("vllm.model_executor.models.gpt_oss:OAIAttention.__init__",),
        installer="rope:install",
        upstream="vllm PR 27722",
    ),
    Patch(
        name="cpu-native-ops",
        reason="A vLLM without compiled CPU operators, or with a torch newer than the one it was built for, calls "
        "operators that are not there, binds threads with them, and compiles with a dynamo that it does not know.",
        module="vllm.platforms.cpu",
        touches=("vllm.platforms.cpu:CpuPlatform.check_and_update_config",),
        installer="cpu:install_native_ops",
        upstream="none found",
    ),
    Patch(
        name="ascend-host-mask",
        reason="vllm-ascend makes a mask of prompt length squared on the host at each prefill and copies it to the "
        "device, for attention operators that gpt-oss does not use.",
        module=_ASCEND_RUNNER,
        touches=(f"{_ASCEND_RUNNER}:NPUModelRunner._make_attention_mask",),
        installer="ascend:install_host_mask",
        upstream="vllm-ascend 0.12 makes one mask of 2048",
    ),
    Patch(
        name="ascend-full-graph",
        reason="vllm-ascend gives new lengths to its own paged attention only when it replays a graph of whole decode "
        "steps, so that attention with sinks would repeat the lengths of its capture.",
        module=_ASCEND_RUNNER,
        touches=(f"{_ASCEND_RUNNER}:update_attn_params", f"{_ASCEND_RUNNER}:NPUModelRunner.__init__"),
        installer="ascend:install_full_graph",
        upstream="vllm-ascend PR 9165",
    ),
    Patch(
        name="request-input",
        reason="A request that the engine core cannot read, make or add ends the engine, or its input thread, after "
        "which every request waits for ever; and one with a wild token id ends a step of everybody.",
        module=_CORE,
        touches=(
            f"{_CORE}:MsgpackDecoder",
            f"{_CORE}:EngineCore.preprocess_add_request",
            f"{_CORE}:EngineCore.add_request",
            f"{_CORE}:EngineCoreProc.process_input_sockets",
            f"{_CORE}:EngineCoreProc.process_output_sockets",
        ),
        installer="barrier:install_input",
        upstream="vllm PR 54196 for stop tokens beside min_tokens; none found for the rest",
    ),
    Patch(
        name="request-steps",
        reason="What goes wrong with one request in the engine core has no way to end that request alone.",
        module=_CORE,
        touches=(f"{_CORE}:EngineCore.step", f"{_CORE}:EngineCore.step_with_batch_queue"),
        installer="barrier:install_steps",
        upstream="vllm PR 47312, for grammars",
    ),
    Patch(
        name="request-updates",
        reason="An exception in one request's stop conditions ends the engine, and so do prompt log-probabilities of a "
        "request that was preempted.",
        module=_SCHEDULER,
        touches=(f"{_SCHEDULER}:Scheduler._update_request_with_output", f"{_SCHEDULER}:Scheduler.update_from_output"),
        installer="barrier:install_scheduler",
        upstream="none found",
    ),
    Patch(
        name="grammar-errors",
        reason="A grammar that does not compile, or raises later, ends the engine.",
        module=_GRAMMARS,
        touches=(
            f"{_GRAMMARS}:StructuredOutputManager._async_create_grammar",
            f"{_GRAMMARS}:StructuredOutputManager.should_fill_bitmask",
            f"{_GRAMMARS}:StructuredOutputManager.should_advance",
        ),
        installer="grammars:install_guard",
        upstream="vllm PR 47312",
    ),
    Patch(
        name="grammar-backends",
        reason="The first structured request chooses the backend of all later ones, which were validated for another.",
        module=_GRAMMARS,
        touches=(
            f"{_GRAMMARS}:StructuredOutputManager.grammar_init",
            f"{_GRAMMARS}:StructuredOutputManager.clear_backend",
        ),
        installer="grammars:install_backends",
        upstream="vllm issue 43920",
    ),
    Patch(
        name="priority-order",
        reason="Under --scheduling-policy priority n > 1 ends the engine, and a preemption may take blocks away from a "
        "request that is computed in the same step.",
        module=_SCHEDULER,
        touches=(f"{_SCHEDULER}:Scheduler.add_request", f"{_SCHEDULER}:Scheduler.schedule"),
        installer="priority:install",
        upstream="none found",
    ),
    Patch(
        name="seed-rows",
        reason="A request with a seed whose prompt is cut by a step's end ends the engine on a CPU, and draws other "
        "tokens than uncut on an NPU.",
        module=_RUNNER,
        touches=(f"{_RUNNER}:GPUModelRunner._update_states",),
        installer="seeds:install_rows",
        upstream="none found",
    ),
    Patch(
        name="seed-rows-ascend",
        reason="As seed-rows, in vllm-ascend's worker.",
        module=_ASCEND_RUNNER,
        touches=(f"{_ASCEND_RUNNER}:NPUModelRunner._update_states",),
        installer="seeds:install_ascend_rows",
        upstream="none found",
    ),
    Patch(
        name="seed-neighbours",
        reason="On a CPU no seed counts as long as one request of the batch has none.",
        module=_SAMPLING,
        touches=(f"{_SAMPLING}:TopKTopPSampler.forward_cpu",),
        installer="seeds:install_cpu_sampler",
        upstream="none found",
    ),
    Patch(
        name="row-masks",
        reason="allowed_token_ids of one request bind another one that is given its row of the batch.",
        module=_BATCH,
        touches=(f"{_BATCH}:InputBatch.add_request", f"{_BATCH}:InputBatch.swap_states"),
        installer="rows:install",
        upstream="none found",
    ),
    Patch(
        name="row-masks-ascend",
        reason="As row-masks, in vllm-ascend's worker.",
        module=_ASCEND_BATCH,
        touches=(f"{_ASCEND_BATCH}:InputBatch.add_request", f"{_ASCEND_BATCH}:InputBatch.swap_states"),
        installer="rows:install_ascend",
        upstream="none found",
    ),
    Patch(
        name="request-outputs",
        reason="An exception in one request's detokenizer, stop strings or log-probabilities ends all requests, and a "
        "request that the engine core ended has no error for its client.",
        module=_OUTPUTS,
        touches=(f"{_OUTPUTS}:OutputProcessor.process_outputs",),
        installer="ending:install_outputs",
        upstream="none found",
    ),
    Patch(
        name="request-sending",
        reason="A request that cannot be sent to the engine is answered with an empty message, and its other samples "
        "run on.",
        module=_ASYNC,
        touches=(f"{_ASYNC}:AsyncLLM.add_request", f"{_ASYNC}:EngineGenerateError"),
        installer="ending:install_sending",
        upstream="none found",
    ),
    Patch(
        name="statistics-errors",
        reason="A number of one request that a statistics logger refuses ends the task that answers all requests.",
        module=_LOGGERS,
        touches=(f"{_LOGGERS}:StatLoggerManager.record",),
        installer="ending:install_statistics",
        upstream="none found",
    ),
    Patch(
        name="stat-logger",
        reason="vLLM loads no stat loggers of plugins, so that /metrics tells neither kernels nor replays nor padding.",
        module=_LOGGERS,
        touches=(f"{_LOGGERS}:StatLoggerManager.__init__",),
        installer="metrics:install_stat_logger",
        upstream="vllm PR 22456, in 0.11.1",
    ),
    Patch(
        name="step-statistics",
        reason="The statistics that travel from the scheduler to /metrics do not say whether a step replayed a graph.",
        module=_SCHEDULER,
        touches=(f"{_SCHEDULER}:Scheduler.update_from_output",),
        installer="metrics:install_statistics",
        upstream="vllm PR 29825",
    ),
    Patch(
        name="step-report",
        reason="The worker does not tell which graph a step replayed, and how many of its rows were padding.",
        module=_RUNNER,
        touches=(f"{_RUNNER}:GPUModelRunner.execute_model",),
        installer="metrics:install_report",
        upstream="vllm PR 29825",
    ),
    Patch(
        name="step-report-ascend",
        reason="As step-report, in vllm-ascend's worker.",
        module=_ASCEND_RUNNER,
        touches=(f"{_ASCEND_RUNNER}:NPUModelRunner.execute_model",),
        installer="metrics:install_ascend_report",
        upstream="vllm-ascend PR 6331",
    ),
    Patch(
        name="cpu-grammar-bitmask",
        reason="xgrammar's CPU kernel takes float32 logits only, so that the first structured output in bfloat16 ends "
        "the engine.",
        module="vllm.v1.structured_output.utils",
        touches=(
            "vllm.v1.structured_output.utils:apply_grammar_bitmask",
            "vllm.v1.worker.gpu_model_runner:apply_grammar_bitmask",
        ),
        installer="structured_output:install_bitmask",
        upstream="vllm PR 32384",
    ),
    Patch(
        name="reasoning-end",
        reason="vLLM takes an earlier answer in the conversation for the end of the reasoning and binds the first "
        "token of a structured output, and it does not know the header `final <|constrain|>json`.",
        module=_REASONING,
        touches=(f"{_REASONING}:GptOssReasoningParser.is_reasoning_end",),
        installer="structured_output:install_reasoning_end",
        upstream="vllm PR 34454",
    ),
    Patch(
        name="admission",
        reason="vLLM's API key guards only what begins with /v1, by a path read from the client's Host header; "
        "fields that end the engine, hold it for hours or fail with 500 reach it unchecked.",
        module=_API_SERVER,
        touches=(f"{_API_SERVER}:build_app",),
        installer="admission:install_gate",
        upstream="CVE-2026-48746, fixed in 0.22.0; CVE-2026-34756 and others one by one",
    ),
    Patch(
        name="structure-verdicts",
        reason="vLLM parses a client's regular expressions, grammars and schemas in the server's own process, which "
        "some of them crash and others hold for ever.",
        module=_PROCESSOR,
        touches=(f"{_PROCESSOR}:Processor._validate_structured_output",),
        installer="admission:install_verdicts",
        upstream="CVE-2026-55574, fixed in 0.24.0",
    ),
    Patch(
        name="response-formats",
        reason="`response_format` of type text, and json_schema without a schema, end the engine; /v1/completions "
        "drops every format in silence, /v1/responses takes no json_object.",
        module=_PROTOCOL,
        touches=tuple(
            f"{_PROTOCOL}:{kind}.to_sampling_params"
            for kind in ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest")
        ),
        installer="admission:install_formats",
        upstream="vllm PR 26822",
    ),
    Patch(
        name="keys-unsaid",
        reason="vLLM writes the key of --api-key, and that of --hf-token, into its log at start.",
        module=_API_SERVER,
        touches=(f"{_API_SERVER}:log_non_default_args",),
        installer="unsaid:install",
        upstream="none found",
    ),
    Patch(
        name="harmony-vocabulary",
        reason="openai-harmony downloads its vocabulary when it is asked for its encoding, and a server without "
        "network does not start.",
        module=_ENGINE,
        touches=(f"{_ENGINE}:OpenAIServing.__init__", f"{_HARMONY}:get_encoding", f"{_CONTEXT}:get_encoding"),
        installer="vocabulary:install",
        upstream="vllm issues 22525 and 57099",
    ),
    Patch(
        name="harmony-parser",
        reason="openai-harmony's parser raises at tokens after the end of a turn (ignore_eos, so every load test) and "
        "at headers that the model spells badly, which fails the request with all its text.",
        module=_HARMONY,
        touches=tuple(f"{module}:get_streamable_parser_for_assistant" for module in (_HARMONY, _CONTEXT, _CHAT)),
        installer="reading:install_parser",
        upstream="vllm issues 23567 and 50690 (open)",
    ),
    Patch(
        name="harmony-channels",
        reason="vLLM tells reasoning from answer by counting messages: an answer without reasoning, or one that is cut "
        "off, becomes reasoning, and /v1/responses fails at a preamble.",
        module=_HARMONY,
        touches=(
            f"{_HARMONY}:parse_chat_output",
            f"{_CHAT}:parse_chat_output",
            f"{_REASONING}:parse_chat_output",
            f"{_HARMONY}:parse_output_message",
            f"{_RESPONSES}:parse_output_message",
            f"{_HARMONY}:parse_remaining_state",
            f"{_RESPONSES}:parse_remaining_state",
        ),
        installer="reading:install_channels",
        upstream="vllm issues 23694 and 24837",
    ),
    Patch(
        name="context-length",
        reason="A chat longer than the model's context is refused with 'max_tokens must be at least 1, got -874', "
        "which clients that shorten the history do not understand, and each refusal is a traceback in the log.",
        module=_ENGINE,
        touches=(
            f"{_ENGINE}:OpenAIServing.create_error_response",
            "vllm.entrypoints.renderer:CompletionRenderer._tokenize",
            "vllm.entrypoints.renderer:CompletionRenderer._create_tokens_prompt",
        ),
        installer="context_length:install",
        upstream="none found",
    ),
    Patch(
        name="harmony-rendering",
        reason="vLLM tells the model that there is no commentary channel, keeps reasoning that an answer has followed, "
        "and encodes with openai-harmony's tokenizer, which takes the square of the length of a run of one character.",
        module=_HARMONY,
        touches=(
            *(f"{module}:get_system_message" for module in (_HARMONY, _CHAT, _RESPONSES)),
            *(f"{module}:get_developer_message" for module in (_HARMONY, _CHAT, _RESPONSES)),
            *(f"{module}:render_for_completion" for module in (_HARMONY, _CHAT, _RESPONSES, _CONTEXT)),
        ),
        installer="prompt:install_rendering",
        upstream="openai/harmony issue 79 (open)",
    ),
    Patch(
        name="effort-words",
        reason="The reasoning effort `minimal`, which clients of newer models send, is refused by chat and an internal "
        "error of /v1/responses.",
        module=_PROTOCOL,
        touches=(f"{_PROTOCOL}:ChatCompletionRequest.__pydantic_fields__",),
        installer="prompt:install_effort",
        upstream="none found",
    ),
    Patch(
        name="tokenize-prompt",
        reason="/tokenize with messages renders the Jinja template, whose tokens are not those of the chat.",
        module=_TOKENIZATION,
        touches=(f"{_TOKENIZATION}:OpenAIServingTokenization.create_tokenize",),
        installer="prompt:install_tokenize",
        upstream="none found",
    ),
    Patch(
        name="chat-prompt",
        reason="vLLM renders a system message as a second system turn beside an empty developer turn, loses the name "
        "of a tool result's function, and leaves out the channel of earlier answers: no prompts that the model knows.",
        module=_CHAT,
        touches=(
            f"{_CHAT}:OpenAIServingChat._make_request_with_harmony",
            f"{_CHAT}:OpenAIServingChat.create_chat_completion",
        ),
        installer="prompt:install_chat",
        upstream="vllm PRs 28729 and 44330",
    ),
    Patch(
        name="responses-prompt",
        reason="vLLM drops the instructions of /v1/responses unless there are tools, and refuses the output of a "
        "function call that the client sends back.",
        module=_RESPONSES,
        touches=(
            f"{_RESPONSES}:parse_response_input",
            f"{_RESPONSES}:OpenAIServingResponses._construct_input_messages_with_harmony",
            f"{_RESPONSES}:OpenAIServingResponses.create_responses",
        ),
        installer="prompt:install_responses",
        upstream="vllm PR 44330",
    ),
    Patch(
        name="chat-stream-tokens",
        reason="A streamed chat drops text when the engine hands over several tokens at once, as under load.",
        module=_CHAT,
        touches=(f"{_CHAT}:OpenAIServingChat.__init__",),
        installer="streaming:install_chat",
        upstream="vllm issue 28635, PRs 26291 and 30437",
    ),
    Patch(
        name="chat-stream-channels",
        reason="A streamed chat is read by other rules than a whole one: it drops preambles and calls on the analysis "
        "channel, gives forced calls and stop strings as content, and breaks when max_tokens cuts a call off.",
        module=_CHAT,
        touches=(f"{_CHAT}:OpenAIServingChat.chat_completion_stream_generator",),
        installer="chat_stream:install_chat_channels",
        upstream="vllm issues 24837 and 37937, PR 45547 (open)",
    ),
    Patch(
        name="reasoning-name",
        reason="Clients look for message.reasoning, as OpenAI's own test does; 0.11.0 has reasoning_content alone.",
        module=_CHAT,
        touches=(f"{_CHAT}:ChatMessage",),
        installer="chat_stream:install_reasoning_name",
        upstream="vllm PR 27752",
    ),
    Patch(
        name="answer-stops",
        reason="A stop string ends a chat in its reasoning, or at the name of a channel, before there is an answer.",
        module="vllm.v1.engine.detokenizer",
        touches=("vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request",),
        installer="stops:install",
        upstream="none found",
    ),
    Patch(
        name="tool-answers",
        reason="With a tool parser a chat loses an answer that is cut off, rewrites arguments, and gives a call that "
        "tool_choice made the model write as content.",
        module=_TOOLS,
        touches=(f"{_TOOLS}:OpenAIToolParser.extract_tool_calls",),
        installer="tools:install_parser",
        upstream="vllm issue 22337",
    ),
    Patch(
        name="tools-without-flags",
        reason="Without --enable-auto-tool-choice a streamed chat has tool calls, and a whole one has their arguments "
        'as content; without --exclude-tools-when-tool-choice-none tool_choice "none" calls tools.',
        module=_CHAT,
        touches=(f"{_CHAT}:OpenAIServingChat.__init__",),
        installer="tools:install_default_parser",
        upstream="vllm issue 22578, PR 30867",
    ),
    Patch(
        name="tool-description",
        reason="A tool without a description is refused with 400, although OpenAI's specification asks for none.",
        module=_HARMONY,
        touches=(f"{_HARMONY}:create_tool_definition",),
        installer="tools:install_definition",
        upstream="vllm PR 44686",
    ),
    Patch(
        name="forced-call-schema",
        reason="A forced call of a function without parameters has no grammar; on /v1/responses none has one, and the "
        "format json_object is answered with 500.",
        module=_PROTOCOL,
        touches=(
            f"{_PROTOCOL}:ChatCompletionRequest._get_json_schema_from_tool",
            f"{_PROTOCOL}:ResponsesRequest.to_sampling_params",
        ),
        installer="tools:install_schema",
        upstream="vllm PR 44664 (open)",
    ),
    Patch(
        name="responses-tool-choice",
        reason='/v1/responses refuses every tool_choice but "auto".',
        module=_RESPONSES,
        touches=(f"{_RESPONSES}:OpenAIServingResponses._make_request_with_harmony",),
        installer="tools:install_responses_choice",
        upstream="vllm PR 44664 (open)",
    ),
    Patch(
        name="responses-stream-tokens",
        reason="A streamed response drops text when the engine hands over several tokens at once, as under load.",
        module=_RESPONSES,
        touches=(f"{_RESPONSES}:OpenAIServingResponses.__init__",),
        installer="streaming:install_responses",
        upstream="vllm PR 30437",
    ),
    Patch(
        name="responses-stream-end",
        reason="A streamed response that max_tokens cut off counts as completed; an output without tokens breaks it.",
        module=_CONTEXT,
        touches=(f"{_CONTEXT}:StreamingHarmonyContext.append_output",),
        installer="streaming:install_context",
        upstream="none found",
    ),
    Patch(
        name="responses-outputs",
        reason="The contexts of /v1/responses do not hand their outputs to the reading that responses-items uses.",
        module=_CONTEXT,
        touches=(f"{_CONTEXT}:HarmonyContext.append_output", f"{_CONTEXT}:StreamingHarmonyContext.append_output"),
        installer="responses:install_answers",
        upstream="none found",
    ),
    Patch(
        name="responses-items",
        reason="A streamed response has no function call, other ids than the final one, items numbered so that "
        "OpenAI's client fails, and not closed when they are cut off, and ends with response.completed in any case.",
        module=_RESPONSES,
        touches=tuple(
            f"{_RESPONSES}:OpenAIServingResponses.{name}"
            for name in (
                "_process_harmony_streaming_events",
                "_make_response_output_items_with_harmony",
                "responses_full_generator",
                "responses_stream_generator",
                "responses_background_stream_generator",
            )
        ),
        installer="responses:install_items",
        upstream="vllm issues 23222 and 45742, PRs 24317, 29947 and 45745",
    ),
    Patch(
        name="responses-nulls",
        reason="A request of /v1/responses with parallel_tool_calls, background or truncation null is not answered.",
        module=_RESPONSES,
        touches=(f"{_RESPONSES}:OpenAIServingResponses.create_responses",),
        installer="responses:install_nulls",
        upstream="none found",
    ),
    Patch(
        name="responses-store",
        reason="A response that is not stored is not found, without a word how responses are stored.",
        module=_RESPONSES,
        touches=(f"{_RESPONSES}:OpenAIServingResponses._make_not_found_error",),
        installer="responses:install_store",
        upstream="none found",
    ),
    Patch(
        name="server-end",
        reason="A signal ends the engine before the server, so that requests in flight are never answered and the "
        "server waits for them without a limit; the engine's death is exit status 0.",
        module=_LAUNCHER,
        touches=(f"{_LAUNCHER}:serve_http", f"{_LAUNCHER}:watchdog_loop"),
        installer="shutdown:install_server",
        upstream="none found",
    ),
    Patch(
        name="server-end-answers",
        reason="A request that the engine's end took is told as an internal error, and a streamed response breaks off.",
        module=_SERVER,
        touches=(f"{_SERVER}:build_app", f"{_SERVER}:_convert_stream_to_sse_events"),
        installer="shutdown:install_answers",
        upstream="none found",
    ),
    Patch(
        name="server-end-errors",
        reason="A stream or a response that the engine's end took tells a bad request, which no client sends again.",
        module=_ENGINE,
        touches=(f"{_ENGINE}:OpenAIServing.create_error_response",),
        installer="shutdown:install_errors",
        upstream="none found",
    ),
    Patch(
        name="server-port",
        reason="Two servers take the same port, and each gets some of the requests.",
        module=_SERVER,
        touches=(f"{_SERVER}:create_server_socket",),
        installer="shutdown:install_port",
        upstream="none found",
    ),
    Patch(
        name="engine-pulse",
        reason="The server knows neither whether its engine answers nor why it died, and an engine outlives a server "
        "that was killed.",
        module=_CORE,
        touches=(
            f"{_CORE}:EngineCoreProc.__init__",
            f"{_CORE}:EngineCoreProc._process_engine_step",
            f"{_CORE}:EngineCoreProc._send_engine_dead",
            f"{_CORE}:EngineCoreProc.run_busy_loop",
            f"{_CORE}:DPEngineCoreProc.run_busy_loop",
        ),
        installer="pulse:install_engine",
        upstream="none found",
    ),
    Patch(
        name="engine-pulse-client",
        reason="As engine-pulse, in the server's process.",
        module=_CLIENT,
        touches=(f"{_CLIENT}:MPClient.__init__",),
        installer="pulse:install_client",
        upstream="none found",
    ),
    Patch(
        name="health",
        reason="/health answers 200 for an engine that is stopped or hangs.",
        module=_ASYNC,
        touches=(f"{_ASYNC}:AsyncLLM.check_health",),
        installer="pulse:install_health",
        upstream="none found",
    ),
    Patch(
        name="worker-parent",
        reason="A worker that hangs in an operation outlives an engine that was killed, and keeps its device.",
        module=_EXECUTOR,
        touches=(f"{_EXECUTOR}:WorkerProc.__init__",),
        installer="pulse:install_worker",
        upstream="none found",
    ),
)


@dataclass(frozen=True)
class PatchStatus:
    """What became of a patch in this process."""

    patch: Patch
    state: Literal["applied", "waiting", "skipped"]  # waiting: its module is not imported in this process
    detail: str  # why skipped; empty otherwise


_lock = threading.Lock()
_status: dict[str, PatchStatus] = {}


def _vllm_release() -> tuple[str, str]:
    """The installed version of vLLM and the release that it is a build of ("" when it is none)."""
    version = installed_vllm()
    if version is None:
        return "not installed", ""
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?", version)
    return version, release[1] if release else ""


def _set(patch: Patch, state: Literal["applied", "waiting", "skipped"], detail: str = "") -> None:
    _status[patch.name] = PatchStatus(patch, state, detail)


def _install(patch: Patch, module: ModuleType) -> None:
    _set(patch, "applied")
    try:
        patch.install(module)
    except Exception as error:  # foreign code has changed in a way nobody foresaw: never break its import
        detail = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        _set(patch, "skipped", detail)
        logger.warning("npu-gptoss leaves out its patch %s: %s. Without it: %s", patch.name, detail, patch.reason)


def apply() -> None:
    """Put every patch in, now or with the import of its module. Calling it again does nothing more."""
    version, release = _vllm_release()
    skip = set(envs.get("NPU_GPTOSS_SKIP_PATCHES"))
    unknown = skip - {patch.name for patch in PATCHES}
    if unknown:
        raise InputError(
            f"NPU_GPTOSS_SKIP_PATCHES names {', '.join(sorted(unknown))}; the patches are "
            + ", ".join(patch.name for patch in PATCHES)
        )
    outside = []
    for patch in PATCHES:
        with _lock:
            if patch.name in _status:
                continue
            if patch.name in skip:
                _set(patch, "skipped", "NPU_GPTOSS_SKIP_PATCHES names it")
                continue
            if release not in patch.vllm:
                _set(patch, "skipped", f"vllm is {version}, the patch was written for {' and '.join(patch.vllm)}")
                outside.append(patch.name)
                continue
            _set(patch, "waiting")
        when_imported(patch.module, lambda module, patch=patch: _install(patch, module))
    if outside:
        logger.warning(
            "npu-gptoss leaves out its patches %s: vllm is %s, they were written for 0.11.0", outside, version
        )


def status() -> tuple[PatchStatus, ...]:
    """What became of each patch, in the order of the table; a patch that `apply` has not seen is waiting."""
    return tuple(_status.get(patch.name, PatchStatus(patch, "waiting", "apply() was not called")) for patch in PATCHES)


def require_essential() -> None:
    """At the model's construction: PatchError when a patch is left out without which it would be wrong in silence."""
    apply()
    missing = [entry for entry in status() if entry.patch.essential and entry.state == "skipped"]
    if missing:
        raise PatchError(
            "gpt-oss is not served without the patch "
            + "; ".join(f"{entry.patch.name} ({entry.detail}). {entry.patch.reason}" for entry in missing)
        )

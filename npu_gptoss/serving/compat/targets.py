"""Modules of vLLM and vllm-ascend whose names several repairs replace."""

from __future__ import annotations

ARGUMENTS = "vllm.engine.arg_utils"
SERVE = "vllm.entrypoints.cli.serve"
CONTEXT = "vllm.entrypoints.context"
HARMONY = "vllm.entrypoints.harmony_utils"
APP = "vllm.entrypoints.launchers.app"  # of 0.33; 0.23 has API_SERVER
APP_ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # of 0.33
LAUNCHER = "vllm.entrypoints.launcher"
API_SERVER = "vllm.entrypoints.openai.api_server"
SERVERS = (API_SERVER, "vllm.entrypoints.api_server")  # which have copies of serve_http
PROTOCOL = "vllm.entrypoints.openai.protocol"
BASE_PROTOCOL = "vllm.entrypoints.generate.base.protocol"  # of 0.33
ENGINE_PROTOCOL = "vllm.entrypoints.openai.engine.protocol"  # of 0.23
COMPLETION_SERVING = "vllm.entrypoints.openai.completion.serving"
CHAT_PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"  # of 0.23 and 0.33, with the five below
CHAT_SERVING = "vllm.entrypoints.openai.chat_completion.serving"
COMPLETION_PROTOCOL = "vllm.entrypoints.openai.completion.protocol"
RESPONSES_PROTOCOL = "vllm.entrypoints.openai.responses.protocol"
RESPONSES_SERVING = "vllm.entrypoints.openai.responses.serving"
RESPONSES_ROUTER = "vllm.entrypoints.openai.responses.api_router"  # of 0.23
CHAT = "vllm.entrypoints.openai.serving_chat"
ENGINE = "vllm.entrypoints.openai.serving_engine"
RESPONSES = "vllm.entrypoints.openai.serving_responses"
TOKENIZATION = "vllm.entrypoints.openai.serving_tokenization"
TOOLS_0_23 = "vllm.tool_parsers.openai_tool_parser"
TOOLS = "vllm.entrypoints.openai.tool_parsers.openai_tool_parser"
REASONING = "vllm.reasoning.gptoss_reasoning_parser"
PARSERS = "vllm.parser.abstract_parser"  # of 0.33
PARSING = "vllm.parser.harmony"  # of 0.33
SAMPLING_PARAMS = "vllm.sampling_params"
TOKENIZER = "vllm.transformers_utils.tokenizer"
SCHEDULER = "vllm.v1.core.sched.scheduler"
KV_CACHE = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
ASYNC = "vllm.v1.engine.async_llm"
CORE = "vllm.v1.engine.core"
CLIENT = "vllm.v1.engine.core_client"
OUTPUTS = "vllm.v1.engine.output_processor"
PROCESSOR = "vllm.v1.engine.processor"
INPUT_PROCESSOR = "vllm.v1.engine.input_processor"  # of 0.33
EXECUTOR = "vllm.v1.executor.multiproc_executor"
RENDERER_0_23 = "vllm.entrypoints.serve.render.serving"
BATCH_SERVING = "vllm.entrypoints.openai.chat_completion.batch_serving"  # of 0.33
SCORING = "vllm.entrypoints.generate.generative_scoring.serving"  # of 0.33
RENDERER = "vllm.renderers.online_renderer"  # of 0.33; the two below are of 0.23 too
HARMONY_UTILS = "vllm.entrypoints.openai.parser.harmony_utils"
RESPONSES_CONTEXT = "vllm.entrypoints.openai.responses.context"
ERRORS = "vllm.entrypoints.serve.exception_handling.error_response"  # of 0.33, with its copies
ERRORS_COPIES = (
    "vllm.entrypoints.serve",
    "vllm.entrypoints.serve.engine.serving",
    "vllm.entrypoints.serve.exception_handling.handlers.exception",
    "vllm.entrypoints.serve.exception_handling.handlers.vllm_error",
    "vllm.entrypoints.openai.models.serving",
    RENDERER,
)
ERRORS_0_23 = "vllm.entrypoints.serve.utils.error_response"  # with its copies
ERRORS_0_23_COPIES = (
    RENDERER_0_23,
    "vllm.entrypoints.serve.utils.server_utils",
    "vllm.entrypoints.openai.engine.serving",
    "vllm.entrypoints.openai.models.serving",
)
LAUNCHER_0_33 = "vllm.entrypoints.launchers.launcher"
MANAGERS = "vllm.v1.utils"
LOGGERS = "vllm.v1.metrics.loggers"
SAMPLING = "vllm.v1.sample.ops.topk_topp_sampler"
GRAMMARS = "vllm.v1.structured_output"
TOKENIZERS = "vllm.tokenizers.registry"  # of 0.23, with its copies
TOKENIZERS_COPIES = ("vllm.tokenizers", "vllm.renderers.registry", GRAMMARS)
BATCH = "vllm.v1.worker.gpu_input_batch"
RUNNER = "vllm.v1.worker.gpu_model_runner"
RUNNER_0_33 = "vllm.v1.worker.gpu.model_runner"  # the second runner, with the one below
BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"
ASCEND_BATCH = "vllm_ascend.worker.npu_input_batch"

"""Releases, and modules of vLLM and vllm-ascend whose names repairs replace."""

from __future__ import annotations

BOTH = "0.11 0.23"  # releases
NEWER = "0.23 0.33"
ALL = "0.11 0.23 0.33"

SERVE = "vllm.entrypoints.cli.serve"
LAUNCHER = "vllm.entrypoints.launchers.launcher"  # of 0.33, as the next
APP_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
API_SERVER = "vllm.entrypoints.openai.api_server"
SERVERS = (API_SERVER, "vllm.entrypoints.api_server")  # which have copies of serve_http
ENGINE = "vllm.entrypoints.openai.serving_engine"
SERVING_0_23 = "vllm.entrypoints.openai.engine.serving"
SERVING = "vllm.entrypoints.generate.base.serving"  # of 0.33
PARSERS = "vllm.parser.abstract_parser"  # of 0.33
SAMPLING_PARAMS = "vllm.sampling_params"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ASYNC = "vllm.v1.engine.async_llm"
CORE = "vllm.v1.engine.core"
RENDERER_0_23 = "vllm.entrypoints.serve.render.serving"
RENDERER = "vllm.renderers.online_renderer"  # of 0.33; the two below are of 0.23 too
LOGGERS = "vllm.v1.metrics.loggers"
WORKERS = "vllm.v1.executor.multiproc_executor"
RUNNER = "vllm.v1.worker.gpu_model_runner"
RUNNER_0_33 = "vllm.v1.worker.gpu.model_runner"  # the V2 runner, as the next
NGRAMS = "vllm.v1.spec_decode.ngram_proposer"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"

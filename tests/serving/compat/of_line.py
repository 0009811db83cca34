"""What the tests of repairs take from vLLM, by the line that is installed, and which files of tests run on which."""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.lines import here
from npu_gptoss.serving.lines.vllm import request_classes

LINE = here().name
OLD = LINE == "0.11"
# Files of this folder; what the others repair, vLLM 0.33 has mended itself or has not got (docs/upstream.md).
ON_0_33 = (
    *("test_admission.py", "test_compat.py", "test_grammars.py", "test_kernel_report.py"),
    *("test_metadata.py", "test_row_widths.py", "test_scheduler.py", "test_scoring.py", "test_structures.py"),
)
# Under vllm-ascend, in the environment of the emulated 910B's second stack.
ON_0_23 = (
    *("test_admission.py", "test_allowed_tokens.py", "test_checkpoint.py", "test_compat.py", "test_ends.py"),
    *("test_ends_0_23.py", "test_failed_requests_engine.py", "test_failed_requests_server.py", "test_grammars.py"),
    *("test_heartbeat.py", "test_kernel_report.py", "test_log_secrets.py", "test_structures.py"),
)
HERE = {"0.23": ON_0_23, "0.33": ON_0_33}.get(LINE)  # None: all but those of newer lines alone


def _request_class(name: str) -> Any:
    return next(cls for cls in request_classes() if cls.__name__ == name)


def chat_class() -> Any:
    return _request_class("ChatCompletionRequest")


def completion_class() -> Any:
    return _request_class("CompletionRequest")


def responses_class() -> Any:
    return _request_class("ResponsesRequest")


def parsed(*flags: str) -> Any:
    """The arguments of a server."""
    if LINE == "0.33":
        from vllm.entrypoints.common.cli_args import make_arg_parser
    else:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    if OLD:
        from vllm.utils import FlexibleArgumentParser
    else:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    return make_arg_parser(FlexibleArgumentParser()).parse_args(flags)


def application(arguments: Any) -> Any:
    """vLLM's application, without state."""
    if LINE != "0.33":
        from vllm.entrypoints.openai import api_server

        return api_server.build_app(arguments, *(() if OLD else (("generate",), None)))
    from vllm.entrypoints.launchers.api_server import entry

    return entry.build_app(arguments, ("generate",), None)


def input_processor() -> Any:
    """The class that makes a request for the engine core of what came in."""
    if OLD:
        from vllm.v1.engine.processor import Processor

        return Processor
    from vllm.v1.engine.input_processor import InputProcessor

    return InputProcessor


def validate(params: Any, model_config: Any, structured_outputs_config: Any) -> None:
    """vLLM's validation of SamplingParams with a structure, with what repairs it."""
    if OLD:
        import types

        from vllm.v1.engine.processor import Processor

        reader = types.SimpleNamespace(structured_outputs_config=structured_outputs_config, model_config=model_config)
        Processor._validate_structured_output(reader, params)
    else:
        configs = (model_config, structured_outputs_config)[LINE == "0.23" :]
        params._validate_structured_outputs(*configs, object())

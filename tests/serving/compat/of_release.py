"""Names of vLLM that differ between releases, and the test files that run on each release."""

from __future__ import annotations

import functools
from typing import Any

from npu_gptoss.serving.releases import here
from npu_gptoss.serving.releases.vllm import ChatCompletionRequest

LINE = here().name
OLD = LINE == "0.11"
# Files of this folder. The defects of the other files are gone in vLLM 0.33 (docs/upstream.md).
ON_0_33 = (
    *("test_admission.py", "test_compat.py", "test_control_tokens.py", "test_forms.py", "test_grammars.py"),
    *("test_kernel_report.py", "test_metadata.py", "test_row_widths.py", "test_scheduler.py", "test_structures.py"),
    *("test_ends.py", "test_failed_steps.py", "test_heartbeat.py", "test_restart.py", "test_start_ends.py"),
    "test_ngrams.py",
)
# Under vllm-ascend, in the environment of the emulated 910B's second stack.
ON_0_23 = (
    *("test_admission.py", "test_checkpoint.py", "test_compat.py", "test_control_tokens.py", "test_ends.py"),
    *("test_failed_requests_engine.py", "test_failed_requests_server.py", "test_forms.py", "test_grammars.py"),
    *("test_heartbeat.py", "test_kernel_report.py", "test_restart.py", "test_rows.py", "test_start_ends.py"),
    *("test_failed_steps.py", "test_structures.py", "test_ngrams.py"),
)
HERE = {"0.23": ON_0_23, "0.33": ON_0_33}.get(LINE)  # None: all files except those for newer releases only


def chat_class() -> Any:
    return ChatCompletionRequest


def completion_class() -> Any:
    if OLD:
        from vllm.entrypoints.openai.protocol import CompletionRequest
    else:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    return CompletionRequest


@functools.cache
def server_parser() -> Any:
    """Returns the parser of `vllm serve`."""
    if LINE == "0.33":
        from vllm.entrypoints.common.cli_args import make_arg_parser
    else:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    if OLD:
        from vllm.utils import FlexibleArgumentParser
    else:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    return make_arg_parser(FlexibleArgumentParser())


def parsed(*flags: str) -> Any:
    """Returns the parsed arguments of a server."""
    return server_parser().parse_args(list(flags))


def application(arguments: Any) -> Any:
    """Returns vLLM's application, without state."""
    if LINE != "0.33":
        from vllm.entrypoints.openai import api_server

        return api_server.build_app(arguments, *(() if OLD else (("generate",), None)))
    from vllm.entrypoints.launchers.api_server import entry

    return entry.build_app(arguments, ("generate",), None)


def input_processor() -> Any:
    """Returns the class that turns inputs into requests for the engine core."""
    if OLD:
        from vllm.v1.engine.processor import Processor

        return Processor
    from vllm.v1.engine.input_processor import InputProcessor

    return InputProcessor


def validate(params: Any, model_config: Any, structured_outputs_config: Any) -> None:
    """Runs vLLM's validation of SamplingParams with a structure, including its repair."""
    if OLD:
        import types

        from vllm.v1.engine.processor import Processor

        reader = types.SimpleNamespace(structured_outputs_config=structured_outputs_config, model_config=model_config)
        Processor._validate_structured_output(reader, params)
    else:
        configs = (model_config, structured_outputs_config)[LINE == "0.23" :]
        params._validate_structured_outputs(*configs, object())

"""Names of vLLM that differ between releases, and the test files that run on each release."""

from __future__ import annotations

import functools
from typing import Any

from npu_gptoss.serving.releases import here
from tests.serving.conftest import found

LINE = here().name
OLD = LINE == "0.11"
# Files of this folder. The defects of the other files are gone in vLLM 0.33 (docs/upstream.md).
ON_0_33 = (
    *("test_admission.py", "test_compat.py", "test_control_tokens.py", "test_forms.py", "test_grammars.py"),
    *("test_kernel_report.py", "test_row_widths.py", "test_scheduler.py", "test_structures.py"),
    *(
        "test_ends.py",
        "test_failed_steps.py",
        "test_heartbeat.py",
        "test_restart.py",
        "test_start_ends.py",
        "test_tls.py",
    ),
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


def completion_class() -> Any:
    return found("CompletionRequest", "vllm.entrypoints.openai.completion.protocol", "vllm.entrypoints.openai.protocol")


@functools.cache
def server_parser() -> Any:
    """Returns the parser of `vllm serve`."""
    make = found("make_arg_parser", "vllm.entrypoints.common.cli_args", "vllm.entrypoints.openai.cli_args")
    return make(found("FlexibleArgumentParser", "vllm.utils.argparse_utils", "vllm.utils")())


def parsed(*flags: str) -> Any:
    """Returns the parsed arguments of a server."""
    return server_parser().parse_args(list(flags))


def application(arguments: Any) -> Any:
    """Returns vLLM's application, without state."""
    build = found("build_app", "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
    return build(arguments, *(() if OLD else (("generate",), None)))


def input_processor() -> Any:
    """Returns the class that turns inputs into requests for the engine core."""
    return found("InputProcessor", "vllm.v1.engine.input_processor") or found("Processor", "vllm.v1.engine.processor")


def validate(params: Any, model_config: Any, structured_outputs_config: Any) -> None:
    """Runs vLLM's validation of SamplingParams with a structure, including its repair."""
    if OLD:
        import types

        reader = types.SimpleNamespace(structured_outputs_config=structured_outputs_config, model_config=model_config)
        input_processor()._validate_structured_output(reader, params)
    else:
        configs = (model_config, structured_outputs_config)[LINE == "0.23" :]
        params._validate_structured_outputs(*configs, object())

"""What the tests of repairs take from vLLM, by the line that is installed, and which files of tests run on which."""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.lines import here
from npu_gptoss.serving.lines.vllm import request_classes

LINE = here().name
OLD = LINE == "0.11"
# Files of this folder; what the others repair, vLLM 0.33 has mended itself or has not got (docs/upstream.md).
ON_0_33 = (
    *("test_admission.py", "test_compat.py", "test_encoding.py", "test_grammars.py", "test_shapes.py"),
    "test_launches.py",
    "test_running.py",
    "test_structures.py",
    "test_tables.py",
    "test_unchanged.py",
)
# Under vllm-ascend, in the environment of the emulated 910B's second stack.
ON_0_23 = (
    *("test_admission.py", "test_channels.py", "test_checkpoint.py", "test_compat.py", "test_encoding.py"),
    *(
        "test_barrier.py",
        "test_ending.py",
        "test_ends.py",
        "test_ends_0_23.py",
        "test_fields_0_23.py",
        "test_grammars.py",
        "test_pulse.py",
        "test_responses_0_23.py",
    ),
    *("test_rows.py", "test_structures.py", "test_unsaid.py"),
)
HERE = {"0.23": ON_0_23, "0.33": ON_0_33}.get(LINE)  # None: all but those of newer lines alone


HARMONY = "vllm.entrypoints.harmony_utils" if OLD else "vllm.entrypoints.openai.parser.harmony_utils"


def chat_class() -> Any:
    return request_classes()["/v1/chat/completions"][0]


def completion_class() -> Any:
    return request_classes()["/v1/completions"][0]


def responses_class() -> Any:
    return request_classes()["/v1/responses"][0]


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
    from vllm.entrypoints.launchers import app

    return app.build_app(arguments, ("generate",), None)


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

"""`vllm run-batch`: its files are checked before an engine starts, as vLLM 0.33 checks them.

One line that is no request ends the batch on every release, before any is computed: vLLM's own choice.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from npu_gptoss.errors import InputError, short
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import BOTH

URLS = ("http://", "https://")


@repair("batch-file", "vllm.entrypoints.openai.run_batch:main", releases=BOTH, until="0.33")
def install(module: ModuleType) -> None:
    """`vllm run-batch` computes the whole batch before it finds that its answers cannot be written, and does not say
    which line is no request."""
    expect_source(
        module.run_batch,
        "(await read_file(args.input_file)).strip().split(",
        "BatchRequestInput.model_validate_json(request_json)",
        "await write_file(args.output_file, responses, args.output_tmp_dir)",
    )

    @around(module, "main")
    async def main(original: Original, args: Namespace) -> None:
        if not args.output_file.startswith(URLS):
            check_output(Path(args.output_file))
        if not args.input_file.startswith(URLS):
            check_lines(Path(args.input_file), module.BatchRequestInput)
        await original(args)


def check_output(path: Path) -> None:
    """Raises InputError if no file can be written there."""
    place = path if path.exists() else path.absolute().parent
    if path.is_dir():
        why = "a folder"
    elif not place.exists():
        why = f"no folder {short(str(place))}"
    elif not os.access(place, os.W_OK):
        why = "no right to write there"
    else:
        return
    said = f"--output-file {short(str(path))}: expected a file to write, got {why}. Make it, or name another file."
    raise InputError(said, field="--output-file")


def check_lines(path: Path, request: type) -> None:
    """Raises InputError for the first line that is no request of vLLM's class."""
    from npu_gptoss.serving.openai.errors import misread

    option = f"--input-file {short(str(path))}"
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    request.model_validate_json(line.strip())
                except Exception as error:  # a validator of vLLM's raises KeyError without a url
                    errors = getattr(error, "errors", None)
                    why = misread(errors()).message if callable(errors) else f"{type(error).__name__}: {error}."
                    said = f"{option}, line {number}: expected a request, got: {short(why, 400)} Mend or delete it."
                    raise InputError(said, field="--input-file") from None
    except (OSError, UnicodeError) as error:
        said = f"{option}: expected a file in UTF-8, got: {getattr(error, 'strerror', None) or error}. Check its path."
        raise InputError(said, field="--input-file") from None

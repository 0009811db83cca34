"""The files of `vllm run-batch`: checked before the engine starts, as 0.33 does, and answers are never lost."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from npu_gptoss.errors import InputError, quoted, short
from npu_gptoss.files import mode_of
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import BOTH


@repair("batch-file", "vllm.entrypoints.openai.run_batch:main write_file", releases=BOTH, until="0.33")
def install(module: ModuleType) -> None:
    """A bad line ends `vllm run-batch` late and unnamed; answers that cannot be written are lost."""
    expect_source(module.run_batch, "BatchRequestInput.model_validate_json(request_json)")

    @around(module, "main")
    async def main(original: Original, args: Any) -> None:
        if not args.output_file.startswith(("http://", "https://")) and not _takes(args.output_file):
            said = f"--output-file {quoted(args.output_file)} cannot be written: name another."
            raise InputError(said, field="--output-file")
        if stat.S_ISREG(mode_of(Path(args.input_file))):  # a pipe can be read once, an address later
            _check(module, args.input_file)
        await original(args)

    @around(module, "write_file")
    async def write_file(original: Original, path_or_url: str, batch_outputs: list[Any], *more: Any) -> None:
        try:
            await original(path_or_url, batch_outputs, *more)
        except Exception as error:
            kept = Path(tempfile.mkdtemp(prefix="vllm-run-batch-")) / "answers.jsonl"
            await module.write_local_file(str(kept), batch_outputs)
            said = f"--output-file {quoted(path_or_url)}: {error}. All answers are in {kept}."
            raise InputError(said, field="--output-file") from error


def _takes(name: str) -> bool:
    """Tells whether a file can be written; vLLM makes no folder."""
    path = Path(name)
    mode = mode_of(path)
    return not stat.S_ISDIR(mode) and os.access(path if mode else path.absolute().parent, os.W_OK)


def _check(module: ModuleType, name: str) -> None:
    """Raises InputError with the number of the first line that vLLM cannot read."""
    with Path(name).open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    module.BatchRequestInput.model_validate_json(line.strip().encode(errors="surrogateescape"))
            except (ValueError, KeyError) as error:
                first = error.errors()[0] if isinstance(error, ValueError) else {"loc": error.args, "msg": "is missing"}
                why = ": ".join([*map(str, first["loc"][-1:]), first["msg"]])
                said = f"{name}, line {number}: {why}. Correct or leave out that line: {short(line.strip())}"
                raise InputError(said, field="--input-file") from None

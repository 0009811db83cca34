"""Checks that a checkpoint is complete, and names its format, from the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok
from npu_gptoss.errors import InputError

TOKENIZER = "tokenizer.json"


def checkpoint(model: Path | None) -> Iterator[Finding]:
    """Needs torch. Every shard that the index names, every tensor of the config, shapes, dtypes and file sizes."""
    if model is None:
        yield not_applicable("No --model DIR is given.")
        return
    from npu_gptoss.model.check import check_directory
    from npu_gptoss.model.checkpoint import check_checkpoint

    try:
        config = check_directory(model, text=(model / TOKENIZER).is_file())
        tensors = check_checkpoint(model, config)
    except InputError as error:
        yield failed(*_split(error))
        return
    files = len({tensor.file for tensor in tensors.values()})
    size = sum(tensor.size for tensor in tensors.values())
    kinds = {tensor.dtype_name for tensor in tensors.values() if not tensor.name.endswith(("_blocks", "_scales"))}
    experts = "MXFP4 experts" if config.quantization else "experts in the BF16 layout"
    if not (model / TOKENIZER).is_file():
        remedy = f"Copy {TOKENIZER} from the original checkpoint: requests arrive as text."
        yield failed(f"{model} has its weights, but no {TOKENIZER}.", remedy)
    yield ok(
        f"{model} is complete: {config.num_hidden_layers} layers of {config.num_local_experts} experts, {experts}, the "
        f"rest in {' and '.join(sorted(kinds))}; {len(tensors)} tensors in {files} file{'s' if files > 1 else ''}, "
        f"{size / 1e9:.2f} GB."
    )


def _split(error: InputError) -> tuple[str, str]:
    """(sentence, remedy) of an InputError: without a Refusal the remedy is its last sentence."""
    text = str(error)
    if error.refusals:
        return text.removesuffix(f"; {error.refusals[-1].remedy}.") + ".", error.refusals[-1].advice
    head, separator, last = text.rpartition(". ")
    return (f"{head}.", last) if separator else (text, "Check that config.json and the weights belong together.")

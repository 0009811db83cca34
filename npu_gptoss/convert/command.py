"""Convert a gpt-oss checkpoint of any tool to the official layout, MXFP4 or BF16, and merge LoRA adapters into it.

It streams a layer at a time, goes on after an interruption, and OUT appears whole or not at all.
"""

from __future__ import annotations

import argparse
import gc
import os
from dataclasses import replace
from pathlib import Path

import torch

from npu_gptoss.convert import lora
from npu_gptoss.convert.source import Source, open_source
from npu_gptoss.convert.write import Job, convert
from npu_gptoss.engine.engine import Engine
from npu_gptoss.errors import InputError
from npu_gptoss.model.check import check_directory
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.model.safetensors_reader import listed
from npu_gptoss.tokenizer import FILE_NAME, load_tokenizer

FORMATS = ("mxfp4", "bf16")
PROBE = (
    "The water in the river was cold and clear. Two times three is six, and the capital of France is Paris. "
    "def add(a, b): return a + b"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="a checkpoint's directory, as a tool wrote it")
    parser.add_argument("output", type=Path, metavar="OUT", help="where to write; must be new or empty")
    parser.add_argument("--to", choices=FORMATS, help="of the experts (default: as they are; bf16 with --lora)")
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="DIR[:weight]",
        help="an adapter of peft to merge; may be repeated",
    )
    parser.add_argument("--no-probe", action="store_true", help="do not compare the first tokens of both checkpoints")


def run(args: argparse.Namespace) -> int:
    # behind links, and from the root: OUT may be the folder that this process runs in, which is replaced
    source, out = open_source(Path(os.path.realpath(args.input))), Path(os.path.realpath(args.output))
    adapters = open_adapters(source, args.lora)
    to = args.to or ("bf16" if adapters or not source.config.quantization else "mxfp4")
    job = Job(source, out, to, adapters)
    there = convert(job)
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file()) / 1e9
    print(f"{args.output}: {to}, {size:.2f} GB" + (f"; {there} shards were there already" if there else ""))
    for note in source.notes:
        print(note)
    if not (out / FILE_NAME).is_file():
        print(f"OUT has no {FILE_NAME}, as IN. Copy that of gpt-oss to it, which a server needs.")
    for adapter in adapters:
        print(
            f"{adapter.directory}: {len(adapter.deltas | adapter.replaced)} tensors merged, weight {adapter.weight:g}"
        )
    width = max(map(len, job.changes), default=0)
    for kind, change in job.changes.items():
        print(f"{kind:<{width}}  relative error {change.relative:.3e}, largest {change.largest:.3e}")
    if not job.changes:
        print("no value changed")
    if not args.no_probe:
        print(probe(source.directory, out))
    return 0


def open_adapters(source: Source, asked: list[str]) -> list[lora.Adapter]:
    """The adapters of the command line, behind the one that lies unmerged in the checkpoint. Raises InputError."""
    config, specs = source.config, expected_tensors(replace(source.config, quantization=None))
    own = [lora.adapter_of(source.directory, source.lora, 1.0, config, specs)] if source.lora else []
    given = ((Path(os.path.realpath(directory)), weight) for directory, weight in map(lora.parse, asked))
    adapters = own + [lora.open_adapter(*each, config, specs) for each in given]
    lora.check_together(adapters)
    source.notes.extend(filter(None, (other_tokens(source, adapter.directory) for adapter in adapters)))
    return adapters


def other_tokens(source: Source, adapter: Path) -> str | None:
    """A note where the adapter's folder has tokens that IN's tokenizer lacks, which OUT gets; else None."""
    theirs = adapter / FILE_NAME
    ours = next((file for folder in source.folders if (file := folder / FILE_NAME).is_file()), theirs)
    if not theirs.is_file() or theirs.samefile(ours):
        return None
    more = load_tokenizer(theirs).get_vocab().items() - load_tokenizer(ours).get_vocab().items()
    names = listed(name for name, _ in sorted(more, key=lambda token: token[1]))
    return (
        f"{theirs} has tokens that OUT's lacks: {names}. If the adapter needs them, copy it to OUT." if more else None
    )


def probe(before: Path, after: Path) -> str:
    """Compares the likeliest next tokens of both checkpoints by the offline engine; a sentence where one cannot run."""
    logits: list[torch.Tensor] = []
    for directory in (before, after):
        try:
            config = check_directory(directory, text=False)
            engine = Engine(directory, device="auto", num_blocks=16, max_batch_size=1, graphs="none")
            text = (
                engine.text.encode(PROBE)
                if engine.text.available
                else [7 * i % config.vocab_size for i in range(1, 65)]
            )
            logits.append(engine.logits(text))
        except InputError as error:
            if directory == before and error.field != "memory":
                continue  # of another tool: only the result can run
            return f"probe: not done: {error}"
        finally:
            engine = None
            gc.collect()
    best = [each.argmax(dim=-1) for each in logits]
    if len(logits) < 2:
        return f"probe: the result computes; the likeliest next tokens are {best[0][-8:].tolist()}"
    same, count = int((best[0] == best[1]).sum()), len(best[0])
    change = (logits[0].log_softmax(-1) - logits[1].log_softmax(-1)).gather(1, best[0][:, None]).abs().max()
    return (
        f"probe: {same} of {count} likeliest next tokens are the same; log-probabilities differ by up to {change:.3f}"
    )

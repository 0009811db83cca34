"""Say what is installed here, whether it fits, and whether it computes what gpt-oss needs; each with its remedy.

Exits with 1 when a check failed, with 0 when all is well or there are warnings only. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from npu_gptoss import __version__
from npu_gptoss.doctor import cann, checks, exposure, graphs, memory, plugins, probe, record, stack, vocabulary
from npu_gptoss.doctor.findings import Finding, as_json, exit_code, guarded, in_words
from npu_gptoss.doctor.machine import GIB, Machine
from npu_gptoss.model.device_memory import AUTO, VARIABLE, buffsize
from npu_gptoss.nominal import MEMORY


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _card(text: str) -> int:
    """Bytes of a card's memory, by the card's name or in GiB."""
    if text in MEMORY:
        return MEMORY[text]
    try:
        return _positive(text) * GIB
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(MEMORY)} or GiB, got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/doctor.md)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint to look at, and to fit into memory")
    parser.add_argument(
        "--max-model-len", type=_positive, default=16384, metavar="N", help="tokens of context to fit (default 16384)"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=_positive, default=1, metavar="N", help="cards for the model (default 1)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_positive,
        default=256,
        metavar="N",
        help="requests at once, for the graphs that are captured (default 256, vLLM's)",
    )
    parser.add_argument(
        "--card-memory",
        type=_card,
        metavar="CARD",
        help=f"reckon memory for cards that are not here: {', '.join(MEMORY)} (64 GB as sold), or GiB",
    )


def diagnose(
    here: Machine,
    model: Path | None,
    *,
    max_model_len: int,
    tensor_parallel_size: int,
    max_num_seqs: int,
    card_memory: int | None = None,
) -> list[Finding]:
    """Every finding, in the order of `checks.CHECKS`. Never raises: a check that breaks is a finding."""
    found: list[Finding] = []
    for check, function, *arguments in (
        ("machine", stack.machine, here),
        ("python", stack.python, here),
        ("torch", stack.torch, here),
        ("torch-npu", stack.torch_npu, here),
        ("vllm", stack.vllm, here),
        ("vllm-ascend", stack.vllm_ascend, here),
        ("cann", cann.toolkit, here),
        ("nnal", cann.nnal, here),
        ("driver", cann.driver, here),
        ("device-files", cann.device_files, here),
        ("plugin", plugins.discovered, here),
        ("plugin-order", plugins.order, here),
        ("platform-plugin", plugins.platforms, here),
        ("registration", plugins.registration, here),
        ("variables", exposure.variables, here),
        ("exposure", exposure.exposure, here),
        ("vocabulary", vocabulary.vocabulary, here, model),
        ("graphs", graphs.graphs, here, model, tensor_parallel_size, max_num_seqs),
    ):
        found += guarded(check, function, *arguments)
    device = None

    def probed() -> list[Finding]:
        nonlocal device
        result = probe.probe(here, model)
        device = result.device
        return result.findings

    found += guarded("torch-works", probed)
    found += guarded("self-test-record", record.remembered, here, found)
    found += guarded(
        "memory",
        memory.memory,
        *(model, max_model_len, tensor_parallel_size, device, card_memory, buffsize(here.environ)),
        *(here.version("triton-ascend") is not None, here.environ.get(VARIABLE) or AUTO),
    )
    return sorted(found, key=lambda finding: checks.CHECKS.index(finding.check))


def run(args: argparse.Namespace) -> int:
    here = Machine()
    if sys.stderr.isatty():
        print("looking; vLLM and torch are loaded for it, which takes a minute …", file=sys.stderr)
    findings = diagnose(
        here,
        args.model,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        max_num_seqs=args.max_num_seqs,
        card_memory=args.card_memory,
    )
    if args.json:
        print(json.dumps(as_json(findings, __version__, here.platform()[0]), indent=1))
    else:
        print(f"npu-gptoss doctor {__version__}")
        print(in_words(findings, checks.GROUPS))
    return exit_code(findings)

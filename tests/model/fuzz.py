"""Corrupt checkpoints through `npu-gptoss generate` or `vllm serve`, each in a forked child with limits.

    python -m tests.model.fuzz --count 2000 --seed 20261122
    python -m tests.model.fuzz --count 60 --through serve

The parent imports everything once, so that a child takes a fraction of a second. A child has a limit of time and of
memory. Outcomes: `refused` (one readable sentence), `right` (the tokens of the pristine checkpoint), `other numbers`
(tokens differ, where the corruption changed numbers that no check can know to be wrong), `starts` (serve: everything is
checked, the engine would be forked next), and the failures: hang, memory, traceback, unreadable, wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.model.corrupt import PRISTINE, Case, case, write_pristine

GOOD = ("refused", "right", "other numbers", "starts")
PATIENCE = 25  # seconds, after which a child counts as hanging; what is slower than SLOW is reported
SLOW = 5
MEMORY = 3 << 30  # bytes of address space above the parent's
STARTS = 77  # exit status of a server that would fork its engine now


@dataclass(frozen=True)
class Outcome:
    case: Case
    did: str
    kind: str
    seconds: float
    text: str  # what the child wrote to standard error


def generate(directory: Path) -> int:
    from npu_gptoss import cli

    return cli.main(["generate", "--model", str(directory), "--prompt", "alpha beta", "--max-tokens", "6", "--json"])


def serve(directory: Path) -> int:
    """`vllm serve` up to the point where it would fork the engine."""
    from vllm.entrypoints.cli import main
    from vllm.v1.engine.core_client import EngineCoreClient

    from npu_gptoss.serving.compat.start import ends

    def would_fork(*_: object, **__: object) -> None:
        os._exit(STARTS)

    EngineCoreClient.make_async_mp_client = staticmethod(would_fork)
    sys.argv = ["vllm", "serve", str(directory), "--host", "127.0.0.1", "--port", "0", "--max-model-len", "1024"]
    ends.install()
    main.main()
    return 0


def prepare(through: str) -> Callable[[Path], int]:
    """Imports the command's modules, so that children need not."""
    if through == "generate":
        importlib.import_module("npu_gptoss.engine.command")
        return generate
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    for name in ("cli.main", "cli.openai", "cli.serve", "cli.benchmark.main", "cli.run_batch", "openai.api_server"):
        importlib.import_module(f"vllm.entrypoints.{name}")
    importlib.import_module("vllm.v1.engine.async_llm")
    load_general_plugins()
    for name in ("AutoConfig", "AutoTokenizer", "GenerationConfig", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    from vllm import ModelRegistry

    # in a process of its own, which takes seconds, and is remembered
    architecture = "GptOssForCausalLM"
    registry._try_inspect_model_cls(architecture, ModelRegistry.models[architecture])
    return serve


def run(one: Case, action: Callable[[Path], int], pristine: Path, scratch: Path) -> Outcome:
    """Corrupts a copy and lets a child have it."""
    directory = scratch / f"case-{one.number}"
    shutil.copytree(pristine / one.pristine, directory)
    try:
        did = one.apply(directory)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(action, directory, scratch)
        status = _wait(pid, started + PATIENCE)
        seconds = time.monotonic() - started
        out, err = ((scratch / name).read_text(errors="replace") for name in ("out", "err"))
        kind = _kind(one, status, out, err, pristine)
        return Outcome(one, did, kind, seconds, err)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _child(action: Callable[[Path], int], directory: Path, scratch: Path) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        code = action(directory)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _wait(pid: int, end: float) -> int | None:
    """The status; None: it hung and was ended."""
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _kind(one: Case, status: int | None, out: str, err: str, pristine: Path) -> str:
    if status is None:
        return "hang"
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    if "can't allocate memory" in err or "MemoryError" in err:
        return "memory"
    if "Traceback" in err or "panicked" in err:
        return "traceback"
    if not readable(err):
        return "unreadable"
    code = os.WEXITSTATUS(status)
    if code == STARTS:
        return "starts"
    if code:
        sentences = [
            line for line in err.splitlines() if re.search(r"(npu-gptoss generate|vllm serve): (?!loaded )\S", line)
        ]
        return "refused" if len(sentences) == 1 else "unreadable"
    tokens = json.loads(out)[0]["token_ids"]
    wanted = json.loads((pristine / f"{one.pristine}.json").read_text())
    return "right" if tokens == wanted else "other numbers" if one.silent else "wrong"


def readable(text: str) -> bool:
    """Lines that a terminal takes and a reader reads. Colours of vLLM's log do not count."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return all(len(line) < 3000 and all(c.isprintable() or c == "\t" for c in line) for line in text.split("\n"))


@contextlib.contextmanager
def ready(through: str) -> Iterator[tuple[Callable[[Path], int], Path, Path]]:
    """Yields the arguments of `run`: the action, the pristine checkpoints with their tokens, a scratch folder."""
    logging.disable(logging.NOTSET)
    torch.set_num_threads(1)  # a forked child has none of its parent's threads, and would wait for them
    action = prepare(through)
    with tempfile.TemporaryDirectory() as folder:
        pristine, scratch = Path(folder) / "pristine", Path(folder) / "scratch"
        scratch.mkdir()
        for kind in PRISTINE:
            write_pristine(pristine / kind, kind)
            if through == "generate":
                (pristine / f"{kind}.json").write_text(json.dumps(_tokens(pristine / kind, scratch)))
        yield action, pristine, scratch


def _tokens(directory: Path, scratch: Path) -> list[int]:
    pid = os.fork()
    if pid == 0:
        _child(generate, directory, scratch)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, (scratch / "err").read_text()
    return json.loads((scratch / "out").read_text())[0]["token_ids"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--through", choices=("generate", "serve"), default="generate")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: today's date")
    parser.add_argument("--seconds", type=float, default=500, help="stop after this long")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.count} cases", flush=True)
    kinds: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    with ready(options.through) as (action, pristine, scratch):
        end = time.monotonic() + options.seconds
        for number in range(options.count):
            if time.monotonic() > end:
                print(f"stopped before case {number}: {options.seconds:.0f} s are over")
                break
            outcome = run(case(options.seed, number), action, pristine, scratch)
            kinds[outcome.kind] += 1
            slowest = max(slowest, outcome.seconds)
            if outcome.kind not in GOOD or outcome.seconds > SLOW:
                did = ascii(outcome.did)[:200]
                print(f"{number} {outcome.case.group}: {did}: {outcome.kind}, {outcome.seconds:.1f} s")
                print("    " + ascii(outcome.text.strip()[-1500:]), flush=True)
    print(f"{kinds.total()} checkpoints: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"slowest {slowest:.1f} s, most memory {peak} MiB")
    return int(not kinds.keys() <= set(GOOD))


if __name__ == "__main__":
    sys.exit(main())

"""What a step that verifies k drafts costs inside vLLM, and what speed published acceptance would make of it.

    python research/eagle3_head.py HEAD --model DIR
    python research/verify_cost.py --model DIR --head HEAD --out FILE

Needs vLLM 0.33 and a GPU. DIR: random weights of full size (`npu-gptoss bench checkpoint DIR --size 20b`). A random
head is hardly ever right, so a step brings each request one token, and its time stands beside that of a plain step.
Of one engine (ours, then stock: NPU_GPTOSS=0), a process for each k starts; once all are ready they are measured one
after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from research.children import Child, inside

ENGINES = {"ours": {}, "stock": {"NPU_GPTOSS": "0"}}
PUBLISHED_DRAFTS, PUBLISHED_TOKENS = 5, (2.68, 3.55)  # a step, with RedHatAI/gpt-oss-20b-speculator.eagle3, by task
WARM_UP_STEPS, CONTEXT = 8, 1024
START_SECONDS, POINT_SECONDS = 400, 90
DEFINITIONS = {
    "step_ms": "mean milliseconds between consecutive outputs of the engine in which every request of the batch has a "
    f"new token, after {WARM_UP_STEPS} that do not count; greedy; drafting is in it; step_median_ms alike",
    "verify_ms": "the same with the head left out and the same drafts proposed at each step: it verifies k drafts",
    "tokens_a_step": "new tokens of a request in such a step: 1 where no draft is accepted",
    "whole_graphs": "of such steps, the share that replayed one graph of batch * (1 + k) rows",
    "context": f"{CONTEXT} random tokens of each prompt",
    "relative": "step_ms over that of the same engine and batch without drafts",
    "predicted_tokens_per_s": "a PREDICTION, not a measurement: batch * tokens / step_ms for "
    f"{PUBLISHED_TOKENS[0]} and {PUBLISHED_TOKENS[1]} tokens a step, the least and the most that are published for "
    f"the head at {PUBLISHED_DRAFTS} drafts; predicted_speedup is over the same engine without drafts",
}


def predicted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured rows with what follows from them, where the plain step of the same engine was measured too."""
    plain = {(row["engine"], row["batch"]): row["step_ms"] for row in rows if row["drafts"] == 0}
    found = []
    for row in rows:
        more: dict[str, Any] = {}
        if base := plain.get((row["engine"], row["batch"])):
            more["relative"] = round(row["step_ms"] / base, 3)
        if row["drafts"] == PUBLISHED_DRAFTS:
            speeds = [row["batch"] * tokens / row["step_ms"] * 1e3 for tokens in PUBLISHED_TOKENS]
            more["predicted_tokens_per_s"] = [round(speed, 1) for speed in speeds]
            if base:
                more["predicted_speedup"] = [round(speed * base / row["batch"] / 1e3, 3) for speed in speeds]
        found.append(row | more)
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        for engine in args.engines:
            children = {drafts: start(args, engine, drafts, Path(logs)) for drafts in args.drafts}
            try:
                ready = {k: child for k, child in children.items() if answered(child) is not None}
                for drafts, child in ready.items():
                    for batch in args.batch:
                        found = answered(child, {"batch": batch, "steps": args.steps})
                        if found is None:
                            break
                        rows.append({"engine": engine, "drafts": drafts, "batch": batch, "context": CONTEXT, **found})
                        print(json.dumps(rows[-1]), flush=True)
                        save(args, rows)
                    child.end()
            finally:
                for child in children.values():
                    child.end()
    return predicted(rows)


def start(args: argparse.Namespace, engine: str, drafts: int, logs: Path) -> Child:
    settings = {"model": str(args.model), "head": str(args.head), "drafts": drafts, "batch": args.batch}
    environment = ENGINES[engine] | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    child = Child(
        f"{engine}, {drafts} drafts", [sys.executable, __file__, "--child"], logs / f"{engine}-{drafts}", environment
    )
    child.tell(settings)
    return child


def answered(child: Child, question: Any = None) -> Any:
    """None, with a sentence printed, where a child fails: the others' numbers are worth having."""
    try:
        return child.hear(START_SECONDS) if question is None else child.ask(question, POINT_SECONDS)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return None


def save(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    content = {"model": args.model.name, "steps": args.steps, "definitions": DEFINITIONS, "records": predicted(rows)}
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# -- in a child


def child() -> None:
    hear, say = inside()
    settings = hear()
    from vllm import LLM
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    replayed: list[int] = []
    replay = ModelCudaGraphManager.run_fullgraph

    def counted(self: Any, what: Any) -> Any:
        replayed.append(what.num_tokens)
        return replay(self, what)

    ModelCudaGraphManager.run_fullgraph = counted
    drafts = settings["drafts"]
    speculative = {"method": "eagle3", "model": settings["head"], "num_speculative_tokens": drafts} if drafts else None
    llm = LLM(
        settings["model"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=3 << 30,
        max_model_len=4096,
        max_num_seqs=max(settings["batch"]),
        max_num_batched_tokens=8192,
        speculative_config=speculative,
        # of a verifying step, and of a step of the head
        compilation_config={
            "cudagraph_capture_sizes": sorted({n * m for n in settings["batch"] for m in (1, 1 + drafts)})
        },
    )
    vocabulary = llm.model_config.get_vocab_size()
    say("ready")
    while True:
        point = hear()
        found = steady(llm.llm_engine, vocabulary, point["batch"], point["steps"], drafts, replayed)
        if drafts:
            with without_head():
                alone = steady(llm.llm_engine, vocabulary, point["batch"], point["steps"], drafts, replayed)
            found["verify_ms"] = alone["step_ms"]
        say(found)


@contextmanager
def without_head() -> Iterator[None]:
    """Inside, what the head proposed last is proposed again, or token 0: a request's last step has no drafts, of which
    vLLM leaves -1 where it found them."""
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    propose = TargetDependentARSpeculator.propose
    TargetDependentARSpeculator.propose = lambda self, input_batch, *_, **__: (
        self.draft_tokens[: input_batch.num_reqs].clamp(min=0)
    )
    try:
        yield
    finally:
        TargetDependentARSpeculator.propose = propose


def steady(engine: Any, vocabulary: int, batch: int, steps: int, drafts: int, replayed: list[int]) -> dict[str, Any]:
    """The measured fields of one point; `replayed` grows by the rows of each replay of a whole step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    draw = random.Random(batch)
    # requests that begin first decode while the others' prompts are computed
    length = WARM_UP_STEPS + steps + 32
    params = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    for number in range(batch):
        prompt = [draw.randrange(vocabulary) for _ in range(CONTEXT)]
        engine.add_request(f"{time.time_ns()}-{number}", {"prompt_token_ids": prompt}, params)
    ends: list[float] = []
    tokens: list[int] = []
    before = after = 0
    while engine.has_unfinished_requests():  # the last tokens are generated and thrown away
        outputs = engine.step()
        now = time.perf_counter()
        fresh = [len(output.outputs[0].token_ids) for output in outputs]
        if not outputs or len(ends) > WARM_UP_STEPS + steps:
            continue
        if len(fresh) < batch or not all(fresh):
            ends, tokens = [], []
            continue
        ends.append(now)
        tokens.append(sum(fresh))
        if len(ends) == WARM_UP_STEPS + 1:
            before = len(replayed)
        after = len(replayed)
    if len(ends) <= WARM_UP_STEPS + steps:
        raise RuntimeError(f"no {steps} steady steps in a row at batch {batch}, {drafts} drafts")
    times = [later - earlier for earlier, later in pairwise(ends[WARM_UP_STEPS:])]
    return {
        "step_ms": round(statistics.fmean(times) * 1e3, 4),
        "step_median_ms": round(statistics.median(times) * 1e3, 4),
        "tokens_a_step": round(sum(tokens[WARM_UP_STEPS + 1 :]) / len(times) / batch, 4),
        "whole_graphs": round(replayed[before:after].count(batch * (1 + drafts)) / len(times), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--head", type=Path, required=True, metavar="HEAD", help="from research/eagle3_head.py")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3, 5, 7])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args(arguments)
    print(json.dumps(DEFINITIONS, indent=1), flush=True)
    for row in measure(args):
        if row["drafts"] == PUBLISHED_DRAFTS:
            print(f"PREDICTED, {row['engine']}, batch {row['batch']}: {row['predicted_tokens_per_s']} tokens/s")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
        os._exit(0)
    sys.exit(main())

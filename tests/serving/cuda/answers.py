"""Greedy tokens of a checkpoint through vLLM's engine on a GPU, in a process of its own, with what its graphs did.

`python -m tests.serving.cuda.answers` reads a `Question` as JSON and prints an `Answer` as the last line.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

NEVER_REFRESHED = ("lengths", "block_table")  # of a decode step
OWN, WRONG, RIGHT = "own", "wrong", "right"
SHIFT = {WRONG: 1, RIGHT: 0}  # of a recorded token's id, where a script proposes in place of vLLM's n-grams


@dataclass(frozen=True)
class Question:
    """options: of vLLM's LLM. spoil: what of a step each graph is to read from where it was at its capture.

    drafters: all prompts are asked with each of them. Scripts follow what vLLM's OWN has brought, so it comes first.
    """

    model: str
    prompts: list[list[int]]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    times: int = 1  # that all prompts are asked; the last answers count
    spoil: str | None = None
    drafters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """full: replays of whole steps of the model, by rows. piecewise: replays of steps in pieces. captured: rows of
    each graph of a whole step. late: captures once the server was ready. preemptions: of requests, by vLLM's count.
    drafted: by drafter, its tokens, and how many drafts were proposed and accepted, by vLLM's count."""

    tokens: list[list[int]]
    full: dict[int, int]
    piecewise: int
    captured: list[int]
    late: int
    preemptions: int
    drafted: dict[str, dict[str, Any]]


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that what is counted is in this process
    import torch
    from vllm import LLM, SamplingParams
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    question = Question(**json.load(sys.stdin))
    seen: Counter[Any] = Counter()

    def counted(owner: type, name: str, key: Any) -> None:
        original = getattr(owner, name)

        def count(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen[key(self, *args)] += 1
            return original(self, *args, **kwargs)

        setattr(owner, name, count)

    counted(torch.cuda.CUDAGraph, "capture_begin", lambda *_: "captures")
    counted(ModelCudaGraphManager, "run_fullgraph", lambda _, what: what.num_tokens)
    counted(BreakableCUDAGraphWrapper, "_replay", lambda *_: "piecewise")
    managers = []
    counted(ModelCudaGraphManager, "capture", lambda self, *_: managers.append(self) or "managers")
    if question.spoil:
        spoil(question.spoil)

    options = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(question.model, **options | {"disable_log_stats": False} | question.options)
    seen.clear()

    def total(name: str) -> int:
        return int(sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}"))

    def asked(more: int = 0) -> list[list[int]]:
        length = question.max_tokens + more
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": ids} for ids in question.prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]

    drafted: dict[str, dict[str, Any]] = {}
    for drafter in question.drafters:
        before = total("spec_decode_num_draft_tokens"), total("spec_decode_num_accepted_tokens")
        if drafter == OWN:  # goes on, so that the last step has right drafts too
            tokens = record = asked(more=question.options["speculative_config"]["num_speculative_tokens"])
        else:
            NgramGPUSpeculator.propose = scripted(record, SHIFT[drafter], llm.model_config.get_vocab_size())
            tokens = asked()
        drafted[drafter] = {
            "tokens": [row[: question.max_tokens] for row in tokens],
            "proposed": total("spec_decode_num_draft_tokens") - before[0],
            "accepted": total("spec_decode_num_accepted_tokens") - before[1],
        }
    for _ in range(0 if drafted else question.times):
        tokens = asked()
    answer = Answer(
        tokens=tokens,
        full={rows: count for rows, count in seen.items() if isinstance(rows, int)},
        piecewise=seen["piecewise"],
        captured=sorted(what.num_tokens for what in managers[-1].graphs) if managers else [],
        late=seen["captures"],
        preemptions=total("num_preemptions"),
        drafted=drafted,
    )
    print(json.dumps(asdict(answer)), flush=True)
    os._exit(0)  # without a tokenizer vLLM does not end by itself


def spoil(name: str) -> None:
    """Hands each decode step a copy, as a builder with tensors of its own would: a graph keeps the first."""
    from npu_gptoss.attention import DecodeMetadata
    from npu_gptoss.serving.cuda.cache import StepBuilder

    build = StepBuilder.build

    def stale(self: StepBuilder, *args: Any, **kwargs: Any) -> Any:
        step = build(self, *args, **kwargs)
        return replace(step, **{name: getattr(step, name).clone()}) if isinstance(step, DecodeMetadata) else step

    StepBuilder.build = stale


def scripted(record: list[list[int]], shift: int, vocabulary: int) -> Callable[..., Any]:
    """In place of NgramGPUSpeculator.propose: the tokens of `record`, a row for each prompt, with their ids shifted."""
    import torch

    def propose(self: Any, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> torch.Tensor:
        drafts = self.drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        states, count = self.req_states, drafts.shape[1]
        lengths = states.total_len.gpu[input_batch.idx_mapping].tolist()
        slots = input_batch.idx_mapping_np.tolist()
        for row, name, slot, length in zip(drafts, input_batch.req_ids, slots, lengths, strict=True):
            prompt = int(name.split("-")[0]) % len(record)  # vLLM numbers its requests
            said = length - int(states.prompt_len.np[slot])
            script = (record[prompt] + [0] * count)[said : said + count]
            row[: len(script)] = torch.tensor([(token + shift) % vocabulary for token in script])
        return drafts

    return propose


if __name__ == "__main__":
    main()

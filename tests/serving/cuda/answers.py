"""Greedy tokens of a checkpoint through vLLM's engine on a GPU, in a separate process, with counts of its graphs.

`python -m tests.serving.cuda.answers` reads a `Question` as JSON and prints an `Answer` as the last line.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NEVER_REFRESHED = ("lengths", "block_table")  # of a decode step
CAPTURE, GRAPHS, FULL, PIECEWISE, STEADY = "capture", "graphs", "full", "piecewise", "steady"  # events of `listen`
# padding rows hold NaN; they also write keys, before a live row's; attention leaves them as they were
GARBAGE, LEAKING, UNCLEARED = "garbage", "leaking", "uncleared"
OWN, WRONG, RIGHT = "own", "wrong", "right"
# ways to other weights: a server that starts with them, or a running one that gets them
STARTED, RELOADED, SLEPT, SENT = "started", "reloaded", "slept", "sent"
SHIFT = {WRONG: 1, RIGHT: 0}  # of a recorded token's id, where a script proposes in place of vLLM's n-grams


@dataclass(frozen=True)
class Question:
    """options: of vLLM's LLM. spoil: the field of a step that each graph reads at its address of the capture.
    padding: GARBAGE, or a mistake of the model with it.

    others: other weights, that `Answer` is about. environment: variables. bits: also asks for logprobs.
    drawn: at temperature 1 with a seed for each prompt, and each answer is shorter than the one before. drawn_before:
    all prompts are asked so first; these answers do not count.
    drafters: all prompts are asked with each of them. Scripts follow the tokens of vLLM's OWN, which comes first.
    """

    model: str
    prompts: list[list[int]]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    times: int = 1  # that all prompts are asked; the last answers count
    spoil: str | None = None
    padding: str | None = None
    drafters: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    bits: bool = False
    others: tuple[str, str] | None = None  # STARTED, RELOADED, SLEPT or SENT, and the checkpoint
    drawn: bool = False
    drawn_before: bool = False


@dataclass(frozen=True)
class Answer:
    """full: replays of whole steps of the model, by rows. piecewise: replays of steps in pieces. captured: rows of
    each graph of a whole step. late: captures once the server was ready; compiled: our kernels that Triton compiled
    then. preemptions: of requests, by vLLM's count. steady: steps of `serving/cuda/steady.py`.
    drafted: by drafter, its tokens, and vLLM's count of proposed and accepted drafts. tail: with `padding`, the largest
    magnitude that attention gave a padding row, NaN included, and the number of such rows. logprobs: with `bits`, of
    each token."""

    tokens: list[list[int]]
    full: dict[int, int]
    piecewise: int
    captured: list[int]
    late: int
    compiled: list[str]
    preemptions: int
    steady: int
    drafted: dict[str, dict[str, Any]]
    tail: tuple[str, int] | None = None
    logprobs: list[list[float]] | None = None


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the counted events are in this process
    question = Question(**json.load(sys.stdin))
    os.environ.update(question.environment)
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    seen: Counter[Any] = Counter()
    captured: list[int] = []

    def note(what: str, rows: Any = 0) -> None:
        seen[what, rows] += 1
        if what == GRAPHS:
            captured[:] = rows

    listen(note)
    if question.spoil or question.padding in (LEAKING, UNCLEARED):
        from npu_gptoss.serving import canary

        canary.run = lambda worker: None  # it finds some of these mistakes at the start; here tokens are to show them
    if question.spoil:
        spoil(question.spoil)
    tail = pad(question.padding) if question.padding else None

    options = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    way, other = question.others or ("", "")
    llm = LLM(other if way == STARTED else question.model, **options | {"disable_log_stats": False} | question.options)
    seen.clear()
    compiled = listen_to_triton()
    if tail is not None:
        tail.zero_()

    def total(name: str) -> int:
        return int(sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}"))

    logprobs: list[list[float]] = []

    def asked(more: int = 0, drawn: bool = question.drawn) -> list[list[int]]:
        length = question.max_tokens + more
        wanted = {"ignore_eos": True, "detokenize": False} | ({"logprobs": 0} if question.bits else {})
        sampling = [
            SamplingParams(temperature=1, seed=index, max_tokens=length - 4 * index, **wanted)
            if drawn
            else SamplingParams(temperature=0, max_tokens=length, **wanted)
            for index in range(len(question.prompts))
        ]
        found = llm.generate([{"prompt_token_ids": ids} for ids in question.prompts], sampling, use_tqdm=False)
        answers = [output.outputs[0] for output in found]
        if question.bits:
            logprobs[:] = [[next(iter(each.values())).logprob for each in one.logprobs] for one in answers]
        return [list(one.token_ids) for one in answers]

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
    if way and way != STARTED:
        asked()
        renew(llm, way, other)
        seen.clear()
    if question.drawn_before:
        asked(drawn=True)
        seen.clear()
    for _ in range(0 if drafted else question.times):
        tokens = asked()
    answer = Answer(
        tokens=tokens,
        full={rows: count for (what, rows), count in seen.items() if what == FULL},
        piecewise=seen[PIECEWISE, 0],
        captured=captured,
        late=seen[CAPTURE, 0],
        compiled=compiled,
        preemptions=total("num_preemptions"),
        steady=seen[STEADY, 0],
        drafted=drafted,
        tail=None if tail is None else (str(float(tail[0])), int(tail[1])),
        logprobs=logprobs or None,
    )
    print(json.dumps(asdict(answer)), flush=True)
    os._exit(0)  # without a tokenizer vLLM does not exit


def renew(llm: Any, way: str, checkpoint: str) -> None:
    """Gives the running engine the weights of another checkpoint."""
    if way == SENT:  # as vLLM's engines for weight transfer: on the device, in pieces, in any order
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc(_send, args=(checkpoint,))
        llm.collective_rpc("finish_weight_update")
    else:
        if way == SLEPT:
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
        if way == SLEPT:
            llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()


def _send(worker: Any, checkpoint: str) -> None:
    """The checkpoint in BF16, also to experts that are MXFP4."""
    import torch

    from npu_gptoss.model.checkpoint import expand_stream, iterate_tensors
    from npu_gptoss.model.config import GptOssConfig

    config = GptOssConfig.from_directory(Path(checkpoint))
    stored = iterate_tensors(checkpoint, config, dtype=torch.bfloat16, progress=False)
    tensors = list(expand_stream(stored, torch.bfloat16))
    random.Random(0).shuffle(tensors)
    for first in range(0, len(tensors), 5):
        worker.get_model().load_weights((name, each.cuda()) for name, each in tensors[first : first + 5])


def listen(note: Callable[..., None]) -> None:
    """Calls note(CAPTURE) as a capture begins, note(GRAPHS, rows of each) once there is a graph for each size of a
    whole step, note(FULL, rows) as one is replayed, note(PIECEWISE) as a step in pieces is, and note(STEADY) as a
    steady one."""
    import torch
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    from npu_gptoss.serving.cuda import steady

    def before(owner: type, name: str, tell: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell(*args)
            return original(self, *args, **kwargs)

        setattr(owner, name, told)

    before(torch.cuda.CUDAGraph, "capture_begin", lambda *_: note(CAPTURE))
    before(ModelCudaGraphManager, "run_fullgraph", lambda what: note(FULL, what.num_tokens))
    before(BreakableCUDAGraphWrapper, "_replay", lambda *_: note(PIECEWISE))
    before(steady.Tokens, "__init__", lambda *_: note(STEADY))
    capture = ModelCudaGraphManager.capture

    def captured(self: ModelCudaGraphManager, *args: Any, **kwargs: Any) -> None:
        capture(self, *args, **kwargs)
        note(GRAPHS, tuple(sorted(what.num_tokens for what in self.graphs)))

    ModelCudaGraphManager.capture = captured


def listen_to_triton() -> list[str]:
    """Records this package's kernels that are compiled from here on, or read from Triton's cache."""
    import triton

    found: list[str] = []

    def note(**told: Any) -> None:
        if told["fn"].module.startswith("npu_gptoss"):
            found.append(told["fn"].name)

    triton.knobs.runtime.jit_post_compile_hook = note
    return found


def spoil(name: str) -> None:
    """Gives each decode step a copy of the field, as a builder without fixed buffers would: a graph keeps the first."""
    from npu_gptoss.attention import DecodeMetadata
    from npu_gptoss.serving.cuda.cache import StepBuilder

    build = StepBuilder.build
    copies: list[torch.Tensor] = []  # a graph that reads memory which has become something else may end the process

    def stale(self: StepBuilder, *args: Any, **kwargs: Any) -> Any:
        step = build(self, *args, **kwargs)
        if not isinstance(step, DecodeMetadata):
            return step
        copies.append(getattr(step, name).clone())
        return replace(step, **{name: copies[-1]})

    StepBuilder.build = stale


def pad(how: str) -> torch.Tensor:
    """Fills padding rows with NaN where they enter the model and where attention is to write. Returns the tensor behind
    `Answer.tail`, which graphs and pieces of graphs keep up to date."""
    import torch

    from npu_gptoss.model.transformer import GptOss
    from npu_gptoss.serving.cuda import model
    from npu_gptoss.serving.cuda.cache import Slots

    tail = torch.zeros(2, device="cuda")
    embed, attend = GptOss.embed, model.attend

    def padding(rows: int) -> torch.Tensor | None:
        live = model.live_rows(model.get_forward_context(), "model.layers.0.self_attn.attn", rows)
        return None if live is None else live == 0

    def embed_garbage(self: GptOss, ids: torch.Tensor) -> torch.Tensor:
        rows, unused = embed(self, ids), padding(len(ids))
        return rows if unused is None else rows.masked_fill(unused[:, None], torch.nan)

    def attend_into_garbage(*inputs: Any) -> None:
        *_, query, out = inputs
        out.fill_(torch.nan)
        attend(*inputs)
        unused = padding(len(query))
        if unused is None:
            return
        if how == UNCLEARED:
            out.masked_fill_(unused[:, None, None], torch.nan)
        largest = out.float().abs().amax((1, 2)).masked_fill(~unused, 0).amax()
        tail[0].copy_(torch.maximum(tail[0], largest))  # NaN stays NaN
        tail[1].add_(unused.sum())

    def writing(slots: torch.Tensor) -> Slots:
        before = slots[:1] - (slots[:1] % 16 != 0).long()  # a key that the first row reads
        return Slots(torch.where(slots < 0, before, slots))

    GptOss.embed, model.attend = embed_garbage, attend_into_garbage
    if how == LEAKING:
        model.Slots = writing
    return tail


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

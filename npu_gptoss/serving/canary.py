"""A canary of whole steps: every captured graph must compute what the same step computes without a graph.

Runs in each worker after capture, before the first request, with steps as vLLM's scheduler sends them: canned prompts
are computed into the empty KV cache, then one more token of each. That step runs without a graph, then replays its
graph four times: twice with the same requests (a first replay may read memory that nothing has written), then with
other requests, in another order and with the most padding rows, and once more as at first (lengths, slots, tokens or
padding rows of an earlier replay, and replays out of order). All rows before the vocabulary, and their logits, must be
finite and equal up to rounding.

Wrong full graphs are replaced by PIECEWISE ones, on all ranks; a graph that is wrong still ends the start.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.server.metrics import CANNED
from npu_gptoss.serving.releases import here

FULL, PIECEWISE, NONE = "FULL", "PIECEWISE", "NONE"
LONGEST, SHORTEST, SPAN = 131, 3, 14  # keys of the first prompt (beyond the window), and of the others
ORDINARY_TOKENS = 199_998  # ids from here on are special
ROWS_AT_ONCE = 64  # of logits, to bound memory
BESIDE = 30  # requests beside a prompt, unless its room is too small: the host takes 0.1 ms to hand one to the runner
# A fault moves logits by more than LARGEST of their size, and than NOISE times what another batch size moves them by:
# that chooses other kernels, whose roundings a network may amplify. Where even SHARE_OF_CONTEXT of the distance between
# two contexts of one token is no more than that, a fault cannot be told from rounding.
LARGEST, NOISE, SHARE_OF_CONTEXT = 0.25, 3.0, 0.5


@dataclass
class Watch:
    """The state that a release's `watching` shares with the canary: in, to run without a graph; out, how the step ran.

    hidden: only where the runner does not keep it. behind: vLLM's result of the last step, for which nobody has waited.
    """

    eager: bool = False
    mode: str = NONE
    size: int = 0
    hidden: torch.Tensor | None = None
    behind: Any = None


@dataclass(frozen=True)
class Prompt:
    """A canned prompt. computed: keys in the cache before the step. blocks: its blocks in each KV cache group."""

    number: int
    computed: int
    room: int
    blocks: tuple[list[int], ...]
    vocabulary: int

    def tokens(self, count: int) -> list[int]:
        return [(31 + 7919 * self.number + 104_729 * place) % self.vocabulary for place in range(count)]


Batch = list[tuple[Prompt, int]]  # and how many rows it takes


@dataclass
class Findings:
    """wrong: the first fault by graph mode. replayed: graphs compared; of these, unjudged: whose differences may be
    rounding. largest: the largest difference. context: what a wrong context moves logits by, at least."""

    wrong: dict[str, str] = field(default_factory=dict)
    replayed: int = 0
    captured: int = 0
    unjudged: int = 0
    largest: float = 0.0
    context: float = math.inf


def release() -> ModuleType:
    """Returns the module that knows this release's runner."""
    return here().module("ascend" if here().vllm_ascend else "vllm")


class Canary:
    """The steps of one worker. worker: vLLM's, whose `model_runner` has captured its graphs."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.runner, self.config = worker, worker.model_runner, worker.vllm_config
        self.release, self.watch = release(), Watch()
        self._numbers, self._finished = itertools.count(), set()
        self.rows_each = self.release.decode_rows(self.runner)
        self.prompts = self._make_prompts()

    def _make_prompts(self) -> list[Prompt]:
        """Makes a full step's prompts, if the cache has blocks for them; the first has room for a chunk of any size."""
        scheduler, longest = self.config.scheduler_config, self.config.model_config.max_model_len
        cache, groups = self.runner.kv_cache_config, self.runner.kv_cache_config.kv_cache_groups
        largest = max((size for sizes in self.release.captured(self.runner).values() for size in sizes), default=0)
        # data-parallel ranks step together
        free = agreed([cache.num_blocks - 1], torch.distributed.ReduceOp.MIN)[0]
        block = 1  # the first block is vLLM's null block
        made: list[Prompt] = []
        vocabulary = min(self.config.model_config.get_vocab_size(), ORDINARY_TOKENS)
        for number in range(scheduler.max_num_seqs):
            computed = SHORTEST + 5 * number % SPAN if number else LONGEST
            computed = max(min(computed, longest - self.rows_each - 2, scheduler.max_num_batched_tokens), 1)
            room = min(computed + max(largest if number == 0 else 0, self.rows_each, 2), longest - 1)
            needed = [-(-(room + 1) // group.kv_cache_spec.block_size) for group in groups]
            if number == 0:  # a small cache must hold other prompts too
                while sum(needed) > max(free // 2, len(groups)) and room > computed + self.rows_each:
                    room -= 1
                    needed = [-(-(room + 1) // group.kv_cache_spec.block_size) for group in groups]
            if block + sum(needed) - 1 > free:
                break
            blocks = []
            for count in needed:
                blocks.append(list(range(block, block + count)))
                block += count
            made.append(Prompt(number, computed, room, tuple(blocks), vocabulary))
        self._used = slice(1, block)
        return made

    def look(self) -> Findings:
        """Compares all captured graphs. Leaves the runner without requests and its cache as it was, empty."""
        found = Findings()
        with torch.inference_mode(), self.release.watching(self.runner, self.watch):
            for batch in self._prefills():
                self._step(batch, computed=False)
            self._look_at_contexts(found)
            for mode, sizes in self.release.captured(self.runner).items():
                for size, before in zip(sizes, [0, *sizes], strict=False):
                    found.captured += 1
                    if pair := self._pair(mode, size, before):
                        self._compare(found, mode, size, *pair)
            self._leave()
        return found

    def _prefills(self) -> Iterator[Batch]:
        most, batch, rows = self.config.scheduler_config.max_num_batched_tokens, [], 0
        for prompt in self.prompts:
            if batch and rows + prompt.computed > most:
                yield batch
                batch, rows = [], 0
            batch.append((prompt, prompt.computed))
            rows += prompt.computed
        if batch:
            yield batch

    def _look_at_contexts(self, found: Findings) -> None:
        """Two contexts of one token: how far this model's logits depend on the context."""
        if len(self.prompts) > 1:
            one, other = (self._step([(prompt, 1)], tokens=[5]) for prompt in self.prompts[:2])
            if one is not None:
                found.context = SHARE_OF_CONTEXT * _worst(self._differences(one, other))

    def _pair(self, mode: str, size: int, before: int) -> tuple[Batch, Batch] | None:
        """Returns a step with this many rows, and one of other requests with the most padding; None without requests
        that get such a step. before: the next smaller graph."""
        if not self.prompts:
            return None
        if mode == FULL:
            each, most = self.rows_each, len(self.prompts)
            count, fewer = min(size // each, most), min(before // each + 1, most)
            if count * each <= before or fewer * each > size:
                return None
            others = self.prompts[count - 1 :: -1] if count > 1 else self.prompts[1:2] or self.prompts
            return [(p, each) for p in self.prompts[:count]], [(p, each) for p in others[:fewer]]
        batches = self._mixed(size), self._mixed(min(before + 1, size))
        return (batches[0], batches[1][::-1]) if None not in batches else None

    def _mixed(self, rows: int) -> Batch | None:
        """Returns a step of so many rows in which one prompt takes at least two, as no decode step does."""
        if rows == 1:
            return [(self.prompts[-1], 1)]
        first, *rest = self.prompts
        rest = rest[: min(max(BESIDE, rows - (first.room - first.computed)), rows - 2)]
        chunk = rows - len(rest)
        return [(first, chunk), *((prompt, 1) for prompt in rest)] if first.computed + chunk <= first.room else None

    def _compare(self, found: Findings, mode: str, size: int, batch: Batch, other: Batch) -> None:
        """Replays follow each other as in service, where a step begins before the one before has ended."""
        want = {id(each): self._step(each) for each in (batch, other)}
        got = []
        for each in (batch, batch, other, batch):
            got.append((want[id(each)], self._step(each, eager=False)))
            if (self.watch.mode, self.watch.size) != (mode, size):
                return  # such a step is not served by this graph
        found.replayed += 1
        limit = 0.0
        for number, (right, replayed) in enumerate(got, 1):
            if right is None:  # a stage of a pipeline before the last
                continue
            if not torch.isfinite(right).all():
                found.wrong.setdefault(NONE, "a step without a graph gives numbers that are not finite")
                return
            if self._equal(right, replayed):
                continue
            limit = limit or self._limit(found, batch, other, want)
            error = _worst(self._differences(right, replayed))
            if error > limit or not math.isfinite(error):
                said = f"differs by {error:.2g} of the logits" if math.isfinite(error) else "is not finite"
                found.wrong.setdefault(mode, f"replay {number} of the {mode} graph of {size} rows {said}")
                return
            found.largest = max(found.largest, error)

    def _equal(self, right: torch.Tensor, replayed: torch.Tensor) -> bool:
        """Bit for bit, on all ranks that compute logits together. Then the logits, which take longer, are equal."""
        from npu_gptoss.serving.releases.vllm import get_tp_group

        (equal,) = agreed([int(torch.equal(right, replayed))], torch.distributed.ReduceOp.MIN, get_tp_group())
        return bool(equal)

    def _limit(self, found: Findings, batch: Batch, other: Batch, want: dict[int, torch.Tensor | None]) -> float:
        limit = max(min(LARGEST, found.context), NOISE * self._noise(batch, other, want))
        if limit > found.context:
            found.unjudged += 1
            return math.inf
        return limit

    def _noise(self, batch: Batch, other: Batch, want: dict[int, torch.Tensor | None]) -> float:
        """Measures how far the batch alone moves logits: of requests that both eager steps have, with as many rows."""
        one, two = want[id(batch)], want[id(other)]
        rows = [(batch.index(each), other.index(each)) for each in batch if each in other]
        if one is None or two is None or not rows:
            return 0.0
        here, there = (list(places) for places in zip(*rows, strict=True))
        found = _worst(self._differences(one[here], two[there]))
        return found if math.isfinite(found) else 0.0

    def _step(
        self, batch: Batch, *, computed: bool = True, eager: bool = True, tokens: list[int] | None = None
    ) -> torch.Tensor | None:
        """Runs a step as the scheduler would send it: new requests whose first keys are in the cache. Returns their
        last rows [requests, hidden] before the vocabulary, in the batch's order; None before a pipeline's last stage.
        """
        from npu_gptoss.serving.releases.vllm import NewRequestData, SamplingParams

        names = [f"{CANNED}{next(self._numbers)}" for _ in batch]
        output = self._empty()
        for name, (prompt, rows) in zip(names, batch, strict=True):
            start = prompt.computed if computed else 0
            ids = prompt.tokens(start + rows + 1)  # one more than computed: nothing is sampled
            if tokens:
                ids[start : start + len(tokens)] = tokens
            more = {"prefill_token_ids": ids} if "prefill_token_ids" in NewRequestData.__dataclass_fields__ else {}
            request = NewRequestData(
                req_id=name,
                prompt_token_ids=ids,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
                pooling_params=None,
                block_ids=prompt.blocks,
                num_computed_tokens=start,
                lora_request=None,
                **more,
            )
            output.scheduled_new_reqs.append(request)
            output.num_scheduled_tokens[name] = rows
        output.total_num_scheduled_tokens = sum(rows for _, rows in batch)
        self._finished = set(names)
        self.watch.eager = eager
        self.worker.execute_model(output)
        order, hidden = self.release.last_rows(self.worker, self.watch)
        if hidden is None:
            return None
        places = {name: place for place, name in enumerate(order)}
        return torch.stack([hidden[places[name]] for name in names])  # a list as index would wait for the device

    def _empty(self) -> Any:
        output = self.release.empty_step()
        output.num_common_prefix_blocks = [0] * len(self.runner.kv_cache_config.kv_cache_groups)
        output.finished_req_ids = self._finished
        return output

    def _differences(self, want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Returns |got - want| / |want - mean| of each row's logits, or of its hidden state where another rank has the
        logits; NaN and infinity stay."""
        logits, errors = self.runner.get_model().compute_logits, []
        for pair in zip(want.split(ROWS_AT_ONCE), got.split(ROWS_AT_ONCE), strict=True):
            right, other = (
                (found if found is not None else rows).float() for rows, found in ((r, logits(r)) for r in pair)
            )
            scale = (right - right.mean(-1, keepdim=True)).square().sum(-1)
            errors.append(((other - right).square().sum(-1) / scale).sqrt())
        return torch.cat(errors).cpu()

    def _leave(self) -> None:
        """Ends the requests, and zeroes what they wrote: a NaN would reach a later request that reads its block."""
        self.worker.execute_model(self._empty())
        for cache in caches(self.runner):
            rows, rest = divmod(len(cache), self.runner.kv_cache_config.num_blocks)
            if rest:
                raise RuntimeError(f"a KV cache {list(cache.shape)} has other blocks than its configuration")
            cache[rows * self._used.start : rows * self._used.stop].zero_()


def caches(runner: Any) -> Iterator[torch.Tensor]:
    """The tensors of a runner's KV cache: of a layer one, or keys and values apart."""
    for layer in runner.kv_caches:
        yield from layer if isinstance(layer, (tuple, list)) else (layer,)


def _worst(errors: torch.Tensor) -> float:
    return float(errors.nan_to_num(nan=math.inf).max())


def agreed(values: list[int], operation: Any, *groups: Any) -> list[int]:
    """Reduces numbers over the ranks of these groups of vLLM; without one, over all ranks that step together."""
    from npu_gptoss.serving.releases.vllm import get_dp_group, get_world_group

    held = torch.tensor(values)
    for group in groups or (get_world_group(), get_dp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(held, op=operation, group=group.cpu_group)
    return held.tolist()


def look(worker: Any) -> Findings:
    """Runs the canary; a fault on any rank is one on all."""
    found = Canary(worker).look()
    modes = (NONE, PIECEWISE, FULL)
    for mode, any_rank in zip(
        modes, agreed([mode in found.wrong for mode in modes], torch.distributed.ReduceOp.MAX), strict=True
    ):
        if any_rank:
            found.wrong.setdefault(mode, f"another rank found a wrong {mode} graph")
    return found


def run(worker: Any) -> None:
    """Checks the worker's graphs; replaces full graphs that are wrong. Raises InputError if graphs are wrong still."""
    config = worker.vllm_config
    if config.model_config.hf_config.model_type != MODEL_TYPE or not release().captured(worker.model_runner):
        return
    if config.kv_transfer_config is not None:
        logger.info("The graphs are not compared with eager steps: a KV connector would store the canned prompts.")
        return
    began, found = time.monotonic(), look(worker)
    if FULL in found.wrong and NONE not in found.wrong:
        logger.warning(
            "Full graphs compute wrong steps here (%s); PIECEWISE graphs take their place.", found.wrong[FULL]
        )
        release().leave_full_graphs(worker)
        found = look(worker)
    if found.wrong:
        sentence = (
            f"captured steps compute wrong results on this card, and text would be wrong without an error: "
            f"{'; '.join(found.wrong.values())}. Use --enforce-eager, or install another driver or CANN, and report it."
        )
        logger.error("%s", sentence)
        raise InputError(sentence)
    unjudged = (
        f"; of {found.unjudged} graphs only that they are finite: rounding moves the logits as far as a fault"
        if found.unjudged
        else ""
    )
    logger.info(
        "Canary: %d of %d captured graphs compute what eager steps compute, four replays each, in %.1f s "
        "(largest difference %.1e of the logits%s).",
        found.replayed,
        found.captured,
        time.monotonic() - began,
        found.largest,
        unjudged,
    )

"""The loop: requests in, steps of the model, results out.

engine = Engine("gpt-oss-20b", device="cuda")
results = engine.generate(["Hello", [9906, 11]], SamplingParams(max_tokens=64))

Or step by step, where requests come while others run:

request = engine.add_request("Hello", SamplingParams(max_tokens=64))
while engine.busy:
    for ended in engine.step():
        print(engine.result(ended).text)
"""

from __future__ import annotations

import gc
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.decode import AUTO, FULL, MODES, NONE, DecodeGraphs, Launch
from npu_gptoss.engine.device import kernels_for, resolve_device, resolve_dtype
from npu_gptoss.engine.kv_cache import BlockAllocator, allocate_kv_caches, default_num_blocks
from npu_gptoss.engine.request import Request, Result, SamplingParams
from npu_gptoss.engine.sampling import choose, report, uniform
from npu_gptoss.engine.scheduler import Chunk, Scheduler
from npu_gptoss.engine.text import TextCodec
from npu_gptoss.errors import InputError
from npu_gptoss.graphs.buckets import capture_sizes, checked_sizes
from npu_gptoss.graphs.recorder import Recorder
from npu_gptoss.kernels import current_platform
from npu_gptoss.model.checkpoint import expected_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.generation import stop_token_ids
from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.warm_up import Reach, warm_up
from npu_gptoss.progress import counted

Prompt = str | Sequence[int]

MAX_BATCH_SIZE = 256
# Rows of one step: enough to fill an accelerator, few enough that a CPU's step does not take minutes.
CPU_BATCH_TOKENS, ACCELERATOR_BATCH_TOKENS = 2048, 16384
# Rows whose logits are held at once when a whole prompt's are wanted: 256 rows of 201 088 float32 are 200 MB.
LOGITS_ROWS = 256


class NonFiniteLogits(InputError):
    """The model computed NaN or infinity; sampling from that would be silent garbage."""


class Engine:
    """A model on one device with its cache. Not thread-safe."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        max_batch_tokens: int | None = None,
        max_batch_size: int = MAX_BATCH_SIZE,
        block_size: int = 16,
        num_blocks: int | None = None,
        graphs: str = AUTO,
        graph_sizes: Sequence[int] | None = None,
        weights: str = AUTO,
        ranks: Ranks | None = None,
        tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
        progress: bool = False,
    ) -> None:
        """max_batch_tokens: rows of one step; a longer prompt is computed in chunks. None: 2048 on a CPU, else 16384.

        max_batch_size: requests under way at once; the others wait.
        num_blocks of block_size tokens make up the cache; None: as many as memory allows (1 GiB on a CPU).
        graphs: decode steps replayed as graphs: "full", with attention inside; "piecewise", around it; "none"; "auto"
        is full for bfloat16 on CUDA with Triton, none elsewhere. graph_sizes: the batch sizes that are captured
        (default: `capture_sizes`).
        weights: the experts' format on the device, one of `model.assembly.WEIGHTS`.
        ranks: the processes that share the model, each with an engine that is given the same work.
        tensors: the stream of official tensors that is not read from model_dir then, only its config.json is.
        progress: show the loading and the capturing on standard error, where that is a terminal.
        """
        directory = Path(model_dir)
        config = GptOssConfig.from_directory(directory)
        self.device = resolve_device(device)
        dtype = resolve_dtype(dtype, config)
        self.config = config
        self.text = TextCodec(directory)
        self.text.check(config.vocab_size)  # before minutes of loading
        self.stop_token_ids = stop_token_ids(directory, config)
        self.block_size = block_size
        with kernels_for(self.device):
            if tensors is None:
                self.model = GptOss.load(directory, self.device, dtype, progress=progress, ranks=ranks, weights=weights)
            else:
                tensors = counted(tensors, len(expected_tensors(config)), "making weights", "tensor", shown=progress)
                self.model = GptOss.from_tensors(config, tensors, self.device, dtype, ranks=ranks, weights=weights)
        config = self.model.config  # this rank's share
        if num_blocks is None:
            num_blocks = default_num_blocks(config, block_size, dtype, self.device, max_batch_size)
            num_blocks = num_blocks if ranks is None else ranks.smallest(num_blocks)
        if max_batch_tokens is None:
            max_batch_tokens = CPU_BATCH_TOKENS if self.device.type == "cpu" else ACCELERATOR_BATCH_TOKENS
        allocator = BlockAllocator(num_blocks, block_size)
        self.scheduler = Scheduler(allocator, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size)
        # The last block belongs to nobody: a graph's padding rows write there.
        self.kv_caches = allocate_kv_caches(config, num_blocks + 1, block_size, dtype, self.device)
        self.graphs = self._capture(graphs, graph_sizes, progress)
        self._ahead: Launch | None = None
        self._ended: list[Request] = []  # by the step that runs

    def _capture(self, mode: str, sizes: Sequence[int] | None, progress: bool) -> DecodeGraphs | None:
        if mode == AUTO:  # plain torch operations ask the device, and cannot be captured
            made_for_graphs = self.device.type == "cuda" and self.model.dtype == torch.bfloat16
            mode = FULL if made_for_graphs and "triton" in current_platform().features else NONE
        if mode not in MODES:
            raise InputError(f"there are no graphs {mode!r}: expected {AUTO}, {', '.join(MODES)}", field="graphs")
        if mode == NONE:
            return None
        with kernels_for(self.device), torch.inference_mode():
            return DecodeGraphs(
                self.model,
                self.kv_caches,
                mode=mode,
                sizes=checked_sizes(capture_sizes(self.scheduler.max_batch_size) if sizes is None else sizes),
                block_size=self.block_size,
                max_blocks=math.ceil(self.max_length / self.block_size),
                recorder=Recorder(self.device),
                progress=progress,
            )

    def warm_up(self) -> None:
        """Compiles Triton's programs for all steps, so that no request waits for them. For measuring and serving; a
        single prompt compiles less without it."""
        most = self.scheduler.max_batch_tokens
        if self.device.type == "cuda" and "triton" in current_platform().features:
            reach = Reach(most, min(self.scheduler.max_batch_size, most), self.max_length)
            with kernels_for(self.device):
                warm_up(self.model, self.kv_caches, reach)

    def close(self) -> None:
        """Gives the graphs back; steps run without them from here on.

        For ranks on GPUs: NCCL ends only when no graph holds one of its collectives any more.
        """
        self._ahead = self.graphs = None
        gc.collect()  # the steps of graphs refer to each other

    @property
    def max_length(self) -> int:
        """Tokens of a request, prompt and generated. The last generated token needs no place in the cache."""
        return min(self.config.max_position_embeddings, self.scheduler.allocator.capacity + 1)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[Sequence[Request]], None] | None = None,
    ) -> list[Result]:
        """One result a prompt, in order. A prompt is text or token ids; `params` is for all, or one for each.

        All prompts are checked before any is computed. on_step sees the requests after every step.
        """
        if isinstance(prompts, str):
            raise InputError("prompts must be a list of prompts, got one text: put it into a list", field="prompts")
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(
                f"{len(prompts)} prompts need as many SamplingParams, or one for all; got {len(each)}", field="params"
            )
        requests = []
        for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                requests.append(self._request(self.encode(prompt), one))
            except InputError as error:
                raise error.at(f"prompt {number} (the first is 0)") from None
        self._run(requests, on_step)
        return [self.result(request) for request in requests]

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queues a prompt, text or token ids; `step` computes it as soon as there is room, in the order of arrival.

        The request holds the tokens generated so far (`token_ids` after `prompt_length`). Raises InputError.
        """
        request = self._request(self.encode(prompt), params or SamplingParams())
        self.scheduler.add(request)
        return request

    @property
    def busy(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """One step of the model over the requests under way; returns those that it ended, for `result`.

        After an error all requests are cancelled, because the state of the caches is unknown.
        """
        if not self.busy:
            return []
        self._ended = []
        try:
            with kernels_for(self.device):
                self._advance()
        except BaseException:
            for request in (*self.scheduler.running, *self.scheduler.waiting):
                self.cancel(request)
            raise
        return self._ended

    def cancel(self, request: Request) -> None:
        """Ends a waiting or running request with finish_reason "cancelled"; an ended request stays unchanged."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if self._ahead is not None:  # what it still writes, later steps overwrite: the device takes them one by one
            for launched in self._ahead.requests:
                launched.num_computed -= 1
            self._ahead = None
        self.scheduler.cancel(request)

    def result(self, request: Request) -> Result:
        """The tokens that a request has generated so far."""
        generated = tuple(request.token_ids[request.prompt_length :])
        stopped = request.finish_reason == "stop"
        prompt_logprobs = None if request.params.prompt_logprobs is None else (None, *request.prompt_logprobs)
        return Result(
            prompt_token_ids=tuple(request.token_ids[: request.prompt_length]),
            token_ids=generated,
            text=self.text.decode(generated[:-1] if stopped else generated) if self.text.available else None,
            finish_reason=request.finish_reason or "",
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            prompt_logprobs=prompt_logprobs,
        )

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The logits after every token of a prompt, [tokens, vocab] float32; computed in chunks like any prompt."""
        return self.batch_logits([token_ids])[0]

    def batch_logits(
        self, prompts: Sequence[Sequence[int]], *, last: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """`logits` of several prompts, computed together; last: of how many tokens of each, the last ones."""
        requests = [self._request(self.encode(prompt), SamplingParams(max_tokens=1)) for prompt in prompts]
        for request, wanted in zip(requests, last or [each.prompt_length for each in requests], strict=True):
            request.prompt_logits = []
            request.prompt_rows_reported = request.prompt_length - wanted
        self._run(requests, None)
        return [torch.cat(request.prompt_logits) for request in requests]

    def encode(self, prompt: Prompt) -> list[int]:
        """Text or token ids to token ids, each checked against the vocabulary."""
        if isinstance(prompt, str):
            return self.text.encode(prompt)
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise InputError(f"a prompt is text or a list of token ids, got {prompt!r:.80}", field="prompt") from None
        wrong = next((i for i in ids if not 0 <= i < self.config.vocab_size), None)
        if wrong is not None:
            raise InputError(
                f"token id {wrong} is not in the vocabulary: expected 0 to {self.config.vocab_size - 1}", field="prompt"
            )
        return ids

    def check_length(self, token_ids: Sequence[int]) -> None:
        """Refuses a prompt that is empty or leaves no room for one generated token."""
        if not token_ids:
            raise InputError("the prompt is empty; the model needs at least one token to continue", field="prompt")
        if len(token_ids) >= self.max_length:
            positions, capacity = self.config.max_position_embeddings, self.scheduler.allocator.capacity
            limit = (
                f"the cache holds {capacity} (more blocks make it larger)"
                if capacity < positions
                else f"the model's context is {positions} with at least one token to generate"
            )
            raise InputError(f"the prompt has {len(token_ids)} tokens, but {limit}", field="prompt")

    def _request(self, token_ids: list[int], params: SamplingParams) -> Request:
        self.check_length(token_ids)
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self.config.vocab_size:
                raise InputError(
                    f"{name} is {count}, but the vocabulary has {self.config.vocab_size} tokens", field=name
                )
        own = frozenset() if params.ignore_eos else self.stop_token_ids
        return Request(
            prompt_length=len(token_ids),
            token_ids=token_ids,
            params=params,
            seed=self._drawn_seed() if params.seed is None else params.seed,
            stop_token_ids=own | frozenset(params.stop_token_ids),
            max_length=self.max_length,
        )

    def _drawn_seed(self) -> int:
        ranks = self.model.ranks
        seed = secrets.randbits(64)
        return seed if ranks is None else ranks.of_rank_0(seed)

    def _run(self, requests: Sequence[Request], on_step: Callable[[Sequence[Request]], None] | None) -> None:
        for request in requests:
            self.scheduler.add(request)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
                if on_step is not None:
                    on_step(requests)
        finally:  # Ctrl-C leaves no request behind to turn up in the next call
            for request in requests:
                self.cancel(request)

    @torch.inference_mode()
    def _advance(self) -> None:
        launch, self._ahead = self._ahead, None
        if launch is None or all(request.finish_reason is not None for request in launch.requests):
            chunks = self.scheduler.schedule()
            assert chunks, "every request fits the empty cache, so the oldest one always advances"
            if self.graphs is None or not self.graphs.takes(chunks):
                self._compute(chunks)
                return
            for chunk in chunks:
                chunk.request.num_computed = chunk.end
            launch = self.graphs.launch([chunk.request for chunk in chunks])
        if self._may_run_ahead(launch):
            self._ahead = self.graphs.launch_next(launch)
            for request in launch.requests:
                request.num_computed += 1
        self._collect(launch)

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        """A step without graphs: prompts, alone or together with decode rows."""
        batch = pack(chunks, self.block_size, self.device)
        hidden = self.model.forward(batch.input_ids, batch.positions, self.kv_caches, batch.metadata)
        for chunk, first_row in zip(chunks, batch.first_rows, strict=True):
            if chunk.request.wants_prompt_rows:
                self._report_prompt(chunk, hidden[first_row : first_row + chunk.end - chunk.start])
            chunk.request.num_computed = chunk.end
        last_rows = {c: row + c.end - c.start - 1 for c, row in zip(chunks, batch.first_rows, strict=True) if c.samples}
        if last_rows:
            logits = self._checked(self.model.logits(hidden[list(last_rows.values())]))
            self._sample([chunk.request for chunk in last_rows], logits)

    def _may_run_ahead(self, launch: Launch) -> bool:
        """True when the step after `launch` can be launched before its tokens are known.

        Its rows must not depend on the tokens (except for stop tokens: later tokens are discarded), the device must
        have chosen the tokens, and each request needs a place for its next token. Rows stay
        the same while no request ends or arrives: every step has all running requests, waiting ones have no room.
        """
        requests = launch.requests
        go_on = all(request.is_greedy and request.goes_on for request in requests)
        return go_on and not self.scheduler.arrived and self.scheduler.reserve(requests)

    def _collect(self, launch: Launch) -> None:
        """The tokens of a launched step. A request that has ended since takes none."""
        if not all(request.is_greedy for request in launch.requests):
            self._sample(launch.requests, self._checked(launch.logits[: len(launch.requests)].float()))
            return
        chosen = launch.chosen()
        for request, token_id in zip(launch.requests, chosen, strict=True):
            if request.finish_reason is None:
                if token_id < 0:
                    raise self._not_finite()
                self._append(request, token_id)

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """The next token of each request from its row of logits [requests, vocab] float32."""
        params = [request.params for request in requests]
        draws = [uniform(request.seed, request.num_generated) for request in requests]
        chosen = choose(logits, params, draws)
        wanting = [row for row, p in enumerate(params) if p.logprobs is not None]
        if wanting:
            counts = [params[row].logprobs or 0 for row in wanting]
            for row, entry in zip(wanting, report(logits[wanting], chosen[wanting], counts), strict=True):
                requests[row].logprobs.append(entry)
        for request, token_id in zip(requests, chosen.tolist(), strict=True):
            self._append(request, token_id)

    def _append(self, request: Request, token_id: int) -> None:
        request.append(token_id)
        if request.finish_reason is not None:
            self.scheduler.finish(request)
            self._ended.append(request)

    def _report_prompt(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Logits or log-probabilities of a chunk's prompt rows but those already reported; hidden [rows, hidden]."""
        request = chunk.request
        stop = min(chunk.end, request.prompt_length)
        for start in range(max(chunk.start, request.prompt_rows_reported), stop, LOGITS_ROWS):
            end = min(start + LOGITS_ROWS, stop)
            logits = self._checked(self.model.logits(hidden[start - chunk.start : end - chunk.start]))
            if request.prompt_logits is not None:
                request.prompt_logits.append(logits)
            # nothing is generated before the whole prompt is reported
            following = request.token_ids[start + 1 : end + 1]
            if request.params.prompt_logprobs is not None and following:
                chosen = torch.tensor(following, device=logits.device)
                counts = [request.params.prompt_logprobs] * len(following)
                request.prompt_logprobs += report(logits[: len(following)], chosen, counts)
            request.prompt_rows_reported = end

    def _checked(self, logits: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(logits).all()):
            raise self._not_finite()
        return logits

    def _not_finite(self) -> NonFiniteLogits:
        return NonFiniteLogits(
            f"the model computed NaN or infinity on {self.device} in {self.model.dtype}: the weights are damaged "
            "or a kernel is wrong. Try another kernel (`npu-gptoss kernels list`) or download the checkpoint again"
        )

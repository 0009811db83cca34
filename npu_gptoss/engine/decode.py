"""Decode steps as replayed graphs: one row a request, inputs that stay on the device from step to step.

`full`: one graph a bucket, attention included; the attention kernel reads its lengths on the device. `piecewise`: the
operations between two attentions are a graph, attention is launched with the host's lengths. Either way a step takes
its inputs from a cursor on the device (`graphs.advance`) and leaves its tokens there; the host reads one small tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss import dense
from npu_gptoss.attention import AttentionMetadata, DecodeMetadata
from npu_gptoss.engine.request import Request
from npu_gptoss.engine.scheduler import Chunk
from npu_gptoss.graphs.advance import advance
from npu_gptoss.graphs.buckets import bucket_for
from npu_gptoss.graphs.recorder import Recorded, Recorder
from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.model.transformer import GptOss, KVCache
from npu_gptoss.progress import counted

FULL, PIECEWISE, NONE, AUTO = "full", "piecewise", "none", "auto"
MODES = (FULL, PIECEWISE, NONE)


@dataclass(eq=False)
class Launch:
    """A running step: its requests, and the place of their next tokens."""

    requests: tuple[Request, ...]
    tokens: torch.Tensor  # [requests] int64 on the host, valid once `done`
    done: Any  # an event, or None where the host waits anyway
    logits: torch.Tensor  # [bucket, vocab], until the next step is launched

    def chosen(self) -> list[int]:
        """The greedy tokens, -1 where a row's logits were not all finite. Waits for the step."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.tolist()


class DecodeGraphs:
    """The graphs of one model over one cache, and the state that they run on."""

    def __init__(
        self,
        model: GptOss,
        kv_caches: Sequence[KVCache],
        *,
        mode: str,
        sizes: Sequence[int],
        block_size: int,
        max_blocks: int,
        recorder: Recorder,
        progress: bool = False,
    ) -> None:
        """sizes ascending; max_blocks: of one request. No request may own the last block of the caches.

        Captures all sizes, the largest first; progress: with a bar.
        """
        self.model = model
        self.kv_caches = kv_caches
        self.sizes = tuple(sizes)
        spare_slot = kv_caches[0][0].shape[0] * block_size - 1
        self.state = DecodeState.allocate(self.sizes[-1], max_blocks, block_size, spare_slot, model.device)
        # one for all graphs: each would otherwise keep its own
        self._logits = torch.empty(self.sizes[-1], model.config.vocab_size, dtype=model.dtype, device=model.device)
        self._recorder = recorder
        self._tables: list[int] = []  # how many blocks of each row the device knows
        capture = self._capture_full if mode == FULL else self._capture_pieces
        self._steps: dict[int, Callable[[Sequence[int]], torch.Tensor]] = {}
        largest_first = reversed(self.sizes)
        for size in counted(largest_first, len(self.sizes), "capturing decode steps", "size", shown=progress):
            self._steps[size] = capture(size)

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """True for a step of decode only that is not larger than the largest graph."""
        return bucket_for(len(chunks), self.sizes) is not None and all(
            chunk.end - chunk.start == 1
            and chunk.samples
            and not (chunk.request.wants_prompt_rows and chunk.start < chunk.request.prompt_length)
            for chunk in chunks
        )

    def launch(self, requests: Sequence[Request]) -> Launch:
        """A step of these requests, whose last tokens the host knows."""
        positions = [len(request.token_ids) - 1 for request in requests]
        self.state.load(
            [request.token_ids[-1] for request in requests], positions, [request.block_ids for request in requests]
        )
        self._tables = [len(request.block_ids) for request in requests]
        return self._replay(requests, [position + 1 for position in positions])

    def launch_next(self, launch: Launch) -> Launch:
        """The step after `launch`, before anyone has seen its tokens: they are the inputs, and lie where they must.

        Each request owns the blocks for one token more than the host knows.
        """
        grown = []
        for row, request in enumerate(launch.requests):
            known, owned = self._tables[row], len(request.block_ids)
            grown += [(row, index, request.block_ids[index]) for index in range(known, owned)]
            self._tables[row] = owned
        self.state.set_blocks(grown)
        return self._replay(launch.requests, [len(request.token_ids) + 1 for request in launch.requests])

    def _replay(self, requests: Sequence[Request], seq_lens: Sequence[int]) -> Launch:
        size = bucket_for(len(requests), self.sizes)
        assert size is not None, "`takes` was asked"
        logits = self._steps[size](seq_lens)
        on_device = self.state.tokens[: len(requests)]
        if on_device.device.type == "cpu":
            return Launch(tuple(requests), on_device.clone(), None, logits)
        tokens = torch.empty(len(requests), dtype=torch.int64, pin_memory=True)
        tokens.copy_(on_device, non_blocking=True)
        done = torch.get_device_module(on_device.device).Event()
        done.record()
        return Launch(tuple(requests), tokens, done, logits)

    def _metadata(self, rows: DecodeState) -> DecodeMetadata:
        """The metadata of a graph: every row of the bucket, the lengths from the device."""
        return DecodeMetadata(
            lengths=rows.seq_lens,
            block_table=rows.block_table,
            slot_mapping=rows.slots,
            max_seq_len=rows.block_table.shape[1] * rows.block_size,
        )

    def _live(self, rows: DecodeState) -> torch.Tensor | None:
        """Marks padding rows, so that no expert is read for them. Ascend's operators take no invalid id."""
        return None if rows.seq_lens.device.type == "npu" else rows.seq_lens

    def _end(self, rows: DecodeState, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.head(hidden, out=self._logits[: rows.capacity])
        dense.greedy(logits, out=rows.tokens)
        return logits

    def _capture_full(self, size: int) -> Callable[[Sequence[int]], torch.Tensor]:
        rows = self.state.rows(size)
        metadata = self._metadata(rows)

        def step() -> torch.Tensor:
            advance(rows)
            hidden = self.model.forward(rows.input_ids, rows.positions, self.kv_caches, metadata, live=self._live(rows))
            return self._end(rows, hidden)

        recorded = self._recorder.record(step)
        return lambda seq_lens: recorded.replay()

    def _capture_pieces(self, size: int) -> Callable[[Sequence[int]], torch.Tensor]:
        rows = self.state.rows(size)
        inside = self._metadata(rows)
        model, caches, last = self.model, self.kv_caches, len(self.kv_caches) - 1
        pieces: list[Recorded] = []
        config = model.config
        # one buffer for all layers: a piece reads it before the next attention writes it
        attended = torch.zeros(size, model.heads, config.head_dim, dtype=model.dtype, device=model.device)

        def piece(index: int, residual: torch.Tensor | None) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
            def work() -> tuple[torch.Tensor, torch.Tensor]:
                if index == 0:
                    advance(rows)
                    stream, delta = model.embed(rows.input_ids), None
                else:
                    assert residual is not None
                    stream, delta = model.leave(index - 1, residual, attended, live=self._live(rows))
                if index > last:
                    return stream, self._end(rows, model.finish(stream, delta))
                return model.enter(index, stream, delta, rows.positions, caches[index], inside)

            return work

        residual = None
        for index in range(last + 2):
            pieces.append(self._recorder.record(piece(index, residual)))
            residual = pieces[-1].result[0]

        def step(seq_lens: Sequence[int]) -> torch.Tensor:
            real = len(seq_lens)
            outside = AttentionMetadata(
                query_start_loc=tuple(range(real + 1)),
                seq_lens=tuple(seq_lens),
                block_table=rows.block_table[:real],
                slot_mapping=rows.slots[:real],
            )
            for index in range(last + 1):
                _, query = pieces[index].replay()
                model.attend(index, query, caches[index], outside, out=attended)
            return pieces[-1].replay()[1]

        return step

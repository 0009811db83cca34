"""The chunks of one step as the packed tensors that the model wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.engine.kv_cache import slot_mapping
from npu_gptoss.engine.scheduler import Chunk


@dataclass(frozen=True)
class Batch:
    input_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    metadata: AttentionMetadata
    first_rows: tuple[int, ...]  # the row of each chunk's first token


def pack(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Batch:
    """One row a token, chunk after chunk."""
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    ids = [token_id for chunk in chunks for token_id in chunk.request.token_ids[chunk.start : chunk.end]]
    slots = [slot_mapping(c.request.block_ids, p, block_size) for c, p in zip(chunks, positions, strict=True)]
    block_table = np.zeros((len(chunks), max(len(chunk.request.block_ids) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(block_table, chunks, strict=True):
        row[: len(chunk.request.block_ids)] = chunk.request.block_ids
    starts = (0, *accumulate(chunk.end - chunk.start for chunk in chunks))
    return Batch(
        input_ids=torch.tensor(ids, dtype=torch.int64).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        metadata=AttentionMetadata(
            query_start_loc=starts,
            seq_lens=tuple(chunk.end for chunk in chunks),
            block_table=torch.from_numpy(block_table).to(device),
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        ),
        first_rows=starts[:-1],
    )

"""The plan of a step for the kernels: its decode rows, and the tiles of its prompts.

Made once a step and window from the host's integers, and sent to the device in one copy from pinned memory. A request
with one row is decoded; one with more is a prompt, whose keys are gathered into contiguous memory first: of a window
layer only the tiles of keys with a visible one. A key lies in the same tile in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from npu_gptoss.attention.metadata import AttentionMetadata
from npu_gptoss.attention.window import first_visible, keys_before

# The gathered keys of one round of prompts, over all of which one launch runs: 2^18 are 0.5 GiB of keys and values at
# gpt-oss's shape. A single prompt may have more.
ROUND_KEYS = 1 << 18
REQUEST_FIELDS = 6  # of `Prompts.requests`


@dataclass(frozen=True)
class Rows:
    """Decode rows. rows, requests: [count] int32, the row of query and the request of each; None: row i is request i.

    lengths: [requests] int32; longest: the largest length of these rows.
    settled: lengths, table and all keys but each row's newest are older than the kernel before (`DecodeMetadata`).
    """

    count: int
    longest: int
    lengths: torch.Tensor
    rows: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    settled: bool = False


@dataclass(frozen=True)
class Prompts:
    """One round of prompts.

    requests: [prompts, 6] int32: request, first row, rows, position of the first row, first key, place of that key
        in the gathered memory. A key is a position of the request.
    tiles: [tiles, 2] int32: index into `requests` and number of the tile within; those with the most keys first.
    keys: of the gathered memory in all, each prompt's padded to a whole number of key tiles; longest: of one prompt.
    """

    requests: torch.Tensor
    tiles: torch.Tensor
    keys: int
    longest: int


@dataclass(frozen=True)
class Plan:
    decode: Rows | None
    rounds: tuple[Prompts, ...]


def make_plan(
    metadata: AttentionMetadata,
    sliding_window: int | None,
    tile_rows: int,
    tile_keys: int,
    device: torch.device,
    *,
    decodes: bool = True,
) -> Plan:
    """tile_rows: query rows of a prompt's tile; tile_keys: to whose multiple a prompt's gathered keys are padded.
    decodes: False where a request of one row is a prompt, too."""
    before = keys_before(sliding_window)
    start, lengths = np.asarray(metadata.query_start_loc), np.asarray(metadata.seq_lens)
    rows = np.diff(start)
    single, several = np.flatnonzero((rows == 1) & decodes), np.flatnonzero(rows > decodes)
    pieces: list[np.ndarray] = [lengths, start[single], single]
    rounds: list[tuple[np.ndarray, np.ndarray, int, int]] = []
    for chosen in _rounds(several, lengths):
        rounds.append(_prompts(chosen, start, rows, lengths, before, tile_rows, tile_keys))
        pieces += [rounds[-1][0].ravel(), rounds[-1][1].ravel()]
    views = _to_device(pieces, device)
    decode = None
    if len(single):
        everyone = len(single) == len(lengths)
        decode = Rows(
            len(single),
            int(lengths[single].max()),
            views[0] if metadata.lengths is None else metadata.lengths,
            None if everyone else views[1],
            None if everyone else views[2],
        )
    return Plan(
        decode,
        tuple(
            Prompts(requests.view(-1, REQUEST_FIELDS), tiles.view(-1, 2), keys, longest)
            for requests, tiles, (_, _, keys, longest) in zip(views[3::2], views[4::2], rounds, strict=True)
        ),
    )


def _rounds(several: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Prompts in order, in groups whose keys stay below ROUND_KEYS; none is cut."""
    if not len(several):
        return []
    group = np.zeros(len(several), dtype=np.int64)
    keys = number = 0
    for index, length in enumerate(lengths[several].tolist()):
        if keys and keys + length > ROUND_KEYS:
            keys, number = 0, number + 1
        keys += length
        group[index] = number
    return np.split(several, np.flatnonzero(np.diff(group)) + 1)


def _prompts(
    chosen: np.ndarray,
    start: np.ndarray,
    rows: np.ndarray,
    lengths: np.ndarray,
    before: int | None,
    tile_rows: int,
    tile_keys: int,
) -> tuple[np.ndarray, np.ndarray, int, int]:
    first_position = lengths[chosen] - rows[chosen]
    first_key = np.array([first_visible(position, before) for position in first_position.tolist()])
    first_key -= first_key % tile_keys
    keys = -(-(lengths[chosen] - first_key) // tile_keys) * tile_keys
    place = np.concatenate(([0], np.cumsum(keys)[:-1]))
    requests = np.stack((chosen, start[chosen], rows[chosen], first_position, first_key, place), axis=1)
    counts = -(-rows[chosen] // tile_rows)
    prompt = np.repeat(np.arange(len(chosen)), counts)
    number = np.arange(len(prompt)) - np.repeat(np.cumsum(counts) - counts, counts)
    seen = (first_position - first_key)[prompt] + number * tile_rows
    order = np.argsort(-seen, kind="stable")
    return requests, np.stack((prompt[order], number[order]), axis=1), int(keys.sum()), int(keys.max())


def _to_device(pieces: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All in one copy, which the host does not wait for; each begins at a multiple of 16 bytes."""
    sizes = [-(-piece.size // 4) * 4 for piece in pieces]
    packed = np.zeros(sum(sizes), dtype=np.int32)
    at = np.cumsum([0, *sizes])
    for piece, offset in zip(pieces, at.tolist(), strict=False):
        packed[offset : offset + piece.size] = piece
    source = torch.from_numpy(packed)
    if device.type != "cpu":
        source = source.pin_memory()
    on_device = source.to(device, non_blocking=True)
    return [on_device[offset : offset + piece.size] for piece, offset in zip(pieces, at.tolist(), strict=False)]

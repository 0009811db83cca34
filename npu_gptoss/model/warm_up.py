"""Compiles, before the first request, every Triton program that a step can ask for.

A program depends on sizes: which kernel the registry has for so many rows, the tile of its table, powers of two. All
of these change at a power of two, at three times one, or where a kernel's `Range` ends. So one step of each size at
either side of those meets every program (`sizes`), of each kind of layer. Attention's programs depend on how many rows
decode and on the longest of them, too (`attention_steps`).

Nothing is kept: no key is written, rows see keys of the cache's first block, and results are dropped. What a graph
holds was compiled when it was captured, or before (`compile_programs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata
from npu_gptoss.model.transformer import GptOss, KVCache

PROMPT_ROWS = 2  # how long a prompt is changes no program
HEAD_ROWS = 256  # of logits at once: 100 MB. For more rows they are cuBLAS's, whatever their number


@dataclass(frozen=True)
class Reach:
    """The largest step to come: rows of one step, rows of it that decode, keys of a request.

    graph_rows: steps up to so many rows are in graphs, but for attention.
    """

    rows: int
    decode_rows: int
    keys: int
    graph_rows: int = 0


def sizes(most: int, ends: Sequence[int] = ()) -> list[int]:
    """Returns sizes up to `most`, on either side of where a program may change. ends: of ranges of the registry."""
    powers = [1 << power for power in range(most.bit_length())]
    edges = {*powers, *(3 * power for power in powers), *ends, most - 1}
    return sorted({size for edge in edges for size in (edge, edge + 1) if 1 <= size <= most})


def powers_up_to(most: int) -> list[int]:
    """The powers of two up to that of the least that holds `most`, the last cut to it."""
    return [min(1 << power, most) for power in range((most - 1).bit_length() + 1)]


def compile_programs(model: GptOss, caches: Sequence[KVCache], reach: Reach) -> None:
    """Compiles on all cores and launches nothing. caches: a pair a layer, of one block or more, laid out as those to
    come."""
    from npu_gptoss.kernels.ahead import compile_ahead

    compile_ahead(lambda: launch_programs(model, caches, reach))


def warm_up(model: GptOss, caches: Sequence[KVCache], reach: Reach) -> None:
    """Compiles, then launches once. caches: a pair a layer, of which nothing changes. With ranks all of them call it
    with the same reach."""
    compile_programs(model, caches, reach)
    launch_programs(model, caches, reach)


@torch.inference_mode()
def launch_programs(model: GptOss, caches: Sequence[KVCache], reach: Reach) -> None:
    """Launches each program once. caches, reach: as for `warm_up`."""
    layers = _layers(model)
    for rows in sizes(reach.rows, _ends(model)):
        if rows > reach.graph_rows:
            for live in (None, torch.ones(rows, dtype=torch.int32, device=model.device)):
                _without_attention(model, caches[:layers], rows, live)
    for rows in sizes(min(reach.decode_rows, HEAD_ROWS), _ends(model)):
        hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        logits = model.head(hidden)
        if model.shortlist is not None and rows <= model.token_rows:
            hidden[:] = model.lm_head[0]  # of zeros every token may be the largest: all would be multiplied in full
            for noise in (None, torch.zeros_like(logits, dtype=torch.float32)):
                model.token(hidden, noise)
    for step in attention_steps(reach, caches[0][0].shape[1], model.device):
        shape = step.num_tokens, model.heads, model.config.head_dim
        query = torch.zeros(shape, dtype=model.dtype, device=model.device)
        for index in range(layers):
            model.attend(index, query, caches[index], step)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _layers(model: GptOss) -> int:
    """Returns how many of the first layers have among them each kind, and one that is not the first of all."""
    windows = [layer.attention.window for layer in model.layers]
    return min(max(2, *(windows.index(window) + 1 for window in windows)), len(windows))


def _ends(model: GptOss) -> list[int]:
    """The sizes at which the registry has another kernel for some operation."""
    return sorted({most for bound in model.bounds for most, _ in bound.ranges})


def _without_attention(model: GptOss, caches: Sequence[KVCache], rows: int, live: torch.Tensor | None) -> None:
    positions = torch.zeros(rows, dtype=torch.int64, device=model.device)
    step = _step([rows], rows, caches[0][0].shape[1], model.device)
    residual = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
    delta = None
    for index, cache in enumerate(caches):
        residual, query = model.enter(index, residual, delta, positions, cache, step)
        residual, delta = model.leave(index, residual, query, live)
    model.finish(residual, delta)


def attention_steps(reach: Reach, block_size: int, device: torch.device) -> Iterator[StepMetadata]:
    """A prompt alone; for each power of two above the rows that decode, and above the longest of their requests, these
    alone, with lengths that the host knows and that the device knows, and beside a prompt."""
    prompt = min(PROMPT_ROWS, reach.rows, reach.keys)
    if prompt > 1:
        yield _step([prompt], prompt, block_size, device)
    for rows in powers_up_to(min(reach.decode_rows, reach.rows)):
        beside = min(rows, reach.rows - prompt) if prompt > 1 else 0
        for longest in powers_up_to(reach.keys):
            alone = _step([1] * rows, longest, block_size, device)
            yield alone
            yield DecodeMetadata(alone.lengths, alone.block_table, alone.slot_mapping, longest)
            if beside:
                yield _step([*[1] * beside, prompt], longest, block_size, device)


def _step(rows: list[int], longest: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """Requests of so many rows. Those of one row may see `longest` keys as far as the host knows, and see one."""
    starts = [0]
    for each in rows:
        starts.append(starts[-1] + each)
    blocks = -(-max(longest, *rows, 1) // block_size)
    return AttentionMetadata(
        tuple(starts),
        tuple(longest if each == 1 else each for each in rows),
        torch.zeros(1, blocks, dtype=torch.int32, device=device).expand(len(rows), blocks),
        torch.full((starts[-1],), -1, dtype=torch.int64, device=device),
        torch.ones(len(rows), dtype=torch.int32, device=device),
    )

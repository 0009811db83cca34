"""Default numbers of tokens for which graphs are captured.

vLLM asks for 81 sizes up to 992 for gpt-oss. On Ascend each is captured once a layer, so the start takes minutes, and
decode steps have at most `max_num_seqs` tokens, so most sizes stay unused. vllm-ascend reduces the rest to its budget
of streams when graphs are captured piecewise (`update_aclgraph_sizes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_gptoss.graphs import buckets

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

STREAMS = 1984  # of an A2 or A3 device, from CANN 8.3's documents; all its processes share them
BUDGET = 1800  # streams that vllm-ascend 0.11.0 gives to graphs


def capture_sizes(max_num_seqs: int, each: int = 1) -> list[int]:
    """Returns the sizes of `graphs`, but at least two: vLLM takes a single size for a maximum.

    each: most rows of a request, more than one with drafts. Up to eight requests sizes lie eight rows apart, then eight
    requests: so many rows read every expert anyway, and there are about as many sizes as without drafts. vLLM rounds
    each up to whole requests.
    """
    few = buckets.capture_sizes(max(2, each * min(max_num_seqs, buckets.STEP)))
    return sorted({*few, *(each * size for size in buckets.capture_sizes(max_num_seqs))})


def _factor(groups: int, aiv: bool) -> int:
    """Returns the streams of one captured piece."""
    return 1 + groups if aiv else 1 + 2 * groups


def most_sizes(layers: int, *, groups: int = 0, aiv: bool = False) -> int:
    """Returns how many sizes vllm-ascend 0.11.0 captures piecewise, with the arithmetic of `update_aclgraph_sizes`.

    groups: groups of communication with more than one rank. aiv: HCCL_OP_EXPANSION_MODE=AIV. Without speculative
    decoding and expert parallelism.
    """
    budget = BUDGET if aiv else BUDGET - 40 * groups
    return budget // ((layers + 1) * _factor(groups, aiv))


def streams(count: int, layers: int, *, groups: int = 0, aiv: bool = False) -> int:
    """Returns the streams that `count` sizes take, with the same arithmetic."""
    return count * (layers + 1) * _factor(groups, aiv) + (0 if aiv else 40 * groups)


def cap(config: VllmConfig) -> None:
    """Sets the sizes before vLLM's own update for this model widens its default list. A user's list stays."""
    from npu_gptoss.serving.releases.vllm import choose_sizes

    choose_sizes(config, capture_sizes(config.scheduler_config.max_num_seqs, _rows_each(config)))


def _rows_each(config: VllmConfig) -> int:
    return 1 + (getattr(config.speculative_config, "num_speculative_tokens", 0) or 0)


def shortfall(config: VllmConfig) -> str | None:
    """Returns what a user loses whose own sizes end below the largest decode step; None if they do not."""
    from npu_gptoss.serving.releases.vllm import largest_chosen

    each, requests = _rows_each(config), config.scheduler_config.max_num_seqs
    rows = min(each * requests, config.scheduler_config.max_num_batched_tokens)
    largest = largest_chosen(config)
    if largest is None or largest >= rows:
        return None
    drafts = f" with {each - 1} drafts each" if each > 1 else ""
    return (
        f"The largest graph that you ask for has {largest} tokens, and larger steps run without one, which is many "
        f"times slower: {requests} requests{drafts} (--max-num-seqs) take {rows}. Leave your capture sizes out, add "
        f"{rows} to them, or lower --max-num-seqs."
    )

"""At which numbers of tokens graphs are captured, when the user did not say.

vLLM asks for 81 sizes up to 992 for gpt-oss. On Ascend each is captured once a layer, start-up takes minutes, and most
can never be used by a decode step, which has at most `max_num_seqs` tokens. What remains, vllm-ascend thins out to its
budget of streams when graphs are captured piecewise (`update_aclgraph_sizes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_gptoss.graphs import buckets

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

STREAMS = 1984  # of an A2 or A3 device, by CANN's documents; all processes on it share them
BUDGET = 1800  # of them vllm-ascend 0.11.0 hands out to graphs


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Those of `graphs`, and at least two: vLLM takes one for a maximum."""
    return buckets.capture_sizes(max(2, max_num_seqs))


def _factor(groups: int, aiv: bool) -> int:
    """Streams that one captured piece takes."""
    return 1 + groups if aiv else 1 + 2 * groups


def most_sizes(layers: int, *, groups: int = 0, aiv: bool = False) -> int:
    """How many sizes vllm-ascend 0.11.0 lets be captured piecewise: the arithmetic of its `update_aclgraph_sizes`.

    groups: groups of communication with more than one rank. aiv: HCCL_OP_EXPANSION_MODE=AIV. Without speculative
    decoding and expert parallelism.
    """
    budget = BUDGET if aiv else BUDGET - 40 * groups
    return budget // ((layers + 1) * _factor(groups, aiv))


def streams(count: int, layers: int, *, groups: int = 0, aiv: bool = False) -> int:
    """What `count` sizes take, by the same arithmetic."""
    return count * (layers + 1) * _factor(groups, aiv) + (0 if aiv else 40 * groups)


def cap(config: VllmConfig) -> None:
    """Before vLLM's own update of this model, which widens the list if it is still the default. A user's stays."""
    from npu_gptoss.serving.lines.vllm import choose_sizes

    choose_sizes(config, capture_sizes(config.scheduler_config.max_num_seqs))

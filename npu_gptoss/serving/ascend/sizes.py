"""At which numbers of tokens graphs are captured, when the user did not say.

vLLM asks for 81 sizes up to 992 for gpt-oss. On Ascend each is captured once a layer, start-up takes minutes, and most
can never be used by a decode step, which has at most `max_num_seqs` tokens. What remains, vllm-ascend thins out to its
budget of streams when graphs are captured piecewise (`update_aclgraph_sizes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STEP = 8  # between sizes, as vLLM has it


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and the largest decode step itself. At least two: vLLM takes one for a maximum."""
    sizes = {size for size in (1, 2, 4, *range(STEP, max_num_seqs, STEP)) if size < max_num_seqs}
    return sorted({*sizes, max(2, max_num_seqs), 1})


def chosen_by_user(config: VllmConfig) -> bool:
    scheduler = config.scheduler_config
    # what vLLM fills in when --cuda-graph-sizes is left out
    default = [min(scheduler.max_num_seqs * 2, 512)]
    return config.compilation_config.cudagraph_capture_sizes is not None or scheduler.cuda_graph_sizes != default


def cap(config: VllmConfig) -> None:
    """Before vLLM's own update of this model, which widens the list if it is still the default."""
    if not chosen_by_user(config):
        config.scheduler_config.cuda_graph_sizes = capture_sizes(config.scheduler_config.max_num_seqs)

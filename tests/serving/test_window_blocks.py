"""The blocks that vLLM's KV cache manager holds for a layer with a window are those of the keys that the kernels read.

Runs on vLLM 0.23 and 0.33 with the layers of 20b, in vLLM's own groups; no device is needed.
"""

from __future__ import annotations

from types import SimpleNamespace as Having
from typing import Any

import pytest
import torch

from npu_gptoss.attention.window import first_visible, keys_before
from npu_gptoss.model.config import published_config
from npu_gptoss.serving.releases import here

if here().name == "0.11":
    pytest.skip("needs vLLM 0.33 or 0.23", allow_module_level=True)

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.request import Request

if here().name == "0.33":
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheLayout

    LAYOUT = KVCacheLayout.LBNHC
else:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    LAYOUT = None

pytestmark = pytest.mark.serving

CONFIG = published_config()
LONG, CHUNK = 32768, 8192


def groups_of(block: int, window: int = CONFIG.sliding_window, one_group: bool = False) -> list[Any]:
    shape = {"block_size": block, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    specs = {
        f"model.layers.{layer}.self_attn.attn": FullAttentionSpec(**shape)
        if CONFIG.window(layer) is None
        else SlidingWindowSpec(**shape, sliding_window=window)
        for layer in range(CONFIG.num_hidden_layers)
    }
    config = Having(
        scheduler_config=Having(disable_hybrid_kv_cache_manager=one_group),
        attention_config=Having(hisparse_config=None),
        cache_config=Having(block_size=block, get_resolved_kv_cache_layout=lambda: LAYOUT),
        parallel_config=Having(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        model_config=Having(max_model_len=LONG, use_mla=False),
        speculative_config=None,
    )
    return get_kv_cache_groups(config, specs)


class Served:
    """One request in a pool of blocks."""

    def __init__(self, block: int, prompt: int, **how: Any) -> None:
        self.block, self.groups = block, groups_of(block, **how)
        cache = KVCacheConfig(num_blocks=3 * LONG // block, kv_cache_tensors=[], kv_cache_groups=self.groups)
        self.manager = KVCacheManager(cache, LONG, block, block, CHUNK, enable_caching=False)
        free = SamplingParams(max_tokens=1000)
        self.request = Request("one", [1] * prompt, sampling_params=free, pooling_params=None)
        self.request.num_in_flight_tokens = 0

    def step(self, tokens: int) -> None:
        assert self.manager.allocate_slots(self.request, tokens) is not None
        self.request.num_computed_tokens += tokens

    def held(self) -> list[set[int]]:
        """Returns for each group the numbers of the request's blocks that are not freed."""
        blocks = self.manager.get_blocks("one").blocks
        return [{at for at, block in enumerate(group) if not block.is_null} for group in blocks]

    def bytes(self) -> int:
        return sum(
            len(held) * len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            for held, group in zip(self.held(), self.groups, strict=True)
        )


def mistakes(block: int, steps: list[int], window: int) -> set[str]:
    """window: as vLLM has it. Returns "short" if a key that a kernel reads was freed, "long" if a block stays whose
    keys no kernel reads."""
    served, found = Served(block, sum(steps), window=window), set()
    windowed = [isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in served.groups]
    for tokens in steps:
        start = served.request.num_computed_tokens
        served.step(tokens)
        for held, has_window in zip(served.held(), windowed, strict=True):
            oldest = first_visible(start, keys_before(CONFIG.sliding_window if has_window else None))
            needed = set(range(oldest // block, -(-(start + tokens) // block)))
            found |= {"short"} if needed - held else set()
            found |= {"long"} if held - needed else set()
    return found


STEPS = {"decode": [200] + [1] * 300, "chunks": [100, 128, 127, 129, 1, 1, 255, 3, 64] + [16] * 40}


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("steps", STEPS)
def test_window_blocks_are_those_of_127_keys_before_the_query(block, steps):
    assert mistakes(block, STEPS[steps], CONFIG.sliding_window) == set()


@pytest.mark.parametrize(("window", "wrong"), [(127, "short"), (129, "long")])
@pytest.mark.parametrize("block", [16, 128])
def test_a_window_of_one_key_less_or_more_is_noticed(block, window, wrong):
    assert mistakes(block, STEPS["decode"], window) == {wrong}


@pytest.mark.parametrize("block", [16, 128])
def test_a_long_request_of_20b_holds_half_of_its_keys(block):
    """At 32k; while a prompt is computed, also the tokens of the step."""
    served, whole = Served(block, LONG), Served(block, LONG, one_group=True)
    for each in (served, whole):
        for _ in range(LONG // CHUNK - 1):
            each.step(CHUNK)
        each.step(CHUNK - 1)
        each.step(1)
    assert len(served.groups) == 2
    assert len(whole.groups) == 1
    assert whole.bytes() == LONG * 2 * 8 * 64 * 2 * CONFIG.num_hidden_layers
    assert served.bytes() / whole.bytes() < 0.505

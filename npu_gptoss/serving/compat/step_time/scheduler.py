"""Skips KV cache calls for a request that decodes within its last block (vLLM 0.33).

A running request reaches the end of a block about every sixteenth token. In between it needs no block, leaves no block
behind its window and fills none for the prefix cache. vLLM finds that out again at every step with about thirty calls
per request: at 256 streams that takes longer than the device. Each repair checks these three cases, and calls vLLM's
own code if one of them applies.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Mismatch, Original, around, expect_source, repair

UNTIL = "vLLM's scheduler takes as little time"
_GROUPS = "_npu_gptoss_groups"

# Group of layers: block manager, tokens per block, keys kept behind a query (None: all)
Group = tuple[Any, int, int | None]


def _expect_managers() -> None:
    """Raises Mismatch unless full attention and windows allocate, free and commit by the values that `_groups` reads
    alone."""
    from vllm.v1.core import kv_cache_coordinator, single_type_kv_cache_manager

    coordinator, of = kv_cache_coordinator.KVCacheCoordinator, single_type_kv_cache_manager
    manager, window, full = of.SingleTypeKVCacheManager, of.SlidingWindowManager, of.FullAttentionManager
    skipping = "manager.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)"
    cached = "num_cached_blocks = self.num_cached_block.get(request.request_id, 0)"
    filled = "num_full_blocks = min(num_tokens, num_hashed_tokens) // self.block_size"
    passed = "max(0, num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens,)"
    for function, *markers in (
        (coordinator.cache_blocks, "if not manager.enable_caching: continue", "manager.cache_blocks(request,"),
        (coordinator.remove_skipped_blocks, skipping),
        (manager.allocate_new_blocks, "if request_id in self._partial_hit_reqs:"),
        (manager.allocate_new_blocks, "num_required_blocks = cdiv(num_tokens, self.block_size)"),
        (manager.allocate_new_blocks, "if num_new_blocks <= 0: return cow_blocks"),
        (manager.cache_blocks, cached, filled, "if num_cached_blocks >= num_full_blocks: return"),
        (manager.remove_skipped_blocks, "num_skipped_blocks = min(num_skipped_blocks, len(blocks))"),
        (manager.remove_skipped_blocks, "self._remove_blocks_in_range(request_id, 0, num_skipped_blocks)"),
        (manager._remove_blocks_in_range, "if blocks[i] == self._null_block: break"),
        (window.get_num_skipped_tokens, passed),
        (full.cache_blocks, "if self.block_size == hash_block_size: return"),
    ):
        expect_source(function, *markers)
    own = {"allocate_new_blocks", "get_num_blocks_to_allocate", "remove_skipped_blocks", "_remove_blocks_in_range"}
    if own & {*vars(full), *vars(window)} or "cache_blocks" in vars(window):
        raise Mismatch("full attention or a window has its own code to allocate or free blocks")


def _groups(coordinator: Any) -> tuple[Group, ...]:
    """Returns the groups; empty if a group is neither full attention nor a window, or commits a part of a block."""
    found = vars(coordinator).get(_GROUPS)
    if found is None:
        from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

        known = type(coordinator).cache_blocks is KVCacheCoordinator.cache_blocks
        found = tuple(
            (
                each,
                each.block_size,
                each.sliding_window - 1 + each.extra_retained_tokens if type(each) is SlidingWindowManager else None,
            )
            for each in coordinator.single_type_managers
            if type(each) in (FullAttentionManager, SlidingWindowManager)
            and (not each.enable_caching or each.block_size == each.block_pool.hash_block_size)
        )
        if not known or len(found) < len(coordinator.single_type_managers):
            found = ()
        setattr(coordinator, _GROUPS, found)
    return found


def _commits_nothing(groups: tuple[Group, ...], request_id: str, tokens: int) -> bool:
    """Returns whether the first `tokens` tokens fill no block that the prefix cache lacks."""
    for manager, size, _ in groups:
        if manager.enable_caching and (manager.num_cached_block.get(request_id, 0) + 1) * size <= tokens:
            return False
    return True


@repair("running-slots", "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", releases="0.33", until=UNTIL)
def install_slots(kv_cache: ModuleType) -> None:
    """For a running request whose next tokens fit into its last block, vLLM counts, frees, allocates and commits blocks
    in each group of layers, to no effect."""
    from vllm.v1.request import RequestStatus

    manager = kv_cache.KVCacheManager
    expect_source(
        manager.allocate_slots,
        "request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED,)",
        "max(0, total_computed_tokens - request.num_in_flight_tokens)",
        "num_tokens_to_cache = min(total_computed_tokens + num_new_tokens, request.num_tokens,)",
    )
    expect_source(manager.create_kv_cache_blocks, "if any(blocks) else self.empty_kv_cache_blocks")
    _expect_managers()
    running = RequestStatus.RUNNING

    @around(manager, "allocate_slots")
    def allocate_slots(
        original: Original,
        self: Any,
        request: Any,
        num_new_tokens: int,
        *more: Any,
        num_lookahead_tokens: int = 0,
        **options: Any,
    ) -> Any:
        if not more and not options and num_new_tokens > 0 and request.status is running:
            groups, request_id = _groups(self.coordinator), request.request_id
            computed = request.num_computed_tokens
            end = computed + num_new_tokens
            slots, settled = end + num_lookahead_tokens, computed - request.num_in_flight_tokens
            if groups and slots <= self.max_model_len:
                for each, size, kept in groups:
                    blocks = each.req_to_blocks.get(request_id, ())
                    if slots > len(blocks) * size or each._partial_hit_reqs:
                        break
                    passed = 0 if kept is None else (settled - kept) // size  # blocks behind the window
                    if passed > 0 and blocks[min(passed, len(blocks)) - 1] is not each._null_block:
                        break
                else:
                    if not self.enable_caching or _commits_nothing(groups, request_id, min(end, request.num_tokens)):
                        return self.empty_kv_cache_blocks
        return original(self, request, num_new_tokens, *more, num_lookahead_tokens=num_lookahead_tokens, **options)


@repair(
    "running-commits", "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks", releases="0.33", until=UNTIL
)
def install_commits(coordinator: ModuleType) -> None:
    """After every token of a request, each group of layers computes the number of blocks that the prefix cache should
    have; it usually has them."""
    own = coordinator.KVCacheCoordinator
    _expect_managers()

    @around(own, "cache_blocks")
    def cache_blocks(original: Original, self: Any, request: Any, num_computed_tokens: int) -> None:
        groups = _groups(self)
        if not groups or not _commits_nothing(groups, request.request_id, num_computed_tokens):
            original(self, request, num_computed_tokens)

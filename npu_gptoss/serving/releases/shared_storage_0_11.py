"""A KV connector for vLLM 0.11: one server computes a prompt, another decodes it; a shared folder holds the cache.

    --kv-transfer-config.kv_connector SharedFolderConnector
    --kv-transfer-config.kv_connector_module_path npu_gptoss.serving.releases.shared_storage_0_11

It derives from vLLM's `SharedStorageConnector`, an example for one GPU and one prompt a step, and repairs its defects:

* it reads with `.cuda()` and expects a layer's cache as one tensor; vllm-ascend has two;
* it stores a prompt of several steps at its first step, before all blocks are computed;
* it uses the same file names on each rank of tensor parallelism, and reads files that are still being written;
* it looks for a prompt of k blocks and one token under the name of k - 1 blocks. If another prompt has that name, the
  missing file ends the engine;
* it skips prompt tokens whose log-probabilities were requested.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from vllm.distributed import get_world_group
from vllm.distributed.kv_transfer.kv_connector.v1 import shared_storage_connector as vllms


def parts(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a layer's cache of one or two tensors into keys and values, each [slots, heads, head_dim]."""
    key, value = cache
    return key.flatten(0, 1), value.flatten(0, 1)


class SharedFolderConnector(vllms.SharedStorageConnector):
    """Contains the scheduler's half and the worker's half; a process uses one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = kwargs.get("vllm_config", args[0] if args else None).parallel_config.world_size
        self._in_prefill: dict[str, tuple[list[int], list[int]]] = {}  # prompt and blocks, by request
        self._read_out: dict[Path, dict[str, torch.Tensor]] = {}

    def _file(self, tokens: torch.Tensor, rank: int) -> Path:
        return Path(self._generate_foldername_debug(tokens, [])) / f"{rank}-of-{self._ranks}.safetensors"

    # the scheduler's half

    def _stored(self, prompt: list[int]) -> int:
        """Returns how many prompt tokens every rank has stored; at least one is left to compute."""
        tokens = vllms.align_to_block_size(len(prompt), self._block_size)
        key = torch.tensor(prompt)[:tokens]
        return tokens if tokens and all(self._file(key, rank).exists() for rank in range(self._ranks)) else 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.sampling_params is None or request.sampling_params.prompt_logprobs is not None:
            return 0, False
        return max(0, self._stored(request.prompt_token_ids) - num_computed_tokens), False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Lists the prompts that this step reads before it computes, and the completed prompts that it stores."""
        meta = vllms.SharedStorageConnectorMetadata()

        def add(prompt: list[int], blocks: list[int], is_store: bool) -> None:
            meta.add_request(prompt, blocks, self._block_size, is_store, mm_hashes=[])

        done = {}
        for new in scheduler_output.scheduled_new_reqs:
            done[new.req_id] = new.num_computed_tokens
            if new.req_id in self._requests_need_load:
                add(new.prompt_token_ids, new.block_ids[0], False)
            elif not self._stored(new.prompt_token_ids):
                self._in_prefill[new.req_id] = new.prompt_token_ids, list(new.block_ids[0])
        again = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(again.req_ids):
            done[name] = again.num_computed_tokens[index]
            more = (again.new_block_ids[index] or ([],))[0]
            if again.resumed_from_preemption[index]:
                if name in self._requests_need_load:
                    add(self._requests_need_load[name].prompt_token_ids, more, False)
                self._in_prefill.pop(name, None)  # its blocks have changed
            elif name in self._in_prefill:
                self._in_prefill[name][1].extend(more)
        for name in scheduler_output.finished_req_ids:
            self._in_prefill.pop(name, None)
        for name, (prompt, blocks) in list(self._in_prefill.items()):
            if done.get(name, 0) + scheduler_output.num_scheduled_tokens.get(name, 0) >= len(prompt):
                add(prompt, blocks, True)
                del self._in_prefill[name]
        self._requests_need_load.clear()
        return meta

    # a worker's half

    def _requests(self, is_store: bool) -> list[tuple[Path, torch.Tensor]]:
        """Returns each request's file on this rank, and the slots of its tokens."""
        rank = get_world_group().rank % self._ranks  # data parallel engines are copies
        requests = self._get_connector_metadata().requests
        return [
            (self._file(request.token_ids, rank), request.slot_mapping)
            for request in requests
            if request.is_store == is_store and len(request.slot_mapping)
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for file, slots in self._requests(is_store=False):
            stored = safetensors.torch.load_file(file)
            vllms.logger.info("%d tokens of a prompt come from %s", len(slots), file)
            for name, layer in forward_context.no_compile_layers.items():
                if getattr(layer, "kv_cache", None) is None:
                    continue
                for part, of in zip(parts(layer.kv_cache[forward_context.virtual_engine]), "kv", strict=True):
                    part[slots.to(part.device)] = stored[f"{name}.{of}"].to(part.device)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for file, slots in self._requests(is_store=True):
            tensors = self._read_out.setdefault(file, {})
            for part, of in zip(parts(kv_layer), "kv", strict=True):
                tensors[f"{layer_name}.{of}"] = part[slots.to(part.device)]

    def wait_for_save(self) -> None:
        """Gives each file its final name when it is complete."""
        for file, tensors in self._read_out.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")
            safetensors.torch.save_file({name: tensor.cpu() for name, tensor in tensors.items()}, unfinished)
            unfinished.replace(file)
        self._read_out.clear()

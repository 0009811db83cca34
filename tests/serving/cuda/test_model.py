"""The model of the CUDA release in vLLM 0.33's own structures, against the offline model; no GPU is needed for it.

Steps are as vLLM's scheduler makes them: prompts, chunks, decode, drafts to verify, in two groups of blocks.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from types import SimpleNamespace as Having
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")

from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.utils import clear_layer_kv_caches, customize_attention_spec

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata
from npu_gptoss.files import CheckpointError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.serving import limits
from npu_gptoss.serving.cuda import cache, model, ranks
from npu_gptoss.serving.cuda.cache import Slots, StepBuilder
from tests.checkpoints import random_tensors, write_random_checkpoint
from tests.refused import refused

BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 16, 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GptOssConfig]:
    folder = tmp_path_factory.mktemp("random")
    return folder, write_random_checkpoint(folder)


def config_of(folder: Path, drafts: int = 0) -> Having:
    return Having(
        model_config=Having(model=str(folder), quantization=None, max_model_len=MAX_MODEL_LEN, dtype=torch.float32),
        scheduler_config=Having(max_num_batched_tokens=256, max_num_seqs=8),
        cache_config=Having(block_size=BLOCK_SIZE, cache_dtype="auto"),
        parallel_config=Having(enable_expert_parallel=False, decode_context_parallel_size=1),
        speculative_config=Having(num_speculative_tokens=drafts, use_eagle=lambda: False) if drafts else None,
        compilation_config=Having(static_forward_context={}, max_cudagraph_capture_size=None),
        lora_config=None,
    )


@dataclass
class Server:
    """Stands for vLLM's runner, with requests that always run together."""

    config: GptOssConfig
    model: model.GptOssForCausalLM
    plain: GptOss
    drafts: int
    tables: tuple[torch.Tensor, torch.Tensor]  # of the layers with a window, and of the others
    lengths: list[int]
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tolerance: float = 1e-5

    @classmethod
    def of(cls, folder: Path, config: GptOssConfig, drafts: int = 0, requests: int = 3) -> Server:
        served = model.GptOssForCausalLM(vllm_config=config_of(folder, drafts))
        served.load_weights(random_tensors(config).items())
        for layer in served.caches:
            page = torch.zeros(BLOCKS, BLOCK_SIZE, layer.num_kv_heads, 2 * layer.head_size)
            layer.bind_kv_cache(page.transpose(1, 2))  # [B, H, N, C] over memory in the order of LBNHC
        shape = (BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        tables = torch.randperm(BLOCKS)[: 2 * requests * 10].view(2, requests, 10).int()
        plain = GptOss.from_tensors(config, random_tensors(config).items(), "cpu", torch.float32)
        caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in served.caches]
        return cls(config, served, plain, drafts, tuple(tables), [0] * requests, caches)

    def step(
        self,
        rows: Sequence[int],
        *,
        prefilling: Sequence[bool],
        unknown: int = 0,
        stray: Mapping[int, int] = MappingProxyType({}),
    ) -> Any:
        """Checks one step. Returns the class of its metadata, or the model's result where it has several tensors.

        unknown: by how much the host's lengths of decoding requests are too long. stray: by row, an id
        outside the vocabulary; it is computed as the nearest token.
        """
        positions = [torch.arange(had, had + new) for had, new in zip(self.lengths, rows, strict=True)]
        self.lengths = [had + new for had, new in zip(self.lengths, rows, strict=True)]
        ids = torch.randint(0, self.config.vocab_size, (sum(rows),))
        for row, token in stray.items():
            ids[row] = min(max(token, 0), self.config.vocab_size - 1)
        start = torch.tensor([0, *rows]).cumsum(0).int()
        bounds = [n + unknown * (not prompt) for n, prompt in zip(self.lengths, prefilling, strict=True)]
        steps, slots = {}, {}
        for window, table in zip((True, False), self.tables, strict=True):
            slot = [
                t.long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for t, at in zip(table, positions, strict=True)
            ]
            common = CommonAttentionMetadata(
                query_start_loc=start,
                query_start_loc_cpu=start,
                seq_lens=torch.tensor(self.lengths).int(),
                seq_lens_cpu_upper_bound=torch.tensor(bounds).int(),
                num_reqs=len(rows),
                num_actual_tokens=sum(rows),
                max_query_len=max(rows),
                max_seq_len=max(bounds),
                block_table_tensor=table,
                slot_mapping=torch.cat(slot),
                is_prefilling=torch.tensor(prefilling),
            )
            layers = [layer.name for layer in self.model.caches if (layer.window is not None) == window]
            config = config_of(Path(), self.drafts)
            spec = self.model.caches[0].get_kv_cache_spec(config)
            built = StepBuilder(spec, layers, config, torch.device("cpu")).build(0, common)
            steps |= dict.fromkeys(layers, built)
            slots |= dict.fromkeys(layers, common.slot_mapping)
        context = ForwardContext(
            no_compile_layers={layer.name: layer for layer in self.model.caches},
            attn_metadata=steps,
            slot_mapping=slots,
        )
        with override_forward_context(context), torch.inference_mode():
            given = ids.clone()
            given[list(stray)] = torch.tensor(list(stray.values()), dtype=given.dtype)
            result = self.model.forward(given, torch.cat(positions))
        got = result[0] if isinstance(result, tuple) else result
        assert torch.equal(self.model.compute_logits(got), self.plain.head(got))
        # all layers get the last group's table
        step = AttentionMetadata(
            tuple(start.tolist()), tuple(self.lengths), common.block_table_tensor, common.slot_mapping
        )
        want = self.plain.forward(ids, torch.cat(positions), self.caches, step)
        torch.testing.assert_close(got, want, rtol=self.tolerance, atol=self.tolerance)
        return result if isinstance(result, tuple) else type(built)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, checkpoint: tuple[Path, GptOssConfig]) -> None:
    monkeypatch.setattr(limits, "checked_config", lambda _: checkpoint[1])
    monkeypatch.setattr(ranks, "get_tensor_model_parallel_world_size", lambda: 1)
    torch.manual_seed(0)


def test_prompts_chunks_and_decode_equal_the_offline_model(checkpoint):
    server = Server.of(*checkpoint)
    assert server.step([5, 70, 33], prefilling=[True, True, True]) is AttentionMetadata
    assert server.step([1, 1, 1], prefilling=[False, False, False]) is DecodeMetadata
    assert server.step([20, 1, 3], prefilling=[True, False, True]) is AttentionMetadata
    assert server.step([1, 1, 1], prefilling=[False, False, False]) is DecodeMetadata


def test_a_batch_invariant_step_of_decode_has_the_lengths_of_other_steps(checkpoint, monkeypatch):
    """Its kernel must know its lengths on the host: attention reads whole tiles of keys at fixed positions."""
    monkeypatch.setattr(cache, "batch_invariant", lambda: True)
    server = Server.of(*checkpoint)
    server.step([5, 70, 33], prefilling=[True] * 3)
    assert server.step([1, 1, 1], prefilling=[False] * 3) is AttentionMetadata


@pytest.mark.parametrize("drafts", [1, 3])
def test_rows_that_verify_drafts_see_the_devices_lengths(checkpoint, drafts):
    server = Server.of(*checkpoint, drafts=drafts)
    server.step([5, 70, 33], prefilling=[True] * 3)
    assert server.step([1 + drafts] * 3, prefilling=[False] * 3, unknown=drafts) is DecodeMetadata
    assert server.step([1 + drafts, 20, 1], prefilling=[False, True, False], unknown=drafts) is AttentionMetadata
    assert server.step([1, 1, 1], prefilling=[False] * 3, unknown=drafts) is DecodeMetadata
    assert server.step([2, 2, 2], prefilling=[False] * 3, unknown=drafts) is DecodeMetadata


@pytest.mark.parametrize("longest", [1024, 1000])
def test_rows_that_verify_drafts_take_tables_as_wide_as_vllms(checkpoint, longest):
    """vLLM makes them for a multiple of 128 tokens. Ours were narrower, and an engine with drafts and another
    `--max-model-len` did not start."""
    config = config_of(checkpoint[0], drafts=1)
    config.model_config.max_model_len = longest
    layer = model.GptOssForCausalLM(vllm_config=config).caches[1]
    spec = layer.get_kv_cache_spec(config)
    width, rows = get_block_table_width(-(-longest // BLOCK_SIZE), BLOCK_SIZE), 2
    table = torch.arange(8 * width, dtype=torch.int32).view(8, width)
    lengths = torch.tensor([longest, 20, 0], dtype=torch.int32)  # the last one pads a graph
    step = StepBuilder(spec, [layer.name], config, torch.device("cpu")).build(
        0,
        CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 2, 4, 6]),
            query_start_loc_cpu=torch.tensor([0, 2, 4, 6]),
            seq_lens=lengths,
            num_reqs=3,
            num_actual_tokens=3 * rows,
            max_query_len=rows,
            max_seq_len=longest,
            block_table_tensor=table[:3],
            slot_mapping=torch.arange(6),
        ),
    )
    assert torch.equal(step.block_table, table[[0, 0, 1, 1, 2, 2]])
    assert step.lengths.tolist() == [longest - 1, longest, 19, 20, 0, 0]


def test_a_row_without_a_proposed_draft_ends_no_engine(checkpoint):
    """An embedding of row -1 raises a device assertion, after which an engine cannot go on."""
    server = Server.of(*checkpoint, drafts=1)
    server.step([5, 70, 33], prefilling=[True] * 3)
    server.step([2, 2, 2], prefilling=[False] * 3, stray={1: -1, 5: -1})


def test_a_row_whose_logits_were_damaged_ends_no_engine(checkpoint):
    """vLLM's kernel looks past the vocabulary's end there: an index behind it wins over NaN."""
    server = Server.of(*checkpoint)
    server.step([5, 70, 33], prefilling=[True] * 3)
    server.step([1, 1, 1], prefilling=[False] * 3, stray={1: server.config.vocab_size + 3})


def test_a_connector_is_called_for_each_layer_after_its_keys(checkpoint, tmp_path, monkeypatch):
    """vLLM's own example, which keeps a prompt's keys in files. Without the calls it kept none, and keys from
    elsewhere ended the engine."""

    def connected(requests: int, stores: bool) -> tuple[Server, ExampleConnector]:
        server = Server.of(*checkpoint, requests=requests)
        connector = ExampleConnector.__new__(ExampleConnector)
        connector._storage_path, connector._block_size = str(tmp_path), BLOCK_SIZE
        asked = ExampleConnectorMetadata()
        for table in server.tables[0]:
            asked.add_request([1] * 33, table[:3].tolist(), BLOCK_SIZE, stores, [])
        connector.bind_connector_metadata(asked)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        return server, connector

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    first, _ = connected(1, stores=True)
    first.tables = first.tables[0], first.tables[0]  # one group, as vLLM has it for a connector that knows of no more
    first.step([33], prefilling=[True])
    second, connector = connected(1, stores=False)
    layers = {layer.name: layer for layer in second.model.caches}
    connector.start_load_kv(
        ForwardContext(no_compile_layers=layers, attn_metadata=dict.fromkeys(layers), slot_mapping={})
    )
    for before, after in zip(first.model.caches, second.model.caches, strict=True):
        for kept, loaded in zip(before.pair, after.pair, strict=True):
            kept, loaded = (part[server.tables[0][0, :2].long()] for part, server in ((kept, first), (loaded, second)))
            assert kept.any()
            assert torch.equal(kept, loaded)


def test_a_cache_that_vllm_frees_is_held_by_no_layer(checkpoint):
    layers = Server.of(*checkpoint).model.caches
    memory = [weakref.ref(layer.kv_cache) for layer in layers]
    clear_layer_kv_caches(layers)
    assert not any(layer.pair for layer in layers)
    assert not any(each() is not None for each in memory)


def update(served: model.GptOssForCausalLM, tensors: dict[str, torch.Tensor], size: int) -> None:
    """As vLLM's engines for weight transfer do: a chunk at a time between the two calls that re-load layers."""
    sent = random.Random(0).sample(list(tensors.items()), len(tensors))
    initialize_layerwise_reload(served)
    for first in range(0, len(sent), size):
        assert served.load_weights(iter(sent[first : first + size]))
    finalize_layerwise_reload(served, Having(dtype=torch.float32))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_step_right_after_an_update_has_the_new_weights(checkpoint, size):
    server = Server.of(*checkpoint)
    server.step([5, 70, 33], prefilling=[True] * 3)
    addresses = {name: tensor.data_ptr() for name, tensor in server.model.named_parameters()}
    new = random_tensors(checkpoint[1], seed=1)
    update(server.model, new, size)
    server.plain = GptOss.from_tensors(checkpoint[1], new.items(), "cpu", torch.float32)
    server.lengths = [0, 0, 0]  # vLLM drops the old keys
    server.step([5, 70, 33], prefilling=[True] * 3)
    server.step([1, 1, 1], prefilling=[False] * 3)
    assert {name: tensor.data_ptr() for name, tensor in server.model.named_parameters()} == addresses


def test_an_update_that_lost_a_chunk_ends_in_an_error_by_name(checkpoint):
    served = Server.of(*checkpoint).model
    new, lost = random_tensors(checkpoint[1], seed=1), "model.layers.3.mlp.router.bias"
    with refused(lost, CheckpointError):
        update(served, {name: tensor for name, tensor in new.items() if name != lost}, 7)
    update(served, new, 7)  # the next one begins anew


def test_an_update_that_failed_half_way_can_be_sent_again(checkpoint):
    server = Server.of(*checkpoint)
    new = random_tensors(checkpoint[1], seed=1)
    damaged = new | {"model.norm.weight": torch.full((96,), torch.nan)}
    with refused("model.norm.weight", CheckpointError):
        update(server.model, damaged, 7)
    update(server.model, new, 7)
    server.plain = GptOss.from_tensors(checkpoint[1], new.items(), "cpu", torch.float32)
    server.step([5, 70, 33], prefilling=[True] * 3)


def test_what_no_checkpoint_holds_outlives_a_sleep_at_level_2(checkpoint):
    """vLLM then keeps the buffers, throws away all other memory of the load, and the update fills the weights."""
    server = Server.of(*checkpoint)
    saved = {name: buffer.clone() for name, buffer in server.model.named_buffers()}
    for tensor in [*dict(server.model.named_parameters()).values(), server.model.gptoss.cos_sin]:
        tensor.fill_(torch.nan)
    for name, buffer in server.model.named_buffers():
        buffer.copy_(saved[name])
    update(server.model, random_tensors(checkpoint[1]), 7)
    server.step([5, 70, 33], prefilling=[True] * 3)


def test_vllms_checksums_change_with_the_weights(checkpoint):
    """There were none, and every comparison matched."""
    served = Server.of(*checkpoint).model
    before = compute_tensor_digests(served)
    update(served, random_tensors(checkpoint[1], seed=1), 1000)
    after = compute_tensor_digests(served)
    update(served, random_tensors(checkpoint[1]), 1000)
    assert before
    assert not before.items() & after.items()
    assert compute_tensor_digests(served) == before


def test_an_eagle_head_shares_the_embedding_after_an_update(checkpoint):
    served = Server.of(*checkpoint).model
    served.model.embed_tokens = torch.nn.Embedding.from_pretrained(served.gptoss.embedding)
    new = random_tensors(checkpoint[1], seed=1)
    update(served, new, 7)
    assert torch.equal(served.model.embed_tokens.weight, new["model.embed_tokens.weight"].float())


def test_an_eagle_head_gets_the_residual_stream_behind_its_layers(checkpoint):
    server = Server.of(*checkpoint)
    seen = []
    leave = server.plain.leave
    server.plain.leave = lambda *inputs: seen.append(leave(*inputs)) or seen[-1]
    server.model.set_aux_hidden_state_layers((1, 3))
    hidden = server.step([5, 9, 1], prefilling=[True] * 3)
    for got, behind in zip(hidden[1], (1, 3), strict=True):
        torch.testing.assert_close(got, sum(seen[behind - 1]), rtol=1e-5, atol=1e-5)


def test_the_check_notices_lengths_that_are_the_hosts(checkpoint, monkeypatch):
    server = Server.of(*checkpoint, drafts=1)
    server.step([5, 70, 33], prefilling=[True] * 3)
    monkeypatch.setattr(cache, "verifying", lambda step, lengths, prefilling: step)
    with pytest.raises(AssertionError, match="not close"):
        server.step([2, 20, 1], prefilling=[False, True, False], unknown=1)


@pytest.mark.parametrize("mistake", ["reads", "writes"])
def test_the_check_notices_blocks_of_the_other_group(checkpoint, monkeypatch, mistake):
    server = Server.of(*checkpoint)
    build, tables = StepBuilder.build, server.tables
    if mistake == "reads":
        windows = lambda *those: replace(build(*those), block_table=tables[0])  # noqa: E731
        monkeypatch.setattr(StepBuilder, "build", windows)
    else:
        first: list[torch.Tensor] = []
        monkeypatch.setattr(model, "Slots", lambda slots: first.append(slots) or Slots(first[0]))
    with pytest.raises(AssertionError, match="not close"):
        server.step([5, 70, 33], prefilling=[True] * 3)


def test_vllms_run_without_keys_computes_and_writes_nothing(checkpoint):
    served = model.GptOssForCausalLM(vllm_config=config_of(checkpoint[0]))
    served.load_weights(random_tensors(checkpoint[1]).items())
    context = ForwardContext(no_compile_layers={}, attn_metadata=None, slot_mapping=None)
    with override_forward_context(context), torch.inference_mode():
        assert torch.isfinite(
            served.forward(torch.zeros(7, dtype=torch.int32), torch.zeros(7, dtype=torch.int64))
        ).all()


class Recorded(TorchDispatchMode):
    """Acts as a CUDA graph: `replay` repeats the recorded operations, from the same tensors into the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, torch.Tensor]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        self.done.append((operation, args, kwargs or {}, operation(*args, **kwargs or {})))
        return self.done[-1][-1]

    def replay(self) -> None:
        for operation, args, kwargs, out in self.done:
            out.copy_(operation(*args, **kwargs))


@pytest.mark.parametrize(
    ("mode", "rows", "live"),
    [
        (CUDAGraphMode.NONE, [1, 1, 1], 3),
        (CUDAGraphMode.PIECEWISE, [1, 1, 1], 3),
        (CUDAGraphMode.PIECEWISE, [11], 11),
        (CUDAGraphMode.PIECEWISE, [1, 9, 2], 12),
    ],
    ids=["decode", "decode in pieces", "a prompt's last rows", "decode and prompts"],
)
def test_a_graph_that_decode_captured_takes_no_row_of_a_prompt_for_padding(mode, rows, live):
    """As vLLM captures: as many requests as rows, and whole steps without a mode. A row that is taken for padding reads
    no expert."""
    size, name = 16, "layer"
    lengths, slots = torch.ones(size, dtype=torch.int32), torch.full((size,), -1)
    step = DecodeMetadata(lengths, torch.zeros(size, 1, dtype=torch.int32), slots, 16)
    context = ForwardContext(
        no_compile_layers={}, attn_metadata={name: step}, slot_mapping={name: slots}, cudagraph_runtime_mode=mode
    )
    with Recorded() as graph:
        found = model.live_rows(context, name, size)
    lengths.zero_()
    lengths[: len(rows)] = torch.tensor(rows) + 64
    slots[:live] = torch.arange(live)
    graph.replay()
    assert (found > 0).tolist() == [True] * live + [False] * (size - live)


def test_layers_with_a_window_keep_no_more_than_that(checkpoint):
    config = config_of(checkpoint[0])
    specs = [layer.get_kv_cache_spec(config) for layer in model.GptOssForCausalLM(vllm_config=config).caches]
    assert [getattr(spec, "sliding_window", None) for spec in specs] == [128, None, 128, None]
    assert len({spec.page_size_bytes for spec in specs}) == 1, "the groups share their blocks"


@pytest.mark.parametrize("form", ["auto", "fp8"])
@pytest.mark.parametrize(("sizes", "groups"), [(None, 3), ([16, 32, 64], 5)], ids=["as it is", "sizes in a list"])
def test_the_layer_of_an_eagle_head_is_in_a_group_of_the_targets(checkpoint, monkeypatch, sizes, groups, form):
    """Two layers with a window, two without, and the head's, in groups of two. Else vLLM gives each layer separate
    tables of blocks and separate metadata at every step (the control)."""
    config = config_of(checkpoint[0])
    config.attention_config, config.scheduler_config.disable_hybrid_kv_cache_manager = (
        Having(hisparse_config=None),
        False,
    )
    config.cache_config.get_resolved_kv_cache_layout = lambda: cache.KVCacheLayout.LBNHC
    config.cache_config.cache_dtype = form
    if sizes:
        monkeypatch.setattr(
            cache.SinkBackend, "get_supported_kernel_block_sizes", staticmethod(lambda spec=None: sizes)
        )
    layers = model.GptOssForCausalLM(vllm_config=config).caches
    specs = {
        layer.name: customize_attention_spec(layer.get_attn_backend(), layer.get_kv_cache_spec(config))
        for layer in layers
    }
    shape = {"num_kv_heads": layers[0].num_kv_heads, "head_size": layers[0].head_size}
    dtype = kv_cache_dtype_str_to_dtype(form, config.model_config)
    head = FullAttentionSpec(BLOCK_SIZE, **shape, dtype=dtype, kv_quant_mode=get_kv_quant_mode(form))
    specs["head"] = customize_attention_spec(FlashAttentionBackend, head)
    assert len(get_kv_cache_groups(config, specs)) == groups

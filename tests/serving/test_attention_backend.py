"""The backend between vLLM and `npu_gptoss.attention`: nothing is dropped, padding stays padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.attention.backends.abstract import AttentionType
from vllm.v1.attention.backends.utils import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from npu_gptoss.attention import AttentionMetadata, paged_attention
from npu_gptoss.serving import attention
from npu_gptoss.serving.attention import SinkAttentionBackend, SinkAttentionImpl, SinkAttentionMetadataBuilder
from tests.refused import refused

pytestmark = pytest.mark.serving

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 16
WINDOW = 128
# Three requests of 1, 40 and 3 new tokens, with 200, 0 and 130 keys before them.
QUERY_LENS, SEQ_LENS = (1, 40, 3), (201, 40, 133)
TOKENS, PADDED = sum(QUERY_LENS), 48


def common_metadata(padding: int = 0) -> CommonAttentionMetadata:
    """The metadata of vLLM's runner; `padding` appends requests and tokens as runners that replay graphs do."""
    starts = torch.tensor([0, *QUERY_LENS, *[1] * padding]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([*SEQ_LENS, *[1] * padding], dtype=torch.int32)
    blocks = torch.arange(1, 3 * 13 + 1, dtype=torch.int32).reshape(3, 13)
    slots = [
        int(blocks[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (new, total) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True))
        for position in range(total - new, total)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=lengths,
        num_reqs=len(QUERY_LENS),
        num_actual_tokens=TOKENS,
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        block_table_tensor=torch.cat([blocks, torch.zeros(padding, 13, dtype=torch.int32)]),
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
    )


def full_spec() -> FullAttentionSpec:
    return FullAttentionSpec(BLOCK, KV_HEADS, HEAD_DIM, torch.float32)


@pytest.fixture
def builder() -> SinkAttentionMetadataBuilder:
    return SinkAttentionMetadataBuilder(full_spec(), ["model.layers.0.self_attn.attn"], None, torch.device("cpu"))


@pytest.fixture
def cache() -> torch.Tensor:
    shape = SinkAttentionBackend.get_kv_cache_shape(40, BLOCK, KV_HEADS, HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def implementation(**options: Any) -> SinkAttentionImpl:
    settings = {"sinks": torch.linspace(-1.0, 2.0, HEADS), "window": WINDOW, **options}
    return SinkAttentionImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, **settings)


def rows(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(count, heads, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


# The builder


def test_cascade_attention_which_knows_no_sinks_is_never_used(builder: SinkAttentionMetadataBuilder) -> None:
    assert builder.use_cascade_attention(common_prefix_len=512, query_lens=None) is False
    with pytest.raises(RuntimeError, match="common prefix of 16 tokens"):
        builder.build(16, common_metadata())


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(BLOCK, KV_HEADS, HEAD_DIM, torch.float32, sliding_window=WINDOW),
        FullAttentionSpec(BLOCK, KV_HEADS, HEAD_DIM, torch.float32, sliding_window=WINDOW),
    ],
)
def test_a_cache_that_forgets_keys_by_vllms_plan_is_refused(spec: Any) -> None:
    with pytest.raises(RuntimeError, match=r"every gpt-oss layer keeps all of its keys.*layers\.0"):
        SinkAttentionMetadataBuilder(spec, ["model.layers.0.self_attn.attn"], None, torch.device("cpu"))


# What the implementation refuses


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sinks": None}, "sinks"),
        ({"sinks": torch.zeros(HEADS + 1)}, "sinks"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"sliding_window": WINDOW - 1}, "sliding_window"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "kv_sharing_target_layer_name"),
        ({"window": 0}, "window"),
        ({"sink_bias": 1}, "sink_bias"),
    ],
)
def test_an_option_that_would_be_dropped_is_refused(options: dict[str, Any], field: str) -> None:
    with refused(field):
        implementation(**options)


def test_the_window_cannot_be_forgotten() -> None:
    with pytest.raises(TypeError, match="window"):
        SinkAttentionImpl(HEADS, HEAD_DIM, 1.0, KV_HEADS, sinks=torch.zeros(HEADS))


def test_sinks_that_the_checkpoint_did_not_fill_are_refused() -> None:
    unfilled = implementation(sinks=torch.full((HEADS,), float("nan")), owner="model.layers.3.self_attn")
    with refused("model.layers.3.self_attn.sinks"):
        unfilled.process_weights_after_loading(torch.float32)
    implementation().process_weights_after_loading(torch.float32)


def test_a_cache_in_another_dtype_is_refused() -> None:
    with refused("--kv-cache-dtype"):
        SinkAttentionBackend.get_kv_cache_shape(40, BLOCK, KV_HEADS, HEAD_DIM, "fp8")


# Running it


def run(
    implementation: SinkAttentionImpl, cache: torch.Tensor, metadata: AttentionMetadata | None, count: int, fill: float
) -> torch.Tensor:
    """One step with `count` rows; rows past the real tokens hold `fill`, and the caller's buffer holds garbage."""
    query, key, value = rows(count, HEADS, 0), rows(count, KV_HEADS, 1), rows(count, KV_HEADS, 2)
    for tensor in (query, key, value):
        tensor[TOKENS:] = fill
    output = torch.full((count, HEADS, HEAD_DIM), float("nan"))
    returned = implementation.forward(None, query, key, value, cache, metadata, output)
    assert returned.data_ptr() == output.data_ptr()
    return output


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_an_output_that_is_to_be_quantised_is_refused(name: str) -> None:
    operands = rows(1, HEADS, 0), rows(1, KV_HEADS, 1), rows(1, KV_HEADS, 2), torch.empty(0), None
    with pytest.raises(NotImplementedError, match="the caller's buffer, in the model's dtype"):
        implementation().forward(None, *operands, torch.empty(1, HEADS, HEAD_DIM), **{name: torch.ones(1)})
    with pytest.raises(NotImplementedError):
        implementation().forward(None, *operands, None)


def test_the_profile_run_without_a_cache_gives_zeros() -> None:
    output = run(implementation(), torch.empty(0), None, PADDED, 1.0)
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("window", [WINDOW, None])
def test_padded_rows_with_nan_reach_no_output_and_no_cache(builder, cache, window):
    metadata, pristine = builder.build(0, common_metadata(padding=4)), cache.clone()
    padded = run(implementation(window=window), cache, metadata, PADDED, float("nan"))
    assert torch.isfinite(padded).all()
    assert torch.equal(padded[TOKENS:], torch.zeros_like(padded[TOKENS:]))
    assert torch.isfinite(cache).all()
    exact = run(implementation(window=window), pristine, metadata, TOKENS, 0.0)
    assert torch.equal(padded[:TOKENS], exact)
    assert torch.equal(cache, pristine)


def test_a_kernel_call_that_keeps_its_padding_would_be_seen(builder, cache, monkeypatch):
    """The mutation of the test above: rows past the tokens are left as the buffer had them."""

    def keeps_the_tail(query: torch.Tensor, *args: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        tail = out[TOKENS:].clone()
        paged_attention(query, *args, out=out, **options)
        out[TOKENS:] = tail
        return out

    monkeypatch.setattr(attention, "paged_attention", keeps_the_tail)
    output = run(implementation(), cache, builder.build(0, common_metadata()), PADDED, 0.0)
    assert not torch.isfinite(output).all()

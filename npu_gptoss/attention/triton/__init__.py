"""Attention as Triton kernels for CUDA: one launch for decode rows, two for prompts, one for the cache write.

Decode splits the keys over programs and combines in the one that arrives last (`decode.py`); prompts and chunks gather
their keys into contiguous memory and run a causal loop over it (`gather.py`, `prefill.py`). Neither waits for the
device: the host's lengths go over once a step (`plan.py`), those of a `DecodeMetadata` never leave the device. Triton
is imported at the first call, so that a machine without it can list these kernels.
"""

from __future__ import annotations

import torch

from npu_gptoss.attention.metadata import StepMetadata
from npu_gptoss.attention.operations import KV_DTYPES, PAGED, WRITE_KV
from npu_gptoss.kernels import ANY, Capability, Priority, accepts, register_kernel

CUDA = Capability.of("cuda", features=("triton",))
HEAD_DIMS = frozenset({16, 32, 64, 128})
BLOCK_SIZES = frozenset({16, 32, 64, 128, 256})


@register_kernel(
    PAGED.family,
    PAGED.mode,
    solution="triton",
    capability=CUDA,
    signatures=(
        accepts(query="bfloat16", kv="bfloat16", sinks=KV_DTYPES),
        accepts(query="float32", kv="float32", sinks=KV_DTYPES),
    ),
    traits={"head_dim": HEAD_DIMS, "block_size": BLOCK_SIZES, "sliding_window": ANY},
    priority=Priority.PERFORMANT,
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """Decode rows in one launch, prompt rows in two; products in the inputs' dtype (float32: no TF32), sums in fp32."""
    from npu_gptoss.attention.triton.launch import run

    run(query, key_cache, value_cache, metadata, sinks, scale, sliding_window, out)


@register_kernel(
    WRITE_KV.family,
    WRITE_KV.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(key=KV_DTYPES, kv=KV_DTYPES),),
    traits={"head_dim": ANY, "block_size": ANY},
    priority=Priority.PERFORMANT,
)
def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Keys and values in one launch; rows with a negative slot are left out."""
    from npu_gptoss.attention.triton.write_kv import write

    write(key, value, key_cache, value_cache, slot_mapping)

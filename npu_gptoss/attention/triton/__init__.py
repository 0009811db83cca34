"""Attention as Triton and Gluon kernels for CUDA: one launch for decode rows, two for prompts, one for the cache write.

Decode splits the keys over programs and combines in the one that arrives last (`decode.py`); prompts and chunks gather
their keys into contiguous memory and run a causal loop over it (`prefill.py`, `hopper.py`). Neither waits
for the device: the host's lengths go over once a step (`plan.py`), lengths of a `DecodeMetadata` never leave the
device. Triton is imported at the first call, so that a machine without it can list these kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_gptoss.attention.operations import FP8, KV_DTYPES, PAGED, WRITE_KV
from npu_gptoss.kernels import ANY, FP8_STORES, HOPPER, TRITON, Priority, Range, Where, accepts, register_kernel

BF16 = accepts(query="bfloat16", kv=("bfloat16", FP8), sinks=KV_DTYPES)
BOTH = (BF16, accepts(query="float32", kv="float32", sinks=KV_DTYPES))
TRAITS = {
    "head_dim": frozenset({16, 32, 64, 128}),
    "block_size": Where("a multiple of 16", lambda size: size % 16 == 0),
    "sliding_window": ANY,
}


def _register(name: str, traits: Mapping[str, Any], summary: str, *, function: str = "run", **more: Any) -> None:
    gluon = name.startswith("gluon")
    register_kernel(
        PAGED,
        solution=name.partition("_")[0],
        name=f"{PAGED.name}.{name}",
        capability=HOPPER if gluon else TRITON,
        signatures=(BF16,) if gluon else BOTH,
        traits=traits,
        function=f"npu_gptoss.attention.triton.launch:{function}",
        summary=summary,
        **{"priority": Priority.PERFORMANT, **more},
    )


_register(
    "triton_decode",
    {**TRAITS, "max_query_len": Range(most=1)},
    "One launch; products in the inputs' dtype (float32: no TF32), sums in fp32.",
)
_register(
    "triton_prefill",
    {**TRAITS, "max_query_len": Range(2)},
    "Prompt rows in two launches; single rows of the same step as triton_decode has them.",
)
_register(
    "gluon_prefill",
    {
        **TRAITS,
        "head_dim": frozenset({64}),
        "sliding_window": frozenset({False}),
        "group_size": Range(1, 64),
        "max_query_len": Range(2),
    },
    "As triton_prefill, the causal loop with copies, products and softmax in warps of their own.",
    function="run_gluon",
    priority=Priority.SPECIALISED,
)
_register(
    "triton_invariant",
    TRAITS,
    "As triton_prefill, single rows too: no bit of a row depends on the other rows.",
    function="run_invariant",
    priority=Priority.PORTABLE,
)
register_kernel(
    WRITE_KV,
    solution="triton",
    capability=TRITON,
    signatures=(accepts(key=KV_DTYPES, kv=KV_DTYPES), accepts(key="bfloat16", kv=FP8, needs=FP8_STORES)),
    traits={"head_dim": ANY, "block_size": ANY},
    priority=Priority.PERFORMANT,
    function="npu_gptoss.attention.triton.write_kv:write",
    summary="Keys and values in one launch; rows with a negative slot are left out.",
)

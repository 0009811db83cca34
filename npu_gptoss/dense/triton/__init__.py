"""The dense operations as Triton and Gluon kernels for CUDA.

Up to some rows on Hopper: projections in Gluon, fused with the next operations. Elsewhere a single decode row: a whole
operation in one launch, the projection as a matrix-vector product. More rows: the projection is cuBLAS's. Triton
is imported at the first call, so that a machine without it can list these kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_gptoss.attention.operations import FP8
from npu_gptoss.dense.operations import ADD_NORM, GREEDY, LOGITS, OUTPUT, QKV, ROUTER, TOKEN
from npu_gptoss.kernels import FP8_STORES, HOPPER, TRITON, Operation, Priority, Range, Where, accepts, register_kernel
from npu_gptoss.moe.operations import FEW_ROWS

BF16 = "bfloat16"
HEAD_DIMS = frozenset({16, 32, 64, 128})
ONE, FEW = Range(most=1), Range(most=FEW_ROWS)
# The Gluon projections, as far as they were measured; each program reads all rows.
GLUON_ROWS = Range(1, 32)
# From where on the Gluon router is worth a launch besides the norm's: rows, and rows times experts.
GLUON_ROUTED, GLUON_LOGITS = Range(33, FEW_ROWS), Range(4096)
SHORTLIST_ROWS = Range(most=32)  # measured up to here: 259 us for lm_head's 408 at 32 rows, 218 for 370 at one


def _power_of_2_from_32(experts: int) -> bool:
    return experts >= 32 and experts & (experts - 1) == 0


def _halves_fill_all_warps(hidden: int) -> bool:
    """True when both halves of a row fill the matrix instructions of the router's 16 warps (`device.halves`)."""
    first = 1 << (max(hidden - 1, 1).bit_length() - 1)
    return first >= 1024 and hidden - first > 512


def _register(
    operation: Operation, name: str, summary: str, traits: Mapping[str, Any], *, priority: int = Priority.PERFORMANT
) -> None:
    """Registers the function whose name is the operation's mode and the end of `name`."""
    solution, _, kind = name.partition("_")
    gluon = solution == "gluon"
    signatures = [accepts(**dict.fromkeys(operation.roles, BF16))]
    if operation == QKV:
        signatures.append(accepts(hidden=BF16, weight=BF16, kv=FP8, needs=FP8_STORES))
    function = f"{operation.mode}_{kind}" if kind else operation.mode
    register_kernel(
        operation,
        solution=solution,
        name=f"{operation.name}.{name}",
        capability=HOPPER if gluon else TRITON,
        signatures=tuple(signatures),
        traits=traits,
        priority=Priority.SPECIALISED if gluon else priority,
        function=f"npu_gptoss.dense.triton.{'launch_hopper' if gluon else 'launches'}:{function}",
        summary=summary,
    )


ALIGNED = {"aligned": frozenset({True})}
ABOVE = Priority.PERFORMANT + 1
_register(
    QKV,
    "gluon",
    "Two launches: add and norm, then all the rest.",
    {"rows": GLUON_ROWS, "head_dim": frozenset({64}), **ALIGNED},
)
_register(
    QKV,
    "triton_gemv",
    "One launch: add, norm, matrix-vector product, RoPE, cache write.",
    {"rows": ONE, "head_dim": HEAD_DIMS},
    priority=ABOVE,
)
_register(QKV, "triton", "Add and norm, cuBLAS's projection, RoPE and cache write.", {"head_dim": HEAD_DIMS})
_register(OUTPUT, "gluon", "One launch.", {"rows": GLUON_ROWS, **ALIGNED})
_register(OUTPUT, "triton_gemv", "One launch: matrix-vector product, bias, residual.", {"rows": ONE})
_register(
    ROUTER,
    "gluon",
    "Two launches: add and norm, then router, top-k and softmax.",
    {
        "rows": GLUON_ROUTED,
        "logits": GLUON_LOGITS,
        "experts": Where("a power of two from 32 on", _power_of_2_from_32),
        "hidden_size": Where("whose two halves fill 16 warps", _halves_fill_all_warps),
        **ALIGNED,
    },
)
_register(ROUTER, "triton", "One launch: add, norm, router, top-k, softmax.", {"rows": FEW})
_register(
    ROUTER, "triton_norm", "Add and norm fused, then cuBLAS and the MoE family's routing.", {}, priority=ABOVE - 2
)
_register(ADD_NORM, "triton", "One launch, a program a row.", {})
_register(LOGITS, "gluon", "One launch.", {"rows": Range(2, GLUON_ROWS.most), **ALIGNED})
_register(LOGITS, "triton_gemv", "A matrix-vector product.", {"rows": ONE}, priority=Priority.SPECIALISED)
register_kernel(
    TOKEN,
    solution="shortlist",
    capability=HOPPER,
    signatures=(accepts(hidden=BF16, weight=BF16),),
    traits={"rows": SHORTLIST_ROWS},
    priority=Priority.SPECIALISED,
    function="npu_gptoss.dense.triton.launches:token",
    summary="Four launches: bounds of all logits from lm_head in eight bits, then the few that can win in full.",
)
register_kernel(
    GREEDY,
    solution="triton",
    capability=TRITON,
    signatures=(accepts(logits=("float32", BF16)),),
    priority=Priority.PERFORMANT,
    function="npu_gptoss.dense.triton.launches:greedy",
    summary="Two launches; the first of equal logits.",
)

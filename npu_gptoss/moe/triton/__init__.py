"""Routing and experts as Triton and Gluon kernels for CUDA.

All share one layout of the weights (`layout.py`): for a single token (`few.py`, `one_hopper.py`), a decode batch
(`few.py`, `few_hopper.py`), a prefill (`many.py`, `many_hopper.py`). Gluon kernels are for MXFP4 on Hopper.
Weights stay in bfloat16, FP8 or MXFP4 and are opened in registers (`device.py`). `tuned.py` has the tile sizes,
`launches.py` the host's side. Triton is imported at the first call, so that a machine without it can list these
kernels.
"""

from __future__ import annotations

from npu_gptoss.kernels import ANY, HOPPER, TRITON, Priority, Range, Where, accepts, register_kernel
from npu_gptoss.moe.activation import SWIGLUOAI
from npu_gptoss.moe.operations import EXPERTS, FEW_ROWS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.moe.triton.layout import INPUTS, prepare
from npu_gptoss.moe.triton.tuned import FEW, GLUON, MOST_SLOTS

LAUNCHES = "npu_gptoss.moe.triton.launches"
TRAITS = {"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY}
# Longer groups are tiles of sorted pairs: with 32 pairs to an expert 209 us instead of 277 (MXFP4 of 20b on an H200).
MOST_UNSORTED = 24
# The inputs of all columns of `few_hopper` in shared memory, of which half is enough for any model here.
STAGED = Range(most=112 * 1024 // (2 * MOST_SLOTS))


def _whole_steps(least: int) -> Where:
    """Makes the condition of `many_hopper`: more than one step of inputs and more than one of the layout's tallest
    tiles (loops of one are folded, and Triton 3.6 does not compile what is left)."""
    return Where(f"a multiple of {INPUTS} above {least}", lambda size: size > least and size % INPUTS == 0)


register_kernel(
    ROUTE,
    solution="triton",
    capability=TRITON,
    signatures=(accepts(logits=WEIGHT_DTYPES),),
    priority=Priority.PERFORMANT,
    function=f"{LAUNCHES}:route",
    summary="One launch; of equal logits the expert with the lower number comes first.",
)
for _name, _sizes, _priority, _summary in (
    (
        "triton_one",
        {"rows": Range(most=1)},
        Priority.SPECIALISED,
        "A program for each tile of rows of each expert that the token chose; the ids stay on the device.",
    ),
    (
        "triton_few",
        {"rows": Range(most=FEW_ROWS), "pairs_per_expert": Range(most=MOST_UNSORTED)},
        Priority.PERFORMANT + 1,
        "Direct grouped products: each program finds its expert's tokens, each distinct expert is read once.",
    ),
    (
        "triton_many",
        {},
        Priority.PERFORMANT,
        "Sorted, ragged grouped products over a grid that depends on shapes alone.",
    ),
    (
        "gluon_one",
        {"rows": Range(most=1)},
        Priority.SPECIALISED + 2,
        "As triton_one, with steps of 256 inputs in registers.",
    ),
    (
        "gluon_few",
        {"rows": Range(most=FEW[-1]), "hidden_size": STAGED, "intermediate_size": STAGED},
        Priority.SPECIALISED + 1,
        "As triton_few, with the tokens' inputs in shared memory.",
    ),
    (
        "gluon_many",
        {
            "rows": Range(FEW_ROWS + 1),
            "pairs_per_expert": Range(GLUON[-1]),
            "hidden_size": _whole_steps(2 * INPUTS),
            "intermediate_size": _whole_steps(INPUTS),
        },
        Priority.SPECIALISED,
        "As triton_many, with copies and products in warps of their own.",
    ),
):
    _gluon = _name.startswith("gluon")
    register_kernel(
        EXPERTS,
        solution=_name.partition("_")[0],
        name=f"{EXPERTS.name}.{_name}",
        capability=HOPPER if _gluon else TRITON,
        signatures=(accepts(hidden="bfloat16", weight="mxfp4" if _gluon else ("bfloat16", *PACKED_FORMATS)),),
        traits={**TRAITS, **_sizes},
        priority=_priority,
        prepare=prepare,
        function=f"{LAUNCHES}:{_name}",
        summary=_summary,
    )

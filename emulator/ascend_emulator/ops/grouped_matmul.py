"""npu_grouped_matmul: one matrix product per expert over rows sorted by expert.

y[rows of e] = x[rows of e] @ weight[e] + bias[e], accumulated in float32 and rounded once. Rows beyond the last group
are unwritten, so they come back poisoned. Contracts of torch_npu 2.7.1's binding, then of aclnnGroupedMatmulV5 (or
WeightNz).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ascend_emulator.ops import formats
from ascend_emulator.ops.table import Arguments, kernel, name_of, poison_, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

NO_GROUPS, SPLIT_M, SPLIT_K = -1, 0, 2
CUMULATIVE, COUNTS, KEY_VALUE = 0, 1, 2
SINGLE_OUTPUT = (2, 3)
WIDEST = 65535
MOST_TENSORS = 128
MOST_GROUPS = 1024

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_COMMON = (
    "Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
    "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
)
_ACTIVATION = (
    "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
    "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
)
_NEWER = {"x_dtype": 54, "weight_dtype": 54, "scale_dtype": 54, "per_token_scale_dtype": 54}


@dataclass(frozen=True)
class Shape:
    """A legal single-weight call: M rows, E experts, N columns."""

    rows: int
    experts: int
    columns: int


@kernel(
    f"npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, {_COMMON}Tensor? group_list=None, {_ACTIVATION}"
    "int[]? tuning_config=None, ScalarType? output_dtype=None) -> Tensor[]",
    host=("group_list",),
    bundle=True,
    absent=_NEWER,
)
def grouped_matmul(a: Arguments) -> list[torch.Tensor]:
    """x [[M, K]], weight [[E, K, N]], group_list [E] int64 -> [[M, N]]."""
    nz = bool(a.weight) and formats.is_nz(a.weight[0])
    call = Call.of("npu_grouped_matmul", "aclnnGroupedMatmulWeightNz" if nz else "aclnnGroupedMatmulV5")
    call.require(a.group_type is not None, 41, "Requires manual passing group_type, current is None.", Layer.BINDING)
    call.require(
        a.group_type in (NO_GROUPS, SPLIT_M, SPLIT_K),
        41,
        f"The group type must be -1, 0 or 2, but now is [{a.group_type}]",
        Layer.BINDING,
    )
    _check_lists(call, a)
    _check_no_small_floats(call, a)
    _check_group_list(call, a)
    _check_modes(call, a)
    if a.group_type == NO_GROUPS:
        return _one_by_one(call, a)
    found = _check_single(call, a)
    _check_dtypes(call, a, found)
    if nz:
        formats.check_nz_weight(call, a.weight[0])
    if a.group_type == SPLIT_K:
        raise NotEmulatedError("npu_grouped_matmul: the emulator has no group_type 2 (split K, training)")
    _read_groups_for_outputs(call, a)
    out = poisoned((found.rows, found.columns), a.x[0], a.output_dtype or a.x[0].dtype)
    if call.context.execute:
        ends = _ends(call, a.group_list, a.group_list_type, found.rows)
        if ends is None:
            poison_(out)
        else:
            _multiply(a, ends, out)
            if a.split_item not in SINGLE_OUTPUT:
                return [out[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [out]


def _check_lists(call: Call, a: Arguments) -> None:
    call.require(a.x and a.weight, None, "Invalid inputs: neither x nor weight could be empty.", Layer.BINDING)
    call.require(
        a.split_item in (0, 1, 2, 3),
        42,
        f"Invalid value of split_item [{a.split_item}], which should only be one of 0/1/2/3.",
        Layer.BINDING,
    )
    call.require(
        a.group_type != NO_GROUPS or a.split_item not in SINGLE_OUTPUT,
        42,
        f"group_type -1 gives one output per input: split_item should be 0 or 1, got {a.split_item}",
        Layer.PARAMETER,
    )
    for name in ("x", "weight"):
        call.require(
            len(getattr(a, name)) <= MOST_TENSORS,
            51,
            f"{name} should have at most {MOST_TENSORS} tensors, got {len(getattr(a, name))}",
            Layer.PARAMETER,
        )
        dtypes = {t.dtype for t in getattr(a, name)}
        call.require(
            len(dtypes) == 1, 49, f"{name} should have one dtype, got {sorted(map(name_of, dtypes))}", Layer.PARAMETER
        )


def _check_no_small_floats(call: Call, a: Arguments) -> None:
    small = formats.small_floats([*a.x, *a.weight, *(a.scale or ()), *(a.per_token_scale or ())], a.output_dtype)
    call.require(not small, 54, f"Atlas A2 has no {', '.join(small)} in the cube or vector unit", Layer.PARAMETER)


def _check_group_list(call: Call, a: Arguments) -> None:
    groups = a.group_list
    if a.group_type == NO_GROUPS and groups is None:
        return
    call.require(groups is not None, 44, "groupList is required when group_type is 0 or 2, got None", Layer.NULL)
    call.require(
        call.context.is_device(groups),
        44,
        f"group_list should be on the device, got {shape(groups)} on {groups.device}",
        Layer.BINDING,
    )
    call.require(
        groups.dtype == torch.int64, 44, f"group_list should be int64, got {name_of(groups.dtype)}", Layer.PARAMETER
    )
    int8 = a.x[0].dtype == torch.int8
    legal_types = (CUMULATIVE, COUNTS, KEY_VALUE) if int8 and a.group_type == SPLIT_M else (CUMULATIVE, COUNTS)
    call.require(
        a.group_list_type in legal_types,
        45,
        f"group_list_type should be one of {legal_types} for {name_of(a.x[0].dtype)} x, got {a.group_list_type}",
        Layer.PARAMETER,
    )
    call.require(
        groups.dim() == (2 if a.group_list_type == KEY_VALUE else 1) and groups.size(0) <= MOST_GROUPS,
        44,
        f"group_list should have one dimension and at most {MOST_GROUPS} groups, got {shape(groups)}",
        Layer.PARAMETER,
    )


def _check_modes(call: Call, a: Arguments) -> None:
    per_token_int8 = a.x[0].dtype == torch.int8 and bool(a.per_token_scale)
    call.require(
        not a.act_type or per_token_int8,
        50,
        f"act_type should be 0 unless x is int8 with per_token_scale, got {a.act_type} for {name_of(a.x[0].dtype)}",
        Layer.PARAMETER,
    )


def _check_single(call: Call, a: Arguments) -> Shape:
    """x [M, K] and weight [E, K, N] in lists of one."""
    if len(a.x) != 1 or len(a.weight) != 1:
        raise NotEmulatedError(
            f"npu_grouped_matmul: the emulator has one x and one weight, got {len(a.x)} and {len(a.weight)}"
        )
    x, weight, groups = a.x[0], a.weight[0], a.group_list
    sizes = f"x {shape(x)}, weight {shape(weight)}, group_list {shape(groups)}"
    call.require(x.dim() == 2, 43, f"x should have 2 dimensions [M, K]: {sizes}", Layer.PARAMETER)
    call.require(weight.dim() == 3, 43, f"weight should have 3 dimensions [E, K, N]: {sizes}", Layer.PARAMETER)
    call.require(x.size(1) == weight.size(1), 43, f"x's K should equal weight's: {sizes}", Layer.PARAMETER)
    if a.group_type == SPLIT_M:
        call.require(
            weight.size(0) == groups.size(0), 43, f"weight's E should equal the groups: {sizes}", Layer.PARAMETER
        )
        call.require(
            x.stride(1) == 1 or x.size(1) == 1 or x.size(0) <= 1,
            56,
            f"x should not be transposed when M is split: {sizes}, x strides {list(x.stride())}",
            Layer.PARAMETER,
        )
    contiguous = weight.size(1) if weight.stride(1) == 1 and weight.stride(2) != 1 else weight.size(2)
    call.require(
        max(x.size(1), contiguous) <= WIDEST,
        51,
        f"K and the contiguous axis of weight should be at most {WIDEST}: {sizes}",
        Layer.PARAMETER,
    )
    return Shape(x.size(0), weight.size(0), weight.size(2))


def _check_dtypes(call: Call, a: Arguments, found: Shape) -> None:
    x, weight = a.x[0].dtype, a.weight[0].dtype
    if not {x, weight} <= set(FLOATS):
        raise NotEmulatedError(f"npu_grouped_matmul: the emulator has no {name_of(x)} x {name_of(weight)} product")
    call.require(
        x == weight,
        49,
        f"x and weight should have one dtype, got {name_of(x)} and {name_of(weight)}",
        Layer.PARAMETER,
    )
    if a.bias:
        _check_bias(call, a, found)


def _check_bias(call: Call, a: Arguments, found: Shape) -> None:
    bias, x = a.bias[0], a.x[0].dtype
    call.require(
        a.group_type != SPLIT_K, 48, f"bias should be None with group_type 2, got {shape(bias)}", Layer.PARAMETER
    )
    legal = {
        torch.bfloat16: (torch.float32,),
        torch.float16: (torch.float16,),
        torch.float32: (torch.float32,),
    }.get(x, ())
    call.require(
        bias.dtype in legal,
        47,
        f"bias should be {' or '.join(map(name_of, legal))} for {name_of(x)} x, got {name_of(bias.dtype)}",
        Layer.PARAMETER,
    )
    call.require(
        list(bias.shape) == [found.experts, found.columns],
        48,
        f"bias should be [E, N] = [{found.experts}, {found.columns}], got {shape(bias)}",
        Layer.PARAMETER,
    )


def _read_groups_for_outputs(call: Call, a: Arguments) -> None:
    """Several outputs are sized by reading each group on the host."""
    if a.split_item in SINGLE_OUTPUT:
        return
    sentence = f"split_item {a.split_item} reads each of {a.group_list.size(0)} groups on the host: one output a group"
    if call.context.capturing:
        call.reject(55, sentence, Layer.CAPTURE)
    call.note(55, sentence)
    if not call.context.execute:
        raise NotEmulatedError("npu_grouped_matmul: outputs cannot be sized without reading group_list")


def _ends(call: Call, groups: torch.Tensor, kind: int, rows: int) -> list[int] | None:
    """Cumulative ends of the groups; None if the groups are undefined."""
    values = [int(v) for v in groups.tolist()]
    ends = values if kind == CUMULATIVE else torch.tensor(values).cumsum(0).tolist()
    steps = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    if min(steps, default=0) < 0 or (ends and ends[-1] > rows):
        what = "cumulative ends" if kind == CUMULATIVE else "counts"
        call.undefined(46, f"groups should not shrink and cover at most {rows} rows, got {what} {values}")
        return None
    return ends


def _multiply(a: Arguments, ends: list[int], out: torch.Tensor) -> None:
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            product = a.x[0][start:end].float() @ a.weight[0][expert].float()
            if a.bias:
                product += a.bias[0][expert].float()
            out[start:end] = product.to(out.dtype)
        start = end


def _one_by_one(call: Call, a: Arguments) -> list[torch.Tensor]:
    """group_type -1: x_i @ weight_i + bias_i."""
    call.require(
        len(a.x) == len(a.weight), 43, f"{len(a.x)} x and {len(a.weight)} weights should be as many", Layer.BINDING
    )
    if a.x[0].dtype not in FLOATS or a.x[0].dtype != a.weight[0].dtype:
        raise NotEmulatedError("npu_grouped_matmul: the emulator has plain float products only for group_type -1")
    results = []
    for i, (x, weight) in enumerate(zip(a.x, a.weight, strict=True)):
        call.require(
            weight.dim() == 2 and x.size(-1) == weight.size(0),
            43,
            f"x[{i}] {shape(x)} should end in weight[{i}]'s K, got {shape(weight)}",
            Layer.PARAMETER,
        )
        out = poisoned((*x.shape[:-1], weight.size(1)), x)
        if call.context.execute:
            product = x.float() @ weight.float()
            out.copy_(product + a.bias[i].float() if a.bias else product)
        results.append(out)
    return results


@kernel(
    f"npu::npu_grouped_matmul.List(Tensor[] x, Tensor[] weight, *, {_COMMON}int[]? group_list=None, {_ACTIVATION}"
    "ScalarType? output_dtype=None) -> Tensor[]",
    host=("group_list",),
    bundle=True,
    absent=_NEWER,
)
def grouped_matmul_list(a: Arguments) -> list[torch.Tensor]:
    """The legacy form: cumulative host groups, one two-dimensional weight per group."""
    call = Call.of("npu_grouped_matmul.List", "aclnnGroupedMatmul")
    if any(isinstance(g, torch.Tensor) and call.context.is_device(g) for g in a.group_list or ()):
        sentence = "group_list should hold host integers, got device tensors, each read with .item()"
        if call.context.capturing:
            call.reject(55, sentence, Layer.CAPTURE)
        call.note(55, sentence)
    _check_lists(call, a)
    _check_no_small_floats(call, a)
    if not a.group_list:
        return _one_by_one(call, a)
    ends = [int(g) for g in a.group_list]
    call.require(
        len(a.x) == 1 and len(a.weight) == len(ends) and all(w.dim() == 2 for w in a.weight),
        43,
        f"group_list needs one x and one two-dimensional weight per group: got {len(a.x)} x, {len(a.weight)} weights "
        f"{shape(a.weight[0])}, {len(ends)} groups",
        Layer.BINDING,
    )
    steps = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    call.require(
        min(steps) >= 0 and ends[-1] <= a.x[0].size(0),
        None,
        f"group_list should not decrease and stay within {a.x[0].size(0)} rows, got {ends}",
        Layer.BINDING,
    )
    rows = a.x[0].split([*steps, a.x[0].size(0) - ends[-1]])[:-1]
    results = _one_by_one(call, Arguments(x=list(rows), weight=a.weight, bias=a.bias))
    if a.split_item in SINGLE_OUTPUT:
        tail = poisoned((a.x[0].size(0) - ends[-1], results[0].size(1)), a.x[0])
        return [torch.cat([*results, tail])]
    return results

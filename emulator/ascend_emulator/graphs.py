"""Launches an operator on a stream: at once, into a graph, into a queue, or as the update of a captured operator.

Capture records and does not execute: outputs hold poison until a replay. Operations that the real device refuses during
capture are refused here with its codes. The runtime (runtime/capture.cpp) checks streams, events, copies and
synchronisation. This module checks operators: host reads (R82), random numbers and operators without an aclnn form
(R83), updates that do not match (R86, R89), version 2 of attention under auto_dispatch_capture (R90), and operators on
a second stream (R91).
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
from typing import Any

import torch
import torch_npu
from ascend_emulator import binding, calls, context, memory, rules, trace
from ascend_emulator.binding import CANNOT_UPDATE, CAPTURING, IDLE, UPDATING, library
from ascend_emulator.calls import Aliases, Call, Operation, Scratch, leaves
from ascend_emulator.ops import fia_defects
from ascend_emulator.rules import ContractError

# Operators that op-plugin 7.2.0 (torch_npu 2.7.1) has only as aclop, the form that cannot be captured:
# op_plugin_functions.yaml, entries with `acl_op` and no `op_api`, without the backward ones.
_ACLOP = """
    _dropout_with_byte_mask _npu_ciou _npu_silent_check dropout_with_byte_mask fast_gelu npu_alloc_float_status
    npu_anchor_response_flags npu_apply_adam npu_apply_adam_w npu_batch_nms npu_bert_apply_adam npu_bmmV2
    npu_bounding_box_decode npu_bounding_box_encode npu_broadcast npu_ciou npu_clear_float_status
    npu_confusion_transpose npu_conv2d npu_conv3d npu_conv_transpose2d npu_convolution npu_convolution_transpose
    npu_deformable_conv2d npu_deformable_conv2dbk npu_diou npu_dropout_do_mask npu_dropout_gen_mask
    npu_dropout_with_add_softmax npu_dtype_cast_ npu_fast_gelu npu_fused_attention_layernorm_qkv_fwd
    npu_fused_attention_qkv_grad npu_fused_attention_score npu_fused_attention_score_fwd
    npu_fused_attention_score_grad npu_get_float_status npu_giou npu_grid_assign_positive npu_gru npu_ifmr
    npu_indexing npu_iou npu_layer_norm_eval npu_layernorm_grad npu_lstm npu_lstm_cell npu_lstm_data
    npu_masked_fill_range npu_max npu_min npu_mish npu_multi_head_attention npu_nms_rotated npu_nms_v4
    npu_nms_with_mask npu_normalize_batch npu_one_hot npu_pad npu_ps_roi_pooling npu_ptiou npu_quant_conv2d
    npu_random_choice_with_mask npu_reshape npu_rotated_box_decode npu_rotated_box_encode npu_rotated_iou
    npu_rotated_overlaps npu_scaled_masked_softmax npu_scatter npu_sign_bits_pack npu_sign_bits_unpack npu_silu
    npu_silu_ npu_slice npu_softmax_cross_entropy_with_logits npu_sort_v2 npu_stride_add npu_stride_copy
    npu_sub_sample npu_transpose npu_view_copy npu_yolo_boxes_encode
"""
ACLOP_ONLY = frozenset(f"npu::{name}" for name in _ACLOP.split())
# Results whose strides follow the operand's, as in torch; everything else is contiguous on an NPU.
KEEPS_STRIDES = frozenset({"aten::clone", "aten::_conj_physical", "aten::as_strided_copy"})
ATTENTION_V2 = "npu::npu_fused_infer_attention_score_v2"

_auto_dispatch_depth = 0


def device_result(result: torch.Tensor, call: Aliases | Scratch, operation: Operation, device: torch.device) -> Any:
    """The device tensor of one result, which is the operand that it aliases or new, and True if it is new."""
    original = call.original(result)
    if original is not None:
        return original, False
    for view, tensor in call.pairs:  # a view of an operand
        if result.numel() and view.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
            if result.dtype != tensor.dtype:
                raise NotImplementedError(f"{operation.name}: a view of its operand with another type is not emulated")
            return torch.as_strided(tensor, result.size(), result.stride(), _offset(result, view, tensor)), False
    if operation.name.rpartition(".")[0] in KEEPS_STRIDES or operation.name in KEEPS_STRIDES:
        return memory.unwritten_strided(result.size(), result.stride(), result.dtype, device), True
    return memory.unwritten(result.size(), result.dtype, device), True


def _offset(result: torch.Tensor, view: torch.Tensor, tensor: torch.Tensor) -> int:
    return tensor.storage_offset() + result.storage_offset() - view.storage_offset()


def _run_now(
    operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, stream: int
) -> Any:
    aliases, fresh = Aliases(), []
    host_args = tuple(calls.convert(value, aliases.of) for value in args)
    host_kwargs = {name: calls.convert(value, aliases.of) for name, value in kwargs.items()}
    result = operation.function(*host_args, **host_kwargs)

    def back(tensor: torch.Tensor) -> torch.Tensor:
        target, new = device_result(tensor, aliases, operation, device)
        if new:
            if tensor.numel():
                memory.alias(target).copy_(tensor)
            fresh.append(tensor)
        return target

    output = calls.convert(result, back)
    if trace.ENABLED:
        inputs = list(leaves([*host_args, *host_kwargs.values()]))
        moved = operation.traffic(host_args, host_kwargs)
        written = operation.written(host_args, host_kwargs)
        number = library.emulator_stream_id(stream)
        trace.operator(operation.name, "eager", number, inputs, written, fresh, moved=moved)
    return output


def _prepare(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple:
    """Checks a call without running it; returns its device result and the targets of its new tensors.

    Our kernels run with `execute=False`, others on zeros: shapes come from the code that runs later.
    """
    stand_ins = Aliases() if operation.ours else Scratch()
    host_args = tuple(calls.convert(value, stand_ins.of) for value in args)
    host_kwargs = {name: calls.convert(value, stand_ins.of) for name, value in kwargs.items()}
    with context.use(execute=False):
        try:
            result = operation.function(*host_args, **host_kwargs)
        except ContractError:
            raise
        except RuntimeError:
            if operation.ours:
                raise
            result = _on_meta(operation, args, kwargs)
    targets: list[torch.Tensor | None] = []

    def back(tensor: torch.Tensor) -> torch.Tensor:
        target, new = device_result(tensor, stand_ins, operation, device)
        targets.append(target if new else None)
        return memory.poison(target) if new else target

    return calls.convert(result, back), targets


def _on_meta(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Infers results of operators that fail on zeros, such as an integer division."""
    return operation.function(
        *(calls.convert(value, lambda t: t.to("meta")) for value in args),
        **{name: calls.convert(value, lambda t: t.to("meta")) for name, value in kwargs.items()},
    )


def launch(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Runs, captures, queues or updates a call, by the state of the device's current stream."""
    stream = memory.raw_stream(device.index)
    state = library.emulator_acquire(stream)
    if state == IDLE:
        try:
            return _run_now(operation, args, kwargs, device, stream)
        finally:
            library.emulator_release(stream)
    if state == CAPTURING:
        check_capturable(operation, stream)
        if "unset-workspace" in context.current().defects:
            for scratch in leaves([kwargs.get(name) for name in operation.scratch]):
                fia_defects.unset(memory.alias(scratch))
    if state == UPDATING:
        return _update(operation, args, kwargs, device, stream)
    with context.use(capturing=state == CAPTURING):
        output, targets = _prepare(operation, args, kwargs, device)
    call = Call.of(operation, args, kwargs, targets, "queued")
    if state == CAPTURING and trace.ENABLED:
        _trace_launch(call, "capture", args, kwargs, targets, stream)
    binding.check(operation.name, library.emulator_submit(stream, calls.keep(call)))
    if state == CAPTURING and _origins.get(device.index, stream) != stream and not _takes_no_memory(operation, args):
        _recorded_wrongly(operation, [*filter(torch.is_tensor, targets), *operation.written(args, kwargs)])
    return output


_origins: dict[int, int] = {}  # device -> the stream on which torch_npu began the capture that is under way


def _takes_no_memory(operation: Operation, args: tuple[Any, ...]) -> bool:
    """True for a plain copy into memory that is there, as ProcessGroupHCCL::allgather makes it on its own stream behind
    the gathering. Of vllm-ascend's nightly tests, test_qwen3_235b_a22b_w8a8_eplb.py captures that (TP=16, experts in
    parallel, no --enforce-eager) and wants 95 % of GSM8K of it; whether it is met there was not seen."""
    return (
        operation.name == "aten::copy_"
        and args[0].dtype == args[1].dtype
        and args[0].is_contiguous()
        and args[1].is_contiguous()
    )


def _recorded_wrongly(operation: Operation, results: list[torch.Tensor]) -> None:
    """Raises R91 on a stream that joined the capture: while its wait is queued, the allocator does not see that the
    stream is captured, and takes results and workspaces from memory that is not the graph's."""
    call = rules.Call.of(operation.name)
    if not call.holds(91):
        return
    call.undefined(
        91,
        "expected one stream inside a capture, but this operator is on a second one: torch_npu 2.7.1 does not flush "
        "its queue when streams wait for each other (upstream's c86f48f9d), and the replay's numbers are wrong",
    )
    for tensor in results:
        memory.poison(tensor)


def _watch_captures() -> None:
    """Records for R91 where a capture began; the runtime knows only which streams it holds."""
    graph = torch_npu.npu.graphs.NPUGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def watched_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        device = torch.npu.current_device()
        _origins[device] = memory.raw_stream(device)

    @functools.wraps(end)
    def watched_end(self: Any) -> None:
        _origins.pop(torch.npu.current_device(), None)
        end(self)

    graph.capture_begin, graph.capture_end = watched_begin, watched_end


def query(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Asks the host how much workspace another call needs: launches and records nothing."""
    capturing = bool(library.emulator_capturing(memory.raw_stream(device.index)))
    with context.use(capturing=capturing):
        return _prepare(operation, args, kwargs, device)[0]


def _trace_launch(call: Call, phase: str, args: tuple, kwargs: dict, targets: list, stream: int) -> None:
    inputs = list(leaves([*args, *kwargs.values()]))
    fresh = [target for target in targets if target is not None]
    written = call.operation.written(args, kwargs)
    number = library.emulator_stream_id(stream)
    trace.operator(call.operation.name, phase, number, inputs, written, fresh, moved=trace.Traffic(0, 0))


def check_capturable(operation: Operation, stream: int, random: bool = False) -> None:
    """Raises if the stream is being captured and no capture can hold the operator."""
    if not library.emulator_capturing(stream):
        return
    refuse = functools.partial(binding.refuse, stream, operation.name)
    if random:
        refuse(binding.NOT_ON_CAPTURED_STREAM, f"{operation.name} draws random numbers, which cannot be captured [R83]")
    if operation.name.partition(".")[0] in ACLOP_ONLY:
        refuse(
            binding.NOT_ON_CAPTURED_STREAM,
            f"Cannot run aclop operators during NPU graph capture; {operation.name} has no other form [R83]",
        )
    if _auto_dispatch_depth and operation.name.startswith(ATTENTION_V2) and context.current().is_8_3:
        refuse(
            CANNOT_UPDATE,
            f"{operation.name} under auto_dispatch_capture: torch_npu 2.7.1 records only version 1 for updates, every "
            "replay would use the captured sequence lengths [R90]",
        )


def _update(operation: Operation, args: tuple, kwargs: dict, device: torch.device, stream: int) -> Any:
    """Replaces the arguments of a captured call. What the graph made for it, and what it writes, must stay; inputs from
    outside may be others: CANN asks for as many tasks of the same type (aclmdlRICaptureTaskUpdateBegin), and
    vllm-ascend's drafter brings its steps' block tables."""
    captured = calls.kept(library.emulator_update_target(stream))

    def refuse(sentence: str, rule: int = 86) -> None:
        library.emulator_set_error(f"{sentence} [R{rule}]".encode())
        binding.check(f"update of {captured.operation.name if captured else operation.name}", CANNOT_UPDATE)

    if captured is None:
        refuse("a task update brings more operators than its group holds")
    if captured.operation.name != operation.name:
        refuse(f"{captured.operation.name} was captured and {operation.name} is to replace it")
    with context.use(capturing=True):
        output, targets = _prepare(operation, args, kwargs, device)
    call = Call.of(operation, args, kwargs, targets, "update")
    if any(target is not None for target in targets):
        refuse(f"{operation.name} returns new memory; an update must write where the graph reads: use its .out form")
    old, new = captured.references(), call.references()
    if len(old) != len(new):
        refuse(f"{operation.name} was captured with {len(old)} device tensors and is updated with {len(new)}")
    written = captured.operation.written(captured.args, captured.kwargs, calls.TensorRef)
    for before, after in zip(old, new, strict=True):
        if before.dtype != after.dtype:
            refuse(f"{operation.name}: {before.dtype} was captured and is updated with {after.dtype}", 89)
        if (before.owner is None or before in written) and before != after:
            refuse(
                f"{operation.name}: a tensor {list(before.size)} at {before.address:#x}, which the graph makes or "
                f"reads, is updated with {list(after.size)} at {after.address:#x}"
            )
    owners, scratch = iter(old), operation.scratch
    call.args = tuple(v if i in scratch else _with_owners(v, owners) for i, v in enumerate(call.args))
    call.kwargs = {n: v if n in scratch else _with_owners(v, owners) for n, v in call.kwargs.items()}
    if trace.ENABLED:
        _trace_launch(call, "update", args, kwargs, targets, stream)
    binding.check(operation.name, library.emulator_submit(stream, calls.keep(call)))
    return output


def _with_owners(value: Any, references: Any) -> Any:
    """Replaces new references by the equal captured ones: an update is often made through weak references. Others are
    not watched: they may be freed before the replay that they are for, on whose stream memory is then used again."""
    if isinstance(value, calls.TensorRef):
        captured = next(references)
        return captured if captured == value else dataclasses.replace(value, watched=False)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_owners(item, references) for item in value)
    return value


@binding.EXECUTE
def _execute(number: int, graph: int, stream: int) -> int:
    """Runs a kept call for the runtime, in the thread that unblocks the stream. graph: negative loses its results."""
    call = calls.kept(number)
    try:
        if call is None:
            raise RuntimeError(f"call {number} was forgotten")
        call.run(stream, abs(graph))
        if graph < 0:
            call.lose_results()
    except BaseException as error:  # nothing may escape into C
        name = call.operation.name if call else "?"
        library.emulator_set_error(f"EE9999: {name} failed on the device: {error}".encode())
        return binding.KERNEL_FAILED
    finally:
        if not graph:
            calls.drop(number)
    return 0


@binding.FORGET
def _forget(number: int) -> None:
    calls.drop(number)


def _count_auto_dispatch() -> None:
    """Records torch_npu's dispatch mode for R90; the mode leaves the stack while it handles an operator."""
    mode = torch_npu.npu.graphs._GraphDispatchMode
    enter, leave = mode.__enter__, mode.__exit__

    @functools.wraps(enter)
    def counted_enter(self: Any) -> Any:
        global _auto_dispatch_depth
        _auto_dispatch_depth += 1
        return enter(self)

    @functools.wraps(leave)
    def counted_leave(self: Any, *exception: Any) -> Any:
        global _auto_dispatch_depth
        _auto_dispatch_depth -= 1
        return leave(self, *exception)

    mode.__enter__, mode.__exit__ = counted_enter, counted_leave


def connect() -> None:
    """Registers the callbacks with which the runtime runs its kept calls."""
    library.emulator_set_hooks(_execute, _forget)
    atexit.register(library.emulator_set_hooks, binding.EXECUTE(), binding.FORGET())  # graphs outlive the interpreter
    _count_auto_dispatch()
    _watch_captures()

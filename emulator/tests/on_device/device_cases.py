"""Memory, copies and operators of the emulated device."""

from __future__ import annotations

import ctypes
import os

import torch
import torch_npu
from ascend_emulator.stacks import CANN
from tools import acl, refused

npu = torch.npu


def case_it_is_a_910B3() -> None:
    assert npu.is_available()
    assert npu.get_device_name(0) == "Ascend910B3"
    properties = npu.get_device_properties(0)
    assert (properties.cube_core_num, properties.vector_core_num) == (20, 40)


def case_cann_version_is_the_selected_one() -> None:
    from torch_npu.npu.utils import get_cann_version

    assert get_cann_version() == CANN[os.environ["ASCEND_EMULATOR_CANN"]]


def case_memory_behind_a_tensor_belongs_to_its_allocation() -> None:
    """R92 needs it: the allocator's block continues behind the allocation by accident."""
    from ascend_emulator import memory

    bare, roomy = (torch.zeros(size, dtype=torch.bfloat16, device="npu") for size in (8, 40))
    assert memory.bytes_behind(memory.alias(bare)) == 0
    assert memory.bytes_behind(memory.alias(roomy[:8])) == 64
    assert memory.bytes_behind(memory.alias(roomy[8:16])) == 48


def case_new_memory_is_poison_every_time() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for _ in range(3):  # the second time the allocator hands out a block of ones
            x = torch.empty(100, device="npu", dtype=dtype)
            assert x.isnan().all()
            x.fill_(1)
            del x
    assert (torch.empty(10, device="npu", dtype=torch.int64) > 1 << 60).all()
    assert torch.empty_strided((2, 3), (1, 2), device="npu").isnan().all()
    assert torch.empty_like(torch.ones(3, device="npu")).isnan().all()


def seen_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The content of device memory, regardless of its owner."""
    from ascend_emulator import memory

    return memory.alias_at(address, (count,), (1,), dtype).clone()


def case_freed_memory_is_poison_at_once() -> None:
    """The allocator keeps the block, so without poison a stale address would still read the old values."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(100, device="npu", dtype=dtype)
        address, view = x.data_ptr(), x[10:].view(-1, 2)
        del x
        assert (seen_at(address, 100, dtype) == 1).all(), "a view is left"
        del view
        assert seen_at(address, 100, dtype).isnan().all()
    x = torch.arange(9, device="npu")
    address = x.data_ptr()
    del x
    assert (seen_at(address, 9, torch.int64) > 1 << 60).all()


def case_freed_memory_stays_while_a_stream_still_has_work() -> None:
    event, side, other = npu.ExternalEvent(), npu.Stream(), npu.Stream()
    x, y = torch.ones(8, device="npu"), torch.zeros(8, device="npu")
    with npu.stream(side):
        event.wait(side)
        y.copy_(x)
    x.record_stream(side)
    del x
    event.record(other)
    npu.synchronize()
    assert (y == 1).all()


def case_memory_of_a_graph_stays_for_its_replays() -> None:
    """vLLM drops a captured graph's outputs and keeps their addresses."""
    x, graph = torch.ones(8, device="npu"), npu.NPUGraph()
    with npu.graph(graph):
        y = x + 1
    graph.replay()
    address = y.data_ptr()
    del y
    assert (seen_at(address, 8, torch.float32) == 2).all()


def raw(size: int) -> int:
    """The address of device memory unknown to torch_npu."""
    pointer = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(size), 0) == 0
    return pointer.value


def case_raw_memory_is_poisoned_when_allocated_and_when_freed() -> None:
    address = raw(256)
    assert ctypes.string_at(address, 256) == b"\xff" * 256
    ctypes.memset(address, 7, 256)
    assert acl.aclrtFree(ctypes.c_void_p(address)) == 0
    # still mapped; the host's allocator keeps its list in the first bytes
    assert ctypes.string_at(address + 64, 192) == b"\xff" * 192
    assert acl.aclrtFree(ctypes.c_void_p(address)) == 107000, "freed twice"


def case_memory_returned_to_the_runtime_is_not_a_tensor() -> None:
    from ascend_emulator import memory

    address = raw(1 << 20)
    assert memory.alias_at(address, (4,), (1,), torch.float32).isnan().all()
    assert acl.aclrtFree(ctypes.c_void_p(address)) == 0
    with refused("R87", "not allocated"):
        memory.alias_at(address, (4,), (1,), torch.float32)


def case_pinned_memory_is_poison_when_allocated() -> None:
    pointer = ctypes.c_void_p()
    assert acl.aclrtMallocHost(ctypes.byref(pointer), ctypes.c_size_t(64)) == 0
    assert ctypes.string_at(pointer.value, 64) == b"\xff" * 64
    assert acl.aclrtFreeHost(pointer) == 0
    assert acl.aclrtFreeHost(pointer) == 107000, "freed twice"


def case_copies_name_their_sides_and_fit_their_targets() -> None:
    """A host address taken for a device address would copy from or to anywhere."""
    device, host = raw(64), ctypes.create_string_buffer(64)
    at = ctypes.addressof(host)
    to_device, to_host, within = 1, 2, 3

    def copied(target: int, source: int, kind: int, room: int = 64) -> int:
        return acl.aclrtMemcpy(*map(ctypes.c_void_p, (target, room, source, 64)), kind)

    assert copied(device, at, to_device) == copied(at, device, to_host) == copied(device, device, within) == 0
    for target, source, kind in (
        (at, at, to_device),
        (device, device, to_device),
        (device, device, to_host),
        (at, at, to_host),
        (at, device, within),
        (device, at, within),
    ):
        assert copied(target, source, kind) == 107000, (kind, target == at, source == at)
    assert copied(device, at, to_device, room=63) == 107000
    assert copied(device + 1, at, to_device) == 107000, "one byte behind the end"


def case_out_of_memory() -> None:
    with refused("out of memory"):
        torch.empty(8 << 30, dtype=torch.uint8, device="npu")


def case_memory_counts() -> None:
    free, total = npu.mem_get_info()
    x = torch.empty(256 << 20, dtype=torch.uint8, device="npu")
    assert total == 4 << 30
    assert free - npu.mem_get_info()[0] >= x.numel()
    assert npu.memory_allocated() >= x.numel()
    before = npu.mem_get_info()[0]
    address = raw(1 << 20)
    assert before - npu.mem_get_info()[0] == 1 << 20
    assert acl.aclrtFree(ctypes.c_void_p(address)) == 0
    assert npu.mem_get_info()[0] == before


def case_mixed_devices_are_refused() -> None:
    x, host = torch.ones(3, device="npu"), torch.ones(3)
    for function in (
        lambda: x + host,
        lambda: host + x,
        lambda: torch.cat([x, host]),
        lambda: torch.where(x > 0, x, host),
        lambda: x.add_(host),
        lambda: torch.mm(x[None], host[:, None]),
        lambda: x.index_select(0, torch.tensor([1])),
        lambda: torch.add(x, x, out=host),
        lambda: torch_npu.npu_rms_norm(x[None], host),
    ):
        with refused("device"):
            function()


def case_host_scalars_mix() -> None:
    x = torch.ones(3, device="npu")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert (x * 2).tolist() == [2, 2, 2]


def case_host_indices_are_copied() -> None:
    x = torch.arange(4.0, device="npu")
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]
    x[torch.tensor([1])] = 9
    assert x.tolist() == [0, 9, 2, 3]


def case_operators_agree_with_the_cpu() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)
        assert torch.equal((a.npu() @ b.npu()).cpu(), a @ b)
        assert torch.equal(a.npu().softmax(-1).cpu(), a.softmax(-1))
        assert torch.equal(a.npu().t().contiguous().cpu(), a.t().contiguous())
        assert torch.equal(a.npu()[1:4, ::2].cpu(), a[1:4, ::2])
        assert torch.equal(a.npu().to(torch.float32).cpu(), a.float())
    a = torch.randint(0, 9, (4, 5))
    assert torch.equal(a.npu().sort(-1).values.cpu(), a.sort(-1).values)
    assert torch.equal(a.npu().cumsum(0).cpu(), a.cumsum(0))
    assert torch.equal((a.npu() > 3).nonzero().cpu(), (a > 3).nonzero())
    top = a.npu().float().topk(2, -1)
    assert torch.equal(top.values.cpu(), a.float().topk(2, -1).values)
    chunks = a.npu().split(2)
    assert [tuple(chunk.shape) for chunk in chunks] == [(2, 5), (2, 5)]


def case_writes_through_views() -> None:
    x = torch.zeros(3, 4, device="npu")
    x[1].add_(1)
    x[:, 2] = 5
    x.view(-1)[0] = 7
    torch.add(x, 1, out=x)
    assert x.tolist() == [[8, 1, 6, 1], [2, 2, 6, 2], [1, 1, 6, 1]]


def case_results_are_contiguous_as_on_an_npu() -> None:
    x = torch.ones(3, 4, device="npu").t()
    assert (x + 1).is_contiguous()
    assert torch.empty_like(x).stride() == x.stride(), "but for what is made like something"
    assert x.clone().stride() == x.stride(), "as in torch"


def case_new_tensors_have_the_requested_type() -> None:
    x = torch.ones(2, device="npu")
    assert x.new_empty_strided((2,), (1,), dtype=torch.int64).dtype == torch.int64
    assert x.new_empty_strided((2,), (1,)).dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    assert torch.empty(2, device="npu").dtype == torch.bfloat16
    assert torch.empty_strided((2,), (1,), device="npu").dtype == torch.bfloat16


def case_the_python_package_acl_copies_and_knows_nothing_else() -> None:
    import acl as package

    x, host = torch.zeros(4, device="npu"), torch.arange(4.0)
    assert package.rt.memcpy(x.data_ptr(), 16, host.data_ptr(), 16, 1) == 0
    assert x.tolist() == [0, 1, 2, 3]
    assert package.rt.memcpy(x.data_ptr(), 15, host.data_ptr(), 16, 1) == 107000
    for owner, name in ((package, "init"), (package.rt, "malloc")):
        assert not hasattr(owner, name), "it would do nothing and say that it did"


def case_pinned_copies() -> None:
    host = torch.arange(4.0).pin_memory()
    assert host.is_pinned()
    x = host.to("npu", non_blocking=True)
    back = torch.empty(4).pin_memory()
    back.copy_(x, non_blocking=True)
    npu.synchronize()
    assert back.tolist() == [0, 1, 2, 3]


def held_up() -> tuple[object, object, object]:
    """A stream that waits for an event, the event, and another stream to record it on."""
    event, side, other = npu.ExternalEvent(), npu.Stream(), npu.Stream()
    event.wait(side)
    return side, event, other


def case_pageable_memory_is_read_when_a_copy_is_issued() -> None:
    """Pinned memory is read when the copy runs, so reusing it too early shows."""
    side, event, other = held_up()
    pageable, pinned = torch.ones(4), torch.ones(4).pin_memory()
    x, y = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    with npu.stream(side):
        x.copy_(pageable, non_blocking=True)
        y.copy_(pinned, non_blocking=True)
    pageable.fill_(9)
    pinned.fill_(9)
    event.record(other)
    npu.synchronize()
    assert x.tolist() == [1] * 4
    assert y.tolist() == [9] * 4


def case_a_copy_to_pageable_memory_waits_for_its_stream() -> None:
    side, _, _ = held_up()
    with npu.stream(side):
        x = torch.ones(4, device="npu") + 1
        with refused("107020", "deadlock"):
            torch.empty(4).copy_(x, non_blocking=True)


def case_copies_convert() -> None:
    x = torch.arange(6.0).view(2, 3)
    y = torch.zeros(3, 2, dtype=torch.bfloat16, device="npu").t()
    y.copy_(x)
    z = torch.zeros(2, 3, dtype=torch.float64)
    z.copy_(y)
    assert torch.equal(z, x.double())


def case_copies_follow_strides_and_broadcast() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.empty(3, 2, device="npu").copy_(x.t()).cpu(), x.t())
    assert torch.equal(torch.empty(2, 3, device="npu").copy_(x[0]).cpu(), x[:1].expand(2, 3))
    assert torch.equal(x.npu().t().cpu(), x.t())
    assert torch.equal(torch.zeros(3, 2, device="npu").t().copy_(x).cpu(), x)


def case_random_numbers_follow_the_seed() -> None:
    npu.manual_seed(3)
    first, second = torch.rand(4, device="npu"), torch.rand(4, device="npu")
    npu.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(4, device="npu").cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    npu.manual_seed(4)
    assert not torch.equal(first.cpu(), torch.rand(4, device="npu").cpu())


def case_unknown_operators_raise() -> None:
    try:
        torch_npu.npu_lstm_cell(*[torch.ones(2, 2, device="npu")] * 6)
    except NotImplementedError as error:
        assert "npu_lstm_cell" in str(error)  # noqa: PT017
        return
    raise AssertionError("an operator without a kernel answered")


def case_events_and_streams() -> None:
    start, end, side = npu.Event(enable_timing=True), npu.Event(enable_timing=True), npu.Stream()
    start.record()
    with npu.stream(side):
        x = torch.ones(3, device="npu") * 2
    npu.current_stream().wait_stream(side)
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert x.sum().item() == 6


def case_a_stream_held_up_by_an_external_event_keeps_its_order() -> None:
    event, side, other = npu.ExternalEvent(), npu.Stream(), npu.Stream()
    x = torch.zeros(2, device="npu")
    with npu.stream(side):
        event.wait(side)
        x.add_(1)
        y = x * 10
        y.sub_(1)
    assert x.tolist() == [0, 0]
    assert not side.query()
    event.record(other)
    npu.synchronize()
    assert side.query()
    assert y.tolist() == [9, 9]


def case_a_wait_is_for_the_last_recording() -> None:
    side, held, third = held_up()
    event, other = npu.Event(), npu.Stream()
    x = torch.zeros(2, device="npu")
    event.record(other)  # an earlier one, which is through
    with npu.stream(side):
        x.add_(1)
        event.record(side)
    assert not event.query()
    with npu.stream(other):
        event.wait(other)
        y = x * 10
    held.record(third)
    npu.synchronize()
    assert event.query()
    assert y.tolist() == [10, 10]


def case_bfloat16_fill_below_the_dispatcher_rounds_to_even() -> None:
    """torch_npu's collectives fill their buffers through aclnn; ties go to the even neighbour."""
    opapi, device = ctypes.CDLL("libopapi.so"), torch.zeros(4, device="npu", dtype=torch.bfloat16)
    for function in (opapi.aclCreateTensor, opapi.aclCreateScalar):
        function.restype = ctypes.c_void_p
    sizes, strides = (ctypes.c_int64 * 1)(4), (ctypes.c_int64 * 1)(1)
    bfloat16, double, nd = 27, 11, 2
    target = opapi.aclCreateTensor(
        sizes, ctypes.c_uint64(1), bfloat16, strides, ctypes.c_int64(0), nd, sizes, ctypes.c_uint64(1),
        ctypes.c_void_p(device.data_ptr()),
    )  # fmt: skip
    stream = ctypes.c_void_p(npu.current_stream().npu_stream)
    for value, rounded in ((1 + 3 / 256, 1 + 4 / 256), (1 + 1 / 256, 1), (-2.5, -2.5)):
        scalar = opapi.aclCreateScalar(ctypes.byref(ctypes.c_double(value)), double)
        size, execution = ctypes.c_uint64(), ctypes.c_void_p()
        asked = ctypes.byref(size), ctypes.byref(execution)
        operands = ctypes.c_void_p(target), ctypes.c_void_p(scalar)
        assert opapi.aclnnInplaceFillScalarGetWorkspaceSize(*operands, *asked) == 0
        assert opapi.aclnnInplaceFillScalar(None, ctypes.c_uint64(0), execution, stream) == 0
        assert device.tolist() == [rounded] * 4


def case_format_cast_is_remembered() -> None:
    x = torch.arange(32 * 32, device="npu", dtype=torch.bfloat16).view(32, 32)
    y = torch_npu.npu_format_cast(x, 29)
    assert int(torch_npu.get_npu_format(y)) == 29
    assert torch.equal(y.cpu(), x.cpu())
    assert torch.equal(torch_npu.npu_format_cast(x.t(), 29).cpu(), x.t().cpu())
    from ascend_emulator import storage

    assert storage.format_of(y) == 29
    assert storage.is_whole(y)
    assert not storage.is_whole(y[1:])
    assert not storage.is_whole(y[:16])
    address = y.data_ptr()
    del y
    assert storage.format_of(torch.empty(32, 32, dtype=torch.bfloat16, device="npu")) == 2, hex(address)


def case_a_format_cast_in_place_ends_with_its_tensor() -> None:
    """Otherwise the next tensor at this address, in ND again, would be refused for the old format."""
    from ascend_emulator import storage

    for _ in range(2):
        x = torch.zeros(2, 32, 32, device="npu", dtype=torch.bfloat16)
        address = x.data_ptr()
        assert storage.format_of(x) == 2
        torch_npu.npu_format_cast_(x, 29)
        assert storage.format_of(x) == 29
        del x
    y = torch.zeros(2, 32, 32, device="npu", dtype=torch.bfloat16)
    assert y.data_ptr() == address, "the allocator hands the block out again"
    assert storage.format_of(y) == 2
    torch_npu.npu_format_cast_(y, 29)
    torch_npu.npu_format_cast_(y, 2)
    assert storage.format_of(y) == 2


def case_float32_weights_have_no_NZ_R77() -> None:
    with refused("R77"):
        torch_npu.npu_format_cast(torch.ones(4, 32, 32, device="npu"), 29)


def case_an_error_outlives_the_tensors_that_die_with_it() -> None:
    """torch_npu's report of freed memory replaced it by "SystemError: error return without exception set"."""
    x = torch.ones(3, device="npu")
    for function, words in (
        (lambda: bool(x * 2), "Boolean value of Tensor with more than one value is ambiguous"),
        (lambda: bool(torch.nn.Parameter(x * 2)), "Boolean value of Tensor"),
        (lambda: torch.matmul(x * 2, torch.ones(5, 5, device="npu") * 1), "cannot be multiplied"),
    ):
        with refused(words):
            function()

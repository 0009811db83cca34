"""ACL graphs: capture, replay, and the rules R81 to R91."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
import torch_npu
from ascend_emulator import context
from tools import acl, captured, refused

npu = torch.npu


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).npu()


def capturing() -> contextlib.AbstractContextManager[None]:
    return npu.graph(npu.NPUGraph())


@contextlib.contextmanager
def task_group() -> Iterator[None]:
    npu.graph_task_group_begin(npu.current_stream())
    yield
    npu.graph_task_group_end(npu.current_stream())


def case_capture_records_and_does_not_execute() -> None:
    x, counter = tensor(1, 2), tensor(0)

    def body() -> torch.Tensor:
        counter.add_(1)
        return x * 2

    graph, out = captured(body)
    assert counter.item() == 0, "a side effect happened during capture"
    assert out.isnan().all(), "the output was written during capture"
    graph.replay()
    graph.replay()
    assert counter.item() == 2
    assert out.tolist() == [2, 4]


def case_a_replay_s_tensors_are_freed_without_a_search_for_cycles() -> None:
    """A server seldom looks for cycles: thousands of tensors stayed in memory for minutes."""
    x = tensor(1, 2)
    graph, out = captured(lambda: torch.cat([x, x + 1]))
    graph.replay()
    out.tolist()
    gc.collect()
    gc.disable()
    for _ in range(3):
        graph.replay()
    assert out.tolist() == [1, 2, 2, 3]
    assert gc.collect() == 0
    gc.enable()


def case_replay_reads_the_captured_addresses() -> None:
    x = tensor(1, 2)
    graph, out = captured(lambda: (x + 1).sum())
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert out.item() == 32


def case_host_tensors_are_copied_at_capture() -> None:
    x, scale = tensor(1, 2), torch.tensor(3.0)
    graph, out = captured(lambda: x * scale)
    scale.fill_(100)
    graph.replay()
    assert out.tolist() == [3, 6]


def case_memory_that_a_replay_does_not_write_is_poison() -> None:
    def body() -> torch.Tensor:
        out = torch.empty(4, device="npu")
        out[:2] = 1
        return out

    graph, out = captured(body)
    for _ in range(2):
        graph.replay()
        assert out[:2].tolist() == [1, 1]
        assert out[2:].isnan().all()
        out.fill_(5)  # as another user of the pool may leave it


def case_pinned_copy_is_part_of_the_graph() -> None:
    source, x = torch.ones(2).pin_memory(), tensor(0, 0)
    graph, _ = captured(lambda: x.copy_(source, non_blocking=True))
    source.fill_(7)
    graph.replay()
    assert x.tolist() == [7, 7]


def case_a_stream_that_is_forked_and_joined_takes_part_in_the_capture() -> None:
    x, side, source = tensor(0, 0), npu.Stream(), torch.ones(2).pin_memory()

    def body() -> torch.Tensor:
        main = npu.current_stream()
        side.wait_stream(main)
        with npu.stream(side):
            x.copy_(source, non_blocking=True)
        main.wait_stream(side)
        return x + 1

    graph, out = captured(body)
    source.fill_(7)
    graph.replay()
    assert out.tolist() == [8, 8]


def case_two_graphs_share_a_pool() -> None:
    x, pool = tensor(1, 2), npu.graph_pool_handle()
    first, second = npu.NPUGraph(), npu.NPUGraph()
    with npu.graph(first, pool=pool):
        y = x * 2
    with npu.graph(second, pool=pool):
        z = y + 1
    first.replay()
    second.replay()
    assert z.tolist() == [3, 5]


def updatable(x: torch.Tensor, out: torch.Tensor | None, stream: object = None) -> tuple[object, object]:
    """A graph of out = x + x and the handle of this task. Without `out` the sum is new memory."""
    graph = npu.NPUGraph()
    with npu.graph(graph, stream=stream):
        npu.graph_task_group_begin(npu.current_stream())
        torch.add(x, x, alpha=1, **({} if out is None else {"out": out}))
        handle = npu.graph_task_group_end(npu.current_stream())
    return graph, handle


class External:
    """A graph of after = (out = x + alpha * x) * 10; `side` updates alpha behind an external event."""

    def __init__(self) -> None:
        self.x, self.out, self.after, self.side = tensor(1, 2), tensor(0, 0), tensor(0, 0), npu.Stream()
        self.graph, self.event = npu.NPUGraph(), npu.ExternalEvent()
        with npu.graph(self.graph):
            stream = npu.current_stream()
            self.event.wait(stream)
            self.event.reset(stream)
            npu.graph_task_group_begin(stream)
            torch.add(self.x, self.x, alpha=1, out=self.out)
            self.handle = npu.graph_task_group_end(stream)
            torch.mul(self.out, 10, out=self.after)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Encloses an update, which the block may end."""
        with npu.stream(self.side):
            npu.graph_task_update_begin(self.side, self.handle)
            yield

    def update(self, alpha: int) -> None:
        with self.updating():
            torch.add(self.x, self.x, alpha=alpha, out=self.out)
            npu.graph_task_update_end(self.side)
            self.event.record(self.side)


def case_replay_waits_for_the_external_event() -> None:
    it = External()
    for alpha in (2, 5):
        it.graph.replay()  # suspended: the update comes afterwards, as vllm-ascend does it
        it.update(alpha)
        assert it.after.tolist() == [10 * (1 + alpha), 20 * (1 + alpha)]


def case_update_before_the_replay() -> None:
    it = External()
    it.update(3)
    it.graph.replay()
    assert it.after.tolist() == [40, 80]


def case_work_behind_a_suspended_replay_queues() -> None:
    it = External()
    it.graph.replay()
    late = it.after + 1  # a launch behind the replay: its result must come after it
    late_host = torch.empty(2).pin_memory()
    late_host.copy_(late, non_blocking=True)
    x_late = it.x.clone()
    it.x.add_(100)
    it.update(2)
    npu.synchronize()
    assert late.tolist() == [31, 61], late
    assert late_host.tolist() == [31, 61], late_host
    assert x_late.tolist() == [1, 2]
    assert it.x.tolist() == [101, 102]


def case_a_dropped_update_leaves_the_captured_arguments() -> None:
    it = External()
    it.graph.replay()
    it.event.record(it.side)
    assert it.after.tolist() == [20, 40]


def case_a_graph_that_was_not_replayed_leaves_its_output() -> None:
    x = tensor(1, 2)
    _, out = captured(lambda: x + 1)
    assert out.isnan().all()


def case_R81_default_stream_cannot_be_captured() -> None:
    with refused("default stream"):
        npu.NPUGraph().capture_begin()


def case_R81_capture_inside_capture() -> None:
    x = tensor(1, 2)
    graph = npu.NPUGraph()  # torch_npu itself aborts when NPUGraph.capture_begin fails half-way
    with refused("107025", "R81"), npu.graph(graph):
        x + 1
        stream = ctypes.c_void_p(npu.current_stream().npu_stream)
        assert acl.aclmdlRICaptureBegin(stream, 0) == 107027
        assert b"R81" in acl.aclGetRecentErrMsg()


def case_R81_second_capture_on_one_object() -> None:
    x = tensor(1, 2)
    graph, _ = captured(lambda: x + 1)
    with refused("capture"), npu.graph(graph):
        x + 1


def case_R81_end_on_another_stream() -> None:
    first, second, graph = npu.Stream(), npu.Stream(), npu.NPUGraph()
    with npu.stream(first):
        graph.capture_begin()
    with refused("same stream"), npu.stream(second):
        graph.capture_end()


def case_R81_end_on_a_stream_that_joined() -> None:
    """torch_npu itself checks its own streams only."""
    side = npu.Stream()
    with refused("107025", "R81", "another stream than it began on"), capturing():
        side.wait_stream(npu.current_stream())
        stream, model = ctypes.c_void_p(side.npu_stream), ctypes.c_void_p()
        assert acl.aclmdlRICaptureEnd(stream, ctypes.byref(model)) == 107036


def case_R81_end_in_another_thread() -> None:
    stream, model, codes = ctypes.c_void_p(npu.Stream().npu_stream), ctypes.c_void_p(), []

    def end() -> None:
        codes.append(acl.aclmdlRICaptureEnd(stream, ctypes.byref(model)))

    relaxed = 2
    for mode, code in ((0, 107038), (relaxed, 0)):
        assert acl.aclmdlRICaptureBegin(stream, mode) == 0
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert codes.pop() == code, acl.aclGetRecentErrMsg()
        if code:
            end()
            assert codes.pop() == 107025, "broken by the first try"


def case_R81_replay_before_capture() -> None:
    with refused("capture"):
        npu.NPUGraph().replay()


def case_a_graph_that_runs_is_not_replayed_on_a_second_stream() -> None:
    it = External()
    it.graph.replay()
    with refused("107037"), npu.stream(it.side):
        it.graph.replay()


def refused_while_capturing(rule: str, code: str, function: Callable[[SimpleNamespace], object]) -> None:
    """function: gets a tensor `x` and the like, made before the capture."""
    it = SimpleNamespace(x=tensor(1, 2), repeats=torch.tensor([1, 2]).npu(), mask=torch.tensor([True, False]).npu())
    it.host, it.pinned, it.event, it.past = torch.ones(3), torch.empty(2).pin_memory(), npu.Event(), npu.Event()
    it.past.record()
    npu.synchronize()
    with refused(code, rule):
        captured(lambda: function(it))


# a failed capture ends its process, so each is a case
REFUSED = {
    "case_R82_item": ("107027", lambda it: it.x[0].item()),
    "case_R82_truth_value": ("107027", lambda it: bool(it.x[0] > 0)),
    "case_R82_to_the_host": ("107027", lambda it: it.x.cpu()),
    "case_R82_tolist": ("107027", lambda it: it.x.tolist()),
    "case_R82_asynchronous_copy_to_pinned_memory": ("107030", lambda it: it.pinned.copy_(it.x, non_blocking=True)),
    "case_R82_pageable_host_to_device": ("107027", lambda it: torch.tensor([1.0, 2.0], device="npu")),
    "case_R82_pageable_host_to_device_non_blocking": ("107030", lambda it: it.host.to("npu", non_blocking=True)),
    "case_R82_device_synchronisation": ("107027", lambda it: (it.x + 1, npu.synchronize())),
    "case_R82_stream_synchronisation": ("107027", lambda it: npu.current_stream().synchronize()),
    "case_R82_event_synchronisation": ("107028", lambda it: (it.event.record(), it.event.synchronize())),
    "case_R82_stream_query": ("107027", lambda it: npu.current_stream().query()),
    "case_R82_event_query": ("107028", lambda it: (it.event.record(), it.event.query())),
    "case_R82_synchronisation_with_an_event_from_outside": ("107030", lambda it: it.past.synchronize()),
    "case_R82_repeat_interleave_without_size": ("107027", lambda it: it.x.repeat_interleave(it.repeats)),
    "case_R82_nonzero": ("107027", lambda it: it.x.nonzero()),
    "case_R82_masked_indexing": ("107027", lambda it: it.x[it.mask]),
    "case_R82_masked_indexing_with_bytes": ("107027", lambda it: it.x[it.mask.byte()]),
    "case_R82_masked_assignment": ("107027", lambda it: it.x.index_put_((it.mask,), torch.zeros((), device="npu"))),
    "case_R82_unique": ("107027", lambda it: it.x.unique()),
    "case_R82_host_index_tensor": ("107027", lambda it: it.x[torch.tensor([1])]),
    "case_R83_random_numbers": ("R83", lambda it: torch.randn(3, device="npu")),
    "case_R83_in_place_random_numbers": ("R83", lambda it: it.x.exponential_()),
    "case_R83_operator_without_aclnn": ("aclop", lambda it: torch_npu.npu_broadcast(it.x, (2, 2))),
}
globals().update({name: partial(refused_while_capturing, name[5:8], *row) for name, row in REFUSED.items()})


def case_repeat_interleave_with_size_is_captured() -> None:
    x, repeats = tensor(1, 2), torch.tensor([1, 2]).npu()
    graph, out = captured(lambda: x.repeat_interleave(repeats, output_size=3))
    graph.replay()
    assert out.tolist() == [1, 2, 2]


def case_R82_another_threads_synchronous_copy_in_global_mode() -> None:
    x, errors = tensor(1), []

    def other() -> None:
        try:
            torch.ones(3).npu()
        except RuntimeError as error:
            errors.append(str(error))

    with refused("107025"), capturing():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        x + 1
    assert "107030" in errors[0]
    assert "R82" in errors[0]


def case_R82_memset() -> None:
    """torch_npu's C++ zeroes some buffers this way."""
    buffer = tensor(1)
    with refused("107025", "memset", "R82"), capturing():
        assert acl.aclrtMemset(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(4), 0, ctypes.c_size_t(4)) == 107030


def copied_by_another_thread(mode: str) -> tuple[object, int]:
    """Captures in this mode; returns the result of another thread's synchronous copy, too."""
    host, target, codes = ctypes.create_string_buffer(4), tensor(1), []

    def copy() -> None:
        operands = map(ctypes.c_void_p, (target.data_ptr(), 4, ctypes.addressof(host), 4))
        codes.append(acl.aclrtMemcpy(*operands, 1))

    x, graph = tensor(1, 2), npu.NPUGraph()
    with npu.graph(graph, capture_error_mode=mode):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        out = x + 1
    graph.replay()
    assert out.tolist() == [2, 3]
    return copy, codes[0]


def case_another_threads_copy_is_let_through_unless_the_mode_is_global() -> None:
    for mode in ("thread_local", "relaxed"):
        assert copied_by_another_thread(mode)[1] == 0, mode


def case_R82_the_own_threads_synchronous_copy_in_thread_local_mode() -> None:
    copy, _ = copied_by_another_thread("relaxed")
    with npu.graph(npu.NPUGraph(), capture_error_mode="relaxed"):
        copy()
    with refused("107025", "R82"), npu.graph(npu.NPUGraph(), capture_error_mode="thread_local"):
        copy()


def case_R83_aclop_launched_below_the_dispatcher() -> None:
    """torch_npu's C++ fills and pads this way; the refusal comes before a check of operands."""
    with refused("107025", "aclop operator Fill", "R83"), capturing():
        stream = ctypes.c_void_p(npu.current_stream().npu_stream)
        nothing = [None] * 3
        assert acl.aclopCompileAndExecute(b"Fill", 0, *nothing[:2], 0, *nothing, 0, 0, None, stream) == 107030


def case_R84_stream_not_joined() -> None:
    x, side, source = tensor(1, 2), npu.Stream(), torch.ones(2).pin_memory()
    with refused("107025", "R84"), capturing():
        side.wait_stream(npu.current_stream())
        with npu.stream(side):
            x.copy_(source, non_blocking=True)


def case_R84_wait_for_an_event_from_outside() -> None:
    event, side, x = npu.Event(), npu.Stream(), tensor(1)
    event.record(side)
    with refused("107024", "R84"):
        captured(lambda: (npu.current_stream().wait_event(event), x + 1))


def case_R84_wait_for_an_event_of_another_capture() -> None:
    first, second, event = (ctypes.c_void_p() for _ in range(3))
    for stream in (first, second):
        assert acl.aclrtCreateStream(ctypes.byref(stream)) == 0
    assert acl.aclrtCreateEvent(ctypes.byref(event)) == 0
    relaxed = 2
    assert acl.aclmdlRICaptureBegin(first, relaxed) == acl.aclmdlRICaptureBegin(second, relaxed) == 0
    assert acl.aclrtRecordEvent(event, first) == 0
    assert acl.aclrtStreamWaitEvent(second, event) == 107032
    assert b"R84" in acl.aclGetRecentErrMsg()


def group_of(count: int) -> None:
    x, out = tensor(1, 2), tensor(0, 0)
    with capturing(), task_group():
        for _ in range(count):
            torch.add(x, x, out=out)


def case_a_group_of_one_operator_is_captured() -> None:
    group_of(1)


def case_a_workspace_query_is_no_operator() -> None:
    query, cache = (torch.ones(1, n, 128, device="npu", dtype=torch.bfloat16) for n in (1, 128))
    table, x, out = torch.zeros(1, 1, dtype=torch.int32, device="npu"), tensor(1, 2), tensor(0, 0)
    with capturing(), task_group():
        torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            query, cache, cache, actual_seq_lengths_kv=[1], block_table=table, num_heads=2, block_size=128
        )
        torch.add(x, x, out=out)


def case_R85_empty_group() -> None:
    with refused("107033", "R85"):
        group_of(0)


def case_R85_two_operators_in_a_group() -> None:
    with refused("107033", "R85"):
        group_of(2)


def case_R85_nested_groups() -> None:
    with refused("107033", "R85", "inside another"), capturing(), task_group(), task_group():
        pass


def case_R85_group_ends_on_another_stream() -> None:
    x, out, side = tensor(1, 2), tensor(0, 0), npu.Stream()
    with refused("107033", "R85"), capturing():
        side.wait_stream(npu.current_stream())
        npu.graph_task_group_begin(npu.current_stream())
        torch.add(x, x, out=out)
        npu.graph_task_group_end(side)


def case_R85_another_streams_operator_in_a_group() -> None:
    x, out, side = tensor(1, 2), tensor(0, 0), npu.Stream()
    with refused("107034", "R85"), capturing():
        side.wait_stream(npu.current_stream())
        with task_group(), npu.stream(side):
            torch.add(x, x, out=out)


def case_R85_group_of_a_copy() -> None:
    x, source = tensor(0, 0), torch.ones(2).pin_memory()
    with refused("107033", "R85", "something else than an operator"), capturing(), task_group():
        x.copy_(source, non_blocking=True)


def case_R85_group_that_is_open_at_the_end() -> None:
    x, out = tensor(1, 2), tensor(0, 0)
    with refused("107033", "R85", "inside a task group"), capturing():
        npu.graph_task_group_begin(npu.current_stream())
        torch.add(x, x, out=out)


def case_R85_group_outside_of_a_capture() -> None:
    with refused("107029", "R85"):
        npu.graph_task_group_begin(npu.Stream())


def case_an_update_may_read_another_tensor_of_another_shape() -> None:
    """CANN asks for as many tasks of the same type; vllm-ascend gives its drafter's steps block tables this way."""
    it, other = External(), tensor(7)
    it.graph.replay()
    with it.updating():
        torch.add(other, it.x, alpha=2, out=it.out)
        npu.graph_task_update_end(it.side)
        del other  # before its replay may end
        it.event.record(it.side)
    assert it.after.tolist() == [90, 110]
    it.graph.replay()
    it.update(4)
    assert it.after.tolist() == [50, 100], "the captured tensor, again"


def refused_as_an_update(words: tuple[str, ...], function: Callable[[External], object]) -> None:
    it = External()
    it.other, it.pinned = tensor(0, 0), torch.ones(2).pin_memory()
    with refused("207019", "R86", *words), it.updating():
        function(it)


OF_GRAPH = ("makes or reads",)  # the graph reads the captured tensor
UPDATES = {
    "case_R86_update_with_another_operator": ((), lambda it: torch.sub(it.x, it.x, alpha=2, out=it.out)),
    "case_R86_update_that_writes_another_tensor": (
        OF_GRAPH, lambda it: torch.add(it.x, it.x, alpha=2, out=it.other),
    ),
    "case_R86_update_that_writes_another_shape": (
        OF_GRAPH, lambda it: torch.add(it.x[:1], it.x[:1], alpha=2, out=it.out[:1]),
    ),
    "case_R86_update_without_an_operator": ((), lambda it: npu.graph_task_update_end(it.side)),
    "case_R86_update_with_two_operators": (
        (), lambda it: [torch.add(it.x, it.x, alpha=2, out=it.out) for _ in range(2)],
    ),
    "case_R86_update_with_a_copy": (
        ("operators only",), lambda it: it.out.copy_(it.pinned, non_blocking=True),
    ),
}  # fmt: skip
globals().update({name: partial(refused_as_an_update, *row) for name, row in UPDATES.items()})


def case_R86_updates_do_not_nest_and_end_once() -> None:
    it = External()
    with refused("107033", "R86", "inside another"), it.updating(), it.updating():
        pass
    it.side = npu.Stream()
    it.update(2)
    with refused("107033", "R86", "not begun"):
        npu.graph_task_update_end(it.side)


def case_R86_a_capture_inside_an_update_and_an_update_inside_a_capture() -> None:
    it = External()
    with refused("107025", "R86"), npu.graph(npu.NPUGraph(), stream=it.side):
        npu.graph_task_update_begin(it.side, it.handle)
    other = npu.Stream()
    npu.graph_task_update_begin(other, it.handle)
    assert acl.aclmdlRICaptureBegin(ctypes.c_void_p(other.npu_stream), 0) == 107033
    assert b"R86" in acl.aclGetRecentErrMsg()


def case_R86_update_that_returns_new_memory() -> None:
    x, side = tensor(1, 2), npu.Stream()
    _graph, handle = updatable(x, None)
    with refused("R86", ".out"), npu.stream(side):
        npu.graph_task_update_begin(side, handle)
        torch.add(x, x, alpha=2)


def case_R86_update_on_the_captured_stream() -> None:
    stream = npu.Stream()
    _graph, handle = updatable(tensor(1, 2), tensor(0, 0), stream)
    with refused("R86"):
        npu.graph_task_update_begin(stream, handle)


def case_R86_handle_of_a_destroyed_graph() -> None:
    it = External()
    it.graph.reset()
    with refused("R86"), it.updating():
        pass


def case_R86_event_that_is_never_recorded_deadlocks() -> None:
    it = External()
    it.graph.replay()
    with refused("107020", "deadlock", "R86"):
        npu.synchronize()


def case_R87_freed_input() -> None:
    holder = [tensor(1, 2)]
    graph, _ = captured(lambda: holder[0] + 1)
    holder.clear()
    with refused("R87"):
        graph.replay()


def case_R87_rebound_input() -> None:
    holder = {"x": tensor(1, 2)}
    graph, _ = captured(lambda: holder["x"] + 1)
    holder["x"] = tensor(3, 4)
    with refused("R87"):
        graph.replay()


def case_a_view_keeps_the_captured_tensor() -> None:
    x = torch.zeros(8, device="npu")
    holder = [x[:4]]
    graph, out = captured(lambda: holder[0] + 1)
    holder.clear()
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [6] * 4


def case_R87_an_error_behind_a_wait_is_raised_by_the_next_synchronisation() -> None:
    """The replay has returned by then, and the event is recorded elsewhere."""
    it = External()
    del it.x
    it.graph.replay()
    it.event.record(it.side)
    with refused("507015", "R87"):
        npu.synchronize()


def case_R87_an_error_is_raised_by_a_thread_that_waits_for_another_streams_event() -> None:
    """So vLLM's thread of results waits, before the replay has failed or afterwards."""
    for first in (True, False):
        it, copies, event = External(), npu.Stream(), npu.Event()
        del it.x
        it.graph.replay()
        if first:
            it.event.record(it.side)
        copies.wait_stream(npu.current_stream())
        event.record(copies)
        if not first:
            it.event.record(it.side)
        with ThreadPoolExecutor(1) as thread, refused("507015", "R87"):
            thread.submit(event.synchronize).result()
        with refused("507015", "R87"):
            npu.synchronize()


def case_R88_later_releases_count_no_streams() -> None:
    stream = ctypes.c_void_p()
    codes = {acl.aclrtCreateStream(ctypes.byref(stream)) for _ in range(2100)}
    assert codes == ({0, 207008} if context.current().is_8_3 else {0})


def case_R88_stream_budget() -> None:
    if not context.current().is_8_3:
        return
    x, graphs = tensor(1), []
    stream = ctypes.c_void_p()
    for _ in range(1800):
        assert acl.aclrtCreateStream(ctypes.byref(stream)) == 0
    with refused("207008", "R88"):
        for _ in range(200):
            graphs.append(captured(lambda: x + 1)[0])
    assert 50 < len(graphs) < 184, len(graphs)


def case_R88_streams_come_back() -> None:
    """Destroyed graphs, failed captures and streams return them. A graph takes one for each stream that joined it."""
    if not context.current().is_8_3:
        return
    streams, model, event = [], ctypes.c_void_p(), ctypes.c_void_p()
    while True:
        stream = ctypes.c_void_p()
        code = acl.aclrtCreateStream(ctypes.byref(stream))
        if code:
            break
        streams.append(stream)
    assert code == 207008
    assert 1984 - 48 < len(streams) <= 1984, "torch_npu may have made its own by now, of which it has few"
    first, relaxed = streams[0], 2
    assert acl.aclmdlRICaptureBegin(first, relaxed) == 207008
    assert acl.aclrtDestroyStream(streams.pop()) == 0
    for _ in range(3):
        assert acl.aclmdlRICaptureBegin(first, relaxed) == 0
        assert acl.aclmdlRICaptureEnd(first, ctypes.byref(model)) == 0
        assert acl.aclmdlRICaptureBegin(first, relaxed) == 207008
        assert acl.aclmdlRIDestroy(model) == 0
        assert acl.aclmdlRICaptureBegin(first, relaxed) == 0
        assert acl.aclrtSynchronizeStream(first) == 107027
        assert acl.aclmdlRICaptureEnd(first, ctypes.byref(model)) == 107025
    assert acl.aclrtDestroyStream(streams.pop()) == 0
    assert acl.aclrtCreateEvent(ctypes.byref(event)) == 0
    second = streams[1]
    assert acl.aclmdlRICaptureBegin(first, relaxed) == 0
    for here, there in ((first, second), (second, first)):
        assert acl.aclrtRecordEvent(event, here) == acl.aclrtStreamWaitEvent(there, event) == 0
    assert acl.aclmdlRICaptureEnd(first, ctypes.byref(model)) == 0
    assert acl.aclmdlRICaptureBegin(first, relaxed) == 207008


def case_R86_update_that_reads_past_what_the_graph_makes() -> None:
    x, out, side, graph = tensor(1, 2), tensor(0, 0), npu.Stream(), npu.NPUGraph()
    with npu.graph(graph):
        made = x + 1
        npu.graph_task_group_begin(npu.current_stream())
        torch.add(made, x, alpha=1, out=out)
        handle = npu.graph_task_group_end(npu.current_stream())
    with refused("207019", "R86", "makes or reads"), npu.stream(side):
        npu.graph_task_update_begin(side, handle)
        torch.add(x, x, alpha=2, out=out)


def case_R89_update_with_another_type() -> None:
    x, out, side = torch.ones(2, 2, device="npu"), torch.zeros(2, 2, device="npu"), npu.Stream()
    _graph, handle = updatable(x, out)
    other = x.view(torch.int32)
    with refused("207019", "R89"), npu.stream(side):
        npu.graph_task_update_begin(side, handle)
        torch.add(other, other, alpha=2, out=out.view(torch.int32))


def case_R86_update_with_another_number_of_tensors() -> None:
    x, out, side = tensor(1, 2), tensor(0, 0), npu.Stream()
    _graph, handle = updatable(x, out)
    with refused("207019", "R86", "with 3 device tensors and is updated with 2"), npu.stream(side):
        npu.graph_task_update_begin(side, handle)
        torch.add(x, torch.tensor(1.0), alpha=2, out=out)


def case_R87_a_weak_update_keeps_watching_the_captured_tensors() -> None:
    """vllm-ascend updates this way: the references are gone before the replay, the tensors are not."""
    holder, out, side = [tensor(1, 2)], tensor(0, 0), npu.Stream()
    graph, handle = updatable(holder[0], out)
    with npu.stream(side):
        npu.graph_task_update_begin(side, handle)
        weak = torch_npu._C._weak_ref_tensor(holder[0])
        torch.add(weak, weak, alpha=4, out=out)
        npu.graph_task_update_end(side)
    del weak
    graph.replay()
    assert out.tolist() == [5, 10]
    holder.clear()
    with refused("R87"):
        graph.replay()


def attend_under_auto_dispatch() -> None:
    query, cache = (
        torch.ones(1, 2, 64, device="npu", dtype=torch.bfloat16),
        torch.ones(1, 128, 64, device="npu", dtype=torch.bfloat16),
    )
    table = torch.zeros(1, 1, dtype=torch.int32, device="npu")
    with npu.graph(npu.NPUGraph(), auto_dispatch_capture=True):
        torch_npu.npu_fused_infer_attention_score_v2(
            query, cache, cache, actual_seq_qlen=[1], actual_seq_kvlen=[1], block_table=table, num_query_heads=2,
            num_key_value_heads=1, block_size=128, input_layout="TND",
        )  # fmt: skip


def case_R90_attention_v2_under_auto_dispatch() -> None:
    with refused("R90") if context.current().is_8_3 else contextlib.nullcontext():
        attend_under_auto_dispatch()


def case_auto_dispatch_knows_version_2_from_8_5() -> None:
    context.set_default(dataclasses.replace(context.current(), cann="8.5"))
    attend_under_auto_dispatch()


def forked(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """One operator on a second stream, in new memory and in `into`, joined before the last one."""
    main, side = npu.current_stream(), npu.Stream()
    side.wait_stream(main)
    with npu.stream(side):
        y = x * 2
        torch.add(x, x, out=into)
    main.wait_stream(side)
    return y + 1


def case_R91_an_operator_on_a_second_stream() -> None:
    x, into = tensor(1, 2), tensor(0, 0)
    assert forked(x, into).tolist() == [3, 5], "outside of a capture streams may fork"
    if torch_npu.__version__ != "2.7.1":
        graph, out = captured(lambda: forked(x, into))
        graph.replay()
        assert (out.tolist(), into.tolist()) == ([3, 5], [2, 4]), "mended in 2.10.0.post4"
        return
    with refused("R91", "a second one"):
        captured(lambda: forked(x, into))


def case_R91_numbers_of_a_second_stream_are_wrong_outside_of_strict_mode() -> None:
    if torch_npu.__version__ != "2.7.1":
        return
    context.set_default(dataclasses.replace(context.current(), strict=False))
    x, into = tensor(1, 2), tensor(0, 0)
    graph, out = captured(lambda: forked(x, into))
    graph.replay()
    assert out.isnan().all()
    assert into.isnan().all()
    assert [finding.rule for finding in context.current().findings] == [91, 91]
    graph, out = captured(lambda: x * 2 + 1)
    graph.replay()
    assert out.tolist() == [3, 5], "the next capture begins anew"

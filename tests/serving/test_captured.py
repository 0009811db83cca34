"""Full decode graphs without vllm-ascend: the lengths of a replay, and each reason to leave such graphs out."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from npu_gptoss.attention import AttentionMetadata, ascend
from npu_gptoss.serving import canary
from npu_gptoss.serving.ascend import captured, full_graph, limits, probe, start_check
from npu_gptoss.serving.releases import ascend_0_11, ascend_0_23, vllm_0_23
from tests.model.published import gpt_oss_20b

pytestmark = pytest.mark.serving


def step(*requests: tuple[int, int]) -> AttentionMetadata:
    """Requests of (rows, keys)."""
    ends = torch.tensor([0, *(rows for rows, _ in requests)]).cumsum(0)
    table = torch.zeros(len(requests), 8, dtype=torch.int32)
    return AttentionMetadata(tuple(ends.tolist()), tuple(keys for _, keys in requests), table, torch.arange(ends[-1]))


@pytest.mark.parametrize(
    ("requests", "rows", "each", "lengths"),
    [
        ([(1, 300), (1, 7)], 2, 1, ([1, 2], [300, 7])),
        ([(1, 300), (1, 7)], 4, 1, ([1, 2, 3, 4], [300, 7, 1, 1])),
        ([(3, 300), (3, 7)], 12, 3, ([3, 6, 9, 12], [300, 7, 3, 3])),
    ],
)
def test_a_padding_request_of_a_graph_sees_its_own_rows_alone(requests, rows, each, lengths) -> None:
    metadata = step(*requests)
    assert captured.padded_lengths(metadata, rows, each) == lengths
    assert captured.padded_lengths(metadata, rows, each)[0] is captured.padded_lengths(metadata, rows, each)[0]
    assert captured.padded_lengths(metadata, rows + each, each) == ([*lengths[0], rows + each], [*lengths[1], each])


@pytest.mark.parametrize(
    ("requests", "rows", "each"),
    [
        ([(3, 300), (2, 7)], 6, 3),  # a request with fewer drafts
        ([(1, 300), (1, 7), (1, 5)], 2, 1),
        ([(3, 300)], 4, 3),
    ],
    ids=["ragged", "too small", "no whole requests"],
)
def test_a_graph_never_replays_a_step_of_another_shape(requests, rows, each) -> None:
    with pytest.raises(RuntimeError, match=f"a graph of {rows} decode rows, {each} a request, was chosen for"):
        captured.padded_lengths(step(*requests), rows, each)


@pytest.mark.parametrize(
    ("lengths", "blocks", "fits"),
    [
        ((128, 129), 7, True),  # 1 + 2, and 4 of padding
        ((128, 129), 6, False),
        ((256, 129), 7, False),
        ((128, 129), None, True),  # before the cache is sized
    ],
)
def test_a_graph_s_call_counts_whole_blocks_and_those_of_padding(lengths, blocks, fits) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=128),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    assert captured.fits_one_call(lengths, config) is fits


class Updates:
    """vllm-ascend's lists for graphs of 4 rows, and a device that counts what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: list[Any], fails_at: int = 99) -> None:
        self.told: list[tuple[str, list[int]]] = []
        self.ended: list[tuple[int, str]] = []
        events = [
            SimpleNamespace(record=lambda stream, at=at: self.ended.append((at, stream))) for at in range(len(calls))
        ]
        params = SimpleNamespace(attn_params={4: calls}, handles={4: list(calls)}, events={4: events})

        def update(stream: Any, call: captured.Call, handle: Any, event: Any, lengths: Any) -> None:
            if len(self.told) == fails_at:
                raise RuntimeError("207000")
            self.told.append((call.layer_name, lengths[1]))

        module = SimpleNamespace(__path__=[], get_graph_params=lambda: params)
        for name in ("vllm_ascend", "vllm_ascend.compilation", "vllm_ascend.compilation.acl_graph"):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(captured, "update", update)
        npu = SimpleNamespace(stream=lambda stream: nullcontext(), Stream=lambda: "aside")
        monkeypatch.setattr(torch, "npu", npu, raising=False)


def calls(each: int = 1) -> list[captured.Call]:
    return [captured.Call(name, {}, torch.empty(0), [], each) for name in ("first", "second", "third")]


def context(**requests: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(attn_metadata={name: step(request) for name, request in requests.items()})


def test_each_captured_layer_gets_the_lengths_of_its_own_step(monkeypatch) -> None:
    seen = Updates(monkeypatch, calls(each=2))
    found = captured.update_step("stream", context(first=(2, 30), second=(2, 40), third=(2, 50)), 4)
    assert found is True
    assert seen.told == [("first", [30, 2]), ("second", [40, 2]), ("third", [50, 2])]
    assert seen.ended == []


def test_an_update_that_fails_frees_the_calls_that_got_none_and_is_told(monkeypatch) -> None:
    """The replay would wait for ever; a call that got its lengths must not be freed for the next replay."""
    seen = Updates(monkeypatch, calls(), fails_at=1)
    with pytest.raises(RuntimeError, match="207000"):
        captured.update_step("stream", context(first=(1, 30), second=(1, 40), third=(1, 50)), 4)
    assert seen.ended == [(1, "aside"), (2, "aside")], "the stream of the update may be blocked"


@pytest.mark.parametrize("others", [[], [("query", "key")]])
def test_graphs_without_our_calls_are_left_to_vllm_ascend(monkeypatch, others) -> None:
    assert Updates(monkeypatch, others).told == []
    assert captured.update_step("stream", context(), 4) is False


REASONS = ("layout", "kernel", "events", "heads", "probe")


@pytest.mark.parametrize("wrong", [None, *REASONS])
def test_each_reason_against_full_graphs_is_asked(monkeypatch, wrong) -> None:
    """An engine that replays what its card cannot would answer wrongly, or hang."""
    asked: list[Any] = []

    def says(name: str, otherwise: Any = None) -> Any:
        return lambda *given, **more: asked.append((name, given, more)) or (name if wrong == name else otherwise)

    monkeypatch.setattr(ascend_0_11, "layout_objection", says("layout"))
    monkeypatch.setattr(full_graph, "_other_kernel", says("kernel"))
    monkeypatch.setattr(start_check, "attention", says("attention"))
    monkeypatch.setattr(limits, "event_objection", says("events"))
    monkeypatch.setattr(ascend, "heads_kept_apart", lambda: wrong == "heads")
    monkeypatch.setattr(probe, "full_graph_objection", says("probe"))
    monkeypatch.setattr(captured, "set_aside", says("set aside"))
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        hf_config=gpt_oss_20b(),
        get_head_size=lambda: 64,
        get_num_attention_heads=lambda parallel: 32,
        get_num_kv_heads=lambda parallel: 4,
    )
    config = SimpleNamespace(model_config=model, parallel_config="ranks", cache_config=SimpleNamespace(block_size=256))
    found = full_graph._objection(config, "npu:3")
    assert (found is None) == (wrong is None)
    by_name = {name: (given, more) for name, given, more in asked}
    order = ["layout", "kernel", "attention", "events", *(["probe", "set aside"] if wrong in (None, "probe") else [])]
    ends = {"layout": 1, "kernel": 2}.get(wrong, len(order))
    assert list(by_name) == order[:ends]
    if wrong is None:
        assert by_name["kernel"][0] == (torch.bfloat16, 64, 256)
        assert by_name["attention"][0] == (32, 4, torch.bfloat16, "npu:3")
        sizes = {"heads": 32, "kv_heads": 4, "head_dim": 64, "window": 128}
        assert by_name["probe"][1] == sizes | {"dtype": torch.bfloat16, "device": "npu:3"}


@pytest.mark.parametrize(("ours", "guarded"), [("gpt_oss", True), ("qwen3", False)])
def test_steps_of_gpt_oss_alone_are_measured_before_a_full_graph(monkeypatch, ours, guarded) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ascend_0_11, "guard", lambda runner, fits: asked.append(fits((300,))))
    monkeypatch.setattr(captured, "fits_one_call", lambda lengths, config: (lengths, config))
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=ours)))
    full_graph.guard(SimpleNamespace(vllm_config=config))
    assert asked == ([((300,), config)] if guarded else [])


@pytest.mark.parametrize(
    ("mode", "built", "chosen"),
    [
        ("FULL", [(1,), (2,)], "FULL"),
        ("FULL", [(1,), (9,)], "NONE"),  # of two groups of layers
        ("PIECEWISE", [(9,), (9,)], "PIECEWISE"),
    ],
)
def test_steps_that_do_not_fit_a_call_run_without_a_graph_on_0_11(mode, built, chosen) -> None:
    groups = [[SimpleNamespace(get_metadata_builder=lambda each=each: SimpleNamespace(built=each))] for each in built]
    dispatcher = SimpleNamespace(dispatch=lambda rows: (CUDAGraphMode[mode], rows))
    ascend_0_11.guard(SimpleNamespace(aclgraph_dispatcher=dispatcher, attn_groups=groups), lambda it: it != (9,))
    without = CUDAGraphMode.NONE, None
    assert dispatcher.dispatch("rows") == (without if chosen == "NONE" else (CUDAGraphMode[mode], "rows"))


@pytest.mark.parametrize(("stages", "replicas", "right"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_layouts_whose_ranks_diverge_capture_no_whole_step_on_0_11(stages, replicas, right) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=stages, data_parallel_size=replicas)
    assert (ascend_0_11.layout_objection(parallel) is None) == right


@pytest.mark.parametrize("release", [ascend_0_11, ascend_0_23])
def test_rows_that_combine_does_not_write_are_zero(release) -> None:
    """Old memory may hold NaN there, and the next layer's routing would read it."""
    rows = torch.full((3, 2), float("nan"))
    rows[0], rows[2] = 1.0, 2.0
    assert release.written(rows, torch.tensor([True, False, True])).tolist() == [[1, 1], [0, 0], [2, 2]]
    assert release.written(rows, None) is rows


def test_padding_rows_that_mc2_leaves_reach_the_next_layer() -> None:
    """The mask is the step's own, which the layer's argument need not be."""
    mask, left = torch.tensor([True, False]), torch.tensor([[1.0], [float("nan")]])
    asked: dict[str, Any] = {}
    dispatcher = SimpleNamespace(
        token_dispatch=lambda **given: asked.update(given)
        or {"hidden_states": 1, "group_list": 2, "group_list_type": 3},
        token_combine=lambda hidden_states: hidden_states,
    )
    method, places = SimpleNamespace(token_dispatcher=dispatcher, mc2_mask=mask), torch.arange(4)
    *sent, combine = ascend_0_11.dispatch(method, left, "weights", "ids", places, None)
    assert sent == [1, 2, 3]
    assert asked["mc2_mask"] is mask
    assert asked["expert_map"] is places
    assert combine(left).tolist() == [[1], [0]]


@pytest.fixture
def runner() -> SimpleNamespace:
    """vllm-ascend 0.11's, with graphs of 8, 16 and 24 rows for 8 requests of two rows."""
    sizes = {rows: SimpleNamespace(num_tokens=rows) for rows in (24, 8, 16)}
    keys = {CUDAGraphMode.FULL: sizes.values(), CUDAGraphMode.PIECEWISE: sizes.values(), CUDAGraphMode.NONE: ()}
    dispatcher = SimpleNamespace(cudagraph_keys=keys, dispatch=lambda rows: (CUDAGraphMode.FULL, sizes[rows]))

    class Model:
        def compute_logits(self, rows: str) -> str:
            return f"logits of {rows}"

    model = Model()
    return SimpleNamespace(
        aclgraph_dispatcher=dispatcher,
        use_aclgraph=True,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        uniform_decode_query_len=2,
        get_model=lambda: model,
    )


def test_a_graph_that_no_decode_step_fills_is_looked_at(runner) -> None:
    assert ascend_0_11.captured(runner) == {"FULL": [8, 16], "PIECEWISE": [8, 16, 24]}
    runner.use_aclgraph = False
    assert ascend_0_11.captured(runner) == {}


def test_the_canary_sees_another_step_than_the_one_that_ran(runner) -> None:
    watch, dispatcher, model = canary.Watch(), runner.aclgraph_dispatcher, runner.get_model()
    right = dispatcher.dispatch
    with ascend_0_11.watching(runner, watch):
        assert dispatcher.dispatch(16)[0] == CUDAGraphMode.FULL
        assert (watch.mode, watch.size) == ("FULL", 16)
        watch.eager = True
        assert dispatcher.dispatch(16) == (CUDAGraphMode.NONE, None)
        assert (watch.mode, watch.size) == ("NONE", 0)
        assert model.compute_logits("rows") == "logits of rows"
    worker = SimpleNamespace(model_runner=SimpleNamespace(input_batch=SimpleNamespace(req_ids=["b", "a"])))
    assert ascend_0_11.last_rows(worker, watch) == (["b", "a"], "rows")
    assert watch.hidden is None, "the next step's rows"
    assert dispatcher.dispatch is right
    assert "compute_logits" not in vars(model)


def test_the_canary_of_0_23_sees_the_step_that_ran(monkeypatch) -> None:
    """Without asynchronous scheduling vLLM fills the buffers of a step that still runs."""
    waited: list[int] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(1))
    graphs = {
        mode: SimpleNamespace(num_tokens=rows) for mode, rows in ((CUDAGraphMode.FULL, 16), (CUDAGraphMode.NONE, 5))
    }

    def determine(*, force_eager: bool, **_: Any) -> tuple[CUDAGraphMode, Any]:
        mode = CUDAGraphMode.NONE if force_eager else CUDAGraphMode.FULL
        return mode, graphs[mode]

    sizes = [(CUDAGraphMode.FULL, [graphs[CUDAGraphMode.FULL]]), (CUDAGraphMode.PIECEWISE, [])]
    runner = SimpleNamespace(
        _determine_batch_execution_and_padding=determine,
        cudagraph_dispatcher=SimpleNamespace(get_capture_descs=lambda: sizes),
        use_aclgraph=True,
        prepare_inputs_event=None,
        input_batch=SimpleNamespace(req_ids=["b", "a"]),
        execute_model_state=SimpleNamespace(sample_hidden_states="rows"),
    )
    assert ascend_0_23.captured(runner) == {"FULL": [16]}
    watch, seen = canary.Watch(), []
    with ascend_0_23.watching(runner, watch):
        for watch.eager, asked in ((False, False), (False, True), (True, False)):
            runner._determine_batch_execution_and_padding(num_tokens=5, force_eager=asked)
            seen.append((watch.mode, watch.size))
    assert seen == [("FULL", 16), ("NONE", 5), ("NONE", 5)]
    assert runner._determine_batch_execution_and_padding is determine
    worker = SimpleNamespace(model_runner=runner)
    assert ascend_0_23.last_rows(worker, watch) == (["b", "a"], "rows")
    assert waited == [1]
    runner.prepare_inputs_event = "with asynchronous scheduling"
    assert ascend_0_23.last_rows(worker, watch) == (["b", "a"], None), "the step's rows are given once"
    assert waited == [1]


@pytest.mark.parametrize(("sizes", "most", "kept"), [(None, None, [1, 2]), ([4, 3], None, [4, 3]), (None, 64, None)])
def test_sizes_that_a_user_of_0_23_chose_stay(sizes, most, kept) -> None:
    compilation = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=most)
    config = SimpleNamespace(compilation_config=compilation)
    assert vllm_0_23.largest_chosen(config) == (4 if sizes else most)
    vllm_0_23.choose_sizes(config, [1, 2])
    assert compilation.cudagraph_capture_sizes == kept


def common(starts: list[int], lengths: list[int] | None, requests: int, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts),
        _seq_lens_cpu=None if lengths is None else torch.tensor(lengths),
        num_reqs=requests,
        num_actual_tokens=tokens,
    )


def test_requests_that_pad_a_full_graph_of_0_23_are_not_counted() -> None:
    """vLLM counts them; rows behind the buffer's requests are left from earlier steps."""
    padded = common([0, 1, 2, 3, 4, 77], [300, 7, 0, 0, 99], requests=4, tokens=2)
    assert vllm_0_23.host_lengths(padded) == ((0, 1, 2), (300, 7))
    drafts = common([0, 3, 6, 9], [300, 7, 0], requests=3, tokens=6)
    assert vllm_0_23.host_lengths(drafts) == ((0, 3, 6), (300, 7))
    mixed = common([0, 40, 41, 77], [40, 7, 99], requests=2, tokens=41)
    assert vllm_0_23.host_lengths(mixed) == ((0, 40, 41), (40, 7))
    with pytest.raises(RuntimeError, match="--async-scheduling"):
        vllm_0_23.host_lengths(common([0, 1], None, requests=1, tokens=1))


@pytest.mark.parametrize(
    ("sizes", "seqs", "ranks", "rows"),
    [([64, 8, 1], 256, 1, 64), ([64, 8, 1], 256, 3, 22), ([], 600, 1, 512), ([], 9, 2, 5)],
)
@pytest.mark.parametrize("release", [ascend_0_11, ascend_0_23])
def test_the_buffer_of_dispatch_is_made_for_the_largest_step(release, sizes, seqs, ranks, rows) -> None:
    """A smaller one ends an A3's first step with 561002. vLLM 0.11 lists its sizes from the largest on."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=None)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        additional_config=None,
    )
    assert release.mc2_rows(config) == rows
    if release is ascend_0_23:
        config.additional_config = {"enable_prefill_mc2": True}
        assert release.mc2_rows(config) == min(-(-2048 // ranks), 512)

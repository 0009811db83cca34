"""The vllm-ascend side, as far as it runs without vllm-ascend; the rest is in `emulated/`."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from npu_gptoss.errors import Refusal, asked_for
from npu_gptoss.graphs import buckets
from npu_gptoss.serving import releases, rotary
from npu_gptoss.serving.ascend import captured, full_graph, limits, probe, sizes, start_check
from npu_gptoss.serving.releases import ascend_0_11, ascend_0_23
from tests.model.published import gpt_oss_20b
from tests.refused import refused

pytestmark = pytest.mark.serving


def operator(*arguments: str) -> SimpleNamespace:
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])
    return SimpleNamespace(default=SimpleNamespace(_schema=schema))


@pytest.mark.parametrize(
    ("operators", "right"),
    [
        ({}, False),
        ({"npu_fused_infer_attention_score_v2": operator("query")}, False),
        ({"npu_fused_infer_attention_score_v2": operator("query", "learnable_sink")}, True),
    ],
)
def test_an_operator_without_sinks_is_refused_before_it_is_called(monkeypatch, operators, right):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.5.1"))
    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(**operators), raising=False)
    refusal = limits.operator_objection()
    assert refusal is None if right else refusal.asked == "torch-npu 2.5.1"


def configuration(additional_config: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """The parts of VllmConfig that this side looks at."""
    parts = {"max_num_seqs": 16, "cuda_graph_sizes": [32], "cudagraph_capture_sizes": None, "sequence_parallel": False}
    parts |= {"enforce_eager": False, "async_scheduling": False, "cudagraph_mode": None, "speculative_config": None}
    ranks = {f"{name}_parallel_size": 1 for name in ("tensor", "data", "pipeline")} | {"enable_expert_parallel": False}
    parts |= {**ranks, "experts": 32, **changes}
    return SimpleNamespace(
        additional_config=additional_config,
        speculative_config=parts["speculative_config"],
        parallel_config=SimpleNamespace(**{name: parts[name] for name in ranks}),
        model_config=SimpleNamespace(
            enforce_eager=parts["enforce_eager"], hf_config=SimpleNamespace(num_local_experts=parts["experts"])
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=parts["max_num_seqs"],
            max_num_batched_tokens=2048,
            cuda_graph_sizes=parts["cuda_graph_sizes"],
            async_scheduling=parts["async_scheduling"],
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=parts["cudagraph_mode"],
            cudagraph_capture_sizes=parts["cudagraph_capture_sizes"],
            pass_config=SimpleNamespace(enable_sequence_parallelism=parts["sequence_parallel"]),
        ),
    )


def against(config: SimpleNamespace) -> list[str]:
    """The refused settings, as a user writes them."""
    return [refusal.asked for refusal in asked_for(limits.checks(config))]


@pytest.fixture
def right_stack(monkeypatch):
    monkeypatch.setattr(limits, "installed", lambda: "0.11.0")
    monkeypatch.setattr(limits, "operator_objection", lambda: None)


@pytest.mark.parametrize("name", limits.OPTIONS)
def test_garbling_options_of_vllm_ascend_are_refused(right_stack, name):
    option, _, part = name.partition(".")
    assert against(configuration({"ascend_scheduler_config": {"enabled": True}, "kv_cache_dtype": "auto"})) == []
    assert against(configuration({option: {part: True} if part else "yes"})) == [f"--additional-config {name}"]


@pytest.mark.parametrize("value", ["1", "2", "true", "True"])
@pytest.mark.parametrize("name", limits.VARIABLES)
def test_garbling_variables_of_vllm_ascend_are_refused(right_stack, monkeypatch, name, value):
    for off in ("0", "", "false", "False"):
        monkeypatch.setenv(name, off)
        assert against(configuration()) == []
    monkeypatch.setenv(name, value)
    assert against(configuration()) == [f"{name}={value}"]


@pytest.mark.parametrize("package", ["version", "cann", "operator", "triton"])
def test_no_package_of_the_stack_is_passed_over_at_the_start(right_stack, monkeypatch, package):
    """Another CANN may compute wrongly without an error."""
    monkeypatch.setattr(limits, f"{package}_objection", lambda *_: Refusal(package, "1", "it computes wrongly"))
    assert against(configuration()) == [f"{package} 1"]


def test_a_sender_of_weights_is_refused_at_the_start(right_stack):
    """Else vLLM 0.23 takes the parameters away before our loader can refuse the update."""
    config = configuration()
    config.weight_transfer_config = SimpleNamespace(backend="hccl")
    assert against(config) == ["--weight-transfer-config"]


def test_experts_that_ranks_do_not_share_evenly_are_refused(right_stack):
    """The third of three has experts 22 to 31 of 32, and vllm-ascend would hand it the rows of 20 to 29."""
    uneven = {"data_parallel_size": 3, "enable_expert_parallel": True}
    assert against(configuration(**uneven)) == ["--enable-expert-parallel on 3 ranks"]
    assert against(configuration(**uneven | {"enable_expert_parallel": False})) == []
    tensor = {"data_parallel_size": 2, "tensor_parallel_size": 12, "enable_expert_parallel": True}
    assert against(configuration(**tensor)) == ["--enable-expert-parallel on 24 ranks"]
    for even in ({"data_parallel_size": 4}, {"data_parallel_size": 2, "tensor_parallel_size": 4}, {"experts": 96}):
        assert against(configuration(**uneven | even)) == []


def test_drafts_in_a_pipeline_or_another_rotary_table_are_refused(right_stack, monkeypatch):
    """vLLM 0.23 on two emulated stages answered wrongly with n-grams' drafts, or scheduled minus two tokens. CANN's
    rotary operator keeps a process's first table [R75]; Triton-Ascend's kernel does not."""
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    monkeypatch.setattr("npu_gptoss.serving.releases.vllm.DRAFTERS", ("ngram", "eagle3"))
    head, ngrams = ({"speculative_config": SimpleNamespace(method=method)} for method in ("eagle3", "ngram"))
    for drafter in (head, ngrams):
        assert against(configuration(pipeline_parallel_size=2, **drafter)) == ["--pipeline-parallel-size 2"]
        assert against(configuration(**drafter)) == []
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    assert against(configuration(**head)) == ["--speculative-config with eagle3"]
    assert against(configuration(**ngrams)) == []


def test_a_drafter_that_no_device_has_is_refused_once(right_stack, monkeypatch):
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    monkeypatch.setattr("npu_gptoss.serving.releases.vllm.DRAFTERS", ())
    drafter = {"speculative_config": SimpleNamespace(method="eagle3")}
    assert against(configuration(pipeline_parallel_size=2, **drafter)) == []


@pytest.mark.parametrize(("python", "install"), [((3, 11), "3.2.0"), ((3, 12), "3.2.2")])
def test_a_triton_without_a_wheel_for_this_python_is_not_advised(python, install):
    assert f"triton-ascend=={install}`" in limits.triton_remedy(releases.ASCEND_RELEASES[1], python)


@pytest.mark.parametrize("spelling", ["vllm-ascend", "vllm_ascend"])
def test_either_spelling_of_the_package_is_found(monkeypatch, spelling):
    def version(name: str) -> str:
        if name != spelling:
            raise PackageNotFoundError(name)
        return "0.11.0rc2"

    monkeypatch.setattr(releases, "version", version)
    assert limits.installed() == "0.11.0rc2"
    monkeypatch.setattr(releases, "version", lambda name: version(""))
    assert limits.installed() is None


@pytest.mark.parametrize("name", ["VLLM_ASCEND_ENABLE_FLASHCOMM", "VLLM_ASCEND_ENABLE_FLASHCOMM1"])
def test_sequence_parallelism_is_refused_however_it_is_asked_for(right_stack, monkeypatch, name):
    assert against(configuration(sequence_parallel=True)) == [f"--compilation-config {limits.SEQUENCES}"]
    monkeypatch.setenv(name, "1")
    assert against(configuration()) == [f"{name}=1"]


@pytest.mark.parametrize("operation", ["experts", "expand"])
@pytest.mark.parametrize("kernel", ["small_ops", "reference", "moe.{}.small_ops"])
def test_experts_that_no_graph_takes_are_refused_with_graphs_only(right_stack, monkeypatch, operation, kernel):
    variable, asked = f"NPU_GPTOSS_KERNEL_MOE_{operation.upper()}", kernel.format(operation)
    monkeypatch.setenv(variable, asked)
    assert against(configuration()) == [f"{variable}={asked}"]
    assert against(configuration(enforce_eager=True)) == []
    monkeypatch.setenv(variable, {"experts": "ascend", "expand": "triton_ascend"}[operation])
    assert against(configuration()) == []


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY])
def test_asynchronous_scheduling_is_refused_with_graphs_only(right_stack, monkeypatch, mode):
    assert against(configuration(async_scheduling=True, cudagraph_mode=mode)) == ["--async-scheduling"]
    assert against(configuration(cudagraph_mode=mode)) == []
    assert against(configuration(async_scheduling=True, cudagraph_mode=mode, enforce_eager=True)) == []
    assert against(configuration(async_scheduling=True, cudagraph_mode=CUDAGraphMode.NONE)) == []
    monkeypatch.setattr(ascend_0_11, "REPLAYS_IN_ORDER", True)  # as on 0.23
    assert against(configuration(async_scheduling=True, cudagraph_mode=mode)) == []


@pytest.mark.parametrize(
    ("asked", "asynchronous", "chosen"),
    [
        (None, None, "FULL_DECODE_ONLY"),
        ("PIECEWISE", None, "PIECEWISE"),
        ("FULL_AND_PIECEWISE", None, "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", True, "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", False, "FULL_AND_PIECEWISE"),
    ],
)
def test_on_0_23_pieces_are_not_replayed_without_order(monkeypatch, caplog, asked, asynchronous, chosen):
    monkeypatch.setattr(ascend_0_11, "WITHOUT_ORDER", ascend_0_23.WITHOUT_ORDER)
    monkeypatch.setattr(ascend_0_11, "default_graphs", lambda config: "FULL_DECODE_ONLY")
    monkeypatch.setattr(ascend_0_11, "runs_ahead", lambda config: config.scheduler_config.async_scheduling is not False)
    config = configuration(async_scheduling=asynchronous, cudagraph_mode=asked and CUDAGraphMode[asked])
    caplog.set_level(logging.WARNING, logger="vllm.npu_gptoss")
    limits.choose_graphs(config)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode[chosen]
    assert len(caplog.records) == (asked == "FULL_AND_PIECEWISE" != chosen)


def test_float32_is_for_diagnosis_only(monkeypatch):
    assert limits.dtypes() == ("bfloat16",)
    monkeypatch.setenv("ASCEND_EMULATOR_FP32", "1")
    assert limits.dtypes() == ("bfloat16", "float32")


def test_one_request_has_graphs_of_two_sizes():
    assert sizes.capture_sizes(1) == [1, 2]
    assert sizes.capture_sizes(17) == buckets.capture_sizes(17)


def test_sizes_are_capped_unless_the_user_chose_them():
    ours = configuration()
    sizes.cap(ours)
    assert ours.scheduler_config.cuda_graph_sizes == [1, 2, 4, 8, 16]
    for chosen in ({"cuda_graph_sizes": [64]}, {"cuda_graph_sizes": [1, 7]}, {"cudagraph_capture_sizes": [3]}):
        theirs = configuration(**chosen)
        sizes.cap(theirs)
        assert theirs.scheduler_config.cuda_graph_sizes == chosen.get("cuda_graph_sizes", [32])
    many = configuration(max_num_seqs=400, cuda_graph_sizes=[512])  # what vLLM fills in from 256 requests on
    sizes.cap(many)
    assert many.scheduler_config.cuda_graph_sizes == sizes.capture_sizes(400)
    drafting = configuration(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    sizes.cap(drafting)
    assert drafting.scheduler_config.cuda_graph_sizes == [1, 2, 4, 8, 16, 24, 32, 64]


def test_a_user_whose_sizes_end_below_a_step_is_told_once(caplog):
    """Else decode steps run without a graph, and nothing says so."""
    caplog.set_level(logging.WARNING, logger="vllm.npu_gptoss")
    drafts = {"speculative_config": SimpleNamespace(num_speculative_tokens=3)}
    enough = ({}, drafts, {"cuda_graph_sizes": [16, 4]}, {"cuda_graph_sizes": [64], **drafts})
    short = ({"cuda_graph_sizes": [8, 1]}, {"cudagraph_capture_sizes": [16, 10, 4, 2, 1], **drafts})
    for given in (*enough, *({**each, "enforce_eager": True} for each in short)):
        config = configuration(**given)
        sizes.cap(config)
        limits.choose_graphs(config)
    few = configuration(**short[0])  # whose steps have no more tokens
    few.scheduler_config.max_num_batched_tokens = 8
    limits.choose_graphs(few)
    assert caplog.messages == []
    for given in short:
        config = configuration(**given)
        sizes.cap(config)
        limits.choose_graphs(config)
    assert [[int(word) for word in message.split() if word.isdigit()] for message in caplog.messages] == [
        [8, 16, 16],
        [16, 16, 3, 64],
    ]


def test_drafts_multiply_rows_and_not_the_number_of_graphs():
    """With pieces each is captured once a layer."""
    without, with_three = sizes.capture_sizes(256), sizes.capture_sizes(256, 4)
    assert with_three[-1] == 4 * 256
    assert {4 * size for size in without} < set(with_three)
    assert len(with_three) <= len(without) + 5
    assert sizes.capture_sizes(1, 4) == [1, 2, 4]


@pytest.fixture
def no_workspaces(monkeypatch):
    for name, empty in (("_workspaces", []), ("_asked", set()), ("_set_aside", [])):
        monkeypatch.setattr(captured, name, empty)


@pytest.mark.usefixtures("no_workspaces")
def test_one_workspace_of_the_largest_size_serves_all_graphs_of_a_window(monkeypatch):
    """Graphs hold its address, so an earlier workspace is never freed."""
    asked = []

    def most(**arguments: Any) -> torch.Tensor:
        asked.append(len(arguments["query"]))
        return torch.empty(100 * len(arguments["query"]))

    operators = SimpleNamespace(_npu_fused_infer_attention_score_v2_get_max_workspace=most)
    monkeypatch.setitem(sys.modules, "torch_npu", operators)

    def given(rows: int, window: int | None) -> torch.Tensor:
        return captured.workspace({"query": torch.empty(rows, 8, 64)}, window)

    four, eight, two = given(4, 128), given(8, 128), given(2, 128)
    assert (len(four), len(eight)) == (400, 800)
    assert two is given(8, 128) is given(4, 128) is eight
    assert any(kept is four for kept in captured._workspaces)
    assert given(1, None) is eight, "calls run one by one and share it"
    assert given(6, 128) is eight, "larger than the first, and than the last is what counts"
    assert asked == [4, 8, 2, 1, 6], "once for each size"


@pytest.mark.usefixtures("no_workspaces")
def test_where_cann_8_3_does_not_tell_the_workspace_it_is_brought(monkeypatch):
    """8.5's kernel needs another size, so its refusal stays."""

    def refused(**arguments: Any) -> torch.Tensor:
        raise RuntimeError("PFA TND ... acl graph not supported at present")

    monkeypatch.setitem(
        sys.modules, "torch_npu", SimpleNamespace(_npu_fused_infer_attention_score_v2_get_max_workspace=refused)
    )
    query = {"query": torch.empty(4, 8, 64)}
    monkeypatch.setattr(captured.importlib.metadata, "version", lambda name: "2.7.1")
    brought = captured.workspace(query, None)
    assert brought.numel() * brought.element_size() >= 100 << 20
    assert captured.workspace(query, 128) is brought, "calls run one by one and share it"
    monkeypatch.setattr(captured.importlib.metadata, "version", lambda name: "2.7.1.post2")
    with pytest.raises(RuntimeError, match="not supported"):
        captured.workspace({"query": torch.empty(8, 8, 64)}, None)
    monkeypatch.setattr(captured.importlib.metadata, "version", lambda name: "2.7.1")
    monkeypatch.setattr(ascend_0_11, "WORKSPACE", None)  # as on 0.23
    with pytest.raises(RuntimeError, match="not supported"):
        captured.workspace({"query": torch.empty(8, 8, 64)}, None)


@pytest.mark.usefixtures("no_workspaces")
def test_the_probes_workspace_comes_back_while_the_model_loads(monkeypatch):
    """The largest is allocated once again, and none is asked for again."""
    captured._workspaces.extend([torch.empty(400), torch.empty(800)])
    captured._asked.add((128, 4))
    freed = []
    monkeypatch.setattr(torch, "npu", SimpleNamespace(empty_cache=lambda: freed.append(1)), raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    captured.set_aside()
    assert (captured._workspaces, freed) == ([], [1])
    with pytest.raises(AssertionError, match="not taken up"):  # the KV cache would get its memory
        captured.workspace({"query": torch.empty(4, 8, 64)}, 128)
    captured.take_up(torch.device("cpu"))
    (found,) = captured._workspaces
    assert len(found) == 800
    assert captured.workspace({"query": torch.empty(4, 8, 64)}, 128) is found


def decoding(model_type: str = "gpt_oss", mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type)),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, splitting_ops=["vllm.mla_forward"]),
    )


def test_full_graphs_that_do_not_work_become_piecewise(monkeypatch):
    counted = []
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", SimpleNamespace(update_aclgraph_sizes=counted.append))
    monkeypatch.setattr(full_graph, "_objection", lambda config, device: "no reason")
    monkeypatch.setattr(start_check, "rest", lambda config, device: None)
    config = decoding()
    full_graph.prepare(config, "npu:0")
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    names = ["vllm.mla_forward", "vllm.unified_ascend_attention_with_output"]
    assert config.compilation_config.splitting_ops == names, "each once"
    assert counted == [config], "the sizes are thinned out to the budget of streams"


@pytest.mark.parametrize("odd", [None, True, False])
def test_a_full_graph_is_compared_with_the_kernels_of_both_kinds_of_layers(monkeypatch, odd):
    """A kernel of another package may take layers with a window only."""

    def select(operation: Any, call: Any, traits: dict[str, Any]) -> SimpleNamespace:
        theirs = traits["sliding_window"] is odd
        return SimpleNamespace(
            kernel=SimpleNamespace(solution="theirs" if theirs else "ascend", name="attention.theirs")
        )

    monkeypatch.setattr(full_graph, "select_kernel", select)
    found = full_graph._other_kernel(torch.bfloat16, 64, 128)
    assert found == (None if odd is None else "attention.theirs")


def test_full_graphs_of_others_and_other_graphs_are_not_tried(monkeypatch):
    checked = []
    monkeypatch.setattr(start_check, "rest", lambda config, device: checked.append(config.compilation_config))
    monkeypatch.setattr(full_graph, "_objection", Mock(side_effect=AssertionError("it was tried")))
    for config in (decoding("qwen3"), decoding(mode=CUDAGraphMode.PIECEWISE), decoding(mode=CUDAGraphMode.NONE)):
        before = config.compilation_config.cudagraph_mode
        full_graph.prepare(config, "npu:0")
        assert config.compilation_config.cudagraph_mode == before
    with pytest.raises(AssertionError, match="it was tried"):
        full_graph.prepare(decoding(), "npu:0")
    assert len(checked) == 3, "gpt-oss is checked at the start whatever its graphs are, and another model is not"


@pytest.mark.parametrize(
    ("layer", "wrong", "sentence"),
    [
        (None, None, None),
        ("full", 0.5, "a full layer: the replayed call did not follow its update to [77, 1] keys"),
        ("window", 0.5, "a window layer: the replayed call did not follow its update to [77, 1] keys"),
        ("window", float("nan"), "a window layer: the replayed call did not follow its update to [77, 1] keys"),
        ("full", RuntimeError("EZ9999:\n no  stream"), "a full layer: EZ9999: no stream"),
        ("full", 1 + 2**-9, "a full layer: two replays with [77, 77, 77, 77] keys gave other bits"),
    ],
)
def test_the_probe_tries_both_layers_and_says_which_does_not_follow(monkeypatch, layer, wrong, sentence):
    tried = []

    def run(arguments: dict[str, Any], window: int | None, replays: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert (arguments["sparse_mode"], arguments["pre_tokens"]) == ((3, 2**31 - 1) if window is None else (4, 127))
        tried.append("full" if window is None else "window")
        right = [(torch.ones(2, 8, 64), torch.ones(2, 8, 64)) for _ in replays]
        if tried[-1] != layer:
            return right
        if isinstance(wrong, Exception):
            raise wrong
        right[-1][1][1, 7, 63] = wrong  # the first replay went well, the way back did not
        return right

    monkeypatch.setattr(probe, "_eager_and_replayed", run)
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "window": 128}
    found = probe.full_graph_objection(**sizes, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert found == sentence
    later = ["full", "window", "full"] if "other bits" in str(sentence) else ["full"]
    assert tried == {"full": later, "window": ["full", "window"], None: ["full", "window"] * 2}[layer]


def test_full_graphs_without_their_patch_are_refused(monkeypatch):
    """Replayed without it, attention would keep the lengths of its capture."""
    modules = {
        "vllm_ascend": {},
        "vllm_ascend.compilation": {},
        "vllm_ascend.compilation.acl_graph": {"get_graph_params": None},
        "vllm_ascend.utils": {"weak_ref_tensors": None},
        "vllm_ascend.worker": {},
        "vllm_ascend.worker.model_runner_v1": {"update_attn_params": lambda *_: None},
    }
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[], **contents))
    with pytest.raises(RuntimeError, match="FULL_DECODE_ONLY needs the patch ascend-full-graph"):
        captured.capture(None, "layer", *[None] * 5)


def test_a_second_rotary_table_in_a_process_is_refused(monkeypatch):
    """torch_npu's operator would go on turning by the first one."""
    monkeypatch.setattr(rotary, "_first_table", [])
    config = SimpleNamespace(rope_theta=150_000.0, rope_scaling=None)
    rotary._check_first_table(config, torch.zeros(4096, 64))
    rotary._check_first_table(config, torch.zeros(4096, 64))
    with refused("rope_scaling"):
        rotary._check_first_table(config, torch.zeros(8192, 64))
    other = (
        SimpleNamespace(rope_theta=10_000.0, rope_scaling=None),
        SimpleNamespace(rope_theta=150_000.0, rope_scaling=1),
    )
    for differs in ((other[0], torch.zeros(4096, 64)), (other[1], torch.zeros(4096, 64))):
        with refused("rope_scaling"):
            rotary._check_first_table(*differs)
    with refused("rope_scaling"):
        rotary._check_first_table(config, torch.zeros(4096, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("device", ["npu", "cpu"])
def test_rotary_tables_are_compared_on_an_npu_only(monkeypatch, device):
    class Table:
        dtype = torch.float32

        def __init__(self, rows: int) -> None:
            self.device, self.shape = SimpleNamespace(type=device), (rows, 64)

        def copy_(self, values: torch.Tensor) -> None:
            self.filled = values

    monkeypatch.setattr(rotary, "_first_table", [])
    tables = iter([Table(64), Table(128)])
    monkeypatch.setattr(rotary, "yarn_rotary", lambda *_: SimpleNamespace(cos_sin_cache=next(tables)))
    first = rotary.rotary_embedding(gpt_oss_20b())
    assert first.cos_sin_cache.filled.shape == (64, 64)
    with nullcontext() if device == "cpu" else refused("rope_scaling"):
        rotary.rotary_embedding(gpt_oss_20b())

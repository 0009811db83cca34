"""The arithmetic of weights and KV cache, and the sentences when they do not fit."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from emulator.tests.machine import emulate
from npu_gptoss.doctor import command, memory
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.doctor.memory import PUBLISHED_20B, PUBLISHED_120B, graphs
from npu_gptoss.model.checkpoint import expected_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.device_memory import Part, buffsize, gib, hccl_bytes, kv_bytes_per_token, weight_bytes
from npu_gptoss.model.layout import BYTES
from npu_gptoss.model.sharding import Shard
from npu_gptoss.nominal import MEMORY
from npu_gptoss.serving.ascend import sizes
from tests.checkpoints import random_config, random_tensors
from tests.doctor.machines import ASCEND_9_1_PACKAGES, ascend, machine, only, write
from tests.model.published import published_config

CARD = Device("npu", "Ascend910B3", 8, memory.CARD, memory.CARD - GIB)


def elements(config: GptOssConfig) -> int:
    return sum(math.prod(spec.shape) for spec in expected_tensors(config).values())


@pytest.mark.parametrize("config", [PUBLISHED_20B, PUBLISHED_120B, random_config()], ids=["20b", "120b", "random"])
def test_weights_are_the_checkpoints_tensors_in_bf16(config):
    assert weight_bytes(config, Part.of(config)) == 2 * elements(config)


@pytest.mark.parametrize(
    ("preset", "sizes", "weights", "kv"),
    [(PUBLISHED_20B, (24, 32), 41.8e9, 48), (PUBLISHED_120B, (36, 128), 233.7e9, 72)],
)
def test_the_presets_are_the_published_models(preset, sizes, weights, kv):
    published = GptOssConfig.from_dict(published_config(*sizes))
    assert preset == replace(published, quantization=None, dtype="bfloat16", eos_token_id=None, pad_token_id=None)
    assert weight_bytes(preset, Part.of(preset)) == pytest.approx(weights, rel=0.01)
    assert kv_bytes_per_token(preset, Part.of(preset)) == kv * 1024


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_all_but_the_parts_that_each_holds_whole(ranks):
    one, part = Part.of(PUBLISHED_120B), Part.of(PUBLISHED_120B, ranks)
    whole, shared = weight_bytes(PUBLISHED_120B, one), ranks * weight_bytes(PUBLISHED_120B, part)
    per_layer = 128 * 2881 + 2 * 2880 + 128 * 2880 + 2880  # router, norms, biases of down and o
    assert shared - whole == 2 * (ranks - 1) * (36 * per_layer + 2880)
    assert ranks * kv_bytes_per_token(PUBLISHED_120B, part) == kv_bytes_per_token(PUBLISHED_120B, one)


@pytest.mark.parametrize("rank", [0, 1])
def test_gpu_memory_is_computed_from_its_share(rank):
    """The embedding is not cut: half of 1.2 GB was left out for each of two GPUs."""
    config = random_config()
    share = sum(Shard(rank, 2).cut(name, tensor).numel() for name, tensor in random_tensors(config).items())
    assert 2 * share == weight_bytes(config, replace(Part.of(config, 2), whole_embedding=True))
    found = memory._elsewhere(PUBLISHED_120B, 2, 4096, Device("cuda", "NVIDIA H200", 2, 139 * GIB, 139 * GIB), ())
    whole = weight_bytes(PUBLISHED_120B, replace(Part.of(PUBLISHED_120B, 2), whole_embedding=True))
    assert f"{gib(whole)} of BF16 weights" in found.sentence


def test_more_ranks_than_key_heads_hold_a_head_each():
    one, eight, sixteen = (Part.of(PUBLISHED_20B, ranks) for ranks in (1, 8, 16))
    assert kv_bytes_per_token(PUBLISHED_20B, sixteen) == kv_bytes_per_token(PUBLISHED_20B, eight)
    assert weight_bytes(PUBLISHED_20B, sixteen) > weight_bytes(PUBLISHED_20B, one) / 16
    sixteen_heads = replace(PUBLISHED_20B, num_key_value_heads=16)  # of which each rank has one as well
    assert weight_bytes(PUBLISHED_20B, sixteen) == weight_bytes(sixteen_heads, sixteen)


def test_hccl_takes_two_buffers_a_communicator():
    assert hccl_bytes(1) == 400 << 20
    assert hccl_bytes(4) == hccl_bytes(8) == 800 << 20
    assert hccl_bytes(4) - hccl_bytes(4, 100) == 200 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "20b/config.json", json.dumps(published_config())).parent


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write(tmp_path / "120b/config.json", json.dumps(published_config(36, 128))).parent


def test_mxfp4_experts_take_a_quarter_so_120b_fits_one_gpu(large):
    config = GptOssConfig.from_dict(published_config(36, 128))
    assert weight_bytes(config, Part.of(config), packed=True) == pytest.approx(
        65.2e9, rel=0.005
    )  # the published checkpoint's files
    assert weight_bytes(config, Part.of(config), packed=True) == sum(
        (1 if spec.dtypes == BYTES else 2) * math.prod(spec.shape) for spec in expected_tensors(config).values()
    )
    gpu = Device("cuda", "NVIDIA H200", 1, 139 * GIB, 139 * GIB, mxfp4=True)
    only(memory.memory(large, 16384, 1, gpu), "ok", "60.8 GiB of weights, experts in MXFP4, and")
    only(memory.memory(large, 16384, 1, replace(gpu, mxfp4=False)), "failed", "of BF16 weights and")


def test_gpus_that_cannot_cut_mxfp4_are_told_to_deal_experts_out(model):
    """The server refuses --tensor-parallel-size 4 alone there, and the doctor called it fine."""
    gpus = Device("cuda", "NVIDIA H200", 4, 139 * GIB, 139 * GIB, mxfp4=True)
    told = {finding.state: finding for finding in memory.memory(model, 16384, 4, gpus)}
    assert "90 groups of 32" in told["warning"].sentence
    assert "--enable-expert-parallel" in told["warning"].remedy
    for fits in (memory.memory(model, 16384, 2, gpus), memory.memory(model, 16384, 4, replace(gpus, mxfp4=False))):
        assert [finding.state for finding in fits] == ["ok"]


def sized(size: int, **changes: object) -> Device:
    return replace(CARD, total=size, free=size, **changes)


TRITON = {"triton": True}


@pytest.mark.parametrize(
    ("name", "ranks", "card", "options", "state", "phrases"),
    [
        ("20b", 1, CARD, {}, "ok", ["39.0 GiB of BF16 weights and 768 MiB", "295 thousand tokens"]),
        ("20b", 1, sized(32 * GIB), {}, "failed", ["32.0 GiB of Ascend910B3: that does not fit", "more cards"]),
        ("20b", 2, sized(32 * GIB), {}, "ok", []),
        ("20b", 1, sized(44 * GIB), {}, "warning", ["tight beside 400 MiB of HCCL's", "0.95 for 9 thousand, 0.97"]),
        ("20b", 1, sized(44 * GIB, kind="cuda"), {}, "warning", ["is tight.", "--gpu-memory-utilization 0.97"]),
        ("20b", 1, sized(MEMORY["910B4"]), TRITON, "ok", ["14.3 GiB of weights", "215 thousand"]),
        # by the variable, where BF16 would fit
        ("20b", 1, CARD, {**TRITON, "wish": "packed"}, "ok", ["packed in MXFP4", "833 thousand"]),
        ("120b", 2, CARD, TRITON, "ok", ["33.4 GiB of weights, experts packed in MXFP4", "544 thousand tokens"]),
        ("120b", 2, CARD, {**TRITON, "wish": "expanded"}, "failed", ["108.8 GiB of BF16 weights"]),
        ("120b", 2, CARD, {}, "failed", ["does not fit beside 800 MiB of HCCL's", "(Triton-Ascend is not installed)"]),
        ("120b", 4, CARD, {}, "warning", ["0.97 for 111 thousand tokens", "HCCL_BUFFSIZE=100 adds 11 thousand"]),
        ("120b", 4, CARD, {"buffsize": 100}, "warning", ["0.95 for 51 thousand, 0.97 for 122"]),
        ("20b", 3, CARD, {}, "failed", ["does not divide query heads 64 and key/value heads 8", "1, 2, 4 or 8"]),
    ],
)
def test_model_fits_or_not_with_its_settings(model, large, name, ranks, card, options, state, phrases):
    only(memory.memory({"20b": model, "120b": large}[name], 16384, ranks, card, **options), state, *phrases)


@pytest.mark.parametrize(("text", "size"), [("100", 100), ("", 200), ("0", 200), ("many", 200)])
def test_the_buffers_size_is_the_shells(tmp_path, text, size):
    assert buffsize(machine(tmp_path, HCCL_BUFFSIZE=text).environ) == size


@pytest.mark.parametrize("text", ["910B9", "0", "-1", "1.5"])
def test_a_card_is_named_or_given_in_gib_or_refused_in_words(text):
    assert (command._card("910B3"), command._card("64")) == (memory.CARD, 64 * GIB)
    assert {command._card(f"Ascend910B{bin_}") for bin_ in ("1", "2", "2C", "4-1")} == {memory.CARD}
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected 910B3 or .* or GiB, got"):
        command._card(text)


A3 = Device("npu", "Ascend910_9391", 16, MEMORY["A3"], MEMORY["A3"])


@pytest.mark.parametrize(
    ("card", "ranks", "variable", "tensor", "data"),
    [
        (CARD, 8, "", None, None),
        (A3, 8, "", ("ok", 50), ("warning", 396)),  # MiB, as CANN's tiling counts; 52 and 415 MB
        (A3, 8, "396", ("ok", 50), ("ok", 396)),
        (A3, 8, "49", ("warning", 50), ("warning", 396)),
        (A3, 4, "", ("ok", 99), ("warning", 396)),
        (A3, 1, "", ("ok", 25), ("warning", 396)),  # all sixteen dies
    ],
)
def test_the_buffer_of_dispatch_is_reckoned_on_an_a3(card, ranks, variable, tensor, data, tmp_path):
    here = ascend(tmp_path, HCCL_BUFFSIZE=variable)
    found = list(memory.expert_buffer(here, None, ranks, 256, [card]))
    if tensor is None:
        only(found, "ok", "A3")
        return
    for finding, (state, needed), layout in zip(found, (tensor, data), ("tensor", "data"), strict=True):
        only([finding], state, f"--{layout}-parallel-size", f"needs HCCL_BUFFSIZE {needed}")
        assert state == "ok" or f"Set HCCL_BUFFSIZE={needed} on all ranks" in finding.remedy


def test_the_buffer_of_dispatch_is_not_reckoned_without_a_device(tmp_path):
    only(memory.expert_buffer(ascend(tmp_path), None, 8, 256, []), "not applicable", "No device")
    only(memory.expert_buffer(ascend(tmp_path), None, 3, 256, [A3]), "not applicable", "not shared out by 3 dies")


def test_packed_experts_name_what_lacks_and_a_utilisation_that_fits():
    """gpt-oss-120b on four 64 GB cards as upstream's tutorial serves it in BF16."""
    said = memory.Cards(PUBLISHED_120B, 4, 4096, memory.CARD, buffsize=512).choice().sentence()
    assert "experts stay packed" in said
    assert "3113 MiB lack; --gpu-memory-utilization 0.95 expands them" in said
    assert "0.95 expands" not in memory.Cards(PUBLISHED_120B, 2, 4096, memory.CARD).choice().sentence()


def test_an_a3_has_a_preset_of_sixteen_dies():
    assert "on sixteen dies" in memory.preset_lines(4096, dies=True)[-1]
    assert not any("sixteen" in line for line in memory.preset_lines(4096))


def test_a_context_beyond_the_models_positions_is_a_failure(model):
    only(memory.memory(model, 131073, 1, CARD), "failed", "more than the checkpoint's 131072 positions")


def test_cards_that_are_not_there_are_a_failure(model):
    first, second = memory.memory(model, 16384, 4, replace(CARD, count=2))
    only([first], "failed", "needs 4 devices, torch sees 2", "ASCEND_RT_VISIBLE_DEVICES")
    assert second.state == "ok"


def test_a_card_that_something_else_uses_is_a_warning(model):
    first, second = memory.memory(model, 16384, 1, replace(CARD, free=20 * GIB))
    assert first.state == "ok"
    only([second], "warning", "Only 20.0 GiB of 61.0 GiB are free", "something else uses")


@pytest.mark.parametrize(
    ("ranks", "free", "small", "where"),
    [(1, 50, 30, "50.0 GiB of {} one process"), (2, 45, 38, "22.5 GiB of {} each of 2")],
)
def test_on_a_cpu_the_available_memory_counts_for_all_processes(model, ranks, free, small, where):
    host = Device("cpu", "Kunpeng", 64, 256 * GIB, free * GIB)
    only(memory.memory(model, 16384, ranks, host), "ok", where.format("available memory for"))
    host = replace(host, free=small * GIB)
    only(memory.memory(model, 16384, ranks, host), "failed", "does not fit", "Free memory")


@pytest.mark.parametrize("here", [None, CARD, Device("cpu", "Kunpeng", 64, 256 * GIB, 20 * GIB)])
def test_cards_that_are_not_here_can_be_reckoned_with(model, here):
    """The line for 0.9 of the tutorial's table, on a laptop too; and as many cards as are asked for."""
    told = only(
        memory.memory(model, 131072, 1, here, memory.CARD),
        "ok",
        "6.0 GiB of KV cache for 131072 tokens on 61.0 GiB of a card",
    )
    assert "about 295 thousand tokens of context fit" in told.sentence
    small = 32 * GIB
    only(
        memory.memory(model, 131072, 1, here, small),
        "failed",
        "on 32.0 GiB of a card (--card-memory): that does not fit",
    )
    only(memory.memory(model, 131072, 8, here, small), "ok", "of BF16 weights")


def test_without_model_config_or_device_the_presets_are_shown(model, tmp_path):
    finding = only(memory.memory(None, 16384, 1, CARD), "not applicable", "No --model")
    assert finding.details == memory.preset_lines(16384)
    assert memory.preset_lines(16384, MEMORY["910B4"])[1].endswith("which leave no room")
    (tmp_path / "empty").mkdir()
    only(memory.memory(tmp_path / "empty", 16384, 1, CARD), "not applicable", "see checkpoint")
    only(memory.memory(model, 16384, 4, None), "not applicable", "No device is usable; each of 4 would need")


# --- captured graphs: our arithmetic is vllm-ascend's, and too many sizes are a warning

# layers, ranks, aiv, sizes that vllm-ascend 0.11.0 allows
KNOWN = [(24, 1, False, 72), (24, 2, False, 23), (36, 1, False, 48), (36, 4, False, 15), (24, 2, True, 36)]


@pytest.mark.parametrize(("layers", "ranks", "aiv", "most"), KNOWN)
def test_how_many_sizes_fit(layers, ranks, aiv, most):
    groups = int(ranks > 1)
    assert sizes.most_sizes(layers, groups=groups, aiv=aiv) == most
    assert sizes.streams(most, layers, groups=groups, aiv=aiv) <= sizes.BUDGET < sizes.STREAMS
    assert sizes.streams(most + 1, layers, groups=groups, aiv=aiv) > sizes.BUDGET


def test_the_published_models_without_a_checkpoint(tmp_path):
    small, large = graphs(ascend(tmp_path), None, 1, 256)
    assert (small.subject, small.state) == ("gpt-oss-20b", "ok")
    assert "35 sizes are captured" in small.sentence
    assert "72 sizes fit" in small.sentence
    assert (large.subject, large.state) == ("gpt-oss-120b", "warning")
    assert "at most 1800 of a device's 1984, so 15 sizes fit, and it thins them out" in large.sentence
    assert "HCCL_OP_EXPANSION_MODE=AIV leaves room for more" in large.remedy


def test_sizes_beyond_the_budget_are_a_warning_for_the_checkpoint_at_hand(tmp_path):
    write(tmp_path / "20b/config.json", json.dumps(published_config()))
    only(graphs(ascend(tmp_path), tmp_path / "20b", 1, 16), "ok", "24 layers on 1 card, --max-num-seqs 16: 5 sizes")
    only(graphs(ascend(tmp_path), tmp_path / "20b", 2, 256), "warning", "35 sizes", "cudagraph_capture_sizes")
    aiv = ascend(tmp_path, HCCL_OP_EXPANSION_MODE="AIV")
    only(graphs(aiv, tmp_path / "20b", 2, 256), "ok", "36 sizes fit")
    only(graphs(aiv, tmp_path / "20b", 2, 512), "warning", "67 sizes")


def test_no_streams_are_counted_where_a_graph_takes_few(tmp_path):
    only(graphs(ascend(tmp_path, ASCEND_9_1_PACKAGES), None, 1, 256), "not applicable", "counts no streams")


def test_it_applies_to_ascend_and_needs_a_config(tmp_path):
    only(graphs(machine(tmp_path), None, 1, 256), "not applicable")
    only(graphs(ascend(tmp_path), tmp_path, 1, 256), "not applicable", "see checkpoint")


@pytest.mark.emulated
def test_the_arithmetic_is_that_of_vllm_ascend(tmp_path):
    """vllm-ascend's function is called with more sizes than fit; ours must leave as many."""
    script = write(
        tmp_path / "ask.py",
        """
import json, os, sys
from types import SimpleNamespace as Made
from vllm_ascend.utils import update_aclgraph_sizes

def most(layers, ranks, aiv):
    os.environ["HCCL_OP_EXPANSION_MODE"] = "AIV" if aiv else ""
    compilation = Made(cudagraph_capture_sizes=list(range(200, 0, -1)))
    compilation.init_with_cudagraph_sizes = lambda s: setattr(compilation, "cudagraph_capture_sizes", s)
    hf = Made(num_hidden_layers=layers, num_local_experts=32)
    hf.to_dict = lambda: {"num_local_experts": 32}
    model = Made(hf_config=hf, architectures=["GptOssForCausalLM"])
    parallel = Made(data_parallel_size=1, tensor_parallel_size=ranks, enable_expert_parallel=False)
    update_aclgraph_sizes(Made(compilation_config=compilation, model_config=model, parallel_config=parallel,
                               speculative_config=None, additional_config={}))
    return len(compilation.cudagraph_capture_sizes)

print(json.dumps([most(*case) for case in json.loads(sys.argv[1])]))
""",
    )
    run = emulate(str(script), json.dumps([case[:3] for case in KNOWN]))
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.strip().splitlines()[-1]) == [case[3] for case in KNOWN]

"""The budget of streams: our arithmetic is vllm-ascend's, and too many sizes are a warning."""

from __future__ import annotations

import json

import pytest

from emulator.tests.machine import emulate
from npu_gptoss.doctor.memory import graphs
from npu_gptoss.serving.ascend import sizes
from tests.doctor.machines import ASCEND_9_1_PACKAGES, ascend, machine, only, write
from tests.model.published import published_config

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


def test_where_nothing_thins_the_sizes_out_the_error_is_named(tmp_path):
    _, large = graphs(ascend(tmp_path, ASCEND_9_1_PACKAGES), None, 1, 256)
    assert (large.state, "error 207008" in large.sentence, "thins" in large.sentence) == ("warning", True, False)


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

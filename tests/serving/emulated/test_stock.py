"""Stock vllm-ascend 0.11.0 without our plugin does to gpt-oss what users report, also on the emulated 910B.

So the emulator can see those defects: the BF16 checkpoint loads without a word and answers garbage (sinks, windows,
biases and activation are each lost on the way), with graphs vLLM's check of buffers ends it, and the MXFP4 one dies
while the model is built.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.launch import Machine

from tests.checkpoints import write_random_checkpoint
from tests.serving.emulated.conftest import asking, importing
from tests.serving.emulated.rounds import EAGER, VOCABULARY, errors, turn

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

STOCK = "ascend,ascend_enhanced_model,ascend_kv_connector"  # all of vllm-ascend's plugins, none of ours
BF16 = {"dtype": "bfloat16"}
PIECEWISE = {**BF16, "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 2, 1]}}
LONG = 700  # tokens of a prompt
Serve = Callable[..., tuple[list[Any], str]]


@pytest.fixture(scope="module")
def stock() -> Iterator[subprocess.Popen[str]]:
    with importing(Machine(), VLLM_PLUGINS=STOCK) as process:
        yield process


@pytest.fixture
def serve_stock(stock: subprocess.Popen[str], checkpoint: Path, tmp_path: Path) -> Serve:
    return asking(stock, checkpoint, tmp_path)


@pytest.mark.long
def test_stock_loads_the_bf16_checkpoint_without_a_word_and_answers_garbage(serve_stock: Serve, expected: Any) -> None:
    """The control with our plugin: test_modes.py in bfloat16."""
    rounds = [turn((5, 40, 200))]
    results, printed = serve_stock(rounds, options=BF16 | EAGER, variables={"VLLM_LOGGING_LEVEL": "INFO"})
    assert float(torch.cat(errors(rounds, results, expected)[0]).median()) > 1
    assert "Loading model weights took" in printed, "its warnings would be seen"
    complaints = r"(?i)(warning|error).*(sink|bias|swiglu|activation|sliding|mxfp4|missing|unexpected)"
    assert [line for line in printed.splitlines() if re.search(complaints, line)] == []


def masks_of_a_long_prompt(checkpoint: Path, folder: Path, **variables: str) -> tuple[int, str]:
    """How often a mask of LONG squared in bfloat16 went to the device with our plugin and graphs; what was printed."""
    trace = folder / "trace"
    with importing(Machine(trace=trace), **variables) as process:
        _, printed = asking(process, checkpoint, folder)([turn((LONG,), tokens=1)], options=PIECEWISE)
    events = map(json.loads, trace.read_text().splitlines())
    return sum(e["event"] == "copy" and e["kind"] == "h2d" and e["bytes"] == 2 * LONG**2 for e in events), printed


@pytest.mark.long
def test_with_graphs_vllms_check_of_buffers_ends_stock_and_not_the_plugin(
    serve_stock: Serve, checkpoint: Path, tmp_path: Path
) -> None:
    """The buffer is rope's table, which vllm-ascend's forward replaces by one in another dtype."""
    with pytest.raises(AssertionError, match="nothing was served") as ending:
        serve_stock([], options=PIECEWISE)
    said = str(ending.value)
    assert "RuntimeError: Assigning / modifying buffers of nn.Module during forward pass is not allowed" in said
    assert "_buffers.update({'cos_sin_cache'" in said
    masks, printed = masks_of_a_long_prompt(checkpoint, tmp_path)
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert masks == 0  # the control of the next test


@pytest.mark.long
def test_a_prompts_mask_is_copied_to_the_device_unless_we_leave_it_out(checkpoint: Path, tmp_path: Path) -> None:
    """Prompt length squared in bfloat16, once a prefill; the fused operator has no use for it (docs/tuning.md)."""
    assert masks_of_a_long_prompt(checkpoint, tmp_path, NPU_GPTOSS_SKIP_PATCHES="ascend-host-mask")[0] == 1


def test_stock_dies_on_the_mxfp4_checkpoint(serve_stock: Serve, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "mxfp4", vocab_size=VOCABULARY, mxfp4=True)
    with pytest.raises(AssertionError, match="nothing was served") as ending:
        serve_stock([], options=BF16 | EAGER, model=tmp_path / "mxfp4")
    assert "get_linear_quant_type" in str(ending.value)
    assert "mlp.experts has different quantization type: set()" in str(ending.value)

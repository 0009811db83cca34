"""Stock vllm-ascend 0.11.0 fails with gpt-oss on the emulated 910B as users report it, and our plugin does not.

With graphs vLLM's check of buffers ends it; the MXFP4 checkpoint ends it while the model is built. The BF16 checkpoint
answers garbage: tests/patches shows that without two of its diffs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.launch import Machine

from tests.checkpoints import write_random_checkpoint
from tests.serving.emulated.conftest import asking, importing
from tests.serving.emulated.rounds import EAGER, VOCABULARY, turn

pytestmark = pytest.mark.long

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


def masks_of_a_long_prompt(checkpoint: Path, folder: Path, **variables: str) -> tuple[int, str]:
    """How often a mask of LONG squared in bfloat16 went to the device with our plugin and graphs; and the output."""
    trace = folder / "trace"
    with importing(Machine(trace=trace), **variables) as process:
        _, printed = asking(process, checkpoint, folder)([turn((LONG,), tokens=1)], options=PIECEWISE)
    events = map(json.loads, trace.read_text().splitlines())
    return sum(e["event"] == "copy" and e["kind"] == "h2d" and e["bytes"] == 2 * LONG**2 for e in events), printed


def test_with_graphs_vllms_check_of_buffers_ends_stock_and_not_the_plugin(serve_stock, checkpoint, tmp_path) -> None:
    """The buffer is rope's table, which vllm-ascend's forward replaces by one in another dtype."""
    with pytest.raises(AssertionError, match="nothing was served") as ending:
        serve_stock([], options=PIECEWISE)
    said = str(ending.value)
    assert "RuntimeError: Assigning / modifying buffers of nn.Module during forward pass is not allowed" in said
    assert "_buffers.update({'cos_sin_cache'" in said
    masks, printed = masks_of_a_long_prompt(checkpoint, tmp_path)
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert masks == 0  # the control of the next test


def test_a_prompts_mask_is_copied_to_the_device_unless_we_leave_it_out(checkpoint: Path, tmp_path: Path) -> None:
    """Prompt length squared in bfloat16, once a prefill; the fused operator has no use for it (docs/tuning.md)."""
    assert masks_of_a_long_prompt(checkpoint, tmp_path, NPU_GPTOSS_SKIP_PATCHES="ascend-host-mask")[0] == 1


def test_stock_dies_on_the_mxfp4_checkpoint(serve_stock: Serve, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "mxfp4", vocab_size=VOCABULARY, mxfp4=True)
    with pytest.raises(AssertionError, match="nothing was served") as ending:
        serve_stock([], options=BF16 | EAGER, model=tmp_path / "mxfp4")
    assert "get_linear_quant_type" in str(ending.value)
    assert "mlp.experts has different quantization type: set()" in str(ending.value)

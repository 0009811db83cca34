"""Small random checkpoints in the official layout, written in a moment.

`mxfp4=True` and `mxfp4=False` with the same seed hold the same values in the two layouts, so every reader must compute
the same bits from both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.config import GptOssConfig, published_config
from npu_gptoss.tiny import random_weights

if TYPE_CHECKING:
    import pytest

SIZES = {"vocab_size": 512, "layers": 4, "hidden": 96, "intermediate": 64, "heads": 8, "kv_heads": 2, "experts": 8}
# large enough that each tensor changes the logits, small enough for sharp comparisons in fp32
DEVIATIONS = random_weights.Deviations(sinks=1.0, sinks_mean=2.0, bias=0.1, gate_up=3.0, gate_up_bias=0.1, down=0.3)


def random_config(**sizes: object) -> GptOssConfig:
    """SIZES, and other arguments of `published_config`."""
    return published_config(**SIZES | sizes)


def random_tensors(config: GptOssConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every official tensor of the config, in its layout and dtype."""
    return dict(random_weights.random_tensors(config, seed, DEVIATIONS))


def write_random_checkpoint(directory: Path, *, seed: int = 0, **sizes: object) -> GptOssConfig:
    """Writes config.json and the weights, no tokenizer; `sizes` are the arguments of `random_config`."""
    config = random_config(**sizes)
    write_checkpoint(directory, config, random_tensors(config, seed))
    return config


def new_checkpoint(tmp_path_factory: pytest.TempPathFactory, **sizes: object) -> Path:
    """Writes the checkpoint into a new folder, for fixtures that several tests share."""
    path = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(path, **sizes)
    return path

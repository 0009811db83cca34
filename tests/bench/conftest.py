"""A tiny random checkpoint, and an fp32 engine over it: sizes at which no time means anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gptoss.engine import Engine
from tests.checkpoints import write_random_checkpoint


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    write_random_checkpoint(path, layers=2, mxfp4=True)
    return path


@pytest.fixture(scope="session")
def engine(directory: Path) -> Engine:
    return Engine(directory, dtype="float32", num_blocks=60, max_batch_tokens=64, max_batch_size=4)

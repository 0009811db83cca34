"""All diffs together: stock vLLM and vllm-ascend, repaired, serve gpt-oss rightly without our plugin.

`tests/serving/test_ascend_emulated.py` shows the same checkpoint's garbage without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patches import trees
from tests.serving.test_ascend_emulated import checkpoint, errors, expected, serve, turn  # noqa: F401 fixtures

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def test_the_stock_packages_with_the_diffs_serve_without_the_plugin(
    ascend_site: Path,
    checkpoint: Path,  # noqa: F811
    expected: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    diffs = [page.diff for package in ("vllm", "vllm-ascend") for page in trees.pages(package)]
    repaired = tmp_path / "repaired"
    trees.copy_for(diffs, ascend_site, repaired)
    for diff in diffs:
        done = trees.apply(diff, repaired, "-C1")
        assert done.returncode == 0, done.stderr
    rounds = [turn((5, 40, 200), tokens=2)]
    results, _ = serve(
        tmp_path,
        checkpoint,
        rounds,
        options={"enforce_eager": True, "dtype": "bfloat16"},
        variables={
            "VLLM_PLUGINS": "ascend,ascend_enhanced_model,ascend_kv_connector",
            "PYTHONPATH": str(repaired),
        },
    )
    found = torch.cat(errors(rounds, results, expected)[0])
    assert float(found.median()) < 0.05  # bfloat16's rounding; released: more than 0.5
    assert float(found.max()) < 0.5

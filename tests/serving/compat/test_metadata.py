"""Repeated data is not copied to the device again; every change and every foreign write causes a new copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.buffer_utils", reason="needs vLLM 0.33")

import numpy as np
import torch
from vllm.v1.worker.gpu import buffer_utils, model_runner

from npu_gptoss.serving.compat.patch import stock

pytestmark = pytest.mark.serving


@pytest.fixture(autouse=True)
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses vLLM's path without pinned memory if there is none."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the copies to the device, in order."""
    seen: list[Any] = []
    copy = buffer_utils.UvaBufferPool.copy_to_uva

    def counted(self: Any, x: Any) -> torch.Tensor:
        seen.append(np.array(x))
        return copy(self, x)

    counted.__npu_gptoss_replaces__ = copy  # the repair reads vLLM's own
    monkeypatch.setattr(buffer_utils.UvaBufferPool, "copy_to_uva", counted)
    return seen


def test_table_is_copied_only_after_a_change(patched, staged):
    with patched("unchanged-tables"):
        table = buffer_utils.UvaBackedTensor(4, torch.int32)
        staged.clear()
        for value in (5, 5, 5, 6, 5, 5):
            table.np[1] = value
            assert table.copy_to_uva().tolist() == table.gpu.tolist() == [0, value, 0, 0]
        assert len(staged) == 3


def test_table_is_copied_again_after_another_copy(patched):
    with patched("unchanged-tables"):
        table = buffer_utils.UvaBackedTensor(4, torch.int32)
        table.np[0] = 1
        table.copy_to_uva()
        table.np[0] = 2
        assert table.copy_to_uva(2).tolist() == [2, 0]
        table.np[0] = 1
        assert table.copy_to_uva().tolist() == [1, 0, 0, 0], "the first content again, but not the first copy"
        stock(buffer_utils.UvaBackedTensor.copy_to_uva)(table)
        table.np[0] = 3
        stock(buffer_utils.UvaBackedTensor.copy_to_uva)(table)
        table.np[0] = 1
        assert table.copy_to_uva().tolist() == [1, 0, 0, 0]


def to_device(data: Any, **where: Any) -> torch.Tensor:
    return model_runner.async_tensor_h2d(data, **where)


def test_row_indices_are_sent_after_a_change(patched):
    with patched("unchanged-rows"):
        kept = to_device(np.array([3, 1]), device="cpu", dtype=torch.int64)
        assert to_device(np.array([3, 1]), device="cpu", dtype=torch.int64) is kept
        for other in ([1, 3], [3], [3, 1, 0]):
            assert to_device(np.array(other), device="cpu", dtype=torch.int64).tolist() == other
        assert to_device(np.array([3, 1]), device="cpu", dtype=torch.int64).tolist() == [3, 1]
        assert to_device(np.array([3, 1], dtype=np.int32), device="cpu").dtype == torch.int32
        assert to_device([3, 1], device="cpu", dtype=torch.int64).tolist() == [3, 1]


@pytest.mark.parametrize(
    "write",
    [
        lambda out: out.fill_(9),
        lambda out: out[1:].zero_(),
        lambda out: torch.cumsum(torch.ones(2), 0, out=out[1:]),
        lambda out: stock(model_runner.async_tensor_h2d)(np.array([0, 7, 8], dtype=np.int32), out=out),
    ],
    ids=["whole", "part", "out", "stock"],
)
def test_starts_are_written_again_after_a_foreign_write(patched, write):
    starts, out = np.array([0, 1, 2], dtype=np.int32), torch.zeros(3, dtype=torch.int32)
    with patched("unchanged-rows"), torch.inference_mode():
        to_device(starts, out=out)
        before = out._version
        to_device(starts, out=out)
        assert out._version == before, "written once"
        write(out)
        to_device(starts, out=out)
        assert out.tolist() == [0, 1, 2]
        to_device(starts, out=torch.zeros(3, dtype=torch.int32))
        inference = torch.zeros(3, dtype=torch.int32)  # made in inference mode: it has no version
        for value in (1, 2):
            inference.fill_(value)
            assert to_device(starts, out=inference).tolist() == [0, 1, 2]


def test_slot_views_match_the_current_step(patched):
    groups = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"]), SimpleNamespace(layer_names=["c"])]
    )
    buffer = torch.zeros(2, 8, dtype=torch.int64)
    with patched("unchanged-views"):
        first = model_runner.build_slot_mappings_by_layer(buffer[:, :1], groups)
        assert model_runner.build_slot_mappings_by_layer(buffer[:, :1], groups) is first
        buffer[:, 0] = torch.tensor([4, 5])
        assert [first[name].tolist() for name in "abc"] == [[4], [4], [5]]
        wider = model_runner.build_slot_mappings_by_layer(buffer[:, :4], groups)
        assert {len(view) for view in wider.values()} == {4}
        one = SimpleNamespace(kv_cache_groups=groups.kv_cache_groups[:1])
        assert list(model_runner.build_slot_mappings_by_layer(buffer[:1, :4], one)) == ["a", "b"]
        other = torch.ones(2, 8, dtype=torch.int64)
        assert model_runner.build_slot_mappings_by_layer(other[:, :4], groups)["a"].tolist() == [1] * 4

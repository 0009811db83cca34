"""FRACTAL_NZ for the experts: only where it is legal, asked for or faster, and with the same numbers."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, FORMAT_ND, current

from npu_gptoss.moe import expert_format, prepare_experts
from npu_gptoss.moe.expert_format import VARIABLE, arrange
from tests import ascend_ops
from tests.moe.cases import check, make_layer
from tests.refused import refused

BF16 = torch.bfloat16
NZ, ND = FORMAT_FRACTAL_NZ, FORMAT_ND


@pytest.fixture
def calls():
    """The operators' calls; tensors keep the format that they were cast to."""
    cast: list[torch.Tensor] = []

    def format_of(tensor: torch.Tensor) -> int:
        return NZ if any(tensor is one for one in cast) else ND

    with ascend_ops.ascend(set_format=lambda tensor, acl_format: cast.append(tensor), format_of=format_of) as calls:
        yield calls


def weight(experts: int = 2, k: int = 32, n: int = 48, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(experts, k, n).to(dtype), torch.randn(experts, n)


def format_of(arranged: torch.Tensor) -> int:
    return current().format_of(arranged)


@pytest.mark.parametrize("tokens", [1, 17])
def test_experts_in_nz_compute_the_definition(calls, monkeypatch, tokens):
    monkeypatch.setenv(VARIABLE, "nz")
    layer = make_layer(tokens, BF16)
    experts = prepare_experts(layer.weights, kernel="ascend").weights
    assert [format_of(experts.gate_up_proj), format_of(experts.down_proj)] == [NZ, NZ]
    check(lambda layer: layer.run("ascend"), layer)


@pytest.mark.parametrize("kind", ["k", "n", "dtype"])
def test_weights_that_the_operator_would_refuse_stay_in_nd(calls, monkeypatch, caplog, kind):
    """A down projection cut by eight has K = 360."""
    monkeypatch.setenv(VARIABLE, "nz")
    odd = {"k": {"k": 360}, "n": {"n": 40}, "dtype": {"dtype": torch.float32}}[kind]
    with caplog.at_level(logging.WARNING, "vllm.npu_gptoss"):
        assert format_of(arrange(*weight(**odd))) == ND
    assert caplog.records


@pytest.mark.parametrize("wanted", ["nd", "auto"])
def test_nothing_is_cast_unless_asked_for_or_timed(calls, monkeypatch, wanted):
    monkeypatch.setenv(VARIABLE, wanted)
    given, bias = weight()
    assert arrange(given, bias) is given
    assert calls == []


def test_a_cast_that_keeps_the_format_is_no_nz(calls, monkeypatch):
    """torch-npu answers with a warning and the tensor in ND where its internal formats are off."""
    monkeypatch.setenv(VARIABLE, "nz")
    monkeypatch.setattr(sys.modules["torch_npu"], "npu_format_cast", lambda tensor, acl_format: tensor.clone())
    with refused(VARIABLE):
        arrange(*weight())


@pytest.mark.parametrize(("nd", "nz", "taken"), [(1.0, 0.8, True), (1.0, 0.99, False), (1.0, 1.2, False)])
def test_nz_is_taken_where_it_is_faster_and_the_log_has_both_times(calls, monkeypatch, caplog, nd, nz, taken):
    times = {ND: nd, NZ: nz}
    monkeypatch.setattr(expert_format, "_seconds", lambda rows, one, bias, counts: times[format_of(one)])
    with caplog.at_level(logging.INFO, "vllm.npu_gptoss"):
        assert expert_format._nz_is_faster(*weight()) is taken
    assert f"{1e3 * nd:.3f}" in caplog.text
    assert f"{1e3 * nz:.3f}" in caplog.text


def test_nz_that_computes_other_numbers_is_not_taken(calls, monkeypatch, caplog):
    """However fast."""
    monkeypatch.setattr(expert_format, "_seconds", lambda rows, one, bias, counts: float(format_of(one) == ND))
    matmul = expert_format.grouped_matmul

    def wrong(rows, one, bias, counts):
        found = matmul(rows, one, bias, counts)
        return found.roll(16, 1) if format_of(one) == NZ else found

    assert expert_format._nz_is_faster(*weight())
    monkeypatch.setattr(expert_format, "grouped_matmul", wrong)
    assert not expert_format._nz_is_faster(*weight())
    assert "stay in ND" in caplog.text


def test_a_word_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "fractal")
    with refused("NPU_GPTOSS_EXPERT_FORMAT"):
        arrange(*weight())

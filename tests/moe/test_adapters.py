"""Experts with LoRA adapters of single tokens: the Triton kernels against the definition and its mutations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import AnyExperts
from npu_gptoss.moe.adapters import ExpertAdapters, ExpertPair
from npu_gptoss.moe.triton.layout import bands, prepare
from npu_gptoss.verify.moe_cases import random_experts
from tests.moe.cases import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, adapted, close
from tests.triton import TRITON_HERE

pytestmark = pytest.mark.cuda if torch.cuda.is_available() else TRITON_HERE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
COUNT = 2
MUTATIONS = ("no delta", "swapped", "behind the activation", "of another expert", "behind the weight")


@pytest.fixture(autouse=True)
def triton_with_nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with platform_override("cuda", frozenset({"triton"})):
        yield
    torch.use_deterministic_algorithms(False)


def made(tokens: int, weight_format: str = "bfloat16", rank: int = 16):
    """Experts, their inputs, and adapters as large as the experts: of the first token none, then by turns."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = random_experts(weight_format, BF16, generator, EXPERTS, HIDDEN, INTERMEDIATE)

    def factors(rows: int, inputs: int) -> ExpertPair:
        a = torch.randn(COUNT, EXPERTS, rank, inputs, generator=generator, device=DEVICE) / inputs**0.5
        b = torch.randn(COUNT, EXPERTS, rows, rank, generator=generator, device=DEVICE) / rank**0.5
        return ExpertPair(a.to(BF16), b.to(BF16))

    of_token = torch.arange(tokens, device=DEVICE).remainder(COUNT + 1).sub(1).int()
    adapters = ExpertAdapters(factors(2 * INTERMEDIATE, HIDDEN), factors(HIDDEN, INTERMEDIATE), of_token)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, device=DEVICE).to(BF16)
    values, ids = torch.randn(tokens, EXPERTS, generator=generator, device=DEVICE).topk(TOP_K)
    return weights, adapters, (hidden, torch.softmax(values, -1), ids)


def run(weights: AnyExperts, adapters: ExpertAdapters | None, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    from npu_gptoss.moe.triton.launches import triton_many

    if adapters is not None:  # as the layout has the rows
        gate_up = torch.stack([bands(one) for one in adapters.gate_up.b])
        adapters = ExpertAdapters(ExpertPair(adapters.gate_up.a, gate_up), adapters.down, adapters.of_token)
    hidden, topk_weights, ids = inputs
    return triton_many(
        adapters,
        hidden_states=hidden,
        weights=prepare(weights, 7.0),
        topk_weights=topk_weights,
        topk_ids=ids,
        swiglu_limit=7.0,
    )


@pytest.mark.parametrize("weight_format", ["bfloat16", "float8_e4m3fn", "mxfp4"])
def test_each_token_has_its_own_adapter(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_gptoss.moe.triton import launches

    monkeypatch.setattr(launches, "_FEW_SLOTS", 0)
    weights, adapters, inputs = made(7, weight_format)
    inputs[2][5] = -1  # padding
    got = run(weights, adapters, inputs)
    close(got, adapted(weights, adapters, *inputs), share=128)
    plain = run(weights, None, inputs)
    assert torch.equal(got[::3], plain[::3]), "tokens without an adapter are computed as ever"


def test_large_ranks_and_shared_out_inputs_count_whole() -> None:
    weights, adapters, inputs = made(3, rank=128)
    got = run(weights, adapters, inputs)
    close(got, adapted(weights, adapters, *inputs), share=128)
    for mutation in MUTATIONS:
        with pytest.raises(AssertionError):
            close(got, adapted(weights, adapters, *inputs, mutation), share=128)

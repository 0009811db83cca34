"""bf16 against fp32, compared with transformers' bf16; and the reason why greedy answers differ.

`make test PYTEST_ARGS="tests/engine/test_bf16.py -s"` prints the figures of docs/accuracy.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from npu_gptoss.dense import small_ops
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.moe import route
from tests.oracle import load_oracle, oracle_greedy, oracle_logits, random_prompts

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM

LENGTHS = (1, 5, 16, 40, 127, 128, 130, 255, 300)
GREEDY = 32


@pytest.fixture(scope="module")
def engines(directory: Path) -> dict[str, Engine]:
    return {dtype: Engine(directory, dtype=dtype, num_blocks=200) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def rounded(directory: Path) -> GptOssForCausalLM:
    return load_oracle(directory, torch.bfloat16)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, 512)


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(engines, rounded, prompts) -> None:
    want = torch.cat(engines["float32"].batch_logits(prompts))
    got = {
        "ours": torch.cat(engines["bfloat16"].batch_logits(prompts)),
        "transformers": torch.cat([oracle_logits(rounded, prompt) for prompt in prompts]),
    }
    error = {name: float((logits - want).abs().mean()) for name, logits in got.items()}
    agreement = {name: float((logits.argmax(-1) == want.argmax(-1)).float().mean()) for name, logits in got.items()}
    print(f"\n{len(want)} rows, mean logit error {error}, argmax as in fp32 {agreement}")
    assert 0 < error["ours"] < 1.1 * error["transformers"]
    assert agreement["ours"] > max(0.9, agreement["transformers"] - 0.02)


def with_routing_of_fp32(engines: dict[str, Engine], token_ids: list[int], monkeypatch: pytest.MonkeyPatch):
    """Logits in fp32, in bf16, and in bf16 with each token sent to the experts that fp32 chose for it."""
    chosen: list[torch.Tensor] = []

    def recorded(logits, top_k):
        weights, ids = route(logits, top_k)
        chosen.append(ids)
        return weights, ids

    def forced(logits, top_k):
        ids = chosen.pop(0)
        return torch.softmax(logits.float().gather(1, ids), -1), ids

    with monkeypatch.context() as patch:
        patch.setattr(small_ops, "route", recorded)
        exact = engines["float32"].logits(token_ids)
        patch.setattr(small_ops, "route", forced)
        routed = engines["bfloat16"].logits(token_ids)
    assert not chosen
    return exact, engines["bfloat16"].logits(token_ids), routed


def test_greedy_answers_part_at_near_ties_and_flipped_routers_only(engines, rounded, prompts, monkeypatch) -> None:
    """A router logit rounded across its neighbour sends a token to an unrelated expert.

    With fp32's choice of experts the rest of the bf16 computation is near enough for fp32's token, or its near-tie.
    """
    partings = 0
    for prompt, result in zip(
        prompts, engines["bfloat16"].generate(prompts, SamplingParams(max_tokens=GREEDY)), strict=True
    ):
        theirs = oracle_greedy(rounded, prompt, GREEDY)
        same = next((i for i in range(GREEDY) if result.token_ids[i] != theirs[i]), None)
        if same is None:
            print(f"prompt of {len(prompt)}: {GREEDY} tokens identical")
            continue
        partings += 1
        context = [*prompt, *result.token_ids[:same]]
        exact, plain, routed = (logits[-1] for logits in with_routing_of_fp32(engines, context, monkeypatch))
        other = oracle_logits(rounded, context)[-1]

        def regret(token: int, exact: torch.Tensor = exact) -> float:
            """By how much fp32 prefers its own choice, in log-probability."""
            return float(exact.max() - exact[token])

        def error(logits: torch.Tensor, exact: torch.Tensor = exact) -> float:
            return float((logits - exact).abs().mean())

        print(
            f"prompt of {len(prompt)}: parts after {same}; regret ours {regret(result.token_ids[same]):.3f}, "
            f"transformers {regret(theirs[same]):.3f}; error ours {error(plain):.3f}, transformers {error(other):.3f}, "
            f"ours with fp32's experts {error(routed):.3f}, regret then {regret(int(routed.argmax())):.3f}"
        )
        assert error(routed) < 0.05
        assert regret(int(routed.argmax())) < 0.1
    assert partings, "without a difference there is nothing to explain; take other prompts"

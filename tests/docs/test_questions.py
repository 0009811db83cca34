"""The short answers hold the numbers that the doctor and the predictions come to."""

from __future__ import annotations

import pytest

from npu_gptoss.doctor.memory import PUBLISHED_20B, PUBLISHED_120B, choice_of
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.device_memory import BF16, MXFP4, gib, thousands
from npu_gptoss.nominal import MEMORY
from research import packed_prediction, prediction_page
from scripts.docs.page_tables import ROOT

ANSWERS = {
    cells[0].strip(): cells[1]
    for line in (ROOT / "docs/questions.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and (cells := line.strip("| ").split(" | "))
}


@pytest.mark.parametrize(
    ("question", "config", "cards", "card"),
    [
        ("Does 120b run on two 64 GB cards?", PUBLISHED_120B, 2, "910B3"),
        ("Does 20b run on one 32 GB card (910B4)?", PUBLISHED_20B, 1, "910B4"),
    ],
)
def test_what_fits_is_what_the_doctor_foretells(question: str, config: GptOssConfig, cards: int, card: str) -> None:
    choice = choice_of(config, cards, 16384, MEMORY[card])
    assert choice.packed
    answer = ANSWERS[question]
    assert f"BF16 no ({gib(choice.expanded.weights)}" in answer
    assert f"packed yes ({gib(choice.kept.weights)}" in answer
    assert f"about {thousands(choice.kept.tokens)} tokens" in answer


def test_whether_packed_is_faster_is_what_the_prediction_says() -> None:
    ratios = []
    for requests in packed_prediction.REQUESTS:
        plain, kept = packed_prediction.layouts(PUBLISHED_20B, 1, requests)
        ratios += [packed / bf16 for packed, bf16 in zip(kept.tpot_ms, plain.tpot_ms, strict=True)]
    answer = ANSWERS["Are packed experts faster?"]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as long" in answer
    assert f"move {MXFP4 + 2 * BF16:.1f} bytes" in answer


def test_how_fast_it_is_is_what_the_prediction_says() -> None:
    answer = ANSWERS["How fast is it on a 910B?"]
    for requests, words in ((1, "ms a token for one request"), (10, "for ten;")):
        better, worse = prediction_page.predict(requests, 192).tpot_ms
        assert f"{better:.0f} to {worse:.0f} {words}" in answer

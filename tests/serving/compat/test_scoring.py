"""Prompts to score (vLLM 0.33) are made in another thread than the event loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.generate.generative_scoring", reason="needs vLLM 0.33")

from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest, ServingGenerativeScoring

pytestmark = pytest.mark.serving


def test_prompts_to_score_block_the_event_loop(patched: Any) -> None:
    """The query is copied for each item before the prompt is cut to the context."""

    async def beats() -> int:
        request = GenerativeScoringRequest(query=[1] * 1_000_000, items=[[2]] * 100, label_token_ids=[1])
        made = ServingGenerativeScoring._build_prompts(SimpleNamespace(), request, None, 4096)
        done, count = asyncio.create_task(made), 0
        while not done.done():
            await asyncio.sleep(0.001)
            count += 1
        assert done.result()[1] == [4095] * 100
        return count

    with patched("scoring-prompts"):
        assert asyncio.run(beats()) > 5

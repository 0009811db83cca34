"""Questions to a vLLM engine over token ids, answered as tensors; how near is near enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM

VOCABULARY = 96  # small, because vLLM makes a Python object of each log-probability
TOLERANCE = 1e-4  # absolute, on logits of standard deviation 2


def ask(engine: LLM, prompts: list[list[int]], **settings: Any) -> list[Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **settings)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return engine.generate(inputs, parameters, use_tqdm=False)


def table(positions: list[dict[int, Any]]) -> torch.Tensor:
    """[positions, vocabulary] from vLLM's dictionaries."""
    return torch.tensor([[position[token].logprob for token in range(VOCABULARY)] for position in positions])


def prompt_logprobs(engine: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """For each prompt [length - 1, vocabulary]: log-probabilities of the next token at all positions but the last."""
    answers = ask(engine, prompts, max_tokens=1, prompt_logprobs=-1)
    return [table(answer.prompt_logprobs[1:]) for answer in answers]


def next_logits(engine: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """For each prompt [vocabulary]: the raw logits after its last token."""
    return [table(answer.outputs[0].logprobs)[0] for answer in ask(engine, prompts, max_tokens=1, logprobs=-1)]


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert torch.isfinite(g).all()
    return max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True) if g.numel())


def tokens(answers: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(answer.outputs[0].token_ids) for answer in answers]

"""A request's parameters (`SamplingParams`), its state (`Request`) and its outcome (`Result`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.config_fields import is_int


@dataclass(frozen=True)
class SamplingParams:
    """The choice of one request's tokens. temperature 0 is greedy; then top_p, top_k and seed have no effect.

    max_tokens: tokens to generate at most. top_k: 0 means all. seed: the same seed gives the same tokens in any
    batch; None draws a fresh one. logprobs: None, or how many of the most likely tokens to report with each
    generated one (0: only the generated one); prompt_logprobs: the same for the prompt's tokens. Log-probabilities are
    of the model's own distribution, before temperature, top_k and top_p. stop_token_ids end a request in addition to
    the model's own stop tokens; ignore_eos leaves out the latter.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "a whole number from 1", self.max_tokens)
        finite = isinstance(self.temperature, (int, float)) and math.isfinite(self.temperature)
        _check(finite and self.temperature >= 0, "temperature", "a finite number from 0 (greedy)", self.temperature)
        _check(
            isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p
        )
        _check(is_int(self.top_k) and self.top_k >= 0, "top_k", "a whole number from 0 (all tokens)", self.top_k)
        _check(self.seed is None or is_int(self.seed), "seed", "a whole number", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or (is_int(value) and value >= 0), name, "a whole number from 0", value)


def _check(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise InputError(f"{name} must be {expected}, got {got!r}", field=name)


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural log-probability of a token, and the most likely tokens at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


@dataclass(frozen=True)
class Result:
    """The output of a request. `token_ids` ends with the stop token if one ended it; `text` leaves out special tokens.

    finish_reason: "stop" (a stop token), "length" (max_tokens, or the context or the cache is full), "cancelled", or ""
    for a request that still runs.
    text is None when the model directory has no tokenizer.json. prompt_logprobs has None for the first token.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(eq=False)
class Request:
    """A request on its way. `token_ids` grows; the keys and values of the first `num_computed` are in the cache."""

    prompt_length: int
    token_ids: list[int]  # prompt, then what was generated
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_length: int  # of prompt and generated tokens together
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    # for callers who want more than the last token's logits; a preempted request does not report its prompt twice
    prompt_rows_reported: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logits: list[torch.Tensor] | None = None  # [rows, vocab] float32 pieces, in order; None: not wanted

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def wants_prompt_rows(self) -> bool:
        return self.prompt_logits is not None or self.params.prompt_logprobs is not None

    @property
    def is_greedy(self) -> bool:
        """True when its next token depends on the largest logit only, and nothing else is reported."""
        return self.params.temperature == 0 and self.params.logprobs is None

    @property
    def goes_on(self) -> bool:
        """True when its next token is not the last, unless that is a stop token."""
        return (
            self.finish_reason is None
            and self.num_generated + 1 < self.params.max_tokens
            and len(self.token_ids) + 1 < self.max_length
        )

    def append(self, token_id: int) -> None:
        """Takes the next generated token and notes if it is the last."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_generated >= self.params.max_tokens or len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"

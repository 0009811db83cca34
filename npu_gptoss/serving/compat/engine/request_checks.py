"""Checks each request in the engine before scheduling: a bad token id would crash the whole batch.

A runner uses some fields of a request as indices into tensors on the device. A CPU raises at an invalid index, in a
step that many requests share; a device writes elsewhere, or stops. vLLM checks most of these fields in the API server,
against the tokenizer, and some only if there is a tokenizer. Here they are checked again, in the engine core and
against the model's own vocabulary. Admission checks them for HTTP clients (`serving/admission`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

SEEDS = range(-(2**63), 2**64)  # accepted by torch.Generator.manual_seed

# field: the token ids in it, which become indices
INDICES: dict[str, Callable[[Any], Collection[int] | None]] = {
    "logit_bias": lambda sampling: sampling.logit_bias,
    "allowed_token_ids": lambda sampling: sampling.allowed_token_ids,
    "bad_words": lambda sampling: list(chain.from_iterable(sampling.bad_words_token_ids or ())),
    "logprob_token_ids": lambda sampling: getattr(sampling, "logprob_token_ids", None),  # of 0.23
}
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
COUNTS = ("logprobs", "prompt_logprobs")  # of tokens, -1 for the whole vocabulary


def _outside(ids: Collection[int] | None, vocabulary: int) -> int | None:
    """Returns an id outside of the vocabulary, or None."""
    if ids:
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < vocabulary:
                return extreme
    return None


def objection(request: Any, vllm_config: Any) -> str | None:
    """Returns the reason why an `EngineCoreRequest` must not reach the scheduler, or None.

    Removes the stop tokens that `min_tokens` suppresses and the model cannot write, and replaces -1 log-probabilities
    by the size of the vocabulary, which vllm-ascend does not.
    """
    model = vllm_config.model_config
    sampling = request.sampling_params
    if sampling is None:
        return None
    vocabulary = model.get_vocab_size()
    return (
        _about_prompt(request, vocabulary, model.max_model_len)
        or _about_sampling(sampling, vocabulary)
        or _about_ascend_scheduler(request, vllm_config)
    )


def _about_prompt(request: Any, vocabulary: int, longest: int) -> str | None:
    prompt = request.prompt_token_ids
    if prompt is None or request.mm_features:  # embeddings, or placeholders of images, which are no tokens
        return None
    if not 0 < len(prompt) < longest:
        return f"prompt: expected 1 to {longest - 1} tokens, so that one more fits, got {len(prompt)}"
    wild = _outside(prompt, vocabulary)
    return None if wild is None else f"prompt: expected token ids from 0 to {vocabulary - 1}, got {wild}"


def _about_sampling(sampling: Any, vocabulary: int) -> str | None:
    for name, ids in INDICES.items():
        wild = _outside(ids(sampling), vocabulary)
        if wild is not None:
            return f"{name}: expected token ids from 0 to {vocabulary - 1}, got {wild}"
    if not all(sampling.bad_words_token_ids or ()):
        return "bad_words: expected words of at least one token, got a word of none"
    for name in NUMBERS:
        if not math.isfinite(getattr(sampling, name)):
            return f"{name}: expected a finite number, got {getattr(sampling, name)}"
    if not all(map(math.isfinite, (sampling.logit_bias or {}).values())):
        return "logit_bias: expected finite numbers"
    if sampling.seed is not None and sampling.seed not in SEEDS:
        return f"seed: expected {SEEDS.start} to {SEEDS.stop - 1}, got {sampling.seed}"
    for name in COUNTS:
        count = getattr(sampling, name)
        if count is not None and not -1 <= count <= vocabulary:
            return f"{name}: expected at most the {vocabulary} tokens of the vocabulary, got {count}"
        if count == -1:
            setattr(sampling, name, vocabulary)
    # the model cannot write them, so there is nothing to suppress
    wild = {token for token in sampling.all_stop_token_ids if not 0 <= token < vocabulary}
    if wild:
        sampling._all_stop_token_ids = sampling.all_stop_token_ids - wild
    return None


def _about_ascend_scheduler(request: Any, vllm_config: Any) -> str | None:
    """Without chunked prefill, vllm-ascend's own scheduler raises at a grammar and loses a prompt that is too long."""
    settings = vllm_config.scheduler_config
    scheduler = settings.scheduler_cls  # None on 0.23, whose vllm-ascend has no such scheduler
    name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__name__", "")
    if "AscendScheduler" not in name or settings.chunked_prefill_enabled:
        return None
    if request.sampling_params.structured_outputs is not None:
        return "structured output needs chunked prefill in vllm-ascend's scheduler, and it is off"
    tokens, limit = len(request.prompt_token_ids or ()), settings.max_num_batched_tokens
    if tokens > limit:
        return f"prompt: expected at most {limit} tokens without chunked prefill, got {tokens}"
    return None

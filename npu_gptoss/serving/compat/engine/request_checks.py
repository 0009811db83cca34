"""What a runner would do to everybody's step because of one request: looked at before the scheduler hears of it.

A runner uses some fields of a request as indices into tensors on the device. A CPU raises at a wild one, in a step that
belongs to everybody; a device writes elsewhere, or stops. vLLM checks most of them in the API server's process, against
the tokenizer, or when there is one; this is the same question once more, against the model's own vocabulary, where the
answer counts. It knows nothing of HTTP: what a client should hear is `admission`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

SEEDS = range(-(2**63), 2**64)  # what torch.Generator.manual_seed takes

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
    """One of the ids that is no token's, or None."""
    if ids:
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < vocabulary:
                return extreme
    return None


def objection(request: Any, vllm_config: Any) -> str | None:
    """Why an `EngineCoreRequest` must not reach the scheduler, in a sentence, or None.

    Takes stop tokens that the model cannot write out of those that `min_tokens` suppresses, and writes -1
    log-probabilities as the size of the vocabulary, which vllm-ascend does not.
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
        return f"a prompt has 1 to {longest - 1} tokens here, so that one more fits, and this one has {len(prompt)}"
    wild = _outside(prompt, vocabulary)
    return None if wild is None else f"prompt tokens lie in 0 to {vocabulary - 1}, and this one has {wild}"


def _about_sampling(sampling: Any, vocabulary: int) -> str | None:
    for name, ids in INDICES.items():
        wild = _outside(ids(sampling), vocabulary)
        if wild is not None:
            return f"token ids of {name} lie in 0 to {vocabulary - 1}, and one is {wild}"
    if not all(sampling.bad_words_token_ids or ()):
        return "one of bad_words has no tokens"
    for name in NUMBERS:
        if not math.isfinite(getattr(sampling, name)):
            return f"{name} must be a finite number, and it is {getattr(sampling, name)}"
    if not all(map(math.isfinite, (sampling.logit_bias or {}).values())):
        return "the values of logit_bias must be finite numbers"
    if sampling.seed is not None and sampling.seed not in SEEDS:
        return f"seed lies in {SEEDS.start} to {SEEDS.stop - 1}, and it is {sampling.seed}"
    for name in COUNTS:
        count = getattr(sampling, name)
        if count is not None and not -1 <= count <= vocabulary:
            return f"{name} is at most the {vocabulary} tokens of the vocabulary, and it is {count}"
        if count == -1:
            setattr(sampling, name, vocabulary)
    # they cannot be written, so there is nothing to suppress
    wild = {token for token in sampling.all_stop_token_ids if not 0 <= token < vocabulary}
    if wild:
        sampling._all_stop_token_ids = sampling.all_stop_token_ids - wild
    return None


def _about_ascend_scheduler(request: Any, vllm_config: Any) -> str | None:
    """vllm-ascend's own scheduler without chunked prefill raises at a grammar and forgets a prompt that is too long."""
    settings = vllm_config.scheduler_config
    scheduler = settings.scheduler_cls  # None on 0.23, whose vllm-ascend has no such scheduler
    if "AscendScheduler" not in (scheduler if isinstance(scheduler, str) else getattr(scheduler, "__name__", "")):
        return None
    if settings.chunked_prefill_enabled:
        return None
    if request.sampling_params.structured_outputs is not None:
        return "vllm-ascend's scheduler takes structured output with chunked prefill only, and that is off"
    tokens, limit = len(request.prompt_token_ids or ()), settings.max_num_batched_tokens
    if tokens > limit:
        return f"a prompt has at most {limit} tokens without chunked prefill, and this one has {tokens}"
    return None

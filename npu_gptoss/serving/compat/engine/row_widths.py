"""Refuses requests that exceed the fixed row widths of the V2 runner's tables (vLLM 0.33)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import INPUT_PROCESSOR

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def _counts(sampling: SamplingParams) -> dict[str, tuple[int, int]]:
    """Returns for each field the tokens that a request puts into a row, and the row's width."""
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias as rows

    # min_tokens suppresses the request's and the model's own stop tokens
    suppressed = sampling.all_stop_token_ids if sampling.min_tokens > 0 else ()
    words = sum(map(len, sampling.bad_words_token_ids or ()))
    return {
        "allowed_token_ids": (len(sampling.allowed_token_ids or ()), rows.MAX_NUM_ALLOWED_TOKEN_IDS),
        "logit_bias": (len(sampling.logit_bias or ()), rows.MAX_NUM_LOGIT_BIAS_TOKENS),
        "stop_token_ids": (len(suppressed), rows.MAX_NUM_STOP_TOKEN_IDS),
        "bad_words": (words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    }


@repair(
    "row-widths",
    f"{INPUT_PROCESSOR}:InputProcessor.process_inputs",
    releases=("0.33",),
    until="vLLM checks a request against the widths of its second runner's tables",
)
def install(module: ModuleType) -> None:
    """If the allowed tokens, biases, tokens of bad words, or stop tokens with min_tokens exceed a row of the runner's
    tables, the worker raises and the engine ends."""
    from vllm.exceptions import VLLMValidationError

    processor = module.InputProcessor
    expect_parameters(processor.process_inputs, "self", "request_id", "prompt", "params")
    expect_source(processor.process_inputs, "sampling_params.update_from_tokenizer(self.tokenizer)")

    @around(processor, "process_inputs")
    def process_inputs(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        request = original(*args, **keywords)
        if request.sampling_params is not None:
            for name, (count, most) in _counts(request.sampling_params).items():
                if count > most:
                    raise VLLMValidationError(f"{name}: expected at most {most} tokens, got {count}.", parameter=name)
        return request

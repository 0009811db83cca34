"""A small engine without a tokenizer, with its core in this process, and helpers to send it requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.checkpoints import write_random_checkpoint
from tests.serving.compat.of_release import OLD

FINAL_ONLY = RequestOutputKind.FINAL_ONLY
VOCABULARY = 128
LENGTH = 256
BLOCK, BLOCKS = (16, 40) if OLD else (128, 6)  # two and a half of the longest requests
HONEST = list(range(3, 43))


def start(directory: Path) -> LLM:
    write_random_checkpoint(directory, vocab_size=VOCABULARY, layers=2)
    return LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="float32" if OLD else "bfloat16",  # 0.23 runs under vllm-ascend
        enforce_eager=not OLD,
        max_model_len=LENGTH,
        max_num_seqs=8,
        max_logprobs=-1,
        enable_prefix_caching=False,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
    )


def core_of(engine: LLM) -> Any:
    return engine.llm_engine.engine_core.engine_core


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False, "output_kind": FINAL_ONLY}
        | fields
    )


def sent(engine: LLM, name: str, prompt: list[int], **fields: Any) -> Any:
    """Returns the `EngineCoreRequest` of this name."""
    llm = engine.llm_engine
    if OLD:
        return llm.processor.process_inputs(name, {"prompt_token_ids": prompt}, greedy(), **fields)[1]
    tasks = llm.get_supported_tasks()
    return llm.input_processor.process_inputs(name, {"prompt_token_ids": prompt}, greedy(), tasks, **fields)


def run(engine: LLM, *requests: tuple[list[int], SamplingParams]) -> list[Any]:
    """Serves the requests together. Returns the tokens of each, or the reason why it was ended; lists of these for n >
    1."""
    llm = engine.llm_engine
    outputs: dict[str, Any] = {}
    for number, (prompt, sampling) in enumerate(requests):
        llm.add_request(str(number), {"prompt_token_ids": prompt}, sampling, priority=number % 2)
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs for output in llm.step() if output.finished}
    answers = [
        [part.stop_reason if part.finish_reason == "abort" else list(part.token_ids) for part in outputs[str(number)]]
        for number in range(len(requests))
    ]
    return [answer[0] if len(answer) == 1 else answer for answer in answers]

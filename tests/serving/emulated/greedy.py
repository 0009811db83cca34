"""`python greedy.py JOB.json`: greedy answers from vLLM's `LLM`. Tests run it in the emulated environment.

The job holds `checkpoint`, `prompts` (token ids), `tokens` (at most so many), `stop` (token ids), `graphs` (whether
they are captured, PIECEWISE) and `out`, where for each prompt goes {"tokens": [...], "first": {token: log-probability}}
with the 20 likeliest first tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    mode = {"compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 2, 1]}}
    engine = LLM(
        job["checkpoint"],
        skip_tokenizer_init=True,
        **(mode if job["graphs"] else {"enforce_eager": True}),
        max_model_len=2048,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
        seed=0,
    )
    sampling = SamplingParams(
        max_tokens=job["tokens"], temperature=0, detokenize=False, logprobs=20, stop_token_ids=job["stop"]
    )
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    said = [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "first": {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()},
        }
        for answer in answers
    ]
    Path(job["out"]).write_text(json.dumps(said))


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # whatever the engine still wants to say at exit

"""All diffs together: stock vLLM and vllm-ascend, repaired, serve gpt-oss rightly without our plugin.

`tests/emulator/test_stock.py` shows the garbage without them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from npu_gptoss.emulator.launch import Machine, environment
from tests.checkpoints import write_random_checkpoint
from tests.oracle import load_oracle, oracle_logits, random_prompts
from tests.patches import trees

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

VOCABULARY = 96
SERVE = """
import json, os, sys
from pathlib import Path
from vllm import LLM, SamplingParams

job = json.load(sys.stdin)
engine = LLM(
    job["checkpoint"], dtype="bfloat16", max_model_len=512, max_num_seqs=8, gpu_memory_utilization=0.5, seed=0,
    skip_tokenizer_init=True, max_logprobs=-1, **job["options"],
)
sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1)
answers = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
said = []
for answer in answers:
    steps = answer.outputs[0].logprobs
    logprobs = [[step[token].logprob for token in range(job["vocabulary"])] for step in steps]
    said.append([list(answer.outputs[0].token_ids), logprobs])
Path(job["out"]).write_text(json.dumps(said))
sys.stdout.flush()
os._exit(0)
"""


def test_the_stock_packages_with_the_diffs_serve_without_the_plugin(
    emulated: Path, ascend_site: Path, tmp_path: Path
) -> None:
    diffs = [page.diff for package in ("vllm", "vllm-ascend") for page in trees.pages(package)]
    repaired = tmp_path / "repaired"
    trees.copy_for(diffs, ascend_site, repaired)
    for diff in diffs:
        done = trees.apply(diff, repaired, "-C1")
        assert done.returncode == 0, done.stderr
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out.json"
    write_random_checkpoint(checkpoint, vocab_size=VOCABULARY)
    prompts = random_prompts((5, 40, 200), VOCABULARY, 1)
    job = {
        "checkpoint": str(checkpoint),
        "options": {"enforce_eager": True},
        "prompts": prompts,
        "vocabulary": VOCABULARY,
        "out": str(out),
    }
    run = subprocess.run(
        [str(emulated / "bin/python"), "-c", SERVE],
        input=json.dumps(job),
        env=environment(Machine(), emulated)
        | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_PLUGINS": "ascend,ascend_enhanced_model,ascend_kv_connector",
            "PYTHONPATH": str(repaired),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert out.exists(), run.stderr[-6000:]
    oracle = load_oracle(checkpoint)
    errors = []
    for prompt, (answer, logprobs) in zip(prompts, json.loads(out.read_text()), strict=True):
        wanted = oracle_logits(oracle, tuple(prompt) + tuple(answer[:-1]))[len(prompt) - 1 :].log_softmax(-1)
        errors.append((torch.tensor(logprobs) - wanted).abs())
    found = torch.cat(errors)
    assert float(found.median()) < 0.05  # bfloat16's rounding; released: more than 0.5
    assert float(found.max()) < 0.5

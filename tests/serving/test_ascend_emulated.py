"""gpt-oss in stock vllm-ascend 0.11.0 on the emulated 910B, strict, against transformers; and that this bites.

Each engine is a process of its own in the emulated environment (`on_ascend.py`). In the diagnostic mode the emulated
operators take float32, so that a mistake cannot hide in bfloat16's rounding: then 1e-4 is asked for.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.emulator.launch import Machine, environment
from tests.checkpoints import write_random_checkpoint
from tests.emulator.machine import venv
from tests.oracle import load_oracle, oracle_logits, random_prompts

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

VOCABULARY = 96
TOLERANCE = 1e-4  # of log-probabilities, in float32
TOKENS = 5
SCRIPT = Path(__file__).with_name("on_ascend.py")
WORKSPACE = {"tnd_max_workspace": True}  # R37 off
FULL = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}

LENGTHS = (1, 2, 5, 127, 128, 129, 300, 700)
ONE_CHUNK_BEYOND_HALF_THE_MASK = (1500,)  # 1100 tokens a step
THREE_IN_A_BUCKET_OF_FOUR = (140, 7, 260)
SPOILT = (250, 131, 40)  # beyond the window, so that lengths matter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulated") / "bf16"
    write_random_checkpoint(path, vocab_size=VOCABULARY)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    """(prompt, answer) -> [tokens, vocabulary]: log-probabilities of transformers in fp32 for the answer's tokens."""
    model = load_oracle(checkpoint)

    @functools.cache
    def logprobs(prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        return torch.log_softmax(oracle_logits(model, prompt + answer[:-1])[len(prompt) - 1 :], -1)

    return logprobs


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    return random_prompts(lengths, VOCABULARY, seed)


def turn(lengths: tuple[int, ...], *, seed: int = 1, tokens: int = TOKENS, spoil: str | None = None) -> dict[str, Any]:
    return {"prompts": prompts(lengths, seed), "tokens": tokens, "spoil": spoil}


@pytest.fixture(scope="module")
def ascend() -> Iterator[subprocess.Popen[str]]:
    """The process in which vLLM is imported, on a machine of two devices."""
    place = venv()
    variables = {
        **environment(Machine(devices=2), place),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    process = subprocess.Popen(
        [str(place / "bin/python"), str(SCRIPT)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = [line for line in iter(process.stdout.readline, "READY\n") if line or process.poll() is not None]
        assert process.poll() is None, "".join(said)
        yield process
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


@pytest.fixture
def serve(ascend: subprocess.Popen[str], checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[list[Any], str]]:
    def run(
        rounds: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = None,
        machine: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        model: Path = checkpoint,
        spoil: str | None = None,
    ) -> tuple[list[Any], str]:
        """What each round said, or the text of the error that ended it; and all that was printed."""
        settings = {
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1100,
            "gpu_memory_utilization": 0.5,
            **(options or {}),
        }
        diagnostic = settings["dtype"] == "float32"
        emulated = {"diagnostic_fp32": diagnostic, **(machine or {})}
        in_process = {} if "data_parallel_size" in settings else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        out, log, path = (tmp_path / name for name in ("out.json", "log", "job.json"))
        job = {
            "checkpoint": str(model),
            "options": settings,
            "rounds": rounds,
            "spoil": spoil,
            "machine": emulated,
            "variables": {
                "NPU_GPTOSS_EMULATED_FP32": str(int(emulated["diagnostic_fp32"])),
                **in_process,
                **(variables or {}),
            },
            "vocabulary": VOCABULARY,
            "log": str(log),
            "out": str(out),
        }
        path.write_text(json.dumps(job))
        print(path, file=ascend.stdin, flush=True)
        answer = ascend.stdout.readline()
        printed = log.read_text() if log.exists() else ""
        assert answer == "DONE\n", f"the process ended: {answer}{printed[-6000:]}"
        assert out.exists(), f"nothing was served:\n{printed[-12000:]}"
        return json.loads(out.read_text()), printed

    return run


def errors(rounds: list[dict[str, Any]], results: list[Any], expected: Any) -> list[list[torch.Tensor]]:
    """For each round and prompt |got - wanted| [tokens, vocabulary]."""
    assert len(rounds) == len(results)
    found = []
    for asked, said in zip(rounds, results, strict=True):
        assert isinstance(said, list), said
        found.append(
            [
                (torch.tensor(answer["logprobs"]) - expected(tuple(prompt), tuple(answer["tokens"]))).abs()
                for prompt, answer in zip(asked["prompts"], said, strict=True)
            ]
        )
    return found


def worst(of_round: list[torch.Tensor]) -> float:
    return max(float(error.nan_to_num(nan=1e9).max()) for error in of_round)


ORDINARY = [
    turn(LENGTHS),
    turn((300, 700), seed=1),  # nothing in common with the first round
    turn(LENGTHS),  # now from the prefix cache
    turn(ONE_CHUNK_BEYOND_HALF_THE_MASK),
    turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2),
]
MODES: dict[str, dict[str, Any]] = {
    "eager": {"options": {"enforce_eager": True}},
    "piecewise": {},
    "full decode graphs": {"options": FULL, "machine": WORKSPACE},
    "small ops": {
        "options": {"enforce_eager": True},
        "variables": {"NPU_GPTOSS_KERNEL_ATTENTION_PAGED": "small_ops", "NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"},
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_transformers_in_float32(mode, serve, expected):
    results, printed = serve(ORDINARY, **MODES[mode])
    assert [worst(of_round) < TOLERANCE for of_round in errors(ORDINARY, results, expected)] == [True] * len(ORDINARY)
    assert ("decode, FULL" in printed) == ("full" in mode)


@pytest.mark.parametrize("options", [{}, FULL], ids=["piecewise", "full decode graphs"])
def test_a_prefix_shared_by_more_requests_than_the_cache_has_blocks(options, serve, expected):
    """Eight requests read 2 shared blocks and their own one: 24 by the operator's count, in a cache of 14 (R32)."""
    (prefix,) = prompts((256,))
    rounds = [
        {"prompts": [[*prefix, 7]], "tokens": 1},
        {"prompts": [prefix + tail for tail in prompts(tuple(range(3, 11)), seed=2)], "tokens": TOKENS},
    ]
    rounds.append({**rounds[1], "spoil": "one_call_for_all"})
    options = {"num_gpu_blocks_override": 14, "max_model_len": 512, "max_num_batched_tokens": 512, **options}
    results, _ = serve(rounds, options=options, machine=WORKSPACE)
    assert [worst(of_round) < TOLERANCE for of_round in errors(rounds[:2], results[:2], expected)] == [True, True]
    assert "[R32]" in results[2]


def test_full_decode_graphs_turn_to_piecewise_with_one_line_where_the_probe_fails(serve, expected):
    """CANN 8.3 as published refuses to say how much workspace a TND call needs (R37)."""
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR)]
    results, printed = serve(rounds, options=FULL)
    assert printed.count("FULL_DECODE_ONLY does not work here (a full layer: ") == 1
    assert "[R37]" in printed
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert "decode, FULL" not in printed
    assert worst(errors(rounds, results, expected)[0]) < TOLERANCE


def test_bfloat16_stays_within_the_rounding_of_transformers_in_bfloat16(serve, checkpoint, expected):
    rounds = [turn(LENGTHS, tokens=3)]
    results, _ = serve(rounds, options={"dtype": "bfloat16"})
    rounded = load_oracle(checkpoint, torch.bfloat16)
    ours = torch.cat(errors(rounds, results, expected)[0])
    theirs = torch.cat(
        [
            (
                torch.log_softmax(oracle_logits(rounded, prompt + answer["tokens"][:-1])[len(prompt) - 1 :], -1)
                - expected(tuple(prompt), tuple(answer["tokens"]))
            ).abs()
            for prompt, answer in zip(rounds[0]["prompts"], results[0], strict=True)
        ]
    )
    # a router that decides otherwise by a hair moves one prompt by much, in either implementation
    assert float(ours.median()) < 1.5 * float(theirs.median())
    assert float(ours.mean()) < 2 * float(theirs.mean())


def test_the_comparison_sees_what_is_spoilt_in_full_decode_graphs(serve, expected):
    spoils = ["updates_dropped", "updates_late", "replay_dropped"]
    rounds = [turn(SPOILT)]
    for seed, spoil in enumerate(spoils, 3):
        rounds += [turn(SPOILT, seed=seed, spoil=spoil), turn(SPOILT, seed=seed + 10)]
    results, _ = serve(rounds, options=FULL, machine=WORKSPACE)
    seen = [worst(of_round) > 100 * TOLERANCE for of_round in errors(rounds, results, expected)]
    # a replay that did not take place leaves its events behind, which let every later one run too early
    assert seen == [False, True, False, True, False, True, True]


def test_the_comparison_sees_a_block_table_that_was_rebound(serve, expected):
    rounds = [turn(SPOILT)]
    results, _ = serve(rounds, options=FULL, machine=WORKSPACE, spoil="block_table_rebound")
    assert worst(errors(rounds, results, expected)[0]) > 100 * TOLERANCE


def test_the_comparison_sees_a_wrong_window_and_sinks_and_the_operators_refuse_short_lists(serve, expected):
    rounds = [
        turn(SPOILT, seed=3, spoil="window_of_129"),
        turn(SPOILT, seed=4, spoil="sinks_dropped"),
        turn(SPOILT, seed=5),
        turn(SPOILT, seed=6, spoil="upstream_lists"),
    ]
    results, _ = serve(rounds, options={"enforce_eager": True})
    seen = [worst(of_round) > 10 * TOLERANCE for of_round in errors(rounds[:3], results[:3], expected)]
    assert seen == [True, True, False]
    assert "[R15]" in results[3] or "[R13]" in results[3]


def test_the_comparison_sees_interleaved_weights(serve, expected):
    rounds = [turn(SPOILT)]
    options = {"enforce_eager": True}
    results, _ = serve(rounds, options=options, spoil="interleaved_weights")
    assert worst(errors(rounds, results, expected)[0]) > 1000 * TOLERANCE


def test_the_published_format_is_claimed_before_ascend_claims_it(serve, expected, tmp_path):
    """vllm-ascend takes any quantised checkpoint for its own; ours are the same values as the BF16 checkpoint's."""
    write_random_checkpoint(tmp_path / "mxfp4", vocab_size=VOCABULARY, mxfp4=True)
    rounds = [turn((5, 140))]
    results, printed = serve(rounds, options={"enforce_eager": True}, model=tmp_path / "mxfp4")
    assert worst(errors(rounds, results, expected)[0]) < TOLERANCE
    assert json.loads(printed.partition("PATCHES ")[2].splitlines()[0]) == {
        "ascend-host-mask": "applied",
        "ascend-full-graph": "applied",
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "float16"}, "--dtype float16: gpt-oss runs in bfloat16 on npu; use --dtype bfloat16."),
        ({"dtype": "float32"}, "--dtype float32: gpt-oss runs in bfloat16 on npu; use --dtype bfloat16."),
        ({"quantization": "ascend"}, "--quantization ascend: the checkpoint says whether it is MXFP4 or BF16;"),
        ({"additional_config": {"kv_cache_dtype": "int8"}}, "--additional-config kv_cache_dtype: the KV cache has the"),
    ],
)
def test_what_this_stack_cannot_do_is_refused_in_words(options, sentence, serve):
    with pytest.raises(AssertionError, match="nothing was served") as refusal:
        serve([], options={"dtype": "bfloat16", **options}, machine={"diagnostic_fp32": False})
    assert "npu-gptoss cannot serve this. " in str(refusal.value)
    assert sentence in str(refusal.value)


def test_biases_in_bf16_are_refused(serve):
    rounds = [turn(SPOILT, spoil="biases_in_bf16")]
    results, _ = serve(rounds, options={"enforce_eager": True, "dtype": "bfloat16"})
    assert "[R47]" in results[0]


PARALLEL: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor_parallel_size": 2},
    "TP=2, experts in parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "PP=2": {"pipeline_parallel_size": 2},
    "DP=2": {"data_parallel_size": 2},
    "DP=2, experts in parallel": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.mark.parametrize("how", PARALLEL)
def test_two_devices_equal_transformers_in_float32(how, serve, expected):
    """Piecewise graphs, whose prefills beyond the largest size run without."""
    rounds = [turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    results, _ = serve(rounds, options=PARALLEL[how])
    assert [worst(of_round) < TOLERANCE for of_round in errors(rounds, results, expected)] == [True, True]


def test_stock_vllm_ascend_gives_the_documented_garbage(serve, expected):
    """Without the plugin the same checkpoint loads and is served without a word: sinks, biases, activation are lost."""
    rounds = [turn((5, 40, 200), tokens=2)]
    stock = "ascend,ascend_enhanced_model,ascend_kv_connector"
    results, _ = serve(
        rounds,
        options={"enforce_eager": True, "dtype": "bfloat16"},
        variables={"VLLM_PLUGINS": stock},
    )
    errors_of_stock = torch.cat(errors(rounds, results, expected)[0])
    assert float(errors_of_stock.median()) > 0.5

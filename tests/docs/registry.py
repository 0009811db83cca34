"""How each shell command of the pages is known to work: the first rule whose pattern fits the whole command counts.

Here     tests/docs/test_commands.py runs it as it stands, in a copy of the tree with the tiny checkpoint
ByTest   a test elsewhere runs it, or the same with other places and sizes; its name has to exist
Needs    no test can run it: the page has to say, next to it, one of the things named here

Whatever the rule, tests/docs/parsing.py has the command's words read by the real parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Here:
    """`limit`: seconds, ten times what it takes on an idle core."""

    limit: int = 120


@dataclass(frozen=True)
class ByTest:
    """`tests`: as tests/evidence.py names them, or the script that CI starts."""

    tests: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """`one_of`: names of tests.docs.shell.NEEDS."""

    one_of: tuple[str, ...]


How = Here | ByTest | Needs


@dataclass(frozen=True)
class Rule:
    pattern: str
    how: How


def tested(*tests: str) -> ByTest:
    return ByTest(tests)


def needs(*one_of: str) -> Needs:
    return Needs(one_of)


CI = tested(".ci/run")
# tests that answer for several rules
MAKE_SERVE = tested("tests/docs/test_quickstart.py::test_make_serve_answers_the_pages_request")
PERF = tested("tests/scripts/test_evalscope.py::test_perf_measures_every_request_and_the_server_saw_them")
MMLU = tested("tests/scripts/test_evalscope.py::test_the_score_is_far_above_chance_and_evalscopes_own")
EMULATED_SERVE = tested("tests/scripts/test_serve_emulated.py::test_the_printed_request_is_answered_rightly")
ON_A_910B = needs("a 910B")
ON_A_GPU = needs("an NVIDIA GPU")
BIN = r"(?:\.venv/bin/)?"
TINY = r"\.checkpoints/gpt-oss-tiny"

RULES = (
    # containers; nothing below can be sure of what it runs on
    Rule(r"(?:\w+=\S+ )?docker .*", needs("Docker")),
    Rule(r"docker/run-910b\.sh .*", ON_A_910B),
    Rule(r"read -rs \w+ && export \w+", needs("a 910B", "Docker")),
    Rule(r"make soak SOAK=.*", needs("hours")),
    Rule(r"make test-clients.*", needs("the network")),
    # set-up and tests: what CI itself starts
    Rule(r"make (?:test|check|setup|setup-emulated|setup-evalscope|docs)(?: setup-\w+)*", CI),
    Rule(r'make test PYTEST_ARGS="[^"]*"', CI),
    Rule(r"python scripts/setup/install_vllm\.py --no-deps", tested("tests/scripts/test_install_vllm.py", ".ci/run")),
    Rule(r"python -m pip install --no-deps \.", needs("the network")),
    # servers and their clients
    Rule(r"make serve", MAKE_SERVE),
    Rule(r"make serve MODEL=\S+", tested("tests/scripts/test_serve_cpu.py", "tests/serving/test_openai_api.py")),
    Rule(r"make serve-emulated.*", EMULATED_SERVE),
    Rule(r"curl .*127\.0\.0\.1:8000/.*", MAKE_SERVE),
    Rule(r"curl .*", needs("a 910B", "a server")),
    Rule(
        r"scripts/serve\.sh --model \S*gpt-oss-tiny .*--on cpu.*",
        PERF,
    ),
    Rule(
        r"scripts/serve\.sh --model \S*gpt-oss-tiny .*--on emulated.*",
        tested(
            "tests/scripts/test_serve_sh.py::test_on_the_emulated_910b_it_runs_inside_the_emulator",
            "tests/serving/emulated/test_modes.py::test_every_mode_equals_transformers_in_float32",
        ),
    ),
    Rule(r"scripts/serve\.sh .*", ON_A_910B),
    Rule(r"vllm serve DIR .*", tested("tests/serving/test_openai_api.py")),
    Rule(r"scripts/perf\.sh.*", PERF),
    Rule(r"scripts/mmlu\.sh (?:--url \S+ )?--data /tmp/tiny-mmlu .*", MMLU),
    Rule(r"scripts/(?:mmlu|eval)\.sh.*", needs("a 910B", "the network")),
    Rule(
        r"\S*python3? scripts/eval_report\.py \S+ --against \S+",
        tested("tests/scripts/test_eval_report.py::test_two_runs_are_compared_question_by_question"),
    ),
    Rule(
        r"\S*python3? scripts/eval_report\.py \S+ --plot \S+",
        tested("tests/scripts/test_evalscope.py::test_the_plot_is_drawn"),
    ),
    Rule(r"\S*python3? scripts/eval_report\.py \S+", tested("tests/scripts/test_eval_report.py")),
    Rule(rf"{BIN}python scripts/tiny_mmlu\.py .*", Here()),
    # a 910B's host
    Rule(r"npu-smi info|for card in .* hccn_tool .*|export HCCL_\w+=\S+|source /usr/local/Ascend/\S+", ON_A_910B),
    Rule(r"python3\.11 -m venv \S+|\. /\S+/bin/activate", ON_A_910B),
    Rule(  # the image's own steps, with torch for the CPU
        r"python -m pip install --no-deps --require-hashes .* -r requirements/910b\.txt"
        r"|TORCH_DEVICE_BACKEND_AUTOLOAD=0 python scripts/setup/install_vllm\.py --no-deps",
        ON_A_910B,
    ),
    Rule(r"hf download .*", needs("the network")),
    # the package's own commands
    Rule(
        rf"{BIN}npu-gptoss emulate -- npu-gptoss doctor(?: --model {TINY})?",
        tested("tests/doctor/test_emulated.py::test_the_doctor_reports_a_910b_and_all_is_well"),
    ),
    Rule(
        r"npu-gptoss emulate -- npu-gptoss verify --mutate",
        tested("tests/verify/test_mistakes.py::test_the_command_passes_on_the_emulated_910b"),
    ),
    Rule(
        r"npu-gptoss emulate -- vllm serve DIR .*",
        tested("tests/serving/emulated/test_modes.py::test_every_mode_equals_transformers_in_float32"),
    ),
    Rule(
        r"npu-gptoss emulate .*-- python my_script\.py",
        tested("tests/emulator/test_launch.py::test_children_run_on_the_machine_too"),
    ),
    Rule(
        rf"VLLM_PLUGINS=\S+ {BIN}npu-gptoss emulate -- vllm serve {TINY} .*",
        tested("tests/emulator/test_stock.py::test_with_graphs_vllms_check_of_buffers_ends_stock_and_not_the_plugin"),
    ),
    Rule(rf"{BIN}npu-gptoss doctor --model {TINY}", Here(300)),
    Rule(
        r"npu-gptoss doctor(?: --model DIR .*)?",
        tested("tests/doctor/test_command.py::test_all_is_well_beside_vllm_with_a_whole_checkpoint"),
    ),
    Rule(
        r"npu-gptoss doctor --model /models/gpt-oss-(?:20b --max-model-len 131072 .*|120b --tensor-parallel-size 4 .*)",
        tested("tests/test_tutorials.py::test_the_table_of_memory_is_the_doctors_arithmetic"),
    ),
    Rule(r"npu-gptoss doctor .*", ON_A_910B),
    Rule(
        r"(?:\w+=\S+ )?(?:pip install tests/third_party/|npu-gptoss "
        r"(?:kernels explain attention\.paged|verify paged-attention-example|bench kernel attention\.paged) ).*",
        tested(
            "tests/third_party/test_paged_attention_example.py::test_every_command_of_the_page_prints_what_the_page_shows"
        ),
    ),
    Rule(rf"(?:\w+=\S+ )?{BIN}npu-gptoss kernels (?:list|explain).*", Here()),
    Rule(rf"{BIN}npu-gptoss generate --model {TINY} .*", Here()),
    Rule(rf"{BIN}npu-gptoss tiny .*", Here()),
    Rule(rf"{BIN}npu-gptoss vocabulary .*", Here()),
    Rule(r"npu-gptoss verify --mutate.*", tested("tests/verify/test_command.py", "tests/verify/test_mistakes.py")),
    Rule(rf"{BIN}npu-gptoss verify(?: attention\.paged)?", Here(300)),
    Rule(
        r"npu-gptoss bench compare /tmp/own\.json /tmp/few\.json",
        tested(
            "tests/bench/test_compare.py::test_a_file_against_itself_is_within_noise_and_one_slower_row_is_the_exit_status"
        ),
    ),
    Rule(r"npu-gptoss bench (?:compare|table|plot) docs/benchmarks/.*", Here()),
    Rule(
        r"npu-gptoss bench sweep .*--device cpu .*",
        tested("tests/bench/test_sweep.py::test_one_and_two_ranks_are_measured_and_stand_in_one_file_a_kind"),
    ),
    Rule(
        r"npu-gptoss bench serve .*",
        tested("tests/docs/test_quickstart.py::test_make_serve_bears_the_pages_load"),
    ),
    Rule(
        r"(?:\w+=\S+ )?npu-gptoss bench (?:decode|prefill|kernel|graphs|agreement|checkpoint|engine|sweep) .*", ON_A_GPU
    ),
    Rule(r"python research/bench_peer_vllm\.py (?:engine|attention) .*", ON_A_GPU),
    Rule(r"python research/dram_bytes\.py .*", ON_A_GPU),
    Rule(r"torchrun .*", ON_A_GPU),
    Rule(r"python3 -c .*< (?:/tmp/)?trace\.jsonl", Here()),
    # scripts that write pages and train
    Rule(
        r"python research/trace_table\.py --write",
        tested("research/tests/test_trace_table.py::test_the_documented_table_is_what_is_counted"),
    ),
    Rule(
        r"python research/prediction_page\.py --write",
        tested("research/tests/test_prediction_page.py::test_the_page_shows_the_prediction"),
    ),
    Rule(r"python research/train_tiny\.py .*--evaluate .*", tested("tests/tiny/test_trained.py")),
    Rule(r"python research/train_tiny\.py .*--output .*", needs("hours")),
    Rule(r"cd vllm-ascend|git apply .*", tested("tests/patches/test_ascend.py")),
)


def rule_for(text: str, rules: tuple[Rule, ...] = RULES) -> Rule | None:
    return next((rule for rule in rules if re.fullmatch(rule.pattern, text)), None)


def how(text: str) -> How | None:
    rule = rule_for(text)
    return rule and rule.how

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from npu_gptoss.cli import main
from npu_gptoss.kernels import accepts, register_kernel
from npu_gptoss.kernels.registry import registry


def test_list_shows_every_operation_and_its_kernels(capsys):
    assert main(["kernels", "list"]) == 0
    out = capsys.readouterr().out
    for name in (
        "attention.paged.small_ops",
        "attention.paged.reference",
        "moe.experts.small_ops",
        "moe.route.reference",
    ):
        assert name in out


def test_list_as_json_can_be_read_back(capsys):
    assert main(["kernels", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "family", "mode", "solution", "priority", "origin", "summary"} == set(rows[0])


def test_explain_answers_for_another_platform_and_dtype(capsys):
    assert main(["kernels", "explain", "attention.paged", "--platform", "ascend", "--set", "sinks=float32"]) == 0
    out = capsys.readouterr().out
    assert "attention.paged on ascend" in out
    assert "sinks float32" in out


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("false", False), ("None", None), ("null", None), ("64", 64), ("few", "few")]
)
def test_values_mean_what_they_mean_in_python_and_in_json(operation, capsys, text, value):
    for handled, code in ((value, 0), ("something else", 1)):
        register_kernel(
            "toy",
            "add",
            solution=str(handled),
            signatures=(accepts(x="bfloat16"),),
            traits={"size": frozenset({handled})},
            priority=4,
        )(len)
        assert main(["kernels", "explain", "toy.add", "--set", f"size={text}"]) == code
        capsys.readouterr()
        registry.kernels.pop(f"toy.add.{handled}")
        registry.generation += 1


def test_one_operation_without_a_kernel_is_enough_for_exit_code_1(capsys):
    """Also when the last one in the list has one."""
    assert main(["kernels", "explain", "--set", "key=int8"]) == 1
    assert "attention.write_kv.reference (priority 0): no: needs bfloat16 or float32 key, got int8" in (
        capsys.readouterr().out
    )


def test_explain_says_no_when_nothing_can_run(capsys):
    assert main(["kernels", "explain", "moe.route", "--set", "dtype=float16"]) == 1
    assert "needs bfloat16 or float32 logits, got float16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["explain", "attention.paged_decode"],
            "there is no operation 'attention.paged_decode'; there are attention.paged",
        ),
        (["explain", "--set", "head_dims=3"], "expected NAME=VALUE with NAME one of"),
        (["explain", "--set", "head_dim"], "expected NAME=VALUE"),
    ],
)
def test_wrong_arguments_get_a_sentence_and_exit_code_2(capsys, arguments, says):
    assert main(["kernels", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_listing_needs_neither_vllm_nor_torch_npu():
    code = (
        "import sys\n"
        "for name in ('vllm', 'torch_npu', 'vllm_ascend', 'transformers'): sys.modules[name] = None\n"
        "from npu_gptoss.cli import main\n"
        "sys.exit(main(['kernels', 'list']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "attention.paged.small_ops" in done.stdout

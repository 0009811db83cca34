from __future__ import annotations

import subprocess
import sys

import pytest

from npu_gptoss.cli import main
from npu_gptoss.kernels import Platform
from npu_gptoss.kernels.registry import registry
from tests.kernels.toy import kernel


@pytest.mark.parametrize(
    ("platform", "settings", "selected"),
    [
        ("ascend", ["attention.paged"], "attention.paged.ascend"),
        ("ascend", ["moe.experts", "--set", "rows=9000"], "moe.experts.ascend"),
        ("cuda", ["attention.paged"], "attention.paged.triton_decode"),
        ("cuda", ["dense.qkv"], "dense.qkv.gluon"),
        ("cuda", ["dense.router", "--set", "rows=127"], "dense.router.triton"),
        ("cuda", ["dense.router", "--set", "rows=128"], "dense.router.gluon"),
        ("cuda", ["moe.experts", "--set", "weight=mxfp4", "--set", "rows=2047"], "moe.experts.triton_many"),
        ("cuda", ["moe.experts", "--set", "weight=mxfp4", "--set", "rows=2048"], "moe.experts.gluon_many"),
    ],
)
def test_platform_option_means_its_supported_stack(capsys, monkeypatch, platform, settings, selected):
    """On a laptop without torch_npu it selected plain torch operations for a 910B."""
    monkeypatch.setattr("npu_gptoss.kernels.platform._detected", lambda: Platform("cpu"))
    assert main(["kernels", "explain", "--platform", platform, *settings]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith(": selected"))
    assert line.split()[0] == selected


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("false", False), ("None", None), ("null", None), ("64", 64), ("few", "few")]
)
def test_values_are_read_as_python_or_json(operation, capsys, text, value):
    for handled, code in ((value, 0), ("something else", 1)):
        kernel(str(handled), size=frozenset({handled}))
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


def test_listing_imports_no_vllm_and_no_torch_npu():
    code = (
        "import sys\n"
        "for name in ('vllm', 'torch_npu', 'vllm_ascend', 'transformers'): sys.modules[name] = None\n"
        "from npu_gptoss.cli import main\n"
        "sys.exit(main(['kernels', 'list']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("attention.paged.small_ops", "attention.paged.reference", "moe.experts.small_ops", "moe.route.ascend"):
        assert name in done.stdout

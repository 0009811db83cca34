"""gpt-oss on a CPU: missing operators are not called, nothing is compiled with a newer torch, windows stay layers'."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import types

import pytest
import torch
from vllm.config import CompilationConfig, CompilationLevel, ModelConfig
from vllm.engine import arg_utils

from npu_gptoss.serving.releases import cpu_0_11 as cpu
from tests.checkpoints import write_random_checkpoint


def chosen(ranks: int = 1, replicas: int = 1) -> types.SimpleNamespace:
    """A configuration with the default compilation, after our choice."""
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(enforce_eager=False),
        parallel_config=types.SimpleNamespace(world_size=ranks, data_parallel_size=replicas),
        compilation_config=CompilationConfig(),
    )
    cpu.choose_operators(config)
    return config


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "0")  # restored afterwards
        monkeypatch.delenv(name)


@pytest.fixture
def installed(monkeypatch):
    def as_if(compiled_ops: bool, torch_release: tuple[int, int] = (2, 8)) -> None:
        monkeypatch.setattr(cpu, "has_compiled_ops", lambda: compiled_ops)
        monkeypatch.setattr(cpu, "torch_release", lambda: torch_release)

    return as_if


def test_torch_bodies_replace_missing_compiled_operators(installed):
    installed(compiled_ops=False)
    config = chosen(ranks=2, replicas=2)
    assert config.compilation_config.custom_ops == ["none"]
    assert config.compilation_config.level is None  # torch 2.8 may compile
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "all|all|all|all"


def test_complete_build_keeps_its_settings(installed):
    installed(compiled_ops=True)
    config = chosen()
    assert (config.compilation_config.level, config.compilation_config.custom_ops) == (None, [])
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_newer_torch_than_vllms_runs_eager(installed, tmp_path):
    """vLLM's own configuration begins with our choice, and keeps it."""
    installed(compiled_ops=False, torch_release=(2, 13))
    write_random_checkpoint(tmp_path / "model", layers=1)
    options = {"model": str(tmp_path / "model"), "skip_tokenizer_init": True, "max_model_len": 64}
    config = arg_utils.EngineArgs(**options).create_engine_config()
    assert config.compilation_config.level == CompilationLevel.NO_COMPILATION
    assert config.compilation_config.custom_ops == ["none"]
    assert config.model_config.enforce_eager
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize("error", [ImportError("no such module"), OSError("undefined symbol: _ZN3c10")])
def test_library_that_does_not_load_counts_as_missing(monkeypatch, error):
    """A library that was linked with another torch exists, but loading it raises OSError."""
    stock = builtins.__import__

    def importing(name: str, *args: object, **kwargs: object) -> object:
        if name == "vllm._C":
            raise error
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    assert cpu.has_compiled_ops() is False


def test_threads_pinned_by_the_user_stay_pinned(installed, monkeypatch):
    installed(compiled_ops=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    chosen()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_torch_release_reads_a_local_version(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert cpu.torch_release() == (2, 13)


SAMPLE = """
import torch
from torch._inductor import config
config.cpp.cxx = ("there-is-no-such-compiler",)
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
import tests.serving.compat.test_cpu as this
this.chosen()
tokens, _ = TopKTopPSampler().forward_cpu(torch.tensor([[0.0, 50.0], [50.0, 0.0]]), {}, None, None)
print(tokens.tolist())
"""


def test_temperature_needs_no_compiler(tmp_path):
    """Without a compiler the first request with a temperature ended the engine."""
    environment = {**os.environ, "VLLM_PLUGINS": "npu_gptoss_cpu", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SAMPLE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["[1, 0]"]), run.stderr


def model_config(model_type: str = "gpt_oss", disable_sliding_window: bool = False) -> ModelConfig:
    """A ModelConfig with only the fields that the tested code reads."""
    config = object.__new__(ModelConfig)
    config.hf_text_config = types.SimpleNamespace(model_type=model_type, sliding_window=128)
    config.hf_config = config.hf_text_config
    config.disable_sliding_window = disable_sliding_window
    return config


def test_gpt_oss_alone_has_no_model_wide_window_and_runs_on_a_cpu(patched, monkeypatch, tmp_path):
    monkeypatch.setattr(arg_utils.current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(ModelConfig, "is_v1_compatible", True)
    monkeypatch.setattr(arg_utils, "_raise_or_fallback", lambda **_: None)
    with patched("model-wide-window"):
        assert model_config().get_sliding_window() is None
        assert model_config("mistral").get_sliding_window() == 128
        assert model_config(disable_sliding_window=True).get_sliding_window() == 128
        runs_on_v1 = arg_utils.EngineArgs(model=str(tmp_path))._is_v1_supported_oracle
        assert (runs_on_v1(model_config()), runs_on_v1(model_config("mistral"))) == (True, False)

"""CPU without vLLM's compiled operators: no call, no thread pinning and no compilation with a newer torch."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import types

import pytest
import torch
from vllm.config import CacheConfig, CompilationConfig, CompilationLevel
from vllm.platforms.cpu import CpuPlatform

from npu_gptoss.serving.compat.start import cpu

pytestmark = pytest.mark.serving


def updated_config(model_type: str = "gpt_oss", ranks: int = 1, replicas: int = 1) -> types.SimpleNamespace:
    """A configuration with the default compilation, after CpuPlatform's update."""
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            hf_config=types.SimpleNamespace(model_type=model_type),
            dtype=torch.bfloat16,
            use_mla=False,
            enforce_eager=False,
        ),
        cache_config=CacheConfig(),
        scheduler_config=types.SimpleNamespace(chunked_prefill_enabled=True),
        parallel_config=types.SimpleNamespace(
            world_size=ranks,
            data_parallel_size=replicas,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            worker_cls="auto",
            enable_dbo=False,
        ),
        compilation_config=CompilationConfig(level=CompilationLevel.PIECEWISE),
        lora_config=None,
        device_config=types.SimpleNamespace(device_type="cpu"),
    )
    CpuPlatform.check_and_update_config(config)
    return config


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (
        "VLLM_WORKER_MULTIPROC_METHOD",
        "NUMEXPR_MAX_THREADS",
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # vLLM changes them: restored afterwards
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


def test_torch_bodies_replace_missing_compiled_operators(patched, monkeypatch):
    monkeypatch.setattr(cpu, "has_compiled_ops", lambda: False)
    monkeypatch.setattr(cpu, "torch_release", lambda: (2, 8))
    with patched("cpu-native-ops"):
        config = updated_config(ranks=2)
    assert config.compilation_config.custom_ops == ["none"]
    assert config.compilation_config.level == CompilationLevel.DYNAMO_ONCE  # torch 2.8 may compile
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "all|all"


def test_newer_torch_than_vllms_runs_eager(patched, monkeypatch):
    monkeypatch.setattr(cpu, "torch_release", lambda: (2, 13))
    with patched("cpu-native-ops"):
        config = updated_config()
    assert config.compilation_config.level == CompilationLevel.NO_COMPILATION
    assert config.model_config.enforce_eager


def test_complete_build_and_other_models_keep_their_settings(patched, monkeypatch):
    with patched("cpu-native-ops"):
        assert updated_config("llama").compilation_config.level == CompilationLevel.DYNAMO_ONCE
        monkeypatch.setattr(cpu, "has_compiled_ops", lambda: True)
        monkeypatch.setattr(cpu, "torch_release", lambda: (2, 8))
        assert updated_config().compilation_config.level == CompilationLevel.DYNAMO_ONCE
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_threads_have_an_entry_per_rank_and_replica(patched, monkeypatch):
    monkeypatch.setattr(cpu, "has_compiled_ops", lambda: False)
    with patched("cpu-native-ops"):
        updated_config(ranks=2, replicas=2)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "all|all|all|all"


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


def test_threads_pinned_by_the_user_stay_pinned(patched, monkeypatch):
    monkeypatch.setattr(cpu, "has_compiled_ops", lambda: False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with patched("cpu-native-ops"):
        updated_config()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_torch_release_reads_a_local_version(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert cpu.torch_release() == (2, 13)


SAMPLE = """
import sys, torch
from torch._inductor import config
config.cpp.cxx = ("there-is-no-such-compiler",)
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
import tests.serving.compat.test_cpu as this
from npu_gptoss.serving import compat
if "patched" in sys.argv:
    compat.apply()
this.updated_config()
tokens, _ = TopKTopPSampler().forward_cpu(torch.tensor([[0.0, 50.0], [50.0, 0.0]]), {}, None, None)
print(tokens.tolist())
"""


@pytest.mark.parametrize(("how", "printed"), [("patched", "[1, 0]"), ("stock", "No working C++ compiler")])
def test_temperature_needs_no_compiler(how, printed, tmp_path):
    """Without a compiler the first request with a temperature ended the engine."""
    environment = {**os.environ, "VLLM_PLUGINS": "npu_gptoss_cpu", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SAMPLE, how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert printed in run.stdout + run.stderr
    assert (run.returncode == 0) == (how == "patched")

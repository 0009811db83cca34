"""Each process of a server of vLLM 0.33 has the model that the first process decided on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")

from npu_gptoss.serving.aside import VARIABLE

CHILD = """
import os

from npu_gptoss import plugin
from npu_gptoss.serving.aside import VARIABLE
from tests.serving.cuda.faked import pretend

pretend()
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins

for first in True, False:
    load_general_plugins() if first else plugin.register()  # a process does the former once
    print(ModelRegistry.models["GptOssForCausalLM"].module_name)
    os.environ.pop(VARIABLE, None)
"""


def test_a_child_process_has_the_model_of_its_parent() -> None:
    variables = os.environ | {VARIABLE: "--enable-lora: no; no."}
    done = subprocess.run([sys.executable, "-c", CHILD], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["vllm.model_executor.models.gpt_oss", "npu_gptoss.serving.cuda.model"]

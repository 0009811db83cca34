"""Every refusal that needs no vLLM, of package stacks and of config.json."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.errors import Refusal
from npu_gptoss.model.config import ConfigError, GptOssConfig, tensor_parallel_objection
from npu_gptoss.model.config_fields import _UNKNOWN, MISSING, RULES
from npu_gptoss.serving.ascend import limits as ascend
from tests.model.published import gpt_oss_20b
from tests.model.test_config import changed


def of_config() -> list[Refusal]:
    """A refusal by each rule of config.json, and of missing, contradictory and unknown fields."""
    found = []
    for name, rule in RULES.items():
        for value in (MISSING, {"a": 1}):
            with pytest.raises(ConfigError) as caught:
                rule.check(name, value)
            found += caught.value.refusals
    contradictions = {"pad_token_id": 201088, "hidden_size": 2884, "head_dim": 63, "num_experts": 128}
    contradictions |= {"layer_types": [], "model_type": "llama", "num_nextn_predict_layers": 1, "rope_scaling": 1}
    contradictions |= {"num_attention_heads": 60, "rope_scaling.beta_fast": 1.0, "eos_token_id": []}
    for name, value in (contradictions | dict.fromkeys(_UNKNOWN, 1)).items():
        with pytest.raises(ConfigError) as caught:
            GptOssConfig.from_dict(changed({name: value}))
        found += caught.value.refusals
    return found


def of_stack(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Refusal]:
    """A refusal of each package of a card's stack, for the CANN 9.1 stack."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.10.0"))
        launched = SimpleNamespace(LAUNCHED=[("os.path", "join")])
        patched.setitem(sys.modules, "npu_gptoss.serving.releases.ascend", launched)
        patched.setattr(torch.ops, "npu", SimpleNamespace(), raising=False)
        patched.setattr(ascend.cann, "find_toolkit", lambda: (folder, ""))
        patched.setattr(ascend.cann, "toolkit_version", lambda place: "9.1.0-beta.1")
        patched.setattr(ascend.ctypes, "CDLL", lambda name: SimpleNamespace())
        patched.setattr(ascend.releases, "ascend_release", lambda: ascend.releases.ASCEND_RELEASES[1])
        found = [ascend.event_objection(), ascend.cann_objection(), ascend.operator_objection()]
        for version in (None, "3.2.0"):
            patched.setattr(ascend.releases, "installed", lambda *names, version=version: version)
            found.append(ascend.triton_objection())
        found += [ascend.version_objection("9"), tensor_parallel_objection(gpt_oss_20b(), 3)]
    assert None not in found
    return found

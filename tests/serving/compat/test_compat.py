"""The table itself: light, guarded, idempotent, and honest about what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from npu_gptoss.errors import InputError
from npu_gptoss.serving import compat
from npu_gptoss.serving.compat import patch as machinery

pytestmark = pytest.mark.serving


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that has not loaded the plugin."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_apply_imports_neither_vllm_nor_torch():
    result = run("""
        import json, sys
        from npu_gptoss.serving import compat
        compat.apply(); compat.apply()
        heavy = [name for name in ("torch", "vllm", "openai_harmony", "fastapi") if name in sys.modules]
        print(json.dumps([heavy, [entry.state for entry in compat.status()]]))
    """)
    heavy, states = json.loads(result.stdout)
    assert heavy == []
    assert states == ["waiting"] * len(compat.PATCHES)


def test_patches_come_in_with_their_modules_and_only_once():
    result = run("""
        import importlib, json
        from npu_gptoss.serving import compat
        compat.apply()
        for patch in compat.PATCHES:
            importlib.import_module(patch.module)
        from vllm.config import ModelConfig
        first = ModelConfig.get_sliding_window
        compat.apply()
        assert ModelConfig.get_sliding_window is first
        print(json.dumps({entry.patch.name: [entry.state, entry.detail] for entry in compat.status()}))
    """)
    assert result.returncode == 0, result.stderr
    states = json.loads(result.stdout.splitlines()[-1])
    assert states == {patch.name: ["applied", ""] for patch in compat.PATCHES}
    assert "leaves out" not in result.stderr


def test_modules_imported_before_apply_are_patched_too():
    result = run("""
        import vllm.v1.worker.gpu_model_runner as runner
        from npu_gptoss.serving import compat
        stock = runner.apply_grammar_bitmask
        compat.apply()
        assert runner.apply_grammar_bitmask.__npu_gptoss_replaces__ is stock
    """)
    assert result.returncode == 0, result.stderr


def test_a_named_patch_is_left_out_and_an_unknown_name_is_refused():
    result = run(
        """
        from npu_gptoss.serving import compat
        compat.apply()
        import vllm.config.model
        assert not hasattr(vllm.config.model.ModelConfig.get_sliding_window, "__npu_gptoss_replaces__")
        entry = {entry.patch.name: entry for entry in compat.status()}["model-wide-window"]
        assert entry.state == "skipped" and "NPU_GPTOSS_SKIP_PATCHES" in entry.detail
        try:
            compat.require_essential()
        except compat.PatchError as error:
            print(error)
    """,
        NPU_GPTOSS_SKIP_PATCHES="model-wide-window",
    )
    assert result.returncode == 0, result.stderr
    assert "not served without the patch model-wide-window" in result.stdout
    result = run("from npu_gptoss.serving import compat; compat.apply()", NPU_GPTOSS_SKIP_PATCHES="window")
    assert "NPU_GPTOSS_SKIP_PATCHES names window; the patches are model-wide-window" in result.stderr


def test_changed_foreign_code_is_left_alone_with_one_warning():
    result = run("""
        import vllm.config.model as module
        def get_sliding_window(self):
            return "changed"
        module.ModelConfig.get_sliding_window = get_sliding_window
        from npu_gptoss.serving import compat
        compat.apply()
        assert module.ModelConfig.get_sliding_window is get_sliding_window
        import vllm.v1.structured_output.utils
        print([entry.patch.name for entry in compat.status() if entry.state == "skipped"])
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("['model-wide-window']")
    assert result.stderr.count("npu-gptoss leaves out its patch model-wide-window") == 1


def test_another_release_of_vllm_is_left_alone():
    result = run("""
        import importlib.metadata
        importlib.metadata.version = lambda name: "0.12.0"
        from npu_gptoss.serving import compat
        compat.apply()
        print({entry.detail for entry in compat.status()})
    """)
    assert result.stdout.strip() == "{'vllm is 0.12.0, the patch was written for 0.11.0'}"
    assert result.stderr.count("leaves out") == 1


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.11.0", "0.11.0"),
        ("0.11.0+empty", "0.11.0"),
        ("0.11.0.post2", "0.11.0"),
        ("0.11.0.post2+cpu", "0.11.0"),
        ("0.11.0rc3", ""),
        ("0.11.1.dev3+g1234567", ""),
    ],
)
def test_builds_of_a_release_count_as_the_release_and_candidates_do_not(monkeypatch, version, release):
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: version)
    assert compat._vllm_release() == (version, release)


def test_guards_name_what_differs():
    def function(first, second):
        return first

    with pytest.raises(machinery.Mismatch, match=r"expected to take third, it takes \(first, second\)"):
        machinery.expect_parameters(function, "first", "third")
    with pytest.raises(machinery.Mismatch, match="no longer contains 'return second'"):
        machinery.expect_source(function, "return second")
    machinery.expect_source(function, "return  first")


def test_names_are_unique_and_every_record_is_filled():
    assert len({patch.name for patch in compat.PATCHES}) == len(compat.PATCHES)
    for patch in compat.PATCHES:
        assert patch.reason.endswith(".")
        assert patch.upstream
        assert all(":" in target for target in patch.touches)
        assert patch.touches[0].startswith(patch.module + ":")


def test_a_wrong_skip_list_is_a_user_error():
    assert issubclass(compat.PatchError, InputError)

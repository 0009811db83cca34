"""The table of repairs: light to import, guarded, idempotent, with a correct status."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import json
import re
import sys
import types

import pytest

from npu_gptoss.errors import InputError
from npu_gptoss.serving import compat, releases
from npu_gptoss.serving.compat import patch as machinery
from tests.serving.compat.conftest import HERE, owner_of
from tests.serving.compat.of_release import OLD
from tests.serving.conftest import run


def test_apply_imports_neither_vllm_nor_torch():
    result = run("""
        import json, sys
        from npu_gptoss.serving import compat
        compat.apply(); compat.apply()
        heavy = [name for name in ("torch", "vllm") if name in sys.modules]
        print(json.dumps([heavy, [entry.state for entry in compat.status()]]))
    """)
    heavy, states = json.loads(result.stdout)
    assert heavy == []
    assert states == ["waiting"] * len(compat.patches_here())


def test_repairs_are_installed_with_their_modules_and_only_once():
    result = run("""
        import contextlib, importlib.util, json
        from npu_gptoss.serving import compat
        compat.apply()
        with contextlib.suppress(ImportError):
            import vllm_ascend.worker.worker  # as vLLM begins; another order imports in a circle
        for patch in compat.patches_here():
            if importlib.util.find_spec(patch.module.partition(".")[0]):
                importlib.import_module(patch.module)
        from vllm.v1.structured_output import StructuredOutputManager
        first = StructuredOutputManager.grammar_init
        compat.apply()
        assert StructuredOutputManager.grammar_init is first
        print(json.dumps({entry.patch.name: [entry.state, entry.detail] for entry in compat.status()}))
    """)
    assert result.returncode == 0, result.stderr
    states = json.loads(result.stdout.splitlines()[-1])
    elsewhere = {patch.name: ["waiting", ""] for patch in compat.patches_here() if patch not in HERE}
    assert states == {patch.name: ["applied", ""] for patch in HERE} | elsewhere
    assert "leaves out" not in result.stdout + result.stderr


def test_each_repair_installs_without_the_others(patched):
    for patch in HERE:
        with patched(patch.name):  # an installer that relies on another repair raises Mismatch here
            for target in patch.touches:
                owner, name = owner_of(target)
                assert hasattr(vars(owner)[name], "__npu_gptoss_replaces__"), target


@pytest.mark.skipif(not OLD, reason="its modules are of vLLM 0.11")
def test_one_changed_or_skipped_target_does_not_stop_the_others():
    """In one process: modules imported before, changed foreign code, a repair left out by name."""
    result = run(
        """
        import vllm.config.model as changed
        import vllm.entrypoints.openai.api_server as copy  # of a name of vllm.entrypoints.launcher
        import vllm.reasoning.gptoss_reasoning_parser as parser
        def get_sliding_window(self):
            return "changed"
        changed.ModelConfig.get_sliding_window = get_sliding_window
        stock = copy.serve_http

        from npu_gptoss.serving import compat
        compat.apply()
        assert copy.serve_http.__npu_gptoss_replaces__ is stock
        assert changed.ModelConfig.get_sliding_window is get_sliding_window
        assert not hasattr(parser.GptOssReasoningParser.is_reasoning_end, "__npu_gptoss_replaces__")
        try:
            compat.require_essential()
        except compat.PatchError as error:
            print(error)
        for entry in compat.status():
            if entry.state == "skipped":
                print("skipped:", entry.patch.name, entry.detail)
    """,
        NPU_GPTOSS_SKIP_PATCHES="reasoning-end",
    )
    assert result.returncode == 0, result.stderr
    assert "gpt-oss is not served without the patch model-wide-window (" in result.stdout
    skipped = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("skipped:")]
    assert skipped == ["reasoning-end", "model-wide-window"]
    assert "skipped: reasoning-end NPU_GPTOSS_SKIP_PATCHES names it" in result.stdout
    assert (result.stdout + result.stderr).count("npu-gptoss leaves out its patch model-wide-window") == 1


def test_unknown_name_to_skip_is_refused():
    result = run("from npu_gptoss.serving import compat; compat.apply()", NPU_GPTOSS_SKIP_PATCHES="window")
    assert f"NPU_GPTOSS_SKIP_PATCHES names window; the patches are {compat.patches()[0].name}" in result.stderr


def test_unsupported_vllm_gets_no_repair_and_one_warning():
    result = run("""
        import importlib.metadata
        importlib.metadata.version = lambda name: "0.12.0"
        from npu_gptoss.serving import compat
        compat.apply()
        for patch, entry in zip(compat.patches(), compat.status(), strict=True):
            assert entry.detail == f"vllm is 0.12.0, the patch was written for {' and '.join(patch.releases)}"
    """)
    assert result.returncode == 0, result.stderr
    assert (result.stdout + result.stderr).count("leaves out") == 1


def test_mismatch_names_the_difference():
    def function(first, second):
        return first

    with pytest.raises(machinery.Mismatch, match=r"expected to take third, it takes \(first, second\)"):
        machinery.expect_parameters(function, "first", "third")
    with pytest.raises(machinery.Mismatch, match="no longer contains 'return second'"):
        machinery.expect_source(function, "return second")
    machinery.expect_source(function, "return  first")
    owner = types.SimpleNamespace(function=function)
    with pytest.raises(machinery.Mismatch, match=r"expected to take later, it takes \(first, second\)"):
        machinery.around(owner, "function")(lambda original, first, later, *rest: original(first, later))
    assert owner.function is function


def test_repair_that_fits_in_part_leaves_half_of_its_changes(monkeypatch):
    """The first function is replaced when the second does not fit."""
    owner = types.SimpleNamespace(fits=lambda first: first, differs=lambda second: second, __name__="a_module")
    before = dict(vars(owner))

    def install(module):
        machinery.around(module, "fits")(lambda original, first: original(first) + 1)
        assert module.fits(1) == 2
        machinery.around(module, "differs")(lambda original, first: original(first))

    patch = dataclasses.replace(compat.patches()[0], install=install)
    monkeypatch.setattr(compat, "_status", {})
    compat._install(patch, owner)
    assert compat._status[patch].state == "skipped"
    assert vars(owner) == before


def test_import_hook_calls_once_and_keeps_the_loader(tmp_path, monkeypatch):
    """inspect, pickle and reload read the module's loader."""
    (tmp_path / "a_module_to_hook.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    machinery.when_imported("a_module_to_hook", calls.append)
    module = importlib.import_module("a_module_to_hook")
    assert calls == [module]
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    importlib.reload(module)
    assert calls == [module]
    machinery.when_imported("a_module_to_hook", calls.append)
    assert calls == [module, module], "already imported"
    monkeypatch.delitem(sys.modules, "a_module_to_hook")


def test_import_hook_leaves_another_hook_its_turn(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_two_hooks.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []

    class Other(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), calls.append("other"))
            return spec

    machinery.when_imported("a_module_of_two_hooks", lambda module: calls.append("ours"))
    monkeypatch.setattr(sys, "meta_path", [machinery._hook, Other(), *sys.meta_path])
    importlib.import_module("a_module_of_two_hooks")
    monkeypatch.delitem(sys.modules, "a_module_of_two_hooks")
    assert calls == ["other", "ours"]


@pytest.mark.parametrize("essential", [True, False])
def test_only_essential_patches_are_required(monkeypatch, essential):
    patch = next(patch for patch in compat.patches() if patch.essential is essential)
    entries = {state: compat.PatchStatus(patch, state, "for this test") for state in ("applied", "waiting", "skipped")}
    for state, entry in entries.items():
        monkeypatch.setattr(compat, "status", lambda entry=entry: (entry,))
        if essential and state == "skipped":
            with pytest.raises(compat.PatchError, match=rf"without the patch {patch.name} \(for this test\)") as raised:
                compat.require_essential()
            assert isinstance(raised.value, InputError)
        else:
            compat.require_essential()


def test_replace_updates_copies_but_not_foreign_values(monkeypatch):
    def stock():
        return "stock"

    def ours():
        return "ours"

    owner, copy, other = (types.SimpleNamespace(name=value) for value in (stock, stock, "another's"))
    monkeypatch.setitem(sys.modules, "a_module_with_a_copy", copy)
    monkeypatch.setitem(sys.modules, "a_module_with_another", other)
    copies = ("a_module_with_a_copy", "a_module_with_another", "a_module_that_is_not_imported")
    assert machinery.replace(owner, "name", ours, copies=copies) is stock
    assert (owner.name, copy.name, other.name) == (ours, ours, "another's")
    assert ours.__npu_gptoss_replaces__ is stock


def test_repair_names_are_unique_and_records_complete():
    named = [(patch.name, line) for patch in compat.patches() for line in patch.releases]
    assert len(set(named)) == len(named)
    for patch in compat.patches():
        assert patch.reason.endswith(".")
        assert patch.upstream
        assert all(":" in target for target in patch.touches)
        assert set(patch.releases) <= {row.name for row in releases.RELEASES}


WHO = re.compile(r"(vLLM|vllm-ascend|torch-npu|openai-harmony|openai/harmony|uvicorn)\b.* \S+")


def test_repair_outlives_its_until():
    """Fails if a release no longer needs its repair, or if no repair covers the last release before `until`."""
    names = [row.name for row in releases.RELEASES]
    wrong = {}
    for patch in compat.patches():
        if not re.fullmatch(r"\d+\.\d+", patch.until):
            if not WHO.match(patch.until):
                wrong[patch.name] = f"until={patch.until!r} does not name who must act"
            continue
        outlived = [line for line in patch.releases if version(line) >= version(patch.until)]
        before = [line for line in names if version(line) < version(patch.until)]
        last = max(before, key=version)
        if outlived or not any(last in other.releases for other in compat.patches() if other.name == patch.name):
            wrong[patch.name] = f"for {patch.releases}, until {patch.until}"
    assert wrong == {}


def version(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))

"""Folders of other tools are named, with a remedy for the user's own path."""

from __future__ import annotations

from pathlib import Path

from npu_gptoss.model.check import check_directory
from npu_gptoss.model.foreign import FORMS, recognise
from tests.checkpoints import random_config, random_tensors, write_random_checkpoint


def test_path_of_the_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    directory = tmp_path / "it's"
    form = recognise(None, ["block.0.attn.sinks"])
    assert form.convertible
    assert f"npu-gptoss convert '{tmp_path}/it'\"'\"'s' '{tmp_path}/it'\"'\"'s-converted'" in form.advice(directory)


def test_a_gguf_beside_the_official_files_is_passed_over(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path)
    (tmp_path / "gpt-oss.gguf").write_bytes(b"GGUF")
    check_directory(tmp_path, text=False)


def test_official_names_are_no_other_tool_s() -> None:
    for mxfp4 in (False, True):
        config = random_config(mxfp4=mxfp4)
        assert recognise(None, random_tensors(config), config.to_dict()) is None


def test_every_form_has_evidence_and_a_remedy() -> None:
    for form in FORMS:
        assert form.files or form.methods or form.fields or form.names != r"(?!)", form.tool
        assert form.advice("/a b").endswith("."), form.tool

"""Foreign files: irregular, long, deep or repetitive content is refused quickly and with a sentence."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_gptoss.bench import records
from npu_gptoss.convert import lora
from npu_gptoss.errors import InputError
from npu_gptoss.files import (
    CheckpointError,
    check_place,
    is_directory,
    is_there,
    parse_json,
    read_json,
    write_atomically,
)
from npu_gptoss.harmony import library, vocabulary
from npu_gptoss.model.safetensors_reader import find_tensors
from npu_gptoss.verify import replay


def _directory(path: Path) -> None:
    path.mkdir()


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "directory": (_directory, "a directory"),
    "device": (lambda p: p.symlink_to("/dev/zero"), "a device"),
    "dangling": (lambda p: p.symlink_to("nowhere"), "a link to a file that is not there"),
    "circle": (lambda p: p.symlink_to(p.name), "symbolic links"),
    "long": (lambda p: p.symlink_to("x" * 300), "too long"),
    "sparse": (lambda p: (p.touch(), os.truncate(p, 4 << 30)), "at most 10 MiB"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_not_small_and_regular_are_refused(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(CheckpointError, match="Permission denied"):
        read_json(path)
    tmp_path.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            is_directory(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_an_impossible_path_is_refused(tmp_path: Path) -> None:
    for check in (is_there, is_directory):
        with pytest.raises(CheckpointError, match="too long") as caught:
            check(tmp_path / ("x" * 5000))
        assert len(str(caught.value)) < 1500
    assert not is_directory(tmp_path / "nowhere")


REPEATED = b"{" + b",".join(b'"k%d":{}' % (i % 99_999) for i in range(100_000)) + b"}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (REPEATED, "'k0' is there twice"),
        (b"[" * 100_000, "too deep"),
        (b"[" * 985 + b"]" * 985, "deep in each other"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": "\xff"}', "no UTF-8"),
    ],
)
def test_json_that_breaks_python_is_refused(content: bytes, words: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=words):
        parse_json(content)
    assert time.process_time() - began < 3  # the first took half a minute when each name was counted


def test_the_error_has_the_requested_class(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is none"):
        read_json(tmp_path / "config.json", InputError)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/dev/zero", "x" * 300 + ".safetensors", "a\0b.safetensors", "\ud800.safetensors", 7]
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, shard: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"\x1b[2J": shard}}))
    with pytest.raises(CheckpointError, match="should lie in a safetensors file of this directory") as caught:
        find_tensors(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_pipe_or_device_is_replaced_by_a_file(tmp_path: Path) -> None:
    """As root `verify --json /dev/null` put a regular file in the place of the device."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)


def test_link_is_replaced_by_a_file(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "there" / "target"
    link.symlink_to(target)
    for content in (b"1", b"2"):
        assert write_atomically(link, content) == link
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_name_that_cannot_be_looked_up_ends_with_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long, or within the home of another user, as in a container that changes its user but not HOME."""
    closed = tmp_path / ("x" * 300)
    with pytest.raises(InputError):
        check_place(closed / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    monkeypatch.setenv(vocabulary.BASE_VARIABLE, str(closed))
    assert vocabulary.find_vocabulary(closed) is None
    library.can_load()
    for read in (replay.read, records.read):
        with pytest.raises(InputError):
            read(closed)
    assert lora.parse(f"{closed}:0.5") == (closed, 0.5)

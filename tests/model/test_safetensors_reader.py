"""Files that are no safetensors checkpoint are refused from their headers, in words that name the file."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from npu_gptoss.model.safetensors_reader import CheckpointError, find_tensors, listed, read_header, read_tensor
from tests.refused import refused

INDEX, FIRST, SECOND = (
    f"model{part}" for part in (".safetensors.index.json", "-00001-of-00002.safetensors", "-00002-of-00002.safetensors")
)
TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(7, dtype=torch.uint8),
    "c": torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
}


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Writes shards and their index; returns the weight map."""
    weight_map = {}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_read_as_the_library_wrote_them(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = find_tensors(tmp_path)
    assert found.keys() == TENSORS.keys()
    for name, stored in found.items():
        tensor = read_tensor(stored)
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])
        tensor.zero_()  # its own memory: the file keeps its values
    assert torch.equal(read_tensor(found["a"]), TENSORS["a"])


def test_the_header_may_name_tensors_in_any_order(tmp_path: Path) -> None:
    """Empty ones share their offset with the next."""
    entries = {
        "last": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "first": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "empty": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
    }
    text = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(5)))
    found = read_header(file)
    assert list(found) == ["empty", "first", "last"]
    assert read_tensor(found["last"]).tolist() == [3, 4]


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    sharded(tmp_path, {FIRST: {"b": TENSORS["b"]}, SECOND: {"a": TENSORS["a"], "c": TENSORS["c"]}})
    found = find_tensors(tmp_path)
    assert {name: stored.file.name for name, stored in found.items()} == {"a": SECOND, "b": FIRST, "c": SECOND}
    assert torch.equal(read_tensor(found["c"]), TENSORS["c"])


HEADERS: dict[str, Callable[[Path], object]] = {
    "empty file": lambda p: p.write_bytes(b""),
    "cut in the header": lambda p: raw_file(p, b'{"a', length=500),
    "not safetensors": lambda p: p.write_bytes(b"PK\x03\x04" + bytes([255]) * 64),
    "no json": lambda p: raw_file(p, b"{nonsense"),
    "no offsets": lambda p: raw_file(p, {"a": {"dtype": "U8", "shape": [1]}}),
    "size against shape": lambda p: raw_file(p, {"a": entry(0, 6, dtype="F32", shape=[2])}, b"x" * 6),
    "data cut": lambda p: raw_file(p, {"a": entry(0, 4), "b": entry(4, 9)}, b"x" * 7),
    "data too long": lambda p: raw_file(p, {"a": entry(0, 4)}, b"x" * 5),
    "gap": lambda p: raw_file(p, {"a": entry(0, 4), "b": entry(5, 9)}, b"x" * 9),
    "overlap": lambda p: raw_file(p, {"a": entry(0, 4), "b": entry(3, 9)}, b"x" * 9),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    file = tmp_path / "model.safetensors"
    HEADERS[case](file)
    with pytest.raises(CheckpointError, match=r"truncated or damaged.*download") as caught:
        find_tensors(tmp_path)
    assert str(file) in str(caught.value)


def test_lfs_pointer_is_refused_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        find_tensors(tmp_path)


def test_dtype_that_torch_lacks_is_kept_in_words(tmp_path: Path) -> None:
    stored = read_header(raw_file(tmp_path / "x", {"a": entry(0, 3, dtype="F4", shape=[6])}, b"xyz"))["a"]
    assert (stored.dtype, stored.dtype_name, stored.shape, stored.size) == (None, "F4", (6,), 3)


def test_unreadable_path_is_refused_in_words(tmp_path: Path) -> None:
    with refused("gone", CheckpointError):
        read_header(tmp_path / "gone")


def test_a_tensor_that_comes_in_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives at most 2 GiB at once; gate_up_proj of gpt-oss-120b in bfloat16 has 4 in each layer."""

    class Slow(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:
            return super().readinto(buffer[:5])

    save_file(TENSORS, tmp_path / "model.safetensors")
    found = find_tensors(tmp_path)
    monkeypatch.setattr(Path, "open", lambda file, *_, **__: Slow(file))
    for name, tensor in TENSORS.items():
        assert torch.equal(read_tensor(found[name]), tensor)


def test_file_that_shrinks_after_the_check_is_an_error_not_garbage(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    stored = find_tensors(tmp_path)["a"]
    file.write_bytes(file.read_bytes()[: stored.offset + 20])
    with refused("a", CheckpointError):
        read_tensor(stored)
    file.unlink()
    with refused("a", CheckpointError):
        read_tensor(stored)


REPEATED = f'{{"weight_map": {{"a": "{SECOND}", "b": "{FIRST}", "c": "{FIRST}", "c": "{SECOND}"}}}}'
# what is done to a directory with shards and this weight map, and what is said of it
DISAGREEING: dict[str, tuple[Callable[[Path, dict[str, str]], object], str]] = {
    "absent": (lambda p, names: (p / SECOND).unlink(), rf"expected 2 shards, but {SECOND} is not there"),
    "in the other shard": (
        lambda p, names: write_index(p, names | {"c": FIRST}),
        rf"expected c in {FIRST}, got it in {SECOND}",
    ),
    "in no shard": (lambda p, names: write_index(p, names | {"d": FIRST}), rf"expected d in {FIRST}, got it in no"),
    "unlisted": (
        lambda p, names: write_index(p, {"a": SECOND, "b": FIRST}),
        rf"expected c in no shard, got it in {SECOND}, not listed",
    ),
    "twice": (
        lambda p, names: save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, p / FIRST),
        rf"expected a in {SECOND}, got it in {SECOND}, in {FIRST} too",
    ),
    "left over": (
        lambda p, names: save_file({"z": TENSORS["a"]}, p / "model-00003-of-00009.safetensors"),
        r"got model-00003-of-00009\.safetensors too.*Delete",
    ),
    "single beside": (
        lambda p, names: save_file(TENSORS, p / "model.safetensors"),
        r"got model\.safetensors too.*Delete",
    ),
    "elsewhere": (
        lambda p, names: write_index(p, names | {"c": "../" + SECOND}),
        r"c should lie in a safetensors file of this directory, got '\.\./",
    ),
    "pickle": (
        lambda p, names: write_index(p, names | {"c": "pytorch_model.bin"}),
        r"c should lie in a safetensors file of this directory, got 'pytorch_model\.bin'",
    ),
    "no map": (lambda p, names: write_index(p, []), "weight_map"),
    "empty map": (lambda p, names: write_index(p, {}), "expected a `weight_map`"),
    "repeated": (lambda p, names: (p / INDEX).write_text(REPEATED), "JSON in UTF-8, but 'c' is there twice"),
    "no json": (lambda p, names: (p / INDEX).write_text("{"), "expected JSON"),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_index_and_shards_that_disagree_are_refused(tmp_path: Path, case: str) -> None:
    damage, expected = DISAGREEING[case]
    damage(tmp_path, sharded(tmp_path, {FIRST: {"b": TENSORS["b"]}, SECOND: {"a": TENSORS["a"], "c": TENSORS["c"]}}))
    with pytest.raises(CheckpointError, match=expected):
        find_tensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "weights.pkl"])
def test_pickles_are_refused_without_opening_them(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was loaded"))
    with pytest.raises(CheckpointError, match=rf"got {re.escape(name)}, a pickle.*never loaded.*convert"):
        find_tensors(tmp_path)


def test_a_list_of_names_says_how_many_it_leaves_out() -> None:
    assert listed("abc") == "a, b, c"
    assert listed("abcde") == "a, b, c and 2 more"


def test_directories_without_a_checkpoint_get_their_own_remedies(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got neither"):
        find_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="there is none"):
        find_tensors(tmp_path / "nowhere")
    save_file({"a": TENSORS["a"]}, tmp_path / FIRST)
    with pytest.raises(CheckpointError, match=rf"got {FIRST} without an index"):
        find_tensors(tmp_path)

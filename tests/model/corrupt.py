"""Corrupt checkpoints from a seed: damage by disks, downloads, tools and attackers.

`case(seed, number)` is one corruption, the same for the same two numbers, so that a run can be cut into slices. It is
applied to a copy of a pristine checkpoint (`write_pristine`): a small random one in either layout, in one file or in
shards, with a tokenizer of words.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from npu_gptoss.model.checkpoint import write_checkpoint
from tests.checkpoints import random_config, random_tensors

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PRISTINE = ("bf16-single", "bf16-shards", "mxfp4-single", "mxfp4-shards")
WORDS = ("alpha", "beta", "gamma")
VOCABULARY = 256


def write_pristine(directory: Path, kind: str) -> None:
    """One of PRISTINE."""
    sizes = {"vocab_size": VOCABULARY, "layers": 2, "hidden": 64, "intermediate": 32, "heads": 4, "experts": 4}
    config = random_config(**sizes, eos_token_id=250, max_positions=4096, mxfp4=kind.startswith("mxfp4"))
    shards = 60_000 if kind.endswith("shards") else 10**9
    write_checkpoint(directory, config, random_tensors(config), max_shard_bytes=shards)
    vocabulary = {**{word: i for i, word in enumerate(WORDS)}, **{f"w{i}": i for i in range(len(WORDS), VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w100"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / TOKENIZER))
    _dump(directory / GENERATION, {"eos_token_id": [250, 251], "do_sample": True})
    _dump(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w100"})


@dataclass(frozen=True)
class Case:
    """One corruption. `silent`: it changes numbers that no check can know to be wrong."""

    number: int
    group: str
    pristine: str
    apply: Callable[[Path], str]  # corrupts a directory; returns what it did, in words
    silent: bool = False


def case(seed: int, number: int) -> Case:
    chance = random.Random(f"{seed}/{number}")
    group = chance.choices(list(GROUPS), [weight for weight, _, _ in GROUPS.values()])[0]
    _, corrupt, silent = GROUPS[group]
    return Case(number, group, chance.choice(PRISTINE), lambda directory: corrupt(directory, chance), silent)


def _dump(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def _weights(directory: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(directory.glob("*.safetensors")))


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _put(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def truncation(directory: Path, chance: random.Random) -> str:
    path = _weights(directory, chance)
    header, data = _header(path)
    size = path.stat().st_size
    start = size - len(data)
    ends = [start + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    cut = chance.choice([0, 1, 7, 8, 9, start - 1, start, *ends, chance.randrange(size)])
    cut = min(cut + chance.choice([-1, 0, 0, 1]), size - 1)
    os.truncate(path, max(cut, 0))
    return f"{path.name} cut to {max(cut, 0)}"


def header_bytes(directory: Path, chance: random.Random) -> str:
    path = _weights(directory, chance)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    if chance.random() < 0.1:
        value = chance.choice([0, 1, length - 1, length + 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
        content[:8] = value.to_bytes(8, "little")
        what = f"length {value}"
    else:
        digits = [i for i in range(8, 8 + length) if chr(content[i]).isdigit()]
        place = chance.choice(digits) if chance.random() < 0.3 else chance.randrange(8, 8 + length)
        content[place] = (
            ord(chance.choice("0123456789")) if place in digits else content[place] ^ 1 << chance.randrange(8)
        )
        what = f"byte {place}"
    path.write_bytes(content)
    return f"{path.name} header {what}"


def header_lies(directory: Path, chance: random.Random) -> str:
    path = _weights(directory, chance)
    header, data = _header(path)
    header.pop("__metadata__", None)
    name = chance.choice(sorted(header))
    other = chance.choice(sorted(header))
    entry = header[name]
    begin, end = entry["data_offsets"]
    lies: dict[str, Callable[[], Any]] = {
        "overlap": lambda: entry.update(data_offsets=[max(begin - 1, 0), end]),
        "gap": lambda: entry.update(data_offsets=[begin + 1, end + 1]),
        "beyond": lambda: entry.update(data_offsets=[begin + 2**40, end + 2**40]),
        "reversed": lambda: entry.update(data_offsets=[end, begin]),
        "negative": lambda: entry.update(data_offsets=[-1, end]),
        "huge shape": lambda: entry.update(shape=[2**62, 2**62]),
        "digits": lambda: entry.update(shape=[int("9" * 4000)]),
        "text for shape": lambda: entry.update(shape="16"),
        "nested shape": lambda: entry.update(shape=[[entry["shape"]]]),
        "shape turned": lambda: entry.update(shape=[*entry["shape"], 1]),
        "zero": lambda: entry.update(shape=[0], data_offsets=[begin, begin]),
        "dtype": lambda: entry.update(dtype=chance.choice(["F16", "F64", "I8", "F8_E4M3", "F4", "\x1b[2J", 7, None])),
        "no dtype": lambda: entry.pop("dtype"),
        "renamed": lambda: header.update({chance.choice(["\x1b[2J", "x" * 10**6, "a/b", "\ud800"]): header.pop(name)}),
        "removed": lambda: header.pop(name),
        "added": lambda: header.update({"extra": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
        "metadata": lambda: header.update(__metadata__=chance.choice([7, [], {"a": 1}, {"a": {"b": []}}, "x"])),
        "same place": lambda: entry.update(data_offsets=header[other]["data_offsets"]),
        "list": lambda: header.update({name: [entry]}),
        "number": lambda: header.update({name: 1e400}),
    }
    raw: dict[str, bytes] = {
        "twice": json.dumps(header).encode()[:-1] + b"," + json.dumps({name: entry}).encode()[1:],
        "50 000 names, one twice": b"{" + b",".join(b'"k%d":{}' % (i % 49_999) for i in range(50_000)) + b"}",
        "deep": b'{"a":' + b"[" * 985 + b"]" * 985 + b"}",
        "very deep": b'{"a":' + b"[" * 100_000 + b"}",
        "no object": b"[1, 2]",
        "no utf-8": json.dumps(header).encode().replace(b"model", b"m\xffdel", 1),
        "spaces": json.dumps(header).encode() + b" " * 10_000,
        "a number of 5000 digits": b'{"a":' + b"9" * 5000 + b"}",
    }
    what = chance.choice([*lies, *raw])
    if what in raw:
        _put(path, raw[what], data)
    else:
        lies[what]()
        _put(path, header, data)
    return f"{path.name} {name}: {what}"


def file_kinds(directory: Path, chance: random.Random) -> str:
    path = directory / chance.choice([CONFIG, GENERATION, TOKENIZER, INDEX, _weights(directory, chance).name])
    long = "x" * 300
    kinds: dict[str, Callable[[], Any]] = {
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "socket": lambda: _bind(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "terminal": lambda: path.symlink_to("/dev/tty"),
        "dangling": lambda: path.symlink_to("nowhere"),
        "loop": lambda: path.symlink_to(path.name),
        "long link": lambda: path.symlink_to(long),
        "process": lambda: path.symlink_to("/proc/self/mem"),
        "empty": lambda: path.write_bytes(b""),
        "zeros": lambda: path.write_bytes(bytes(1000)),
        "sparse": lambda: (path.write_bytes(b""), os.truncate(path, 4 << 30)),
        "pointer": lambda: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "page": lambda: path.write_text("<!DOCTYPE html><html>404</html>"),
        "pickle": lambda: (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR."),
        "absent": lambda: None,
    }
    what = chance.choice(list(kinds))
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    kinds[what]()
    if what == "sparse" and path.suffix == ".safetensors":  # that agrees with its header and with config.json
        _sparse(directory, path, content, chance)
    return f"{path.name} {what}"


def _bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 100 characters only
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(directory: Path, path: Path, content: bytes, chance: random.Random) -> None:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    rows, position = chance.choice([1 << 24, 1 << 31, 1 << 40]), 0
    for name in sorted(header, key=lambda n: header[n]["data_offsets"]):
        entry = header[name]
        begin, end = entry["data_offsets"]
        size = end - begin
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            size = size // entry["shape"][0] * rows
            entry["shape"][0] = rows
        entry["data_offsets"] = [position, position + size]
        position += size
    _put(path, header, b"")
    os.truncate(path, min(path.stat().st_size + position, 1 << 42))
    values = json.loads((directory / CONFIG).read_text())
    _dump(directory / CONFIG, {**values, "vocab_size": rows})


def index(directory: Path, chance: random.Random) -> str:
    path = directory / INDEX
    if not path.exists():
        names = {name: SINGLE for name in _header(directory / SINGLE)[0] if name != "__metadata__"}
        _dump(path, {"metadata": {}, "weight_map": names})
    content = json.loads(path.read_text())
    weight_map = content["weight_map"]
    name = chance.choice(sorted(weight_map))
    shard = weight_map[name]
    odd = ("x" * 300, "\x1b[2J", "a\0b", "\ud800", "../x", "sub/x")
    places = ["../../etc/passwd", "/etc/passwd", "/dev/zero", "x.bin", "", ".", "..", 7, None, [shard]]
    places += [f"{name}.safetensors" for name in odd]
    changes: dict[str, Callable[[], Any]] = {
        **{f"place {place!r:.30}": lambda place=place: weight_map.update({name: place}) for place in places},
        "unlisted": lambda: weight_map.pop(name),
        "unknown": lambda: weight_map.update({"model.extra": shard}),
        "no map": lambda: content.pop("weight_map"),
        "empty map": lambda: weight_map.clear(),
        "list": lambda: content.update(weight_map=[name]),
        "shard gone": lambda: (directory / shard).unlink(),
        "stray": lambda: (directory / "model-00077-of-00099.safetensors").write_bytes(b"x"),
        "metadata": lambda: content.update(metadata={"total_size": -1}),
    }
    raw = {
        "50 000 names, one twice": '{"weight_map": {' + ",".join(f'"k{i % 49_999}":"a"' for i in range(50_000)) + "}}",
        "deep": "[" * 985 + "]" * 985,
        "very deep": "[" * 100_000,
        "cut": json.dumps(content)[: chance.randrange(len(json.dumps(content)))],
        "text": "nonsense",
    }
    what = chance.choice([*changes, *raw])
    if what in raw:
        path.write_text(raw[what])
    else:
        changes[what]()
        _dump(path, content)
    return f"{INDEX} {what}"


VALUES: tuple[Any, ...] = (
    *(None, True, "", "x", [], {}, [[]], {"a": 1}, -1, 0, 1, 3, 0.5, 1e-30, 1e200, 1e308, float("nan"), float("inf")),
    *(2**20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**70, 10**300, 10**400, int("9" * 4000), "\x1b[2J", "y" * 10**6),
    *([1] * 100_000, ["sliding_attention"] * 10**5, "\ud800", {"rope_type": "linear"}, ["full_attention", "x"]),
)


def config(directory: Path, chance: random.Random) -> str:
    path = directory / CONFIG
    values = json.loads(path.read_text())
    kind = chance.random()
    if kind < 0.2:
        return _raw(path, chance)
    section = values if kind < 0.8 else values[chance.choice([k for k in values if isinstance(values[k], dict)])]
    name = chance.choice([*section, "auto_map", "unsloth_version", "num_nextn_predict_layers", "\x1b[2J", "z" * 10**5])
    if chance.random() < 0.1:
        section.pop(name, None)
        what = "removed"
    elif chance.random() < 0.1:  # numbers that agree with each other
        layers = chance.choice([1000, 10**5, 10**6])
        values.update(num_hidden_layers=layers, layer_types=["full_attention"] * layers)
        what = f"{layers} layers"
    else:
        section[name] = chance.choice(VALUES)
        what = f"= {section[name]!r:.30}"
    _dump(path, values)
    return f"{CONFIG} {name:.30} {what}"


def _raw(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    changes: dict[str, Callable[[], bytes]] = {
        "cut": lambda: content[:place],
        "bit": lambda: content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :],
        "deep": lambda: b'{"a":' + b"[" * 985 + b"]" * 985 + b"}",
        "very deep": lambda: b"[" * 100_000,
        "50 000 names, one twice": lambda: b"{" + b",".join(b'"k%d":1' % (i % 49_999) for i in range(50_000)) + b"}",
        "mark": lambda: b"\xef\xbb\xbf" + content,
        "utf-16": lambda: content.decode("utf-8", "replace").encode("utf-16"),
        "no utf-8": lambda: content.replace(b":", b":\xff", 1),
        "digits": lambda: content.replace(b":", b":" + b"9" * 5000, 1),
        "nothing": lambda: b"",
        "null": lambda: b"null",
        "list": lambda: b"[]",
        "text": lambda: b'"x"',
        "spaces": lambda: content + b"\n" * 1000,
    }
    what = chance.choice(list(changes))
    path.write_bytes(changes[what]())
    return f"{path.name} {what}"


def generation(directory: Path, chance: random.Random) -> str:
    path = directory / GENERATION
    if chance.random() < 0.4:
        return _raw(path, chance)
    values = json.loads(path.read_text())
    name = chance.choice(["eos_token_id", "temperature", "top_p", "top_k", "max_new_tokens", "pad_token_id", "note"])
    values[name] = chance.choice([*VALUES, VOCABULARY, 10**12, [250, 10**12], ["x"], [True], 250])
    _dump(path, values)
    return f"{GENERATION} {name} = {values[name]!r:.30}"


def tokenizer(directory: Path, chance: random.Random) -> str:
    path = directory / TOKENIZER
    values = json.loads(path.read_text())
    changes: dict[str, Callable[[], Any]] = {
        "panic": lambda: values.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(A+)+$"}, "behavior": "Isolated", "invert": False}
        ),
        "bad pattern": lambda: values.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
        ),
        "ids beyond": lambda: values["model"]["vocab"].update(far=chance.choice([VOCABULARY, 10**6, 2**32 - 1])),
        "negative id": lambda: values["model"]["vocab"].update(far=-1),
        "other type": lambda: values["model"].update(type=chance.choice(["BPE", "Unigram", "x", 7, None])),
        "no model": lambda: values.pop("model"),
        "decoder": lambda: values.update(decoder={"type": "x"}),
        "special": lambda: values.update(added_tokens=[{"id": 2**40, "content": "x"}]),
    }
    what = chance.choice([*changes, *["raw"] * 8])
    if what == "raw":
        return _raw(path, chance)
    changes[what]()
    _dump(path, values)
    return f"{TOKENIZER} {what}"


def values(directory: Path, chance: random.Random) -> str:
    """A NaN, an infinity, or the scale that stands for NaN, somewhere in a tensor."""
    path = _weights(directory, chance)
    header, data = _header(path)
    kinds = {"BF16": [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"], "U8": [b"\xff"]}
    names = [n for n, e in header.items() if n != "__metadata__" and not n.endswith("_blocks")]
    if not names:
        return truncation(directory, chance)
    name = chance.choice(names)
    begin, end = header[name]["data_offsets"]
    word = chance.choice(kinds[header[name]["dtype"]])
    place = chance.randrange(begin, end, len(word))
    _put(path, header, data[:place] + word + data[place + len(word) :])
    return f"{name} at {place - begin}: {word.hex()}"


def bits(directory: Path, chance: random.Random) -> str:
    """A flipped bit in a weight: the format has no checksum."""
    path = _weights(directory, chance)
    header, data = _header(path)
    place = chance.randrange(len(data))
    _put(path, header, data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
    return f"{path.name} data byte {place}"


def mixed(directory: Path, chance: random.Random) -> str:
    did = []
    for corrupt in chance.sample([truncation, header_bytes, index, config, generation, tokenizer, values], 2):
        try:
            did.append(corrupt(directory, chance))
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
            continue  # the first has left nothing for the second to corrupt
    return "; ".join(did)


# group -> its share, what corrupts, and whether it may change numbers that no check can know to be wrong
GROUPS: dict[str, tuple[int, Callable[[Path, random.Random], str], bool]] = {
    "truncation": (10, truncation, False),
    "header bytes": (18, header_bytes, False),
    "header lies": (10, header_lies, False),
    "file kinds": (10, file_kinds, False),
    "index": (8, index, False),
    "config": (22, config, True),
    "generation_config": (6, generation, True),
    "tokenizer": (6, tokenizer, True),
    "values": (5, values, False),
    "flipped weight bits": (3, bits, True),
    "mixed": (6, mixed, True),
}

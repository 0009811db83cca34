"""Every tensor of a checkpoint is accounted for before one is read, and loading stays near the result's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_gptoss.model import checkpoint
from npu_gptoss.model.assembly import assemble
from npu_gptoss.model.checkpoint import (
    CheckpointError,
    check_checkpoint,
    expand_stream,
    expected_tensors,
    iterate_tensors,
    write_checkpoint,
)
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.sharding import Shard
from tests.checkpoints import random_config, random_tensors, write_random_checkpoint
from tests.model.published import gpt_oss_20b, published_config
from tests.refused import refused

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts."


def small_config(*, mxfp4: bool = False, dtype: str = "bfloat16") -> GptOssConfig:
    return random_config(vocab_size=64, layers=2, hidden=64, intermediate=32, experts=4, mxfp4=mxfp4, dtype=dtype)


def stored(directory: Path, tensors: Tensors) -> Path:
    """Writes tensors unchanged, right or wrong."""
    save_file(tensors, directory / "model.safetensors")
    return directory


def loaded(directory: Path, config: GptOssConfig, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return dict(expand_stream(iterate_tensors(directory, config, dtype=dtype, progress=False), dtype))


def test_published_checkpoints_have_these_tensors_and_bytes() -> None:
    """Count and total_size of the published indexes. Names and shapes are held against transformers below."""
    for config, count, size in (
        (gpt_oss_20b(), 459, 13_761_264_768),
        (GptOssConfig.from_dict(published_config(36, 128)), 687, 65_248_815_744),
    ):
        specs = expected_tensors(config)
        assert len(specs) == count
        assert sum(torch.Size(spec.shape).numel() * spec.dtypes[0].itemsize for spec in specs.values()) == size


@pytest.mark.parametrize("mxfp4", [False, True])
def test_names_and_shapes_equal_transformers(mxfp4: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = small_config()
    hub = transformers.GptOssConfig.from_dict(config.to_dict())
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(hub)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = {name: spec.shape for name, spec in expected_tensors(replace(config, quantization=None)).items()}
    assert ours == theirs
    if mxfp4:
        packed = expected_tensors(replace(config, quantization="mxfp4"))
        merged = {name.removesuffix("_blocks").removesuffix("_scales") for name in packed}
        assert merged == theirs.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_layouts_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = write_random_checkpoint(tmp_path / "bf16", vocab_size=64, hidden=64, intermediate=32)
    packed = write_random_checkpoint(tmp_path / "mxfp4", vocab_size=64, hidden=64, intermediate=32, mxfp4=True)
    one, other = loaded(tmp_path / "bf16", plain, dtype), loaded(tmp_path / "mxfp4", packed, dtype)
    assert list(one) == list(other) == list(expected_tensors(plain))
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype == dtype
        assert torch.equal(tensor, other[name]), name
    assert GptOssConfig.from_directory(tmp_path / "mxfp4") == packed
    assert GptOssConfig.from_directory(tmp_path / "bf16") == plain


def wrong(tensors: Tensors, name: str, tensor: torch.Tensor | None) -> Tensors:
    """One tensor replaced, added or (None) left out."""
    changed = {n: t for n, t in tensors.items() if n != name}
    return changed if tensor is None else changed | {name: tensor}


SINKS = "model.layers.1.self_attn.sinks"
FAULTS = [
    ("missing", SINKS, None, rf"got 1 missing \({SINKS}\)"),
    ("missing bias", EXPERTS + "down_proj_bias", None, r"1 missing \(.*down_proj_bias\)"),
    ("unexpected", "model.layers.2.self_attn.sinks", torch.zeros(8), r"1 unexpected \(model\.layers\.2\."),
    ("adapter", "model.layers.0.self_attn.q_proj.lora_A", torch.zeros(8), r"1 unexpected \(.*lora_A\)"),
    ("shape", SINKS, torch.zeros(4), rf"{SINKS} should have shape \[8\] by config\.json, got \[4\]"),
    (
        "turned",
        EXPERTS + "down_proj",
        torch.zeros(4, 64, 32),
        r"down_proj should have shape \[4, 32, 64\].*got \[4, 64",
    ),
    ("float16", SINKS, torch.zeros(8).half(), rf"{SINKS} should have dtype bfloat16 or float32, got float16\. .*range"),
    ("float8", SINKS, torch.zeros(8).to(torch.float8_e4m3fn), "got float8_e4m3fn"),
    ("integers", SINKS, torch.zeros(8).to(torch.int8), "got int8"),
]


@pytest.mark.parametrize(("name", "tensor", "expected"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_fault_is_found_before_any_tensor_is_read(tmp_path, monkeypatch, name, tensor, expected) -> None:
    config = small_config()
    if tensor is not None and tensor.dtype == torch.float32:
        tensor = tensor.to(torch.bfloat16)
    stored(tmp_path, wrong(random_tensors(config), name, tensor))
    monkeypatch.setattr(checkpoint, "read_tensor", lambda _: pytest.fail("a tensor was read before the check was over"))
    with pytest.raises(CheckpointError, match=expected) as caught:
        iterate_tensors(tmp_path, config, dtype=torch.bfloat16)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "field"),
    [
        (EXPERTS + "down_proj_scales", None, "model.layers.1.mlp.experts.down_proj_scales"),
        (EXPERTS + "down_proj_scales", torch.zeros(4, 64, 2), "model.layers.1.mlp.experts.down_proj_scales"),
        (EXPERTS + "down_proj_scales", torch.zeros(4, 64, 1), "model.layers.1.mlp.experts.down_proj_scales"),
        (EXPERTS + "down_proj_blocks", torch.zeros(4, 64, 1, 16).char(), "model.layers.1.mlp.experts.down_proj_blocks"),
    ],
)
def test_fault_in_mxfp4_experts_is_named(tmp_path: Path, name: str, tensor: torch.Tensor | None, field: str) -> None:
    config = small_config(mxfp4=True)
    stored(tmp_path, wrong(random_tensors(config), name, tensor))
    with refused(field, CheckpointError):
        check_checkpoint(tmp_path, config)


def test_layout_that_contradicts_the_config_is_one_sentence(tmp_path: Path) -> None:
    plain, packed = small_config(), small_config(mxfp4=True)
    stored(tmp_path, random_tensors(plain))
    with refused("quantization_config", CheckpointError):
        check_checkpoint(tmp_path, packed)
    stored(tmp_path, random_tensors(packed))
    with refused("quantization_config", CheckpointError):
        check_checkpoint(tmp_path, plain)
    stored(tmp_path, random_tensors(plain) | {n: t for n, t in random_tensors(packed).items() if EXPERTS in n})
    with refused("model.layers.1.mlp.experts.down_proj_blocks", CheckpointError):
        check_checkpoint(tmp_path, packed)


def test_damaged_scales_are_named(tmp_path: Path) -> None:
    config = small_config(mxfp4=True)
    tensors = random_tensors(config)
    tensors[EXPERTS + "gate_up_proj_scales"][2, 5, 0] = 255
    write_checkpoint(tmp_path, config, tensors)
    with refused("model.layers.1.mlp.experts.gate_up_proj", CheckpointError):
        loaded(tmp_path, config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_loading_as_another_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    for load in (
        lambda: iterate_tensors(tmp_path, small_config(), dtype=dtype),
        lambda: next(expand_stream([], dtype)),
    ):
        with refused("dtype", CheckpointError):
            load()


def test_halves_may_come_in_any_order_and_far_apart() -> None:
    tensors = random_tensors(small_config(mxfp4=True))
    want = dict(expand_stream(tensors.items(), torch.bfloat16))
    assert want.keys() == expected_tensors(small_config()).keys()
    names = sorted(tensors)
    for order in (names, names[::-1], sorted(names, key=lambda name: name[::-1])):
        got = dict(expand_stream(((name, tensors[name]) for name in order), torch.bfloat16))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    passed = [name for name in tensors if not name.endswith(("_blocks", "_scales"))]
    assert all(want[name] is tensors[name] for name in passed)


def test_halves_that_do_not_fit_are_named() -> None:
    tensors = random_tensors(small_config(mxfp4=True))
    pair = [(EXPERTS + "down_proj_blocks", tensors[EXPERTS + "down_proj_blocks"])]
    pair += [(EXPERTS + "down_proj_scales", tensors[EXPERTS + "gate_up_proj_scales"])]
    with refused("model.layers.1.mlp.experts.down_proj", CheckpointError):
        list(expand_stream(pair, torch.bfloat16))


MEMORY_PROGRAM = """
import json, sys
from pathlib import Path
import torch
from npu_gptoss.model.checkpoint import expand_stream, iterate_tensors
from npu_gptoss.model.config import GptOssConfig

torch.set_num_threads(1)
directory = Path(sys.argv[1])
config = GptOssConfig.from_directory(directory)


def mebibytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def load(keep):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, kept = mebibytes("VmRSS"), []
    stored = iterate_tensors(directory, config, dtype=torch.bfloat16, progress=False)
    for name, tensor in expand_stream(stored, torch.bfloat16):
        if keep:
            kept.append(tensor)
    return mebibytes("VmHWM") - before, sum(t.numel() * t.element_size() for t in kept) / 2**20


load(keep=False)  # the first one also pays for the code's own pages
print(json.dumps({"drop": load(keep=False), "keep": load(keep=True)}))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not reset peak memory")
@pytest.mark.parametrize("mxfp4", [False, True])
def test_peak_memory_is_the_result_and_one_layer(tmp_path: Path, mxfp4: bool) -> None:
    """Reading all first, or keeping yielded tensors, would cost the whole result once more."""
    config = random_config(vocab_size=64, layers=4, hidden=1024, intermediate=768, experts=8, mxfp4=mxfp4)
    layer = 2 * 3 * 8 * 1024 * 768 / 2**20  # the experts of one: 36 MiB

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in expected_tensors(config).items():
            yield name, torch.ones(spec.shape, dtype=spec.dtypes[0])

    write_checkpoint(tmp_path, config, tensors())
    # tensors of real size are mapped one by one; so that small ones are too, the heap is not to keep what they free
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    measured = json.loads(done.stdout)
    peak, result = measured["keep"]
    assert 4 * layer < result < peak * 1.05, "the measurement misses the result itself"
    assert peak < result + layer, f"{peak:.0f} MiB for a result of {result:.0f} MiB and layers of {layer:.0f}"
    assert measured["drop"][0] < 1.2 * layer, f"{measured['drop'][0]:.0f} MiB where nothing is kept"


@pytest.mark.parametrize("stage", ["expansion", "share of a rank"])
def test_nothing_that_was_handed_on_is_held_while_the_next_tensor_is_read(stage: str) -> None:
    """The embedding of gpt-oss alone has 1.2 GB."""
    alive: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def read(tensor: torch.Tensor) -> torch.Tensor:
        held.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(tensor))
        return tensor

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", read(torch.zeros(64, 32))
        yield "model.norm.weight", read(torch.zeros(32))
        yield EXPERTS + "down_proj_blocks", read(torch.zeros(4, 64, 1, 16, dtype=torch.uint8))
        yield EXPERTS + "down_proj_scales", read(torch.zeros(4, 64, 1, dtype=torch.uint8))
        yield "lm_head.weight", read(torch.zeros(64, 32))
        yield "model.norm.weight", read(torch.zeros(32))

    stream = expand_stream(source(), torch.float32) if stage == "expansion" else Shard(0, 2).cut_all(source())
    while next(stream, None) is not None:
        pass  # nobody else holds what came
    half = int(stage == "expansion")  # blocks wait for their scales
    assert held == [0, 0, 0, half, 0, 0]


def test_converted_tensor_is_freed_before_the_next_is_read() -> None:
    config = small_config()
    last: list[weakref.ref[torch.Tensor]] = []

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        assert not last or last[-1]() is None
        last.append(weakref.ref(tensor))
        return tensor

    stream = ((name, wide(tensor.float())) for name, tensor in random_tensors(config).items())
    assemble(config, stream, "cpu", torch.bfloat16)
    assert len(last) == len(expected_tensors(config))


def test_large_checkpoint_is_written_in_shards_with_an_index(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors, max_shard_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    held = {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["weight_map"] == held
    assert not (tmp_path / "model.safetensors").exists()
    for shard in shards:
        values = load_file(shard)
        assert len(values) == 1 or sum(t.numel() * t.element_size() for t in values.values()) <= 40_000
    got = loaded(tmp_path, config)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_written_files_are_whole_and_readable_by_others(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "checkpoint"
    config = small_config()
    tensors = random_tensors(config)
    write_checkpoint(directory, config, iter(tensors.items()))
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    written = load_file(directory / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    modes = {file.stat().st_mode & 0o777 for file in directory.iterdir()}
    (tmp_path / "plain").write_text("")
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_views_and_shared_memory_are_written_as_their_values(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].t().contiguous().t()
    write_checkpoint(tmp_path, config, tensors)
    got = loaded(tmp_path, config)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


WRITE_FAULTS = [
    ("missing", SINKS, None, r"1 missing"),
    ("unexpected", "model.extra", torch.zeros(1), r"1 unexpected \(model\.extra\)"),
    ("shape", SINKS, torch.zeros(3).bfloat16(), r"should have shape \[8\]"),
    ("dtype", SINKS, torch.zeros(8).half(), "got float16"),
    ("mixed", SINKS, torch.zeros(8), "one dtype"),
]


@pytest.mark.parametrize(
    ("name", "tensor", "expected"), [f[1:] for f in WRITE_FAULTS], ids=[f[0] for f in WRITE_FAULTS]
)
def test_wrong_tensors_leave_nothing_behind(tmp_path, name, tensor, expected) -> None:
    config = small_config()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=expected):
        write_checkpoint(tmp_path, config, wrong(random_tensors(config), name, tensor), max_shard_bytes=10_000)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_config_comes_last_so_that_a_directory_with_one_is_complete(tmp_path, monkeypatch) -> None:
    renamed = []
    right = Path.replace
    monkeypatch.setattr(Path, "replace", lambda file, target: (renamed.append(target.name), right(file, target)))
    config = small_config()
    write_checkpoint(tmp_path, config, random_tensors(config), max_shard_bytes=40_000)
    assert renamed[-2:] == ["model.safetensors.index.json", "config.json"]
    assert sorted(renamed) == sorted(file.name for file in tmp_path.iterdir())


def test_weights_are_never_written_over(tmp_path: Path) -> None:
    config = small_config()
    write_checkpoint(tmp_path, config, random_tensors(config, seed=1), max_shard_bytes=40_000)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="without weights, got model"):
        write_checkpoint(tmp_path, config, random_tensors(config, seed=2))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_config_and_tensors_must_agree_on_the_dtype(tmp_path: Path) -> None:
    config = small_config(dtype="float32")
    tensors = random_tensors(config)
    with refused("dtype", CheckpointError):
        write_checkpoint(tmp_path, replace(config, dtype="bfloat16"), tensors)
    write_checkpoint(tmp_path, replace(config, dtype=None), tensors)
    assert GptOssConfig.from_directory(tmp_path).dtype == "float32"


def test_tensor_given_twice_is_refused(tmp_path: Path) -> None:
    config = small_config()
    items = [*random_tensors(config).items()]
    with refused("model.layers.0.input_layernorm.weight", CheckpointError):
        write_checkpoint(tmp_path, config, [*items, items[3]])

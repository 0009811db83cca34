"""vLLM reads each form of a checkpoint as the offline engine does, on each release, and refuses what that refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.platforms import current_platform

from npu_gptoss.harmony.rendering import CONTROL
from npu_gptoss.model.check import check_directory
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import accounted, expected_tensors
from npu_gptoss.serving import tokenizer_file
from npu_gptoss.serving.compat.start import checkpoint
from npu_gptoss.serving.loading import readable
from npu_gptoss.serving.releases import here
from npu_gptoss.serving.releases import vllm as names
from npu_gptoss.serving.releases.vllm import as_written, load_tokenizer
from tests.model.forms import FORMS, Form, as_transformers_5, changed_config, write_bases
from tests.refused import refused

TEXT = "alpha w7 beta"
REPAIRS = ("config-spellings", "tokenizer-class")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has no device here."""
    if current_platform.device_type not in here().devices:
        monkeypatch.setattr(type(current_platform), "device_type", here().devices[0])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize("form", [form for form in FORMS if form.served], ids=lambda form: form.name)
def test_form_is_not_read_differently_by_vllm(form: Form, bases: Path, tmp_path: Path, patched) -> None:
    folder = form.written(tmp_path / "model", bases)
    checkpoint.check(EngineArgs(model=str(folder), max_model_len=256))
    with patched(*REPAIRS):
        model = EngineArgs(model=str(folder), max_model_len=256).create_model_config()
        tokenizer = load_tokenizer(model)
    assert model.architectures == ["GptOssForCausalLM"]
    config = GptOssConfig.from_dict(as_written(model.hf_config.to_dict()))
    assert config == check_directory(folder)
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    files = [str(folder / name) for name in sorted(set(named))]
    loaded = readable(safetensors_weights_iterator(files, use_tqdm_on_load=False), config, str(folder))
    assert len(list(accounted(loaded, config, folder))) == len(expected_tensors(config))
    assert tokenizer.encode(TEXT) == [0, 7, 1]
    assert tokenizer.decode([0, 1]) == "alpha beta"


def test_hub_is_asked_about_a_tokenizer_in_a_folder(bases: Path, tmp_path: Path, patched, monkeypatch) -> None:
    """By transformers 5, for a vocabulary of the published size: it refuses a path, and without network a name."""

    monkeypatch.setattr("huggingface_hub.model_info", Mock(side_effect=AssertionError))
    if transformers.__version__ >= "5":  # 4 has no such file
        monkeypatch.setattr("transformers.tokenization_utils_tokenizers.is_offline_mode", lambda: False)
    folder = next(form for form in FORMS if form.served).written(tmp_path / "model", bases)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(100_001)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    with patched(*REPAIRS):
        made = AutoTokenizer.from_pretrained(str(folder))
    assert made.name_or_path == str(folder)
    assert made.encode("w7 w9") == [7, 9]


TOKENIZER, MAP = "tokenizer_config.json", "special_tokens_map.json"
TYPES = (None, True, -1, "x", [], ["x"], {}, {"a": 1}, {"content": "<|zz|>", "special": True})
FIELDS = """
    additional_special_tokens added_tokens_decoder add_bos_token add_prefix_space auto_map backend bos_token
    clean_up_tokenization_spaces eos_token extra_special_tokens fast_tokenizer_files from_slow init_inputs is_local
    model_input_names model_max_length model_specific_special_tokens name_or_path pad_token padding_side
    split_special_tokens tokenizer_class tokenizer_file tokenizer_object truncation_side unk_token
"""
ADDED = {"content": "<|zz|>", "special": True, "lstrip": True, "rstrip": True, "normalized": False}


RIGHT = [[0, 7, 1, 100, 250, 100], "alpha w7 beta w100 w250 w100", 256, 250]


def read(tokenizer: Any) -> list[object]:
    """Everything of a tokenizer that reaches an answer."""
    ids = tokenizer.encode(TEXT + " , w250 .")
    return [ids, tokenizer.decode(ids), len(tokenizer), tokenizer.eos_token_id]


def loaded(folder: Path, patched) -> list[object]:
    """From a new folder each time: vLLM keeps the tokenizer of an old one."""
    with patched(*REPAIRS):
        return read(load_tokenizer(EngineArgs(model=str(folder), max_model_len=256).create_model_config()))


@pytest.mark.parametrize("field", FIELDS.split())
def test_field_beside_the_tokenizer_changes_no_token(field: str, bases: Path, tmp_path: Path, patched) -> None:
    for number, value in enumerate(TYPES):
        folder = tmp_path / str(number)
        shutil.copytree(bases / "bf16-single", folder)
        values = json.loads((folder / TOKENIZER).read_text()) | {field: value}
        (folder / TOKENIZER).write_text(json.dumps(values))
        checkpoint.check(EngineArgs(model=str(folder), max_model_len=256))
        assert loaded(folder, patched) == RIGHT, value


BESIDE = {
    "a token that only its list has": {TOKENIZER: {"added_tokens_decoder": {"256": ADDED}}},
    "another name for a token": {TOKENIZER: {"added_tokens_decoder": {"7": ADDED | {"content": "w7"}}}},
    "no file": {TOKENIZER: None},
    "a token of the map": {MAP: {"pad_token": "<pad>", "additional_special_tokens": ["<img>"]}},
    "a map that is a list": {MAP: []},
    "an old list of tokens": {TOKENIZER: {}, "added_tokens.json": {"<|zz|>": 300, "a": "b"}},
    "a token that ends nothing": {TOKENIZER: {"eos_token": "w7"}},
    "a class of Mistral": {TOKENIZER: {"tokenizer_class": "MistralCommonTokenizer"}},
    "a token's text with its flags": {TOKENIZER: {"eos_token": ADDED | {"content": "w250"}}},
}


@pytest.mark.parametrize("files", BESIDE.values(), ids=BESIDE)
def test_file_beside_the_tokenizer_changes_no_token(files, bases: Path, tmp_path: Path, patched) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases / "bf16-single", folder)
    for name, values in files.items():
        (folder / name).unlink(missing_ok=True)
        if values is not None:
            (folder / name).write_text(json.dumps(values))
    checkpoint.check(EngineArgs(model=str(folder), max_model_len=256))
    assert loaded(folder, patched) == RIGHT


def test_tokenizer_of_a_hub_or_without_config_json_is_read_alike(bases: Path, tmp_path: Path, patched) -> None:
    from transformers import AutoTokenizer

    repository = tmp_path / "models--org--model"
    folder = repository / "snapshots" / "a"
    shutil.copytree(bases / "bf16-single", folder)
    (folder / TOKENIZER).write_text('{"extra_special_tokens": null}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a")
    with patched(*REPAIRS):
        hub = AutoTokenizer.from_pretrained("org/model", cache_dir=tmp_path, local_files_only=True)
        assert read(hub) == RIGHT
        (folder / "config.json").unlink()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([*CONTROL])
        tokenizer.save(str(folder / "tokenizer.json"))
        assert read(AutoTokenizer.from_pretrained(folder))[:2] == RIGHT[:2]


def test_tokenizer_takes_what_a_program_gives_it(bases: Path, patched) -> None:
    from transformers import AutoTokenizer

    with patched(*REPAIRS):
        given = AutoTokenizer.from_pretrained(bases / "bf16-single", padding_side="left", pad_token="w3", use_fast=True)
    assert given(["alpha", "alpha beta"], padding=True).input_ids == [[3, 0], [0, 1]]
    assert given.model_input_names == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    "fields",
    [
        {"swiglu_limit": 7, "router_aux_loss_coef": 0, "initializer_range": 0},
        dict.fromkeys(("auto_map", "id2label", "label2id", "num_labels", "problem_type", "max_length", "vocab")),
        {"id2label": ["x"], "label2id": 7, "num_labels": "2", "problem_type": "x"},
        {"id2label": {"a": 1}, "label2id": {"a": 1}, "num_labels": 2.5},
    ],
    ids=["whole numbers", "null", "labels", "names for numbers"],
)
def test_config_without_a_meaning_of_its_own_starts(fields, bases: Path, tmp_path: Path, patched) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases / "bf16-single", folder)
    changed_config(**fields)(folder)
    with patched(*REPAIRS):
        model = EngineArgs(model=str(folder), max_model_len=256).create_model_config()
    assert GptOssConfig.from_dict(as_written(model.hf_config.to_dict())) == check_directory(bases / "bf16-single")


YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "truncate": False}
OVERRIDES = (
    *({name: YARN | theta} for name in ("rope_scaling", "rope_parameters") for theta in ({}, {"rope_theta": 20000.0})),
    *({"rope_theta": 20000.0}, {"num_experts_per_tok": 2}, {"sliding_window": 64}),
)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=str)
@pytest.mark.parametrize("form", [None, as_transformers_5])
def test_override_is_not_lost_by_the_spelling_of_the_file(
    form, overrides, bases: Path, tmp_path: Path, patched, monkeypatch
) -> None:
    made: list[ModelConfig] = []  # vLLM's start goes no further than this
    folder = tmp_path / "model"
    shutil.copytree(bases / "bf16-single", folder)
    changed_config(rope_theta=10000.0)(folder)
    if form is not None:
        form(folder)
    with patched(*REPAIRS, "checkpoint-check"), monkeypatch.context() as patching:
        build = EngineArgs.create_model_config
        patching.setattr(EngineArgs, "create_model_config", lambda options: made.append(build(options)) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            EngineArgs(model=str(folder), max_model_len=256, hf_overrides=overrides).create_engine_config()
    (model,) = made
    found = GptOssConfig.from_dict(as_written(model.hf_config.to_dict()))
    assert found == check_directory(folder, overrides=overrides) != check_directory(folder)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.served], ids=lambda form: form.name)
def test_form_is_not_refused_differently_by_vllm(form: Form, bases: Path, tmp_path: Path) -> None:
    folder = form.written(tmp_path / "model", bases)
    with refused(form.field or str(folder)):
        checkpoint.check(EngineArgs(model=str(folder), max_model_len=256))


def test_first_chat_reads_the_tokenizer_where_another_device_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.33 on a CPU: the front end answers there, and its encoder takes seconds."""

    class Options:
        def __post_init__(self) -> None: ...

        def create_engine_config(self) -> Any:
            """maybe_override_with_speculators(self.create_model_config())"""
            return SimpleNamespace(model_config="ours")

    monkeypatch.setattr(names, "current_platform", SimpleNamespace(device_type="another"))
    monkeypatch.setattr(tokenizer_file, "served", [])
    module = ModuleType("arg_utils")
    module.EngineArgs = Options
    checkpoint.install_check(module)
    Options().create_engine_config()
    assert tokenizer_file.served == ["ours"]

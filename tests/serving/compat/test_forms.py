"""vLLM reads each form of a checkpoint as the offline engine does, on each release, and refuses what that refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.platforms import current_platform

from npu_gptoss.errors import InputError
from npu_gptoss.model.check import check_directory
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import accounted, expected_tensors
from npu_gptoss.serving.compat.start import checkpoint
from npu_gptoss.serving.loading import readable
from npu_gptoss.serving.releases import here
from npu_gptoss.serving.releases.vllm import as_written, load_tokenizer
from tests.model.forms import FORMS, Form, as_transformers_5, changed_config, write_bases

pytestmark = pytest.mark.serving
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
    with pytest.raises(InputError) as caught:
        checkpoint.check(EngineArgs(model=str(folder), max_model_len=256))
    assert caught.value.field == (form.field or str(folder))

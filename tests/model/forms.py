"""Forms of checkpoints that people have, made small: what tools publish, train and convert. docs/files.md lists them.

Each form changes a good checkpoint in the way of its tool. It is served with the numbers of that checkpoint, or it is
refused in one sentence whose remedy is true.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from npu_gptoss.model.config_fields import PUBLISHED_YARN
from tests.model.corrupt import VOCABULARY, write_pristine

Make = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]
ABSENT = object()
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = "model.layers.0."
EXPERTS = LAYER + "mlp.experts."
CONVERT, MERGE = "`npu-gptoss convert MODEL OUT`", "`npu-gptoss convert BASE OUT --lora MODEL`"
ANOTHER, EXPORT = "take the checkpoint it was made from", "export it with the trainer"
RANK_FILE, LINEAR = "model-rank-0-part-0.safetensors", ("experts.{}.gate_proj", "experts.{}.down_proj")
DTYPES, YARN = ("torch_dtype", "dtype"), {"rope_type": "yarn", **PUBLISHED_YARN}


@dataclass(frozen=True)
class Form:
    """name, by: the page's words for the files and for the tools that write them. make: changes a copy of `base`.

    do: the page's remedy for a form that is refused. field: that the refusal names; by default the folder. tool: named
    in the refusal. base: its numbers are the form's, unless `oracle`: then transformers computes them from the form.
    mend: follows the refusal's remedy; then the form has its base's numbers.
    """

    name: str
    by: str
    make: Make
    do: str = ""
    base: str = "bf16-single"
    field: str | None = None
    tool: str = ""
    oracle: bool = False
    mend: Make | None = None

    @property
    def served(self) -> bool:
        return not self.do

    def written(self, folder: Path, pristine: Path) -> Path:
        """The form in a new folder; pristine: has the good checkpoints."""
        shutil.copytree(pristine / self.base, folder)
        self.make(folder)
        return folder


def write_bases(folder: Path) -> Path:
    for base in ("bf16-single", "bf16-shards", "mxfp4-single", "mxfp4-shards"):
        (folder / base).mkdir(parents=True)
        write_pristine(folder / base, base)
    return folder


def _all(*makes: Make) -> Make:
    return lambda folder: [make(folder) for make in makes]


def _json(file: str, **fields: Any) -> Make:
    """Sets fields of a JSON file, or removes them (ABSENT)."""

    def make(folder: Path) -> None:
        path = folder / file
        values = (json.loads(path.read_text()) if path.exists() else {}) | fields
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not ABSENT}))

    return make


def changed_config(**fields: Any) -> Make:
    return _json("config.json", **fields)


def _rope(**fields: Any) -> Make:
    def make(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        changed_config(rope_scaling=values["rope_scaling"] | fields)(folder)

    return make


def as_transformers_5(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    rope = values["rope_scaling"] | {"rope_theta": values["rope_theta"]}
    changed_config(rope_parameters=rope, dtype=values["torch_dtype"], swiglu_alpha=1.702, experts_implementation=None)(
        folder
    )
    changed_config(**dict.fromkeys(("rope_scaling", "rope_theta", "torch_dtype", "experts_implementation"), ABSENT))(
        folder
    )


def _tensors(change: Callable[[Tensors], Tensors]) -> Make:
    def make(folder: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in change(load_file(folder / SINGLE)).items()}
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})

    return make


def _renamed(change: Callable[[str], str]) -> Make:
    return _tensors(lambda tensors: {change(name): tensor for name, tensor in tensors.items()})


def _replaced(old: str, new: str) -> Make:
    """In the names of tensors."""
    return _renamed(lambda name: name.replace(old, new))


def _without(name: str) -> Make:
    return lambda folder: (folder / name).unlink()


def _split_experts(gate_up: str, down: str) -> Make:
    """Experts as modules of their own, by names with the expert's number."""

    def split(tensors: Tensors) -> Tensors:
        made = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
        for name in tensors.keys() - made.keys():
            stem, _, matrix = name.rpartition(".")
            for number, expert in enumerate(tensors[name]):
                module = (gate_up if matrix.startswith("gate_up") else down).format(number)
                kind = "bias" if matrix.endswith("bias") else "weight"
                made[f"{stem}.{module}.{kind}"] = expert.movedim(0, -1).clone()
        return made

    return _tensors(split)


def _files(*names: str, size: int = 20) -> Make:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"{}" if size < 100 and name.endswith(".json") else b"x")
            os.truncate(folder / name, 2 if name.endswith(".json") and size < 100 else size)

    return make


def _instead(*names: str) -> Make:
    """Other files in place of the weights."""

    def make(folder: Path) -> None:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        _files(*names)(folder)

    return make


def _method(name: str, **fields: Any) -> Make:
    return changed_config(quantization_config={"quant_method": name, **fields})


def _tokenizer(change: Callable[[Tokenizer], object]) -> Make:
    def make(folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))

    return make


def _template(text: str) -> Make:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def _links(folder: Path) -> None:
    """As the hub's cache: a folder of links into another one."""
    blobs = folder.with_name("blobs")
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)


def _from_zero(folder: Path) -> None:
    """Counts shards from 0, with one less than their number in the name, as the published 120b."""
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    new = {old: f"model-{i:05}-of-{len(shards) - 1:05}.safetensors" for i, old in enumerate(shards)}
    for old in shards:
        (folder / old).rename(folder / f"new-{new[old]}")
    for name in new.values():
        (folder / f"new-{name}").rename(folder / name)
    index["weight_map"] = {name: new[file] for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def _pruned(experts: int) -> Make:
    cut = _tensors(lambda all_: {n: t[:experts] if ".router." in n or ".experts." in n else t for n, t in all_.items()})
    return _all(
        cut, changed_config(num_local_experts=experts, num_experts_per_tok=min(experts, 4), output_scores=False)
    )


def _grown(tensors: Tensors) -> Tensors:
    more = torch.nn.functional.pad
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return tensors | {name: more(tensors[name], (0, 0, 0, 8)) for name in names}


def _pruned_alone(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    _pruned(3)(folder)
    (folder / "config.json").write_text(config)


def _hidden(folder: Path) -> None:
    _files(*(f"._{file.name}" for file in folder.glob("model-*")))(folder)


def _wrapped(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def _more(names: tuple[str, ...]) -> Make:
    return _tensors(lambda tensors: tensors | {name: torch.ones(4) for name in names})


def _renamed_file(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model.bf16.safetensors")


def _floats(test: Callable[[str], bool], dtype: torch.dtype) -> Make:
    return _tensors(lambda tensors: {name: t.to(dtype) if test(name) else t for name, t in tensors.items()})


def _below(name: str) -> Make:
    def make(folder: Path) -> None:
        files = list(folder.iterdir())
        (folder / name).mkdir(parents=True)
        for file in files:
            file.rename(folder / name / file.name)

    return make


def _above(name: str) -> Make:
    return lambda folder: [file.rename(folder / file.name) for file in list((folder / name).iterdir())]


def _stale_index(folder: Path) -> None:
    names = load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}))


def _as_bytes(folder: Path) -> None:
    """The dtype that some exporters write for MXFP4's scales; written into the header, as any torch may run this."""
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith("_scales"):
            entry["dtype"] = "F8_E8M0"
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
TOKENIZER_5 = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["w7"], "unk_token": "w100"}
SHARDS, PACKED = "bf16-shards", "mxfp4-single"
METHOD = "quantization_config.quant_method"
OF_OPENAI = ("original/model.safetensors", "original/config.json", "metal/model.bin", "LICENSE", ".cache/x.lock")
TRAINER = ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "runs/events.1", "args.json", "nemo_version.txt")
CACHE_SCALES = tuple(f"{LAYER}self_attn.{letter}_scale" for letter in "kv")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_left = dict.fromkeys(("experts_per_token", "layer_types", "sliding_window", "rope_theta", "hidden_act"), ABSENT)
_fixed = changed_config(unsloth_fixed=True, pad_token_id=255)
_wide = _floats(lambda name: any(part in name for part in ("norm", "router", "lm_head")), torch.float32)
_longer = _all(_rope(factor=64.0), changed_config(max_position_embeddings=262144))
_fp32 = _all(_floats(lambda _: True, torch.float32), changed_config(torch_dtype="float32"))


# name, by, make: with the numbers of the BF16 checkpoint in one file
PLAIN = (
    ("config of transformers 5: `rope_parameters`", "transformers 5", as_transformers_5),
    ("float32 weights", "trainers", _fp32),
    ("norms, router and head in float32", "trainers", _wide),
    ("BF16 under `quantization_config` MXFP4", "LlamaFactory, axolotl", changed_config(quantization_config=MXFP4)),
    ("`quantization_config: null`", "trainers", changed_config(quantization_config=None)),
    ("`FSDPGptOssForCausalLM`", "axolotl, accelerate", changed_config(architectures=["FSDPGptOssForCausalLM"])),
    ("no `architectures`", "mergers", changed_config(architectures=ABSENT)),
    ('`"torch.bfloat16"` spelled out', "scripts", changed_config(**dict.fromkeys(DTYPES, "torch.bfloat16"))),
    ("`attention_factor` that says the default", "scripts", _rope(attention_factor=0.1 * math.log(32) + 1)),
    ("a grown vocabulary", "unsloth, axolotl", _all(_tensors(_grown), changed_config(vocab_size=VOCABULARY + 8))),
    ("a trainer's folder: optimizer, states, `runs/`", "TRL, DeepSpeed, NeMo, ms-swift", _files(*TRAINER)),
    ("notes of more than 100 MiB", "TRL", _files("trainer_state.json", "train.txt", size=101 << 20)),
    ("fields that are null", "scripts", changed_config(quantization=None, pooler_hidden_size=None)),
    ("`eos_token_id` null", "scripts", _json("generation_config.json", eos_token_id=None, top_k=0)),
    ("no generation_config.json", "mergers", _without("generation_config.json")),
    ("tokenizer of transformers 5", "transformers 5", _json("tokenizer_config.json", **TOKENIZER_5)),
    ("`GPT2Tokenizer` for a class", "trainers", _json("tokenizer_config.json", tokenizer_class="GPT2Tokenizer")),
    ("`LlamaTokenizer` for a class", "mergers", _json("tokenizer_config.json", tokenizer_class="LlamaTokenizer")),
    ("padding left in tokenizer.json", "TRL", _tokenizer(lambda t: t.enable_padding(length=64))),
    ("truncation left in tokenizer.json", "unsloth", _tokenizer(lambda t: t.enable_truncation(2))),
    ("a chat template of its own, in harmony", "fine-tunes", _template("<|start|>system<|message|>You are Kim.")),
)
IN_SHARDS = (
    ("a folder of links", "the hub's cache", _links),
    ("BF16 of a fine-tune", "unsloth, heretic, abliterated", changed_config(unsloth_version="2026.9")),
    ("BF16 in shards under MXFP4 with `dequantize`", "transformers", _method("mxfp4", **MXFP4 | {"dequantize": True})),
    ("hidden files of macOS: `._model…`", "copies", _hidden),
    ("merged shards with the adapter beside them", "LlamaFactory", _files("adapter_model.safetensors")),
)
WITH_NUMBERS_OF_THEIR_OWN = (
    ("fields left out that have a default", "scripts", changed_config(**_left)),
    ("`num_experts_per_tok` changed alone", "scripts", changed_config(num_experts_per_tok=2, experts_per_token=4)),
    ("a longer context", "scripts", _longer),
    ("pruned experts", "REAP, AmanPriyanshu", _pruned(3)),
)
# name, by, a field of config.json with its wrong value, the page's remedy, and the value that follows from it
EDITS: tuple[tuple[str, str, str, Any, str, Any], ...] = (
    ("fields that change the model", "scripts", "lora_rank", 8, "remove them if they do not", ABSENT),
    ("`is_causal: false`", "embedders", "is_causal", False, "remove it if the model generates text", ABSENT),
    ("`rope_scaling: null`", "scripts", "rope_scaling", None, "write the base's section", YARN),
    ("no `model_type`", "scripts", "model_type", ABSENT, "write `gpt_oss`", "gpt_oss"),
    ('`"torch_dtype": "float16"` over BF16', "scripts", "torch_dtype", "float16", "remove the field", ABSENT),
)
# name, by, make, the name of the tool in the refusal; `npu-gptoss convert` reads them
CONVERTED = (
    ("experts as modules", "unsloth", _split_experts("gate_up_projs.{}", "down_projs.{}"), "unsloth"),
    ("experts as modules, linear", "llm-compressor", _split_experts(*LINEAR), "llm-compressor"),
    (
        "gate and up apart",
        "mlx-lm, dequantized",
        _replaced("experts.down_proj_bias", "experts.down_proj.bias"),
        "mlx-lm",
    ),
    ("names with `_orig_mod.`", "torch.compile", _renamed(lambda name: f"_orig_mod.{name}"), "wrapper"),
    ("names with `model.language_model.`", "wrappers", _renamed(_wrapped), "wrapper"),
    ("a value head: `v_head.`", "TRL", _more(("v_head.summary.weight",)), "value head"),
    ("one file of another name", "scripts", _renamed_file, ""),
    ("names with `base_model.model.`", "peft", _renamed(lambda name: f"base_model.model.{name}"), ""),
    ("saved without merging", "peft", _replaced("q_proj.weight", "q_proj.base_layer.weight"), "without merging"),
    ("names of `original/`", "OpenAI", _replaced(LAYER + "self_attn.q_proj", "block.0.attn.qkv"), "original/"),
)
# name, by, a file in place of the weights, the page's remedy, the name of the tool in the refusal
FOREIGN = (
    ("MODEL is `metal/`", "OpenAI", "model.bin", "take the folder above", "Metal"),
    ("x.gguf", "llama.cpp", "gpt-oss-20b-Q4_K_M.gguf", "take the safetensors", "GGUF"),
    ("W8A8, W4A8", "ModelSlim", "quant_model_weight_w8a8_dynamic.safetensors", ANOTHER, "ModelSlim"),
    ("hf_quant_config.json", "NVIDIA ModelOpt", "hf_quant_config.json", ANOTHER, "ModelOpt"),
    ("weights.00.npz", "mlx-lm", "weights.00.npz", ANOTHER, "MLX"),
    ("a training state: x.distcp", "FSDP", "__0_0.distcp", EXPORT, "distributed"),
    ("a file of each rank", "vLLM save_sharded_state", RANK_FILE, "save it with transformers", "save_sharded_state"),
    ("ONNX", "optimum", "model.onnx", ANOTHER, "ONNX"),
    ("OpenVINO", "optimum", "openvino_model.bin", ANOTHER, "OpenVINO"),
    ("a pickle", "old scripts", "pytorch_model.bin", "convert it where you trust it", ""),
)
# name, by, quant_method, its other fields, the name of the tool in the refusal
QUANTISED: tuple[tuple[str, str, str, dict[str, str], str], ...] = (
    ("NVFP4, FP8", "NVIDIA ModelOpt", "modelopt", {}, "ModelOpt"),
    ("NVFP4", "llm-compressor", "compressed-tensors", {"format": "nvfp4-pack-quantized"}, "NVFP4"),
    ("four bits", "llm-compressor", "compressed-tensors", {"format": "pack-quantized"}, "four bits"),
    ("AWQ", "AutoAWQ", "awq", {}, "AWQ"),
    ("GPTQ", "GPTQModel", "gptq", {}, "GPTQ"),
    ("bitsandbytes", "unsloth-bnb-4bit", "bitsandbytes", {}, "bitsandbytes"),
    ("auto-round", "Intel", "auto-round", {}, "auto-round"),
    ("torchao", "PyTorch", "torchao", {}, "torchao"),
    ("HQQ", "HQQ", "hqq", {}, "HQQ"),
    ("Quark", "AMD", "quark", {}, "Quark"),
)
TRAINED_IN_HARMONY = {"do": "delete it if the model was trained in harmony", "field": "chat_template.jinja"}
NO_SUCH_FIELD = changed_config(quantization_config=ABSENT)

FORMS = (
    Form("`openai/gpt-oss-20b`: MXFP4, `original/`, `metal/`", "OpenAI", _files(*OF_OPENAI), base="mxfp4-shards"),
    Form("`openai/gpt-oss-120b`: shards counted from 0", "OpenAI", _from_zero, base="mxfp4-shards"),
    Form("MXFP4 experts, `unsloth_fixed`", "unsloth", _fixed, base=PACKED),
    Form("MXFP4 scales as `F8_E8M0`", "exporters, vLLM", _as_bytes, base=PACKED),
    *(Form(*row, base=SHARDS) for row in IN_SHARDS),
    *(Form(*row) for row in PLAIN),
    *(Form(*row, oracle=True) for row in WITH_NUMBERS_OF_THEIR_OWN),
    # edited by hand
    Form(
        "a chat template of another format", "fine-tunes", _template("<|im_start|>user"), **TRAINED_IN_HARMONY,
        mend=_without("chat_template.jinja"),
    ),
    Form(
        "such a template in tokenizer_config.json", "fine-tunes",
        _json("tokenizer_config.json", chat_template=[{"name": "default", "template": "<|im_start|>user"}]),
        **TRAINED_IN_HARMONY, mend=_json("tokenizer_config.json", chat_template=ABSENT),
    ),
    *(
        Form(name, by, changed_config(**{field: wrong}), do, field=field, mend=changed_config(**{field: right}))
        for name, by, field, wrong, do, right in EDITS
    ),
    Form(
        "another model's config.json", "trainers", changed_config(architectures=["GptOssForSequenceClassification"]),
        "take a checkpoint for text generation", field="architectures",
        mend=changed_config(architectures=["GptOssForCausalLM"]),
    ),
    Form(
        "stale `layer_types`", "mergekit", changed_config(num_hidden_layers=1), "correct one of the two",
        field="layer_types", mend=changed_config(num_hidden_layers=2),
    ),
    Form(
        "MXFP4 without `quantization_config`", "scripts", NO_SUCH_FIELD, "write the section", base=PACKED,
        field="quantization_config", mend=_method("mxfp4"),
    ),
    Form(
        "BF16 under another `quant_method`", "llm-compressor", _method("compressed-tensors", format="dense"),
        "remove `quantization_config`", field=METHOD, mend=NO_SUCH_FIELD,
    ),
    Form(
        "original/ alone in MODEL", "`hf download --include`", _below("original"),
        "download the rest, or `npu-gptoss convert MODEL/original OUT`", mend=_above("original"),
    ),
    Form("checkpoint-500 in MODEL", "trainers", _below("checkpoint-500"), "give it", mend=_above("checkpoint-500")),
    Form(
        "MODEL is `models--…`", "the hub's cache", _below("snapshots/a"), "give its snapshot",
        mend=_above("snapshots/a"),
    ),
    Form(
        "the base's index beside one new file", "trainers", _stale_index, "delete the index", field=INDEX,
        mend=_without(INDEX),
    ),
    Form(
        "a pointer of Git LFS for tokenizer.json", "git clone",
        lambda folder: (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "run `git lfs pull`", field="tokenizer.json", tool="`git lfs pull`",
    ),
    Form(
        "no tokenizer.json", "split folders", _without("tokenizer.json"),
        "get it from the base, or give `--tokenizer`", field="tokenizer.json",
    ),
    Form(
        "pruned experts under the base's config.json", "REAP", _pruned_alone, "write their number",
        field=LAYER + "mlp.router.weight",
    ),
    # converted by one command
    *(Form(name, by, make, CONVERT, tool=tool) for name, by, make, tool in CONVERTED),
    Form(
        "half precision", "scripts", _floats(lambda _: True, torch.float16), CONVERT, field="model.embed_tokens.weight"
    ),
    Form("FP8 with block scales", "DeepSeek-like", _method("fp8", weight_block_size=[128, 128]), CONVERT, field=METHOD),
    Form(
        "FP8 of compressed-tensors", "llm-compressor", _method("compressed-tensors", format="float-quantized"), CONVERT,
        field=METHOD, tool="FP8",
    ),
    Form("an adapter with the base's config.json", "axolotl", _instead(*ADAPTER), MERGE, tool="an adapter"),
    Form("an adapter", "peft, unsloth, Tinker", _all(_instead(*ADAPTER), _without("config.json")), MERGE),
    Form(
        "a merge without experts: `gate_up_proj$`", "transformers 5, peft",
        _replaced("layers.1.mlp.experts.gate_up_proj", "gate_up_proj$"),
        "merge again: `npu-gptoss convert BASE OUT --lora ADAPTER`", tool="without its experts",
    ),
    Form(
        "MODEL is `original/`", "OpenAI", changed_config(model_type=ABSENT, rope_scaling_factor=32.0),
        "give the folder above, or " + CONVERT, field="model_type",
    ),
    Form(
        "x.safetensors.aria2 beside a file", "hfd", _files(SINGLE + ".aria2"), "go on with its download", field=SINGLE,
        mend=_without(SINGLE + ".aria2"),
    ),
    Form("scales of a KV cache in FP8", "llm-compressor, Quark", _more(CACHE_SCALES), CONVERT, tool="FP8"),
    Form("shards without their index", "downloads", _without(INDEX), "get the index too, or " + CONVERT, base=SHARDS),
    # refused
    *(Form(name, by, _instead(file), do, tool=tool) for name, by, file, do, tool in FOREIGN),
    *(
        Form(name, by, _method(method, **fields), ANOTHER, field=METHOD, tool=tool)
        for name, by, method, fields, tool in QUANTISED
    ),
    Form(
        "int8 with `weight_offset`", "ModelSlim", _more(("q.weight_scale", "q.weight_offset")), ANOTHER,
        tool="ModelSlim",
    ),
    Form("flat parameters", "FSDP", _replaced("self_attn.q_proj.weight", "_flat_param"), EXPORT, tool="distributed"),
    Form(
        "an index of other shards", "downloads", lambda folder: next(folder.glob("model-00002*")).unlink(),
        "download what is missing", base=SHARDS, field=INDEX,
    ),
    Form(
        "MLX", "mlx-lm, LM Studio", changed_config(quantization={"group_size": 32, "bits": 4}), ANOTHER,
        field="quantization",
    ),
)  # fmt: skip


def table() -> str:
    """The page's table: a row for each form; those of which only the origin can be served are a list below it, and so
    are those that one command converts, and those that an edit by hand mends."""
    listed = [form for form in FORMS if form.do in (CONVERT, ANOTHER) or form.mend]
    lines = ["| files | written by | result |", "|---|---|---|"]
    lines += [f"| {form.name} | {form.by} | {form.do or 'served'} |" for form in FORMS if form not in listed]
    for do in (CONVERT, ANOTHER):
        forms = ", ".join(f"{form.name} ({form.by})" for form in listed if form.do == do)
        lines += [
            "",
            *textwrap.wrap(f"For these, {do.replace('`npu', 'run `npu')}: {forms}.", 158, break_on_hyphens=False),
        ]
    edits = "; ".join(f"{form.name}: {form.do}" for form in listed if form.mend)
    return "\n".join([*lines, "", *textwrap.wrap(f"An edit by hand: {edits}.", 158, break_on_hyphens=False)])

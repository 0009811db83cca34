"""Which tool wrote a folder that is no gpt-oss checkpoint in the official layout, and the way from it to one.

One table: evidence in the folder, the tool, the remedy. `refuse_foreign` is for every start's refusal. Rows whose
remedy names {convert} are what `npu-gptoss convert` reads; the others it refuses with the same sentence. Sources: the
files that each tool writes, looked at or rebuilt from its code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_gptoss.errors import InputError
from npu_gptoss.files import CheckpointError

CONVERT = "run `{convert}`"
_ORIGINAL = "take the checkpoint that it was made from, in MXFP4 or BF16"
_MERGE_AGAIN = (
    "the experts of the other layers are not in it; merge the adapter again with `npu-gptoss convert BASE OUT --lora "
    "ADAPTER`, or with transformers 4.57"
)


@dataclass(frozen=True)
class Foreign:
    """A form of checkpoint; any evidence is enough.

    tool: completes "this is …". remedy: for the user, in lower case; {path} is the folder, {convert} the command.
    files: patterns of file names. methods: `quant_method`, or `quant_method:format`, of quantization_config.
    fields: fields of config.json. names: a pattern of tensors' names.
    """

    tool: str
    remedy: str = _ORIGINAL
    files: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    names: str = r"(?!)"

    @property
    def convertible(self) -> bool:
        return "{convert}" in self.remedy

    def says(self, names: Iterable[str], values: Mapping[str, Any]) -> bool:
        """True if the tensors' names or config.json are of this form."""
        section = values.get("quantization_config") or values.get("compression_config") or {}
        method = section.get("quant_method") if isinstance(section, Mapping) else None
        methods = {method, f"{method}:{section.get('format')}"} if isinstance(method, str) else set()
        return bool(
            methods & set(self.methods)
            or any(values.get(field) is not None for field in self.fields)
            or any(re.search(self.names, name) for name in names)
        )

    def advice(self, path: object) -> str:
        """The remedy for this folder as a full sentence."""
        text = self.remedy.format(path=shlex.quote(str(path)), convert=convert_command(path))
        return f"{text[:1].upper()}{text[1:]}."


# The first that fits names the folder: forms that no conversion reads come first.
FORMS = (
    Foreign(
        "a GGUF file of llama.cpp",
        "take the safetensors that it was made from, or serve it with llama.cpp",
        files=("*.gguf",),
    ),
    Foreign(
        "W8A8 or W4A8 of ModelSlim for vllm-ascend",
        files=("quant_model_weight*.safetensors", "quant_model_description*.json"),
        methods=("ascend",),
        names=r"\.(weight_offset|quant_bias|deq_scale)$",
    ),
    Foreign(
        "NVFP4 or FP8 of NVIDIA ModelOpt",
        files=("hf_quant_config.json",),
        methods=("modelopt", "modelopt_fp4", "modelopt_mixed", "nvfp4", "compressed-tensors:nvfp4-pack-quantized"),
    ),
    Foreign("AWQ", methods=("awq",)),
    Foreign("GPTQ", methods=("gptq", "gptqmodel"), files=("quantize_config.json",), names=r"\.(qweight|qzeros|g_idx)$"),
    Foreign(
        "bitsandbytes",
        'save it again in 16 bits (unsloth: save_method="merged_16bit"), or take the checkpoint that it was made from',
        methods=("bitsandbytes",),
        names=r"\.(quant_state\.bitsandbytes|absmax|SCB)",
    ),
    Foreign("HQQ", methods=("hqq",)),
    Foreign("torchao", methods=("torchao",)),
    Foreign(
        "Quark of AMD",
        "take the checkpoint that it was made from, or serve it by stock vLLM with NPU_GPTOSS=0",
        methods=("quark",),
    ),
    Foreign("auto-round of Intel", methods=("auto-round", "intel/auto-round", "auto_round")),
    Foreign(
        "integers or four bits of llm-compressor (compressed-tensors)",
        names=r"\.weight_packed$",
        methods=(
            "compressed-tensors:pack-quantized",
            "compressed-tensors:int-quantized",
            "compressed-tensors:marlin-24",
            "compressed-tensors:mxfp4-pack-quantized",
        ),
    ),
    Foreign("MLX", fields=("quantization",), files=("weights*.npz",), names=r"_proj\.scales$"),
    Foreign(
        "an adapter",
        "merge it into its base model: `npu-gptoss convert BASE BASE-merged --lora {path}`",
        files=("adapter_config.json", "adapter_model.safetensors"),
    ),
    Foreign("ONNX", files=("*.onnx", "*.onnx_data")),
    Foreign("OpenVINO", files=("openvino_model.*",)),
    Foreign("OpenAI's format for Metal", "take the folder above {path}", files=("model.bin",)),
    Foreign(
        "a shard of each rank, saved by vLLM's save_sharded_state",
        "save it with transformers' save_pretrained, or take the checkpoint that it was loaded from",
        files=("model-rank-*-part-*.safetensors",),
    ),
    Foreign(
        "a training state of PyTorch's distributed checkpoints",
        "export it with the trainer, for instance `accelerate merge-weights`",
        files=("*.distcp",),
        names=r"\._?flat_param$|^_?flat_param$",
    ),
    Foreign("a merge that transformers 5 saved without its experts", _MERGE_AGAIN, names=r"(gate_up|down)_proj\$$"),
    Foreign(
        "OpenAI's original/ layout",
        "give the directory above it, or " + CONVERT,
        fields=("rope_scaling_factor",),
        names=r"^block\.\d+\.",
    ),
    Foreign(
        "unsloth's experts as separate modules", CONVERT, names=r"\.(gate_up|down)_projs\.\d+\.|\.router\.linear\."
    ),
    Foreign(
        "llm-compressor's experts as separate modules",
        CONVERT,
        names=r"\.experts\.(experts\.)?\d+\.(gate|up|down)_proj\.",
    ),
    Foreign(
        "mlx-lm's experts, gate and up apart", CONVERT, names=r"\.mlp\.experts\.(gate|up|down)_proj\.(weight|bias)$"
    ),
    Foreign("a model that peft saved without merging", CONVERT, names=r"\.base_layer\.|\.lora_[AB]\."),
    Foreign(
        "names of a wrapper (torch.compile, peft, FSDP)",
        CONVERT,
        names=r"(^|\.)(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.|"
        r"^base_model\.model\.|^(model\.)?language_model\.|^model\.model\.|^layers\.\d",
    ),
    Foreign("a model with a value head of reinforcement learning", CONVERT, names=r"^v_head\."),
    Foreign(
        "FP8 with scales",
        CONVERT,
        methods=("fp8", "fbgemm_fp8", "compressed-tensors:float-quantized", "compressed-tensors:naive-quantized"),
        names=r"\.weight_scale(_inv)?$|_proj_scale(_inv)?$|\.[kv]_scale$",
    ),
)


def recognise(
    directory: Path | None, names: Iterable[str] = (), values: Mapping[str, Any] | None = None
) -> Foreign | None:
    """The form of this folder; None where no row fits.

    names: of tensors, values: of config.json; what they say counts before the names of files. directory: None leaves
    the files out. Raises nothing.
    """
    try:
        files = [] if directory is None else [directory]
        files = [path for file in files for path in (file.iterdir() if file.is_dir() else [file] * file.exists())]
    except OSError:
        files = []
    names, values = list(names), values if isinstance(values, Mapping) else {}
    said = (form for form in FORMS if form.says(names, values))
    return next(said, None) or next((f for f in FORMS if any(p.match(g) for p in files for g in f.files)), None)


def convert_command(path: object) -> str:
    """The command for this folder, as a shell takes it."""
    text = str(path).rstrip("/") or "/"
    return f"npu-gptoss convert {shlex.quote(text)} {shlex.quote(text + '-converted')}"


def refuse_foreign(
    directory: Path,
    names: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    *,
    files: bool = True,
    field: str | None = None,
    error: type[InputError] = CheckpointError,
) -> None:
    """Raises `error` where the folder is another tool's form: which, and what to do.

    files: False where the names of files are no evidence, because others belong here. field: that the error names.
    """
    form = recognise(directory if files else None, names, values)
    if form is not None:
        raise error(
            f"{directory}: expected a gpt-oss checkpoint in the official layout, but this is {form.tool}. "
            f"{form.advice(directory.parent if directory.is_file() else directory)}",
            field=field or str(directory),
        )

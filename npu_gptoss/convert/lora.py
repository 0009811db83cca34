"""LoRA adapters of peft, merged: W + weight * scaling * B @ A in float32, rounded once.

Contract: peft's `LoraConfig` and its layers `Linear`, `Embedding` and `ParamWrapper` (peft/tuners/lora/layer.py). The
experts' parameters (`target_parameters`) have lora_A `[experts * r, a]`, the rank within the expert, and lora_B
`[b, r * experts]`, the expert within the rank. The parameter is [experts, a, b] where transformers says `is_transposed`
(5) or peft is older than that question, and [experts, b, a] elsewhere. The shapes tell which; of a square matrix, those
of the other one. Tinker's adapters have the experts' factors in three axes, [experts, r, a] and [experts, b, r]; either
may have one expert, whose factor all share (tinker_cookbook/weights/_merge.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.convert.places import TRANSPOSED, WHOLE, View, place, unwrapped
from npu_gptoss.errors import InputError, quoted, short
from npu_gptoss.files import is_directory, is_there, mode_of, read_json
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.config_fields import is_number
from npu_gptoss.model.layout import TensorSpec
from npu_gptoss.model.safetensors_reader import StoredTensor, read_header, read_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(
    r"(?P<module>.*?)\.lora_(?P<kind>A|B|embedding_A|embedding_B|magnitude_vector)(\.(?!weight$|bias$)[^.]+)?(\.weight)?"
)
_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts")
# Fields of adapter_config.json that change no merge, or that are read here. Any other one that is set is refused.
_KNOWN = """
    peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules
    exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora modules_to_save init_lora_weights
    layers_to_transform layers_pattern rank_pattern alpha_pattern bias loftq_config eva_config corda_config
    lora_ga_config use_dora qalora_group_size runtime_config target_parameters ensure_weight_tying megatron_core
"""
_PATTERNS = {"alpha_pattern": "lora_alpha", "rank_pattern": "r"}
_OF_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT")
# They change the base model before the training; the adapter belongs to that base
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(InputError):
    """An adapter that cannot be merged: names the adapter and the field or tensor."""


def _wrong(directory: Path, why: str, field: str, remedy: str = "Merge it with peft.") -> AdapterError:
    return AdapterError(f"{directory}: {why}. {remedy}", field=field)


@dataclass(frozen=True)
class Delta:
    """An adapter's addition to `view` of the official tensor `name`. factors: `A`, `B`, of DoRA `magnitude_vector`."""

    name: str
    factors: Mapping[str, StoredTensor]
    view: View
    experts: int = 0  # of a parameter of peft's; 0: factors as they are
    turned: bool = False  # B has the parameter's first axis
    embedding: bool = False
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        return self.factors["A"].shape[-2] // (self.experts or 1)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [..., rank, in] and B [..., out, rank] in float32; of experts with an axis for them, which may be 1."""
        a, b = (read_tensor(self.factors[letter]).float() for letter in "AB")
        if self.experts:
            a, b = a.view(self.experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.experts).permute(2, 0, 1)
        return a, b

    def add_to(self, tensor: torch.Tensor) -> None:
        """tensor: the official one, float32 or bfloat16; changed in place, rounded once."""
        target = self.view(tensor)
        targets = target if target.dim() == 3 else target[None]
        for one, a, b in zip(targets, *(each.expand(len(targets), -1, -1) for each in self.matrices()), strict=True):
            self._add(one, b @ a)

    def _add(self, target: torch.Tensor, delta: torch.Tensor) -> None:
        merged = target.float() + self.scaling * delta
        if "magnitude_vector" in self.factors:  # DoRA: rows of the base's length times the magnitude
            merged *= (read_tensor(self.factors["magnitude_vector"]).float().view(-1) / merged.norm(dim=1))[:, None]
        target.copy_(merged)


@dataclass(frozen=True)
class Adapter:
    """deltas, replaced: by official name; replaced are whole tensors (modules_to_save)."""

    directory: Path
    weight: float
    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    replaced: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def files(self) -> set[Path]:
        factors = (stored for each in self.deltas.values() for delta in each for stored in delta.factors.values())
        return {stored.file for stored in (*self.replaced.values(), *factors)}


def parse(text: str) -> tuple[Path, float]:
    """`DIR` or `DIR:weight`."""
    path, colon, number = text.rpartition(":")
    try:
        weighted = colon and not mode_of(Path(text)) and math.isfinite(float(number))
    except ValueError:
        weighted = False
    return (Path(path), float(number)) if weighted else (Path(text), 1.0)


def open_adapter(directory: Path, weight: float, config: GptOssConfig, specs: Mapping[str, TensorSpec]) -> Adapter:
    """An adapter's folder. specs: the base's tensors in the BF16 layout. Raises AdapterError."""
    if not is_directory(directory, AdapterError) or not is_there(directory / WEIGHTS, AdapterError):
        if (directory / "adapters.safetensors").is_file():
            remedy = "Fuse it there (`mlx_lm.fuse --dequantize`), and convert the result."
            raise _wrong(directory, "expected an adapter of peft, got one of mlx-lm", "--lora", remedy)
        why = f"expected {CONFIG} and {WEIGHTS} of an adapter of peft, got none"
        raise _wrong(directory, why, "--lora", "Check the path; a pickle (.bin) is never opened: use safetensors.")
    return adapter_of(directory, read_header(directory / WEIGHTS), weight, config, specs)


def adapter_of(
    directory: Path,
    stored: Mapping[str, StoredTensor],
    weight: float,
    config: GptOssConfig,
    specs: Mapping[str, TensorSpec],
) -> Adapter:
    """The adapter whose tensors these are, with the adapter_config.json of `directory`."""
    settings = _settings(directory)
    adapter, modules = Adapter(directory, weight), {}
    for name, tensor in stored.items():
        if found := _KEY.fullmatch(name):
            modules.setdefault(found["module"], {})[found["kind"]] = tensor
            continue
        (where,) = places if len(places := place(name, config)) == 1 else [None]
        if where is None or where.name not in specs:
            raise _wrong(directory, f"expected LoRA's tensors for gpt-oss, got {short(name)}", name)
        if (shape := specs[where.name].shape) != tensor.shape:  # a vocabulary that training resized
            why = f"{short(name)} should have shape {list(shape)} as in IN, got {list(tensor.shape)}"
            raise _wrong(directory, why, name, "Merge it with peft into the base as the training resized it.")
        adapter.replaced[where.name] = tensor
    if adapter.replaced and weight != 1:
        why = (
            f"{next(iter(adapter.replaced))} (modules_to_save) replaces the base's and cannot be weighted by {weight:g}"
        )
        raise _wrong(directory, why, "--lora", "Leave the weight away.")
    fits = {module: _fits(module, factors, config, specs) for module, factors in modules.items()}
    turned = {one.turned for found in fits.values() if len(found) == 1 for one in found if one.experts}
    for module, factors in modules.items():
        found = fits[module] if len(fits[module]) < 2 else [one for one in fits[module] if one.turned in turned]
        first = next(iter(factors.values()))
        if len(found) != 1:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in factors.values())
            why, remedy = f"{first.name} fits no tensor of IN: {shapes}", "Give the base of its training."
            if fits[module]:
                why, remedy = f"{first.name} is of a square matrix, and nothing tells its input", "Merge it with peft."
            raise _wrong(directory, why, first.name, remedy)
        names = unwrapped(module), found[0].name
        alpha, rank = (_of_pattern(settings, *each, names) for each in _PATTERNS.items())
        if rank != found[0].rank and len(first.shape) == 2:  # Tinker gives experts any, and divides by r all the same
            why = f"{first.name} has rank {found[0].rank}, got {short(rank)} in {CONFIG}"
            raise _wrong(directory, why, "r", "Take the file of this training.")
        scaling = weight * alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        if "magnitude_vector" in factors and (weight != 1 or found[0].embedding):
            why = f"{first.name} is of DoRA, which has no weight here, and no embedding"
            raise _wrong(directory, why, first.name)
        adapter.deltas.setdefault(found[0].name, []).append(replace(found[0], scaling=scaling))
    if not adapter.deltas and not adapter.replaced:
        raise _wrong(directory, "expected an adapter's tensors, got none", "--lora", "Save it again.")
    return adapter


def factors(deltas: Sequence[Delta], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The deltas of one official tensor as A [rank, in] and B [out, rank] in float32, B with the scaling; of experts
    ([experts, in, out]) as A [experts, rank, in] and B [experts, out, rank].

    The ranks of several deltas add up, within each expert.
    """
    experts, inputs, rows = shape if len(shape) == 3 else (1, *shape[::-1])
    parts: list[list[list[torch.Tensor]]] = [[] for _ in range(experts)]
    for delta in deltas:
        a, b = delta.matrices()
        b = b * delta.scaling
        own = torch.arange(1)  # the experts of the delta
        if len(shape) == 3:
            if delta.turned:
                a, b = b.mT, a.mT
            own = delta.view(torch.arange(experts)[:, None, None].expand(shape))[..., 0, 0].reshape(-1)
            if not delta.experts:  # linear layers, or half of their rows
                places = delta.view(torch.arange(rows).expand(shape))[..., 0].reshape(len(own), -1)[0]
                b = b.new_zeros(*b.shape[:-2], rows, b.shape[-1]).index_copy_(-2, places, b)
        for expert, *pair in zip(own.tolist(), *(each.expand(len(own), -1, -1) for each in (a, b)), strict=True):
            parts[expert].append(pair)
    rank = max(sum(len(a) for a, _ in part) for part in parts)
    made = torch.zeros(experts, rank, inputs), torch.zeros(experts, rows, rank)
    for expert, part in enumerate(parts):
        if part:
            a, b = torch.cat([a for a, _ in part]), torch.cat([b for _, b in part], 1)
            made[0][expert, : len(a)], made[1][expert, :, : len(a)] = a, b
    return made if len(shape) == 3 else (made[0][0], made[1][0])


def _fits(
    module: str, stored: Mapping[str, StoredTensor], config: GptOssConfig, specs: Mapping[str, TensorSpec]
) -> list[Delta]:
    """The deltas that a module's factors fit: none, one, or, of square experts, one in each layout."""
    name, embedding = unwrapped(module), "embedding_A" in stored
    factors = {kind.removeprefix("embedding_"): tensor for kind, tensor in stored.items()}
    a, b = (factors[letter].shape if letter in factors else () for letter in "AB")
    if len(a) not in (2, 3) or len(b) != len(a) or a[-2] != b[-1]:
        return []
    sides = (*map(max, b[:-2], a[:-2]), b[-2], a[-1])
    if _EXPERTS.fullmatch(name):
        count, whole = config.num_local_experts, [f"{name}.{matrix}" for matrix in ("gate_up_proj", "down_proj")]
        return [
            Delta(official, factors, WHOLE if turned else TRANSPOSED, count, turned)
            for official in whole
            for turned in (False, True)
            if len(a) == 2
            and official in specs
            and specs[official].shape[1:] == (sides if turned else sides[::-1])
            and a[0] % count == 0
        ]
    (where, *_) = place(f"{name}.weight", config)
    if where.name not in specs:
        return []
    view = TRANSPOSED if embedding else where.view
    fits = tuple(view(torch.empty(specs[where.name].shape, device="meta")).shape) == sides
    fits &= all(count in (1, sides[0]) for count in (*a[:-2], *b[:-2]))
    fits &= "magnitude_vector" not in factors or factors["magnitude_vector"].shape[-1:] == sides[:1]
    return [Delta(where.name, factors, view, embedding=embedding)] if fits else []


def _of_pattern(settings: Mapping[str, Any], name: str, default: str, names: tuple[str, str]) -> float:
    """The number of a layer by a field of patterns, as peft's get_pattern_key reads them, or by the field `default`."""
    patterns = settings.get(name) or {}
    found = (patterns[key] for key in patterns if any(re.match(rf"(.*\.)?({key})$", name) for name in names))
    return next(found, settings[default])


def _settings(directory: Path) -> dict[str, Any]:
    if not is_there(directory / CONFIG, AdapterError):
        why = f"expected {CONFIG}, which has the adapter's alpha, got none"
        raise _wrong(directory, why, CONFIG, "Copy it from the training's folder.")
    settings = read_json(directory / CONFIG, AdapterError)
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind != "LORA":
        told = ("It is no change of weights: train LoRA.",) if kind in _OF_PROMPTS else ()
        raise _wrong(directory, f"peft_type should be LORA, got {short(kind)}", "peft_type", *told)
    for name in ("r", "lora_alpha"):
        if not is_number(settings.get(name)) or settings[name] <= 0:
            why = f"{name} should be a number above 0, got {quoted(settings.get(name))}"
            raise _wrong(directory, why, name, "Take the file of the training.")
    for name in _PATTERNS:
        patterns = settings.get(name) or {}
        try:
            right = all(re.compile(pattern) and is_number(number) for pattern, number in patterns.items())
        except (re.error, AttributeError):
            right = False
        if not right:
            why = f"{name} should have a number for each pattern, got {quoted(patterns)}"
            raise _wrong(directory, why, name, "Take the file of the training.")
    others = [name for name, value in settings.items() if value and name not in _KNOWN.split()]
    if str(settings.get("init_lora_weights")).lower().startswith(_OTHER_BASES):
        others.append("init_lora_weights")
    for name in others:
        raise _wrong(directory, f"{name} = {short(settings[name])} makes another merge than LoRA's", name)
    return settings


def check_together(adapters: list[Adapter]) -> None:
    """Several adapters add up; a tensor that one replaces or rescales is no other's."""
    for number, adapter in enumerate(adapters):
        others = {
            name for other in adapters[:number] + adapters[number + 1 :] for name in (*other.deltas, *other.replaced)
        }
        alone = [n for n, ds in adapter.deltas.items() if any("magnitude_vector" in d.factors for d in ds)]
        for name in (*adapter.replaced, *alone):
            if name in others:
                why = f"{name} is replaced or rescaled (modules_to_save, DoRA), and another adapter changes it too"
                raise _wrong(adapter.directory, why, "--lora", "Merge one of them alone.")


def merged(name: str, tensor: torch.Tensor, adapters: list[Adapter]) -> torch.Tensor:
    """The official tensor with all that the adapters change; itself where none does."""
    for adapter in adapters:
        if name in adapter.replaced:
            tensor = read_tensor(adapter.replaced[name])
    several = sum(name in adapter.deltas for adapter in adapters) > 1
    wide = tensor.float() if several else tensor  # their sum is rounded, not each
    for delta in (delta for adapter in adapters for delta in adapter.deltas.get(name, ())):
        delta.add_to(wide)
    return wide.to(tensor.dtype)

"""Which model serves gpt-oss: ours, or, for a server that asks for what only vLLM's has, vLLM's own.

vLLM 0.33 serves gpt-oss itself on NVIDIA GPUs, with pooling, pipelines and more formats than ours. So the process that
makes a server's configuration makes it for our model first. If our limits refuse it, the same options are tried with
vLLM's model; if vLLM takes them, one warning says why our model steps aside. The server's other processes read the
decision from the environment. The front end stays: it needs token ids and a tokenizer only.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npu_gptoss.errors import InputError, Refusal
from npu_gptoss.model.config_fields import ARCHITECTURE
from npu_gptoss.model.device_memory import VARIABLE as EXPERT_WEIGHTS
from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.start import ends
from npu_gptoss.serving.releases import here

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

VARIABLE = "_GPTOSS_STEPPED_ASIDE"  # the reason, in the environment of the server's processes
_COPIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
# Fields of config.json that vLLM's model may read in another way. Any other wrong field would give wrong answers.
_FIELDS = ("quantization_config.quant_method", "architectures")
# Options that vLLM's model serves no better, or never reads
_OURS_ALONE = ("--max-model-len", EXPERT_WEIGHTS)
_stock: list[Any] = []  # vLLM's entry of its registry


def stepped_aside() -> bool:
    return VARIABLE in os.environ


def take_over() -> None:
    """Registers our model with vLLM in place of vLLM's own."""
    from npu_gptoss.serving.releases.vllm import ModelRegistry

    os.environ.pop(VARIABLE, None)
    module, _, name = here().model.partition(":")
    known = ModelRegistry.models.get(ARCHITECTURE)
    if (getattr(known, "module_name", None), getattr(known, "class_name", None)) != (module, name):
        _stock[:] = [known]
        entry = here().module("vllm").registered_model(module, name)  # by name: imported only where it is needed
        ModelRegistry.models[ARCHITECTURE] = entry


def step_aside(refusals: tuple[Refusal, ...]) -> None:
    from npu_gptoss.serving.releases.vllm import ModelRegistry

    ModelRegistry.models[ARCHITECTURE] = _stock[0]
    os.environ[VARIABLE] = " ".join(f"{refusal}." for refusal in refusals)
    copied = os.environ.get(_COPIED_BY_RAY, "").split(",")
    os.environ[_COPIED_BY_RAY] = ",".join(dict.fromkeys(filter(None, (*copied, VARIABLE))))


def refusals_of(error: BaseException | None) -> tuple[Refusal, ...]:
    """Returns the refusals in an error of ours, also if vLLM's config classes have wrapped it."""
    while error is not None:
        if isinstance(error, InputError):
            return error.refusals
        inner = (one for one in ends.causes(error) if isinstance(one, InputError))
        error = next(inner, error.__cause__ or error.__context__)
    return ()


def _are_only_ours(refusals: tuple[Refusal, ...]) -> bool:
    def is_ours(refusal: Refusal) -> bool:
        if refusal.option in _FIELDS:
            return refusal.got is not None  # a missing field is no other format
        return refusal.option.startswith(("--", "VLLM_")) and refusal.option not in _OURS_ALONE

    return bool(refusals) and all(map(is_ours, refusals))


def configured(make: Callable[[], VllmConfig], options: Any) -> VllmConfig:
    """Returns the configuration of a server of gpt-oss, made for our model or for vLLM's.

    make: vLLM's own; it changes `options`, the fields that the user set. Raises what vLLM raises, and InputError.
    """
    told = os.environ.get(VARIABLE)
    take_over()
    # vLLM's own model may serve on NVIDIA GPUs, unless NPU_GPTOSS=1 insists on ours
    if here().devices != ("cuda",) or os.environ.get("NPU_GPTOSS"):
        return make()
    before = copy.copy(vars(options))
    try:
        return make()
    except Exception as error:
        refusals = refusals_of(error)
        if not _are_only_ours(refusals):
            raise
        vars(options).clear()
        vars(options).update(before)
        step_aside(refusals)
        try:
            made = make()
        except Exception:  # vLLM's model cannot either: our sentence says more
            take_over()
            raise error from None
    if os.environ[VARIABLE] != told:
        words = "npu-gptoss steps aside: vLLM's own model serves gpt-oss here (NPU_GPTOSS=1 refuses instead). %s"
        logger.warning(words, os.environ[VARIABLE])
    return made

"""Other weights for a model that runs: written tensor by tensor to the addresses of the first.

A captured graph holds addresses, and training sends its weights in pieces of any size and order. So a tensor is written
as soon as it comes, q, k and v into their rows of one matrix. Only MXFP4's blocks and scales wait for each other. The
checks are those of the first load, and all tensors must come: a model of two checkpoints answers fluently and wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_gptoss.files import CheckpointError
from npu_gptoss.model.assembly import FLOATS, FP8
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import PACKED, Account, split_layer
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.values import check_finite
from npu_gptoss.model.weights import OFFICIAL
from npu_gptoss.moe import (
    AnyExperts,
    ExpertWeights,
    Fp8Experts,
    Mxfp4Experts,
    converted,
    lone,
    rewrite_bias,
    rewrite_experts,
)
from npu_gptoss.moe.mxfp4 import expand_transposed

_EXPERTS = "mlp.experts."


class WeightUpdate:
    """One set of weights on its way into `model`."""

    def __init__(self, model: GptOss, config: GptOssConfig, where: object) -> None:
        """config: of the whole model on every rank. where: names the weights in errors."""
        self.model, self.where = model, where
        self.account = Account(config, where, expanded=True)
        self._places = dict(_places(model))
        self._halves: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self._written = 0

    @torch.no_grad()
    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one official tensor, in the BF16 or the MXFP4 layout; keeps no reference to it.

        Raises CheckpointError, which also says what state the model is in.
        """
        try:
            self.account.take(name, tensor)
            if tensor.is_floating_point():
                check_finite(name, tensor, self.model.dtype, self.where)
            if self.model.ranks is not None:
                tensor = self.model.ranks.shard.cut(name, tensor)
            dtype = self.model.dtype if tensor.is_floating_point() else None
            self._write(name, tensor.to(device=self.model.device, dtype=dtype))
            if self.model.device.type == "cuda":
                # vLLM calls on several streams in turn, and a half that waits is written on one and read on another
                torch.cuda.current_stream(self.model.device).synchronize()
            if self.complete:
                self.model.keep_shortlist()
        except Exception as error:
            raise CheckpointError(f"{error} {self.state}", field=getattr(error, "field", name)) from error

    @property
    def complete(self) -> bool:
        return self.account.complete

    def close(self) -> None:
        """Raises CheckpointError, which names what is missing, unless all tensors have come."""
        try:
            self.account.close()
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self.state}", field=error.field) from error

    @property
    def state(self) -> str:
        """A sentence about the model while the update is not complete."""
        if not self._written:
            return "The weights of the server are unchanged."
        new = f"{self._written} of {len(self.account.expected)} tensors are new"
        return f"The weights of the server are now mixed, {new}: send all again, or restart the server."

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        index, suffix = split_layer(name)
        if not suffix.startswith(_EXPERTS):
            self._places[name].copy_(tensor)
            self._written += 1
            return
        experts, matrix = self.model.layers[index].moe.experts, suffix.removeprefix(_EXPERTS)
        packed, count = PACKED.fullmatch(name), 1
        if matrix.endswith("_bias"):
            rewrite_bias(experts, matrix.removesuffix("_bias"), tensor)
        elif packed is None:
            rewrite_experts(experts, matrix, self._in_form(lone(ExpertWeights, {matrix: tensor}), matrix))
        else:
            matrix = matrix.removesuffix(f"_{packed['half']}")
            halves = self._halves.setdefault((index, matrix), {})
            halves[packed["half"]] = tensor
            if len(halves) == 1:
                halves[packed["half"]] = tensor.clone()  # the sender may use its memory again
                return
            count = len(self._halves.pop((index, matrix)))
            whole = lone(Mxfp4Experts, {f"{matrix}_{half}": each for half, each in halves.items()})
            rewrite_experts(experts, matrix, self._in_form(whole, matrix))
        self._written += count

    def _in_form(self, given: AnyExperts, matrix: str) -> AnyExperts:
        """One projection as the model has it."""
        if self.model.form != FLOATS:
            experts = next(iter(vars(given).values())).shape[0]
            return converted(given, matrix, Fp8Experts if self.model.form == FP8 else Mxfp4Experts, experts)
        if isinstance(given, Mxfp4Experts):
            halves = (getattr(given, f"{matrix}_{half}") for half in ("blocks", "scales"))
            return lone(ExpertWeights, {matrix: expand_transposed(*halves, self.model.dtype)})
        return given


def _places(model: GptOss) -> Iterator[tuple[str, torch.Tensor]]:
    """The memory of each official tensor outside of the experts."""
    weights, config = model.weights, model.config
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.norm
    yield "lm_head.weight", weights.lm_head
    rows = [heads * config.head_dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    for index, layer in enumerate(weights.layers):
        for part, held in OFFICIAL.items():
            for field, names in held.items():
                whole = getattr(getattr(layer, part), field)
                pieces = [whole] if len(names) == 1 else whole.split(rows)
                yield from ((f"model.layers.{index}.{n}", piece) for n, piece in zip(names, pieces, strict=True))

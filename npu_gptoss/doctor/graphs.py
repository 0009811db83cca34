"""Counts the streams that captured graphs take on a 910B, and compares them with the device's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from npu_gptoss.doctor.findings import Finding, not_applicable, ok, on_ascend, warning
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.doctor.memory import PUBLISHED_20B, PUBLISHED_120B
from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.serving.ascend import sizes

AIV_VARIABLE = "HCCL_OP_EXPANSION_MODE"


@on_ascend("a budget of streams")
def graphs(here: Machine, model: Path | None, ranks: int, max_num_seqs: int) -> Iterator[Finding]:
    aiv = here.environ.get(AIV_VARIABLE) == "AIV"
    if model is not None:
        try:
            models = [("", GptOssConfig.from_directory(model).num_hidden_layers, ranks)]
        except InputError:
            yield not_applicable("The checkpoint has no config.json that can be read: see checkpoint.")
            return
    else:
        models = [
            ("gpt-oss-20b", PUBLISHED_20B.num_hidden_layers, 1),
            ("gpt-oss-120b", PUBLISHED_120B.num_hidden_layers, 4),
        ]
    for name, layers, cards in models:
        yield _budget(name, layers, cards, max_num_seqs, aiv, here.release.reckons_streams)


def _budget(name: str, layers: int, ranks: int, max_num_seqs: int, aiv: bool, thinned_out: bool) -> Finding:
    asked = sizes.capture_sizes(max_num_seqs)
    groups = int(ranks > 1)
    most = sizes.most_sizes(layers, groups=groups, aiv=aiv)
    streams = sizes.streams(len(asked), layers, groups=groups, aiv=aiv)
    what = f"{layers} layers on {ranks} card{'s' if ranks > 1 else ''}"
    sentence = (
        f"{what}, --max-num-seqs {max_num_seqs}: {len(asked)} sizes are captured, {streams} streams by the reckoning "
        f"of vllm-ascend 0.11.0; it uses at most {sizes.BUDGET} of a device's {sizes.STREAMS}, so {most} sizes fit"
    )
    if len(asked) <= most:
        return ok(f"{sentence}.", subject=name)
    longer = (
        ""
        if aiv or not groups
        else f"{AIV_VARIABLE}=AIV leaves room for more (not with data parallelism, where it can hang); or "
    )
    then = (
        "it thins them out: steps in between are padded to the next size"
        if thinned_out
        else "this vllm-ascend captures them all: too many end the start with error 207008"
    )
    return warning(
        f"{sentence}, and {then}.",
        f"{longer}name the sizes that you use, as in --compilation-config "
        '\'{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [16, 10, 4, 2, 1]}\'. '
        "Servers that share a card share the streams.",
        subject=name,
    )

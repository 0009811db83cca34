"""Functions that are no registered operations and still decide every number: MXFP4's expansion and YaRN's tables.

Their definitions are written down here once more, from the specification and the paper, value by value in double
precision.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import torch

from npu_gptoss.model.config import GptOssConfig, YarnScaling
from npu_gptoss.model.rope import apply_rotary, cos_sin_cache, yarn_inv_freq
from npu_gptoss.moe import mxfp4
from npu_gptoss.tiny.checkpoint import tiny_config
from npu_gptoss.verify.calls import Call, Check, Inputs, Mistake, Outputs, Wanted, with_inputs

OURS = "npu_gptoss"  # the one "kernel" of a function
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PUBLISHED_YARN = YarnScaling(32.0, 4096, 32.0, 1.0, truncate=False)


def _mxfp4_calls(wanted: Wanted) -> Iterator[Call]:
    """Every byte under every scale whose values fit, which includes subnormals; then random shapes."""
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(253, dtype=torch.uint8)
    blocks = every.repeat(253, 1, 1)  # [253, 16, 16]: each scale with all bytes
    dtype = getattr(torch, wanted.roles["values"])
    yield Call(
        "every byte under every scale", {"blocks": blocks, "scales": scales[:, None].expand(-1, 16), "dtype": dtype}
    )
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} mxfp4")
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 2))] + [draw.randint(1, 90)]
        yield Call(
            f"fuzz {number} of seed {wanted.seed}",
            {
                "blocks": torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8),
                "scales": torch.randint(0, 253, shape, generator=generator, dtype=torch.uint8),
                "dtype": dtype,
            },
        )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """So that -0 is told from 0."""
    return values.cpu().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def run_expand(inputs: Inputs, kernel: str) -> Outputs:
    values = mxfp4.expand(**inputs)
    outputs = {"values": values.float(), "bits": _bits(values)}
    if inputs["blocks"].dim() == 4:
        outputs["transposed"] = mxfp4.expand_transposed(**inputs).mT.contiguous().float()
    return outputs


def define_expand(inputs: Inputs) -> Outputs:
    """OCP MX 1.0: the low nibble first, sign, two bits of exponent, one of mantissa; times 2 ** (scale - 127)."""
    codes = torch.stack((inputs["blocks"] & 15, inputs["blocks"] >> 4), -1).flatten(-2).long()
    magnitude = torch.tensor(MAGNITUDES, dtype=torch.float64)[codes & 7]
    signed = torch.copysign(magnitude, torch.where(codes >= 8, -1.0, 1.0).double())
    values = torch.ldexp(signed, inputs["scales"].to(torch.float64)[..., None] - 127).flatten(-2).to(inputs["dtype"])
    outputs = {"values": values.float(), "bits": _bits(values)}
    if inputs["blocks"].dim() == 4:
        outputs["transposed"] = values.float()
    return outputs


EXPAND_MISTAKES = (
    with_inputs("high nibble first", blocks=lambda i: (i["blocks"] << 4) | (i["blocks"] >> 4)),
    with_inputs("scale exponent off by one", scales=lambda i: i["scales"] + 1),
    with_inputs("sign dropped", blocks=lambda i: i["blocks"] & 0x77),
    with_inputs("scale of the next group", scales=lambda i: i["scales"].roll(1, 0)),
    with_inputs("mantissa bit dropped", blocks=lambda i: i["blocks"] & 0xEE),
)


def _compress_calls(wanted: Wanted) -> Iterator[Call]:
    """What is representable must come back, and what is not goes to the nearest; ties are among both."""
    dtype = getattr(torch, wanted.roles["values"])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.9, -0.25, -5.0, 0.0]).repeat(8)[:96]
    yield Call("ties", {"weight": ties.to(dtype)})
    for number in range(max(wanted.cases, 1)):
        draw = random.Random(f"{wanted.seed} {number} compress")
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        drawn = torch.randn(draw.randint(1, 40), 32 * draw.randint(1, 5), generator=generator)
        yield Call(f"fuzz {number} of seed {wanted.seed}", {"weight": (drawn * 10 ** draw.uniform(-6, 6)).to(dtype)})


def run_compress(inputs: Inputs, kernel: str) -> Outputs:
    blocks, scales = mxfp4.compress(inputs["weight"])
    return {"blocks": blocks, "scales": scales}


def define_compress(inputs: Inputs) -> Outputs:
    """OCP MX 1.0, section 6.3, with all candidates tried: the nearest value, of two equally near the even code."""
    groups = inputs["weight"].double().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    exponent = torch.where(largest > 0, torch.floor(torch.log2(largest.clamp(min=1e-300))) - 2, 0.0).clamp(min=-127)
    # log2 of a value just below a power of two may round up to it
    exponent = torch.where(torch.ldexp(torch.ones_like(largest), exponent + 2) > largest, exponent - 1, exponent)
    exponent = torch.where(largest > 0, exponent.clamp(min=-127), 0.0)
    scaled = torch.ldexp(groups, -exponent[..., None])
    distance = (scaled.abs()[..., None] - torch.tensor(MAGNITUDES, dtype=torch.float64)).abs()
    distance = distance + torch.tensor([0.0, 1e-12] * 4, dtype=torch.float64)  # of two equally near the even one
    codes = distance.argmin(-1) | (torch.signbit(scaled).long() << 3)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return {"blocks": blocks.to(torch.uint8), "scales": (exponent + 127).to(torch.uint8)}


COMPRESS_MISTAKES = (
    Mistake("high nibble first", lambda i, d: {**d(i), "blocks": (d(i)["blocks"] << 4) | (d(i)["blocks"] >> 4)}),
    Mistake("scale exponent off by one", lambda i, d: {**d(i), "scales": d(i)["scales"] + 1}),
    with_inputs("sign dropped", weight=lambda i: i["weight"].abs()),
)


def _config(yarn: YarnScaling, head_dim: int) -> GptOssConfig:
    return dataclasses.replace(tiny_config(), head_dim=head_dim, rope_scaling=yarn, max_position_embeddings=131072)


def _rope_calls(wanted: Wanted) -> Iterator[Call]:
    """The published numbers up to the last position, other head sizes and factors; then random ones."""
    plans = [
        ("published", PUBLISHED_YARN, 64, 131072),
        ("published, short", PUBLISHED_YARN, 64, 300),
        ("heads of 128", PUBLISHED_YARN, 128, 5000),
        ("heads of 16", PUBLISHED_YARN, 16, 5000),
        ("factor 1", dataclasses.replace(PUBLISHED_YARN, factor=1.0), 64, 5000),
        ("another context", dataclasses.replace(PUBLISHED_YARN, original_max_position_embeddings=8192), 64, 5000),
        ("a file that says truncate", dataclasses.replace(PUBLISHED_YARN, truncate=True), 64, 5000),
    ]
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} rope")
        yarn = YarnScaling(draw.uniform(1, 64), draw.choice((512, 4096, 8192)), 32.0, 1.0, truncate=draw.random() < 0.3)
        plan = (f"fuzz {number} of seed {wanted.seed}", yarn, draw.choice((16, 32, 64, 128)), draw.randint(1, 9000))
        plans.append(plan)
    for name, yarn, dim, positions in plans:
        config = _config(yarn, dim)
        yield Call(
            name,
            {
                "yarn": yarn,
                "theta": config.rope_theta,
                "head_dim": dim,
                "positions": positions,
                "device": torch.zeros(0),
            },
        )


def run_rope(inputs: Inputs, kernel: str) -> Outputs:
    """The first, the last and some rows between; logarithms, because frequencies count relative to their size."""
    config = _config(inputs["yarn"], inputs["head_dim"])
    table = cos_sin_cache(config, inputs["positions"], torch.float32, inputs["device"].device)
    return {"log_frequencies": yarn_inv_freq(config)[0].log(), "cos_sin": table[_rows(inputs["positions"])]}


def _rows(positions: int) -> torch.Tensor:
    return torch.tensor(sorted({0, 1, 127, 128, 4095, 4096, positions // 2, positions - 1} & set(range(positions))))


def define_rope(inputs: Inputs) -> Outputs:
    """YaRN's "NTK by parts" (2309.00071), one pair after the other in double precision."""
    yarn, dim, theta = inputs["yarn"], inputs["head_dim"], inputs["theta"]

    def pair_with(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / turns
        return dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    if "rounded" in inputs:
        low, high = round(low), round(high)
    low, high = max(low, 0), min(high, dim - 1)
    frequencies = []
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        divided = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies.append(plain * (1 - divided) + plain / yarn.factor * divided)
    table = _rows(inputs["positions"]).double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    scale = inputs.get("attention_factor", 0.1 * math.log(yarn.factor) + 1.0)
    return {
        "log_frequencies": torch.tensor(frequencies, dtype=torch.float64).log().float(),
        "cos_sin": torch.cat((table.cos() * scale, table.sin() * scale), -1).float(),
    }


def _yarn(change: dict[str, object]) -> object:
    def changed(inputs: Inputs) -> YarnScaling | None:
        yarn = inputs["yarn"]
        return None if all(getattr(yarn, n) == v for n, v in change.items()) else dataclasses.replace(yarn, **change)

    return changed


ROPE_MISTAKES = (
    with_inputs("ramp truncated to whole pairs", yarn=_yarn({"truncate": True})),
    with_inputs("ramp rounded to whole pairs", rounded=lambda i: None if i["yarn"].truncate else True),
    with_inputs("truncate ignored", yarn=_yarn({"truncate": False})),
    with_inputs("no YaRN", yarn=_yarn({"factor": 1.0})),
    with_inputs("cos and sin not scaled", attention_factor=lambda i: 1.0 if i["yarn"].factor > 1 else None),
    with_inputs("original context of the whole model", yarn=_yarn({"original_max_position_embeddings": 131072})),
    with_inputs("theta 10000", theta=lambda i: 10000.0),
    Mistake(
        "cosines and sines in turn",
        lambda i, d: {**d(i), "cos_sin": d(i)["cos_sin"].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)},
    ),
)


def _rotary_calls(wanted: Wanted) -> Iterator[Call]:
    dtype = getattr(torch, wanted.roles["values"])
    for number, (tokens, heads, dim) in enumerate(((1, 1, 64), (7, 3, 64), (5, 8, 128), (300, 2, 16))):
        generator = torch.Generator().manual_seed(wanted.seed * 100 + number)
        angle = torch.rand(tokens, dim // 2, generator=generator) * 6.28
        yield Call(
            f"{tokens} tokens, {heads} heads of {dim}",
            {
                "x": torch.randn(tokens, heads, dim, generator=generator).to(dtype),
                "cos": (angle.cos() * 1.3).to(dtype),
                "sin": (angle.sin() * 1.3).to(dtype),
            },
        )


def define_rotary(inputs: Inputs) -> Outputs:
    """Each pair of dimensions i and i + dim / 2 is a complex number, multiplied by cos + i sin."""
    first, second = inputs["x"].double().chunk(2, -1)
    turn = torch.complex(inputs["cos"].double(), inputs["sin"].double())[:, None]
    turned = torch.complex(first, second) * turn
    return {"x": torch.cat((turned.real, turned.imag), -1).float()}


ROTARY_MISTAKES = (
    with_inputs("RoPE halves swapped", sin=lambda i: -i["sin"]),
    with_inputs("cosine and sine swapped", sin=lambda i: i["cos"], cos=lambda i: i["sin"]),
    Mistake(
        "neighbours for halves",
        lambda i, d: {"x": d({**i, "x": _paired(i["x"])})["x"].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)},
    ),
)


def _paired(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


_VALUES = {"values": ("bfloat16", "float32")}
_BITS = {"values": "exact", "bits": "exact", "transposed": "exact"}
CHECKS = (
    Check(
        "mxfp4.expand",
        "MXFP4 to floats, every bit",
        _mxfp4_calls,
        run_expand,
        define_expand,
        EXPAND_MISTAKES,
        _VALUES,
        precisions=_BITS,
    ),
    Check(
        "mxfp4.compress",
        "floats to MXFP4, every bit",
        _compress_calls,
        run_compress,
        define_compress,
        COMPRESS_MISTAKES,
        _VALUES,
        precisions={"blocks": "exact", "scales": "exact"},
    ),
    Check(
        "rope.tables",
        "YaRN's frequencies, cosines and sines",
        _rope_calls,
        run_rope,
        define_rope,
        ROPE_MISTAKES,
        {"values": ("float32",)},
    ),
    Check(
        "rope.rotate",
        "RoPE of heads",
        _rotary_calls,
        lambda inputs, kernel: {"x": apply_rotary(**inputs)},
        define_rotary,
        ROTARY_MISTAKES,
        _VALUES,
    ),
)

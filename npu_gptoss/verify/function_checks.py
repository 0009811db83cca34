"""Functions that are no registered operations and still decide every number: MXFP4's expansion and YaRN's tables.

Their definitions are written down here once more, from the specification and the paper, value by value in double
precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from npu_gptoss.dense.small_ops import apply_rotary
from npu_gptoss.model.config import YarnScaling, published_config
from npu_gptoss.model.rope import cos_sin_cache, yarn_inv_freq
from npu_gptoss.moe import mxfp4
from npu_gptoss.verify.calls import Call, CallSpec, Check
from npu_gptoss.verify.cases import Inputs, bits
from npu_gptoss.verify.compare import Outputs

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PUBLISHED = published_config()
PUBLISHED_YARN = PUBLISHED.rope_scaling


def expand_calls(spec: CallSpec) -> Iterator[Call]:
    """Every byte under every scale with finite values, subnormals included; then random shapes."""
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(253, dtype=torch.uint8)
    blocks = every.repeat(253, 1, 1)  # [253, 16, 16]: each scale with all bytes
    dtype = getattr(torch, spec.roles["values"])
    scales = scales[:, None].expand(-1, 16)
    yield Call("every byte under every scale", {"blocks": blocks, "scales": scales, "dtype": dtype})
    for name, draw in spec.fuzz("mxfp4"):
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 2))] + [draw.randint(1, 90)]
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 253, shape, generator=generator, dtype=torch.uint8)
        yield Call(name, {"blocks": blocks, "scales": scales, "dtype": dtype})


def run_expand(inputs: Inputs, kernel: str | None) -> Outputs:
    values = mxfp4.expand(**inputs)
    outputs = {"values": values.float(), "bits": bits(values)}
    if inputs["blocks"].dim() == 4:
        outputs["transposed"] = mxfp4.expand_transposed(**inputs).mT.contiguous().float()
    return outputs


def define_expand(inputs: Inputs) -> Outputs:
    """OCP MX 1.0: the low nibble first, sign, two bits of exponent, one of mantissa; times 2 ** (scale - 127)."""
    codes = torch.stack((inputs["blocks"] & 15, inputs["blocks"] >> 4), -1).flatten(-2).long()
    magnitude = torch.tensor(MAGNITUDES, dtype=torch.float64)[codes & 7]
    signed = torch.copysign(magnitude, torch.where(codes >= 8, -1.0, 1.0).double())
    values = torch.ldexp(signed, inputs["scales"].to(torch.float64)[..., None] - 127).flatten(-2).to(inputs["dtype"])
    outputs = {"values": values.float(), "bits": bits(values)}
    if inputs["blocks"].dim() == 4:
        outputs["transposed"] = values.float()
    return outputs


def compress_calls(spec: CallSpec) -> Iterator[Call]:
    """Representable values must come back, others become the nearest value; ties are among both."""
    dtype = getattr(torch, spec.roles["values"])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.9, -0.25, -5.0, 0.0]).repeat(8)[:96]
    yield Call("ties", {"weight": ties.to(dtype)})
    for name, draw in dataclasses.replace(spec, cases=max(spec.cases, 1)).fuzz("compress"):
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        drawn = torch.randn(draw.randint(1, 40), 32 * draw.randint(1, 5), generator=generator)
        yield Call(name, {"weight": (drawn * 10 ** draw.uniform(-6, 6)).to(dtype)})


def run_compress(inputs: Inputs, kernel: str | None) -> Outputs:
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


def table_calls(spec: CallSpec) -> Iterator[Call]:
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
    for name, draw in spec.fuzz("rope"):
        yarn = YarnScaling(draw.uniform(1, 64), draw.choice((512, 4096, 8192)), 32.0, 1.0, truncate=draw.random() < 0.3)
        plans.append((name, yarn, draw.choice((16, 32, 64, 128)), draw.randint(1, 9000)))
    for name, yarn, dim, positions in plans:
        inputs = {"yarn": yarn, "theta": PUBLISHED.rope_theta, "head_dim": dim, "positions": positions}
        yield Call(name, {**inputs, "device": torch.zeros(0)})


def run_tables(inputs: Inputs, kernel: str | None) -> Outputs:
    """The first, the last and some rows between; logarithms, because frequencies count relative to their size."""
    config = dataclasses.replace(PUBLISHED, head_dim=inputs["head_dim"], rope_scaling=inputs["yarn"])
    table = cos_sin_cache(config, inputs["positions"], torch.float32, inputs["device"].device)
    return {"log_frequencies": yarn_inv_freq(config)[0].log(), "cos_sin": table[_rows(inputs["positions"])]}


def _rows(positions: int) -> torch.Tensor:
    return torch.tensor(sorted({0, 1, 127, 128, 4095, 4096, positions // 2, positions - 1} & set(range(positions))))


def define_tables(inputs: Inputs) -> Outputs:
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


def rotary_calls(spec: CallSpec) -> Iterator[Call]:
    dtype = getattr(torch, spec.roles["values"])
    for number, (tokens, heads, dim) in enumerate(((1, 1, 64), (7, 3, 64), (5, 8, 128), (300, 2, 16))):
        generator = torch.Generator().manual_seed(spec.seed * 100 + number)
        angle = torch.rand(tokens, dim // 2, generator=generator) * 6.28
        tables = {"cos": (angle.cos() * 1.3).to(dtype), "sin": (angle.sin() * 1.3).to(dtype)}
        x = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
        yield Call(f"{tokens} tokens, {heads} heads of {dim}", {"x": x, **tables})


def run_rotary(inputs: Inputs, kernel: str | None) -> Outputs:
    return {"x": apply_rotary(**inputs)}


def define_rotary(inputs: Inputs) -> Outputs:
    """Each pair of dimensions i and i + dim / 2 is a complex number, multiplied by cos + i sin."""
    first, second = inputs["x"].double().chunk(2, -1)
    turn = torch.complex(inputs["cos"].double(), inputs["sin"].double())[:, None]
    turned = torch.complex(first, second) * turn
    return {"x": torch.cat((turned.real, turned.imag), -1).float()}


_VALUES = {"values": ("bfloat16", "float32")}
_BITS = {"values": "exact", "bits": "exact", "transposed": "exact"}
_PACKED = {"blocks": "exact", "scales": "exact"}
_FLOAT32 = {"values": ("float32",)}
CHECKS = (
    Check("mxfp4.expand", expand_calls, run_expand, _VALUES, _BITS, define_expand),
    Check("mxfp4.compress", compress_calls, run_compress, _VALUES, _PACKED, define_compress),
    Check("rope.tables", table_calls, run_tables, _FLOAT32, defined=define_tables),
    Check("rope.rotate", rotary_calls, run_rotary, _VALUES, defined=define_rotary),
)

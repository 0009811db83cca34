"""Projections and norms in the shapes of a rank.

On Ascend these are vllm-ascend's calls, torch's linear and torch_npu's norms; elsewhere the public operations. No
release for a 910B is known to compute gpt-oss's shapes wrongly. Betas of CANN 9.1 did, with fewer than 64 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from npu_gptoss import dense
from npu_gptoss.dense.operations import ROTATE_WRITE
from npu_gptoss.kernels import current_platform, platform_override
from npu_gptoss.verify.cases import Inputs, on, poison, widened
from npu_gptoss.verify.compare import Outputs, Result, by_rows, checked
from npu_gptoss.verify.dense_cases import DenseInputs, Sizes
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test.attention import HEAD_DIM

EPSILON = 1e-5
WIDTH = 2880  # of gpt-oss's norms
FEW_ROWS = "torch's linear with fewer than 64 rows, or with an Inf (ops-nn e3f831f65 and 678cacee2, betas of CANN 9.1)"
NORM = "npu_rms_norm or npu_add_rms_norm"
NARROW_ROWS, NARROW_WIDTH = (300,), 1024  # up to 2000 wide CANN 8.3 and 8.5 merge rows, and do not wait
FIRST_ROWS = (1, 40)  # of norms: around the number of vector cores
NORM_ROWS = (*FIRST_ROWS, 41, 257)


@dataclass(frozen=True)
class Case:
    """x [rows, inputs] times [outputs, inputs] transposed, plus a bias. infinite: a row that holds one Inf. later: not
    at a server's start."""

    rows: int
    infinite: int | None = None
    later: bool = False


CASES = (Case(1), Case(16), Case(63, infinite=5), Case(64, later=True), Case(257, 64, later=True))


def shapes(rank: Rank) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a rank's projections."""
    return {
        "qkv_proj": (rank.hidden, (rank.heads + 2 * rank.kv_heads) * HEAD_DIM),
        "o_proj": (rank.heads * HEAD_DIM, rank.hidden),
        "router": (rank.hidden, rank.experts),
    }


def results(rank: Rank) -> Iterator[Result]:
    """Projections, and norms in the width of the rank; beyond the start in gpt-oss's width."""
    yield from projections([case for case in CASES if not (case.later and rank.short)], rank)
    yield from norms(FIRST_ROWS, rank.hidden, rank) if rank.short else norms(NORM_ROWS, WIDTH, rank)


def narrow(rank: Rank) -> Iterator[Result]:
    """Norms narrower than gpt-oss's, as tiny checkpoints have them."""
    yield from norms(NARROW_ROWS, NARROW_WIDTH, rank)


def rotation(rank: Rank) -> Iterator[Result]:
    """RoPE and the cache write as one launch, with slots of -1, which are not written."""
    dtype = str(rank.dtype).removeprefix("torch.")
    sizes = Sizes(heads=rank.heads, kv_heads=rank.kv_heads, head_dim=HEAD_DIM)
    for rows in FIRST_ROWS:
        made = DenseInputs(torch.Generator().manual_seed(rows), {"qkv": dtype, "kv": dtype}, rows, sizes).rotate_write()
        with platform_override("cpu"):
            want = _rotated(widened(made), f"{ROTATE_WRITE.name}.reference")
        there = on(made, rank.device)
        call = f"RoPE and the cache write of {rows} rows"
        run = functools.partial(_rotated, there)
        yield checked(call, run, by_rows(want), repeats=rank.repeats, suspect="Triton-Ascend's compiler")[0]


def _rotated(inputs: Inputs, kernel: str | None = None) -> Outputs:
    query = dense.rotate_write(**inputs, kernel=kernel)[: inputs["metadata"].num_tokens]
    return {name: t.cpu() for name, t in (("query", query), *((n, inputs[n]) for n in ("key_cache", "value_cache")))}


def projections(cases: Iterable[Case], rank: Rank) -> Iterator[Result]:
    """Each case with each projection."""
    cases, (device, dtype) = tuple(cases), (rank.device, rank.dtype)
    poison(device)
    for name, (inputs, outputs) in shapes(rank).items():
        generator = torch.Generator().manual_seed(inputs + outputs)
        weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        there = weight.to(device), bias.to(device)
        for case in cases:
            x = torch.randn(case.rows, inputs, generator=generator).to(dtype)
            if case.infinite is not None:
                x[case.infinite, 3] = float("inf")
            run = functools.partial(_linear, x.to(device), *there, case.infinite)
            want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
            if case.infinite is not None:
                want[case.infinite] = 0
            call = f"{name} [{case.rows}, {inputs}] to {outputs}{' with an Inf' * (case.infinite is not None)}"
            yield checked(call, run, by_rows({"out": want}), repeats=rank.repeats, suspect=FEW_ROWS)[0]


def norms(rows: Iterable[int], width: int, rank: Rank) -> Iterator[Result]:
    """The residual's addition with its norm, and the norm alone."""
    poison(rank.device)
    suspect = f"{NORM} up to 2000 wide (ops-nn cf84e2226, repaired in CANN 9.0.0)" if width <= 2000 else NORM
    for count in rows:
        generator = torch.Generator().manual_seed(count)
        residual, delta = (torch.randn(count, width, generator=generator).to(rank.dtype) for _ in range(2))
        weight = (1 + torch.rand(width, generator=generator)).to(rank.dtype)
        there = [tensor.to(rank.device) for tensor in (residual, delta, weight)]
        for name, second in (("add_rms_norm", delta), ("rms_norm", None)):
            arguments = there[0], None if second is None else there[1], there[2]
            with platform_override("cpu"):
                whole = residual if second is None else residual + second
                norm = weight.float(), EPSILON, torch.float32
                want = dense.add_norm(whole.float(), None, *norm, kernel="reference")[1]
            run = functools.partial(_add_norm, *arguments)
            call = f"{name} [{count}, {width}]"
            both = {"residual": whole, "normed": want}
            yield checked(call, run, by_rows(both), repeats=rank.repeats, suspect=suspect)[0]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, infinite: int | None) -> Outputs:
    product = torch.nn.functional.linear if current_platform().kind == "ascend" else dense.output
    out = product(x, weight, bias).cpu()
    if infinite is not None:  # the row with the Inf may hold anything; the others must not
        out[infinite] = 0
    return {"out": out}


def _add_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> Outputs:
    if current_platform().kind != "ascend":
        total, normed = dense.add_norm(residual, delta, weight.float(), EPSILON, residual.dtype)
        return {"residual": total.to(residual.dtype).cpu(), "normed": normed.cpu()}
    import torch_npu

    if delta is None:
        return {"residual": residual.cpu(), "normed": torch_npu.npu_rms_norm(residual, weight, EPSILON)[0].cpu()}
    normed, _, total = torch_npu.npu_add_rms_norm(delta, residual, weight, EPSILON)
    return {"residual": total.cpu(), "normed": normed.cpu()}

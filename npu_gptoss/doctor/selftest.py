"""Ten seconds of arithmetic on the device at hand: the public operations with the kernels that are selected for it,
against the definition (`reference`, fp32 on the CPU), on inputs that make each classic mistake large.

* sink: every head has another one, from none to one that outweighs all keys;
* window: one key is planted 127 positions before a query and another 128 before; the first must be seen, the second
  not, in a decode step and in a prefill chunk of 1100 tokens. On a full layer a key 300 back must be seen;
* bias: expert outputs in which both biases weigh as much as the products;
* activation: pre-activations of which a quarter lies beyond the clamp, gate and up interleaved.

Where a result is wrong, the known mistakes are computed too, and the one that explains it is named. The other tests
make the calls that known defects of CANN get wrong, or that stand at an edge of its kernels (`npu_gptoss.selftest`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from npu_gptoss import envs
from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, one_line, warning
from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import ExpertWeights, expert_mlp, prepare_experts, route
from npu_gptoss.moe.activation import ALPHA, LIMIT
from npu_gptoss.selftest import attention, dense, experts, formats, graph
from npu_gptoss.selftest.experts import Sizes
from npu_gptoss.selftest.outcome import Outcome
from npu_gptoss.selftest.steps import HEAD_DIM, WINDOW, Step, deviation

# Of the worst row, relative to the largest one. bfloat16 rounds the activation, both products and the result: up to
# 0.3 per cent were seen; every mistake above makes ten per cent and more.
LIMITS = {torch.bfloat16: 0.02, torch.float32: 1e-4}
REMEDY = (
    "Text would be wrong without a word: do not serve with it. `kernels` above names the kernel; {} falls back to "
    "plain torch operators. Please report it with `npu-gptoss doctor --json`."
)
_ATTENTION = "NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops"
OTHER_CANN = (
    "Text would be wrong without a word: do not serve with it. Install another release of CANN, and report it with "
    "`npu-gptoss doctor --json`."
)
_EXPERTS = "NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops (with --enforce-eager on Ascend)"


def explained(got: torch.Tensor, suspects: Mapping[str, torch.Tensor], limit: float) -> str:
    """The known mistake that gives this result, as a clause; empty when none does."""
    near = {name: deviation(got, tensor) for name, tensor in suspects.items()}
    name = min(near, key=near.__getitem__, default=None)
    return f": {name}" if name is not None and near[name] <= 2 * limit else ""


def _normal(generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * std


def sink_step(dtype: torch.dtype) -> Step:
    """A prompt, a decode step and a chunk of a longer prompt, 64 heads on 8."""
    generator = torch.Generator().manual_seed(1)
    rows, lengths = [40, 1, 130], [40, 200, 300]
    keys, values = ([_normal(generator, n, 8, HEAD_DIM).to(dtype) for n in lengths] for _ in range(2))
    query = _normal(generator, sum(rows), 64, HEAD_DIM).to(dtype)
    return Step(query, keys, values, rows, torch.linspace(-2, 8, 64).to(dtype))


def planted_step(dtype: torch.dtype, distances: list[int], chunk: int = 0) -> Step:
    """Decode steps of 400 keys, each with one key `distance` back that takes nearly all of the attention and is the
    only one with a value (1); and a prompt of `chunk` tokens with planted keys at every 100th position."""
    heads, kv_heads, length = 8, 1, 400
    lengths, rows = [length] * len(distances), [1] * len(distances)
    planted = [[length - 1 - distance] for distance in distances]
    if chunk:
        lengths, rows, planted = [*lengths, chunk], [*rows, chunk], [*planted, list(range(0, chunk, 100))]
    keys, values = [], []
    for n, at in zip(lengths, planted, strict=True):
        key, value = torch.zeros(n, kv_heads, HEAD_DIM), torch.zeros(n, kv_heads, HEAD_DIM)
        key[at] = 1.5  # times a query of 1 at 64 places, times the scale 1/8: a score of 12, above 400 scores of 0
        value[at] = 1 + torch.arange(len(at)).view(-1, 1, 1) / 4
        keys.append(key.to(dtype))
        values.append(value.to(dtype))
    query = torch.ones(sum(rows), heads, HEAD_DIM)
    return Step(query.to(dtype), keys, values, rows, torch.zeros(heads).to(dtype))


def sink(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    step = sink_step(dtype)
    got, want = step.run(device, None), step.want(None)
    none = replace(step, sinks=torch.full_like(step.sinks, float("-inf")))
    scaled = replace(step, sinks=step.sinks * HEAD_DIM**-0.5)
    suspects = {"the sinks are dropped": none.want(None), "the sinks are scaled like scores": scaled.want(None)}
    yield _judged("self-test-sink", "Attention with sinks", got, want, suspects, dtype, _ATTENTION)


def window(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    check = "self-test-window"
    step = planted_step(dtype, [WINDOW - 1, WINDOW], chunk=1100)
    got = step.run(device, WINDOW)
    inside, outside = got[0].float().mean().item(), got[1].float().mean().item()
    remedy = REMEDY.format(_ATTENTION)
    if not inside > 0.5:
        yield failed(
            check, "A key 127 positions before the query is not seen: the window is shorter than 128 keys.", remedy
        )
    if not outside < 0.5:
        yield failed(
            check,
            "A key 128 positions before the query is seen: the window has 129 keys or more (128 keys include the "
            "query's own; Ascend's pre_tokens counts those before it, 127).",
            remedy,
        )
    if not inside > 0.5 or not outside < 0.5:
        return
    suspects = {
        "the window is 127": step.want(WINDOW - 1),
        "the window is 129": step.want(WINDOW + 1),
        "there is no window": step.want(None),
    }
    chunk = _judged(check, "The window of 128 keys", got, step.want(WINDOW), suspects, dtype, _ATTENTION)
    if chunk.state != "ok":
        yield chunk
        return
    full = planted_step(dtype, [300])
    if not full.run(device, None).float().mean().item() > 0.5:
        yield failed(check, "A full layer does not see a key 300 back: it is given a window.", remedy)
        return
    yield chunk


@dataclass(frozen=True)
class Layer:
    """Tokens and experts on the CPU. hidden [tokens, 256], logits [tokens, 8], weights in the official layout."""

    hidden: torch.Tensor
    logits: torch.Tensor
    weights: ExpertWeights

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Layer:
        w = self.weights
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        weights = ExpertWeights(**{name: move(getattr(w, name)) for name in names})
        return Layer(move(self.hidden), move(self.logits), weights)

    def run(self, kernel: str | None = None, limit: float = LIMIT) -> torch.Tensor:
        weights, ids = route(self.logits, 4, kernel=kernel)
        prepared = prepare_experts(self.weights, swiglu_limit=limit, kernel=kernel)
        return expert_mlp(self.hidden, prepared, weights, ids).cpu()

    def want(self, limit: float = LIMIT) -> torch.Tensor:
        with platform_override("cpu"):
            return self.moved(torch.Tensor.float).run("reference", limit)


def expert_layer(dtype: torch.dtype, *, seed: int, gate_up: float, gate_up_bias: float, bias: float) -> Layer:
    """Standard deviations of the pre-activations' two parts and of the outer bias; products of `down` are about 1."""
    generator = torch.Generator().manual_seed(seed)
    tokens, hidden, inner, experts = 33, 256, 256, 8
    size = max(1.0, gate_up + gate_up_bias) ** 2  # of the activation, roughly
    weights = ExpertWeights(
        _normal(generator, experts, hidden, 2 * inner, std=gate_up * hidden**-0.5),
        _normal(generator, experts, 2 * inner, std=gate_up_bias),
        _normal(generator, experts, inner, hidden, std=inner**-0.5 / size),
        _normal(generator, experts, hidden, std=bias),
    )
    layer = Layer(_normal(generator, tokens, hidden), _normal(generator, tokens, experts), weights)
    return layer.moved(lambda tensor: tensor.to(dtype))


def bias(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    layer = expert_layer(dtype, seed=2, gate_up=1.0, gate_up_bias=1.0, bias=0.5)
    got = layer.moved(lambda tensor: tensor.to(device)).run()
    w, suspects = layer.weights, {}
    outer, inner = torch.zeros_like(w.down_proj_bias), torch.zeros_like(w.gate_up_proj_bias)
    for name, changed in (
        ("both biases are omitted", {"down_proj_bias": outer, "gate_up_proj_bias": inner}),
        ("the bias of gate and up is omitted", {"gate_up_proj_bias": inner}),
        ("the bias of down is omitted", {"down_proj_bias": outer}),
    ):
        suspects[name] = replace(layer, weights=replace(w, **changed)).want()
    yield _judged("self-test-bias", "Routing and experts with biases", got, layer.want(), suspects, dtype, _EXPERTS)


def activation(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    layer = expert_layer(dtype, seed=3, gate_up=5.0, gate_up_bias=4.0, bias=0.0)
    got = layer.moved(lambda tensor: tensor.to(device)).run()
    w = layer.weights

    def columns(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        weights = replace(w, gate_up_proj=change(w.gate_up_proj), gate_up_proj_bias=change(w.gate_up_proj_bias))
        return replace(layer, weights=weights).want()

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor[..., 1::2], tensor[..., 0::2]], dim=-1).flatten(-2)

    def as_halves(tensor: torch.Tensor) -> torch.Tensor:
        gate, up = tensor.chunk(2, dim=-1)
        return torch.stack([gate, up], dim=-1).flatten(-2)

    suspects = {
        "gate and up are swapped": columns(swap),
        "gate and up are taken for halves, not interleaved": columns(as_halves),
        "the clamp is left out": layer.want(limit=float(torch.finfo(torch.float32).max)),
    }
    name = f"gpt-oss's activation (clamp {LIMIT:g}, {ALPHA} in the sigmoid, up + 1)"
    yield _judged("self-test-activation", name, got, layer.want(), suspects, dtype, _EXPERTS)


def _judged(
    check: str,
    what: str,
    got: torch.Tensor,
    want: torch.Tensor,
    suspects: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    override: str,
) -> Finding:
    found, limit = deviation(got, want), LIMITS[dtype]
    if found <= limit:
        return ok(check, f"{what}: {found:.2%} from the definition, at most {limit:.2%} is rounding.")
    size = "NaN or Inf" if found == float("inf") else f"{found:.0%} from the definition"
    return failed(check, f"{what}: {size}{explained(got, suspects, limit)}.", REMEDY.format(override))


# of gpt-oss-20b on one card; on a CPU and on the emulated 910B, where these take long, small ones
PUBLISHED = Sizes(hidden=2880, inner=2880, experts=32, held=(0, 32))
SMALL = Sizes(hidden=96, inner=64, experts=8, held=(0, 8))


def _is_slow(device: torch.device) -> bool:
    return device.type == "cpu" or envs.get("NPU_GPTOSS_EMULATED")


def attention_calls(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Calls that known defects of CANN get wrong; where they take long, some of them with the heads of one key head."""
    cases = [case for case in attention.CASES if case.at_start or not _is_slow(device)]
    kv_heads, repeats = (1, 2) if _is_slow(device) else (8, 20)
    found = [
        outcome
        for case in cases
        for outcome in attention.outcomes(
            case, device, heads=8 * kv_heads, kv_heads=kv_heads, dtype=dtype, repeats=repeats
        )
    ]
    remedy = REMEDY.format(_ATTENTION)
    if all(outcome.merged_heads for outcome in found if outcome.problem):
        remedy = "A server goes round it by itself, with one line in its log. A newer CANN may have it mended."
    yield _all_right("self-test-attention", found, repeats, remedy)


def moe(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Routing and experts at the edges of their kernels, on a rank with all experts and on one with a quarter."""
    sizes, repeats = (SMALL, 2) if _is_slow(device) else (PUBLISHED, 5)
    part = replace(sizes, held=(sizes.experts // 4, sizes.experts // 2))
    found = [
        *experts.gates(experts.GATES, device, dtype),
        *experts.gates(experts.GATES, device, torch.float32),
        *experts.group_lists(sizes, device, dtype),
        *experts.outcomes([case for case in experts.CASES if not case.of_part], sizes, device, dtype, repeats),
        *experts.outcomes([case for case in experts.CASES if case.of_part], part, device, dtype, repeats),
    ]
    yield _all_right("self-test-moe", found, repeats, REMEDY.format(_EXPERTS))


def around(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Projections and norms; of norms narrower than gpt-oss's a word apart."""
    sizes, repeats = (SMALL, 2) if _is_slow(device) else (PUBLISHED, 5)
    shapes = dense.shapes(sizes.hidden, *((8, 2) if _is_slow(device) else (64, 8)), HEAD_DIM, sizes.experts)
    found = [
        *dense.projections(dense.CASES, shapes, device, dtype, repeats),
        *dense.norms(dense.NORM_ROWS[False], PUBLISHED.hidden, device, dtype, repeats),
    ]
    yield _all_right("self-test-dense", found, repeats, OTHER_CANN)
    if narrow := [found for found in dense.norms(*dense.NARROW, device, dtype, repeats) if found.problem]:
        yield warning(
            "self-test-dense",
            "Norms up to 2000 wide are wrong on this card; gpt-oss's are 2880 wide, a tiny checkpoint's are not.",
            "Serve no tiny checkpoint on this CANN; CANN 9.0.0 has it mended.",
            details=tuple(outcome.sentence() for outcome in narrow),
        )


def nz(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Weights in FRACTAL_NZ; in a process of its own, where no call in ND came before."""
    if device.type != "npu":
        yield not_applicable("self-test-nz", "FRACTAL_NZ is a format of Ascend.")
        return
    sizes = SMALL if _is_slow(device) else PUBLISHED
    found = [*formats.experts(sizes, device, dtype), *formats.linear(sizes, device, dtype)]
    remedy = "Keep the experts in ND: NPU_GPTOSS_EXPERT_FORMAT=nd. Please report it with `npu-gptoss doctor --json`."
    finding = _all_right("self-test-nz", found, 1, remedy)
    # a server looks before it takes this format, and nothing obliges it to
    yield finding if finding.state == "ok" else replace(finding, state="warning")


def graphs(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Captured work against the definition; in a process of its own, because what waits for ever takes its process
    along."""
    if device.type == "cpu":
        yield not_applicable("self-test-graph", "A CPU captures no graphs.")
        return
    found = [*graph.outcomes(SMALL if _is_slow(device) else PUBLISHED, device, dtype)]
    yield _all_right("self-test-graph", found, 1, "Serve with --enforce-eager. Another release of CANN may be right.")
    if device.type != "npu" or importlib.util.find_spec("vllm_ascend") is None:
        return
    from npu_gptoss.serving.ascend.probe import full_graph_objection

    heads, kv_heads = (8, 1) if _is_slow(device) else (64, 8)
    objection = full_graph_objection(
        heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, window=WINDOW, dtype=dtype, device=device
    )
    if objection is None:
        yield ok("self-test-graph", "Attention captured short follows its updates to long contexts and back.")
    else:
        yield warning(
            "self-test-graph",
            f"Attention captured short does not follow its updates: {objection}.",
            "Servers see it at their start and capture PIECEWISE graphs instead of FULL_DECODE_ONLY ones.",
        )


def _all_right(check: str, found: Iterable[Outcome | attention.Outcome], repeats: int, remedy: str) -> Finding:
    found = list(found)
    wrong = [outcome for outcome in found if outcome.problem]
    if wrong:
        what = f"{len(wrong)} of {len(found)} calls are wrong."
        return failed(check, what, remedy, details=tuple(outcome.sentence() for outcome in wrong))
    worst = max((outcome.deviation for outcome in found), default=0.0)
    often = f", {repeats} times each" if repeats > 1 else ""
    return ok(check, f"{len(found)} calls at edges of CANN's kernels{often}: {worst:.2%} from the definition.")


CASES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Finding]]] = {
    "self-test-sink": sink,
    "self-test-window": window,
    "self-test-attention": attention_calls,
    "self-test-bias": bias,
    "self-test-activation": activation,
    "self-test-moe": moe,
    "self-test-dense": around,
    "self-test-nz": nz,
    "self-test-graph": graphs,
}
ALONE = ("self-test-nz", "self-test-graph")  # each in a process of its own


def self_test(check: str, device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """One of CASES. What a kernel or the device raises is a finding about them, not about this test."""
    try:
        with torch.inference_mode():  # as a server calls them: torch_npu has other kernels for some operators otherwise
            found = list(CASES[check](device, dtype))
    except Exception as error:  # an operator's refusal, a driver's error
        override = {"sink": _ATTENTION, "window": _ATTENTION, "attention": _ATTENTION, "dense": "", "graph": ""}.get(
            check.removeprefix("self-test-"), _EXPERTS
        )
        to_blame = f" {override} tells whether the kernel is to blame." if override else ""
        found = [
            failed(
                check,
                f"It could not be computed on {device}: {type(error).__name__}: {one_line(error)}",
                f"Mend what the checks of versions and CANN say.{to_blame}",
            )
        ]
    yield from found

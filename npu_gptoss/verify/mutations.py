"""The known mistakes of gpt-oss's operations: one table, with the check that must notice each.

Ports of gpt-oss have made them, or its formulas invite them. `verify --mutate` shows that each would be caught, and the
doctor names the mistake that explains a wrong result. A mutation returns the result of a kernel with that mistake.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.dense import Shortlist
from npu_gptoss.graphs.state import NOBODY, DecodeState
from npu_gptoss.moe import AnyExperts, ExpertWeights, Mxfp4Experts
from npu_gptoss.verify.attention_cases import WINDOW
from npu_gptoss.verify.cases import Inputs
from npu_gptoss.verify.compare import Outputs

Definition = Callable[[Inputs], Outputs]
Tensor = torch.Tensor

PAGED, WRITE, ROUTE, EXPERTS = "attention.paged", "attention.write_kv", "moe.route", "moe.experts"
QKV, OUTPUT, ROUTER, ADD_NORM = "dense.qkv", "dense.output", "dense.router", "dense.add_norm"
TURNS = ("dense.qkv", WRITE_TURNED := "dense.rotate_write")
LOGITS, GREEDY, TOKEN, ADVANCE = "dense.logits", "dense.greedy", "dense.token", "graphs.advance"
PACKED = "moe.expand"
EXPAND, COMPRESS, TABLES, ROTATE = "mxfp4.expand", "mxfp4.compress", "rope.tables", "rope.rotate"
STREAM = (QKV, ROUTER, ADD_NORM)  # operations that add to the residual stream and norm it
BIASED = (QKV, OUTPUT, ROUTER)
SEES_ALL = 1 << 30  # keys of a window


@dataclass(frozen=True)
class Mutation:
    """checks: which must notice it. answer: of a kernel that makes the mistake; None where a call cannot show it."""

    name: str
    checks: tuple[str, ...]
    answer: Callable[[Inputs, Definition], Outputs | None]


def of_inputs(name: str, *checks: str, **changes: Callable[[Inputs], Any]) -> Mutation:
    """The definition of changed inputs, each a function of all inputs; None says that the call cannot show it."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs | None:
        changed = {key: change(inputs) for key, change in changes.items()}
        return None if any(v is None for v in changed.values()) else definition({**inputs, **changed})

    return Mutation(name, checks, answer)


def of_each(name: str, *checks: str, **changes: Callable[[Any], Any]) -> Mutation:
    """Does as `of_inputs`, each change a function of the input itself; a call without it cannot show the mistake."""

    def changed(key: str, inputs: Inputs) -> Any:
        return None if inputs[key] is None else changes[key](inputs[key])

    return of_inputs(name, *checks, **{key: functools.partial(changed, key) for key in changes})


def of_result(name: str, *checks: str, change: Callable[[Inputs, Outputs], Outputs | None]) -> Mutation:
    """A change of the right result: the outputs that are off, None where the call cannot show it."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs | None:
        right = definition(inputs)
        wrong = change(inputs, right)
        return None if wrong is None else {**right, **wrong}

    return Mutation(name, checks, answer)


def _changed(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same data with these fields changed; None where a change says so. It has no plans for the old ones."""

    def changed(data: Any) -> Any:
        fields = {name: change(getattr(data, name)) for name, change in changes.items() if hasattr(data, name)}
        plans = {"plans": {}} if hasattr(data, "plans") else {}
        shown = fields and all(value is not None for value in fields.values())
        return dataclasses.replace(data, **fields, **plans) if shown else None

    return changed


# --- attention


def _of_metadata(name: str, change: Callable[[AttentionMetadata, int], AttentionMetadata | None]) -> Mutation:
    """Unused blocks hold numbers here, as they do in a server: the mistake is found by its result, not by NaN."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs | None:
        metadata = inputs["metadata"]
        changed = change(metadata, inputs["key_cache"].shape[1]) if isinstance(metadata, AttentionMetadata) else None
        caches = {name: inputs[name].float().nan_to_num(nan=0.5) for name in ("key_cache", "value_cache")}
        return None if changed is None else definition({**inputs, **caches, "metadata": changed})

    return Mutation(name, (PAGED,), answer)


def _short_keys(metadata: AttentionMetadata, block_size: int) -> AttentionMetadata | None:
    rows = pairwise(metadata.query_start_loc)
    lengths = tuple(max(n - 1, end - start) for n, (start, end) in zip(metadata.seq_lens, rows, strict=True))
    return None if lengths == metadata.seq_lens else dataclasses.replace(metadata, seq_lens=lengths, plans={})


def _table(metadata: AttentionMetadata, axis: int, by: int, shown: bool) -> AttentionMetadata | None:
    table = metadata.block_table.roll(by, axis)
    return dataclasses.replace(metadata, block_table=table, plans={}) if shown else None


def _one_key_ahead(inputs: Inputs, definition: Definition) -> Outputs | None:
    """Each row but a request's last sees the next key too, as if it stood one row further down."""
    metadata = inputs["metadata"]
    if metadata.max_query_len < 2:
        return None
    query, out = inputs["query"].clone(), definition(inputs)["out"].clone()
    for start, end in pairwise(metadata.query_start_loc):
        query[start + 1 : end] = inputs["query"][start : end - 1].clone()
    shifted = definition({**inputs, "query": query})["out"]
    for start, end in pairwise(metadata.query_start_loc):
        out[start : end - 1] = shifted[start + 1 : end]
    return {"out": out}


def _tail_kept(inputs: Inputs, right: Outputs) -> Outputs | None:
    out, tokens = right["out"].clone(), inputs["metadata"].num_tokens
    out[tokens:] = 1.0
    return None if out.shape[0] == tokens else {"out": out}


def _heads_in_turn(inputs: Inputs, definition: Definition) -> Outputs | None:
    """Query head h reads key head h % kv_heads instead of h // group."""
    heads, kv_heads = inputs["query"].shape[1], inputs["key_cache"].shape[2]
    if kv_heads == 1 or heads == kv_heads:
        return None
    order = torch.arange(heads).view(-1, kv_heads).t().flatten()
    turned = definition({**inputs, "query": inputs["query"][:, order], "sinks": inputs["sinks"][order]})["out"]
    return {"out": turned[:, order.argsort()]}


def _reversed(metadata: AttentionMetadata) -> AttentionMetadata | None:
    tokens = metadata.num_tokens
    return _changed(slot_mapping=lambda slots: slots[:tokens].flip(0))(metadata) if tokens > 1 else None


def _window_of_a_full_layer(inputs: Inputs) -> int | None:
    return WINDOW if inputs["sliding_window"] is None else None


ATTENTION = (
    of_each("sink dropped", PAGED, sinks=lambda t: torch.full_like(t, -1e4)),
    of_each("sink counted twice", PAGED, sinks=lambda t: t.float() + math.log(2)),
    of_each("sink of head 0 for all", PAGED, sinks=lambda t: t[:1].expand_as(t)),
    of_each("sinks in reverse order", PAGED, sinks=lambda t: t.flip(0)),
    of_inputs("sinks scaled like scores", PAGED, sinks=lambda i: i["sinks"].float() * i["scale"]),
    of_each("window 127 for 128", PAGED, sliding_window=lambda window: window - 1 if window > 1 else None),
    of_each("window 129 for 128", PAGED, sliding_window=lambda window: window + 1),
    of_each("window ignored", PAGED, sliding_window=lambda window: SEES_ALL),
    of_inputs("window on a layer that sees all", PAGED, sliding_window=_window_of_a_full_layer),
    Mutation("causal off by one", (PAGED,), _one_key_ahead),
    of_each("scale missing", PAGED, scale=lambda scale: 1.0),
    of_each("scale twice", PAGED, scale=lambda scale: scale**2),
    _of_metadata("block table of the next request", lambda m, size: _table(m, 0, 1, m.num_requests > 1)),
    _of_metadata("block table off by one", lambda m, size: _table(m, 1, -1, max(m.seq_lens) > size)),
    _of_metadata("keys one too short", _short_keys),
    of_inputs("keys for values", PAGED, value_cache=lambda i: i["key_cache"]),
    Mutation("key heads in turn, not in groups", (PAGED,), _heads_in_turn),
    of_result("padded rows not zeroed", PAGED, change=_tail_kept),
    of_each("slot off by one", WRITE, metadata=_changed(slot_mapping=lambda slots: slots + 1)),
    of_each("slots in reverse order", WRITE, metadata=_reversed),
    of_inputs("values for keys", WRITE, key=lambda i: i["value"]),
    of_each("rows one too far", WRITE, key=lambda t: t.roll(1, 0)),
)

# --- experts


def _of_weights(name: str, **changes: Callable[[Tensor], Tensor | None]) -> Mutation:
    """Changes of the fields that this format has; where it has none of them, the call cannot show it."""
    return of_each(name, EXPERTS, weights=_changed(**changes))


def _columns(change: Callable[[Tensor], Tensor]) -> Callable[[AnyExperts], AnyExperts]:
    """Changes gate_up's outputs and bias: columns in floats, rows in the packed formats."""

    def changed(weights: AnyExperts) -> AnyExperts:
        floats = isinstance(weights, ExpertWeights)

        def moved(tensor: Tensor) -> Tensor:
            axis = tensor.dim() - 1 if floats else 1
            return tensor.index_select(axis, change(torch.arange(tensor.shape[axis])))

        names = [f.name for f in dataclasses.fields(weights) if f.name.startswith("gate_up")]
        return dataclasses.replace(weights, **{name: moved(getattr(weights, name)) for name in names})

    return changed


def _while(name: str, target: str, value: object) -> Mutation:
    """The definition while a part of it is another."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs:
        with mock.patch(target, value):
            return definition(inputs)

    return Mutation(name, (EXPERTS,), answer)


def _silu(gate_up: Tensor, limit: float) -> Tensor:
    return torch.nn.functional.silu(gate_up[..., 0::2]) * gate_up[..., 1::2]


def _no_one(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up[..., 0::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return up * gate * torch.sigmoid(1.702 * gate)


def _softmax_over_all(inputs: Inputs) -> Tensor | None:
    ids = inputs["topk_ids"]
    return None if bool((ids < 0).any()) else torch.softmax(inputs["logits"], -1).gather(1, ids)


def _first_only(weights: Tensor) -> Tensor | None:
    top_k = weights.shape[1]
    return weights * (torch.arange(top_k) == 0) if top_k > 1 else None


def _map_ignored(weights: AnyExperts) -> AnyExperts | None:
    """Global ids taken for local ones, round the number that is here."""
    if weights.expert_map is None:
        return None
    return _changed(expert_map=lambda places: torch.arange(len(places)) % weights.num_experts)(weights)


def _nibbles_swapped(blocks: Tensor) -> Tensor:
    return (blocks << 4) | (blocks >> 4)


def _scale_off(weights: AnyExperts) -> AnyExperts | None:
    return _changed(gate_up_proj_scales=lambda t: t + 1)(weights) if isinstance(weights, Mxfp4Experts) else None


def _where_several(change: Callable[[Outputs], Outputs]) -> Callable[[Inputs, Outputs], Outputs | None]:
    """Restricts a change to calls that choose more than one expert."""
    return lambda inputs, right: change(right) if inputs["top_k"] > 1 else None


def _alike(weights: Tensor) -> Tensor:
    return torch.full_like(weights, 1 / weights.shape[1])


def _all_experts(inputs: Inputs, right: Outputs) -> Outputs | None:
    logits, k = inputs["logits"].float(), inputs["top_k"]
    return {"weights": torch.softmax(logits, -1).topk(k).values} if k < logits.shape[1] else None


MOE = (
    of_result("softmax over all experts", ROUTE, change=_all_experts),
    of_result("weights not normalised", ROUTE, change=lambda i, right: {"weights": right["logits"]}),
    of_result("all weights equal", ROUTE, change=_where_several(lambda r: {"weights": _alike(r["weights"])})),
    of_each("smallest logits chosen", ROUTE, logits=lambda t: -t),
    of_result("smallest of them first", ROUTE, change=_where_several(lambda r: {"logits": r["logits"].flip(-1)})),
    of_result("one expert twice", ROUTE, change=_where_several(lambda r: {"distinct": r["distinct"] - 1})),
    _of_weights("gate and up bias dropped", gate_up_proj_bias=torch.zeros_like),
    _of_weights("gate and up bias twice", gate_up_proj_bias=lambda t: 2 * t),
    _of_weights("down bias dropped", down_proj_bias=torch.zeros_like),
    _of_weights("down bias twice", down_proj_bias=lambda t: 2 * t),
    _of_weights("bias of the next expert", down_proj_bias=lambda t: t.roll(1, 0) if len(t) > 1 else None),
    of_each("gate and up swapped", EXPERTS, weights=_columns(lambda i: i.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))),
    of_each("interleaved read as halves", EXPERTS, weights=_columns(lambda i: i.unflatten(-1, (2, -1)).mT.flatten(-2))),
    of_each("clamp left out", EXPERTS, swiglu_limit=lambda limit: 1e9),
    _while("alpha 1.0", "npu_gptoss.moe.activation.ALPHA", 1.0),
    _while("up without one added", "npu_gptoss.moe.reference.swigluoai", _no_one),
    _while("plain SwiGLU", "npu_gptoss.moe.reference.swigluoai", _silu),
    of_inputs("routing weight dropped", EXPERTS, topk_weights=lambda i: (i["topk_ids"] >= 0).float()),
    of_inputs("routing softmax over all experts", EXPERTS, topk_weights=_softmax_over_all),
    of_each("only the first expert", EXPERTS, topk_weights=_first_only),
    of_each("expert_map ignored", EXPERTS, weights=_map_ignored),
    of_each("padding rows computed", EXPERTS, topk_ids=lambda t: t.clamp(min=0) if bool((t < 0).any()) else None),
    _of_weights("high nibble first in gate and up", gate_up_proj_blocks=_nibbles_swapped),
    _of_weights("high nibble first in down", down_proj_blocks=_nibbles_swapped),
    of_each("scale exponent off by one", EXPERTS, weights=_scale_off),
    _of_weights("scale of the next row", down_proj_scales=lambda t: t.roll(1, 1)),
)

# --- the rest of a layer


def _turned(change: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], Tensor]:
    return lambda cos_sin: torch.cat(change(*cos_sin.chunk(2, -1)), -1)


def _next_slot(inputs: Inputs) -> AttentionMetadata:
    slots = inputs["key_cache"].shape[0] * inputs["key_cache"].shape[1]
    return _changed(slot_mapping=lambda slot: (slot + 1) % slots)(inputs["metadata"])


def _padding_stored(inputs: Inputs) -> AttentionMetadata | None:
    """A slot of -1 is the cache's last but one from its end on."""
    slots, count = inputs["metadata"].slot_mapping, inputs["key_cache"][..., 0, 0].numel()
    if not bool((slots < 0).any()):
        return None
    return _changed(slot_mapping=lambda slot: torch.where(slot < 0, count - 2, slot))(inputs["metadata"])


def _values_turned(inputs: Inputs, definition: Definition) -> Outputs:
    """Turns the values, as if they stood where the keys are."""
    width = inputs["key_cache"].shape[2] * inputs["key_cache"].shape[3]
    qkv = torch.cat((inputs["qkv"][:, : -2 * width], inputs["qkv"][:, -width:].repeat(1, 2)), 1)
    return {**definition(inputs), "value_cache": definition({**inputs, "qkv": qkv})["key_cache"]}


def _last_of_equals(inputs: Inputs, right: Outputs) -> Outputs:
    logits = inputs["logits"]
    last = logits.shape[1] - 1 - logits.flip(-1).argmax(-1)
    return {"ids": torch.where(right["ids"] < 0, right["ids"], last)}


def _eight_bits_decide(inputs: Inputs, definition: Definition) -> Outputs:
    shortlist = Shortlist.of(inputs["weight"])
    rows = shortlist.bounds[:, :1] * shortlist.rows
    return definition({**inputs, "weight": rows[: len(inputs["weight"]), : inputs["weight"].shape[1]]})


def _forbidden_as_damage(inputs: Inputs, right: Outputs) -> Outputs:
    return {"ids": torch.where(inputs["logits"].isfinite().all(-1), right["ids"], -1)}


DENSE = (
    of_each("norm weight dropped", *STREAM, norm_weight=torch.ones_like),
    of_each("norm weight with one added", *STREAM, norm_weight=lambda t: t + 1),
    of_each("residual dropped", *STREAM, OUTPUT, residual=torch.zeros_like),
    of_each("delta dropped", *STREAM, delta=torch.zeros_like),
    of_each("delta twice", *STREAM, delta=lambda t: 2 * t.float()),
    of_each("bias dropped", *BIASED, bias=torch.zeros_like),
    of_each("bias twice", *BIASED, bias=lambda t: 2 * t),
    of_each("RoPE halves swapped", *TURNS, cos_sin=_turned(lambda cos, sin: (cos, -sin))),
    of_each("cosine and sine swapped", *TURNS, cos_sin=_turned(lambda cos, sin: (sin, cos))),
    of_each("angles in reverse order", *TURNS, cos_sin=_turned(lambda cos, sin: (cos.flip(-1), sin.flip(-1)))),
    of_each("RoPE left out", *TURNS, cos_sin=_turned(lambda c, s: (torch.ones_like(c), torch.zeros_like(s)))),
    of_each("position one too far", *TURNS, positions=lambda t: t - 1),
    of_inputs("slot off by one", *TURNS, metadata=_next_slot),
    Mutation("values turned", (WRITE_TURNED,), _values_turned),
    of_result("keys not stored", WRITE_TURNED, change=lambda i, right: {"key_cache": i["key_cache"]}),
    of_inputs("padding rows stored", WRITE_TURNED, metadata=_padding_stored),
    of_each("smallest logits chosen", ROUTER, weight=lambda t: -t, bias=lambda t: -t),
    of_each("padding rows routed", ROUTER, live=lambda t: torch.ones_like(t) if bool((t == 0).any()) else None),
    of_result("routing weight dropped", ROUTER, change=_where_several(lambda r: {"weights": (r["ids"] >= 0).float()})),
    of_each("no epsilon", ADD_NORM, eps=lambda eps: 0.0),
    of_each("rows one too far", LOGITS, normed=lambda t: t.roll(1, 0) if len(t) > 1 else None),
    of_each("row of the next token", LOGITS, weight=lambda t: t.roll(1, 0)),
    of_each("noise left out", TOKEN, noise=lambda t: None if t is None else torch.zeros_like(t)),
    of_each("row of the next token", TOKEN, weight=lambda t: t.roll(1, 0)),
    Mutation("eight bits decide", (TOKEN,), _eight_bits_decide),
    of_result("one token further", TOKEN, change=lambda i, right: {"ids": right["ids"] + 1}),
    of_result("last of equals", GREEDY, change=_last_of_equals),
    of_result("damage not reported", GREEDY, change=lambda i, right: {"ids": i["logits"].nan_to_num().argmax(-1)}),
    of_result("forbidden tokens as damage", GREEDY, change=_forbidden_as_damage),
    of_result("one token further", GREEDY, change=lambda i, right: {"ids": right["ids"] + 1}),
)

# --- a decode step's beginning


def _cursor(change: Callable[[Tensor], Tensor]) -> Callable[[DecodeState], DecodeState]:
    """Another position of each row."""
    return _changed(cursor=lambda cursor: torch.stack((cursor[0], change(cursor[1]))))


def _where_padded(change: Callable[[DecodeState], DecodeState]) -> Callable[[DecodeState], DecodeState | None]:
    return lambda state: change(state) if bool((state.cursor[1] == NOBODY).any()) else None


GRAPHS = (
    of_each("position one too far", ADVANCE, state=_cursor(lambda positions: positions + (positions >= 0))),
    of_each("block table off by one", ADVANCE, state=_changed(block_table=lambda table: table.roll(1, 1))),
    of_each("padding rows in use", ADVANCE, state=_where_padded(_cursor(lambda positions: positions.clamp(min=0)))),
    of_each("another spare slot", ADVANCE, state=_where_padded(_changed(spare_slot=lambda slot: 0))),
    of_result("the cursor stays", ADVANCE, change=lambda i, r: {n: r[n.replace("second", "first")] for n in r}),
)

# --- functions that are no registered operations


def _yarn(**change: object) -> Callable[[Any], Any]:
    return lambda yarn: (
        None if all(getattr(yarn, n) == v for n, v in change.items()) else dataclasses.replace(yarn, **change)
    )


def _in_turn(tensor: Tensor) -> Tensor:
    """The two halves of the last axis, element by element."""
    return tensor.unflatten(-1, (2, -1)).mT.flatten(-2)


def _by_neighbours(inputs: Inputs, definition: Definition) -> Outputs:
    """Pairs (0, 1), (2, 3) for the two halves."""
    paired = inputs["x"].unflatten(-1, (-1, 2)).mT.flatten(-2)
    return {"x": _in_turn(definition({**inputs, "x": paired})["x"])}


FUNCTIONS = (
    of_each("high nibble first", EXPAND, PACKED, blocks=_nibbles_swapped),
    of_each("scale exponent off by one", EXPAND, scales=lambda t: t + 1),
    of_each("scale exponent off by one", PACKED, scales=lambda t: t - (t > 0).to(t.dtype)),  # one more may overflow
    of_each("sign dropped", EXPAND, PACKED, blocks=lambda t: t & 0x77),
    of_each("scale of the next group", EXPAND, scales=lambda t: t.roll(1, 0)),
    of_each("mantissa bit dropped", EXPAND, PACKED, blocks=lambda t: t & 0xEE),
    of_result("high nibble first", COMPRESS, change=lambda i, right: {"blocks": _nibbles_swapped(right["blocks"])}),
    of_result("scale exponent off by one", COMPRESS, change=lambda i, right: {"scales": right["scales"] + 1}),
    of_each("sign dropped", COMPRESS, weight=torch.abs),
    of_each("ramp truncated to whole pairs", TABLES, yarn=_yarn(truncate=True)),
    of_inputs("ramp rounded to whole pairs", TABLES, rounded=lambda i: None if i["yarn"].truncate else True),
    of_each("truncate ignored", TABLES, yarn=_yarn(truncate=False)),
    of_each("no YaRN", TABLES, yarn=_yarn(factor=1.0)),
    of_inputs("cos and sin not scaled", TABLES, attention_factor=lambda i: 1.0 if i["yarn"].factor > 1 else None),
    of_each("original context of the whole model", TABLES, yarn=_yarn(original_max_position_embeddings=131072)),
    of_each("theta 10000", TABLES, theta=lambda theta: 10000.0),
    of_result("cosines and sines in turn", TABLES, change=lambda i, right: {"cos_sin": _in_turn(right["cos_sin"])}),
    of_each("RoPE halves swapped", ROTATE, sin=lambda t: -t),
    of_inputs("cosine and sine swapped", ROTATE, sin=lambda i: i["cos"], cos=lambda i: i["sin"]),
    Mutation("neighbours for halves", (ROTATE,), _by_neighbours),
)

MUTATIONS: tuple[Mutation, ...] = (*ATTENTION, *MOE, *DENSE, *GRAPHS, *FUNCTIONS)


def mutations_of(check: str) -> tuple[Mutation, ...]:
    return tuple(mutation for mutation in MUTATIONS if check in mutation.checks)

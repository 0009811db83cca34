"""Helpers for tests of contracts: expected rules, and legal calls to break in one point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ascend_emulator.context import current, use
from ascend_emulator.rules import ContractError

TRIANGLE = torch.ones(2048, 2048, dtype=torch.int8).triu_(1)
Run = Callable[[], object]
# rule -> a call that breaks it, in words -> (the call, words of its refusal); rule 0: a refusal without a number
Broken = Mapping[int, Mapping[str, tuple[Any, ...]]]


def of(operator: Callable[..., object], make: Callable[..., dict[str, Any]], **changes: object) -> Run:
    """A call with the arguments of a legal one and these changes."""
    return lambda: operator(**make(**changes))


def under(run: Run, **context: Any) -> Run:
    """The call on another machine, or not executed."""

    def run_there() -> None:
        with use(**context):
            run()

    return run_there


def broken_calls(broken: Broken) -> pytest.MarkDecorator:
    """Parametrises `check_refusal`."""
    rows = [
        pytest.param(rule, run, words, id=f"R{rule:02d} {what}")
        for rule, calls in broken.items()
        for what, (run, *words) in calls.items()
    ]
    return pytest.mark.parametrize(("rule", "run", "words"), rows)


def check_refusal(rule: int, run: Run, words: list[str]) -> None:
    if rule:
        with rejects(rule, *words):
            run()
        return
    with pytest.raises(ContractError) as caught:
        run()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def legal_calls(legal: Mapping[str, Run]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", legal.values(), ids=legal)


@contextmanager
def rejects(rule: int, *words: str) -> Iterator[None]:
    """The block raises ContractError with exactly this rule, and its text holds `words`."""
    with pytest.raises(ContractError) as caught:
        yield
    text = str(caught.value)
    assert caught.value.rule == rule, f"expected R{rule:02d}, got: {text}"
    assert f"[R{rule:02d}]" in text
    for word in words:
        assert word in text, f"{word!r} not in: {text}"


@contextmanager
def notes(rule: int, *words: str) -> Iterator[None]:
    """The block breaks the rule once, warns with `words`, and does not raise."""
    before = len(current().findings)
    with pytest.warns(RuntimeWarning, match=rf"\[R{rule:02d}\]"):
        yield
    (finding,) = current().findings[before:]
    assert finding.rule == rule
    for word in words:
        assert word in finding.sentence, f"{word!r} not in: {finding.sentence}"


@contextmanager
def leaves_undefined(rule: int) -> Iterator[None]:
    """Outside strict mode the block breaks the rule and does not raise."""
    assert not current().strict, "enter use(strict=False) first"
    with notes(rule):
        yield


def attention_case(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    window: bool = False,
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 64,
    block: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    sink: bool = True,
    spare: int = 1,
) -> dict[str, object]:
    """Arguments of a legal paged TND call like gpt-oss's, scaled down; `_k`/`_v` hold the unpaged keys per request."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    blocks = [-(-n // block) for n in kv_lens]
    total = sum(blocks) + spare
    order = torch.randperm(total, generator=generator).to(torch.int32)
    table = torch.zeros(len(kv_lens), max(blocks) + spare, dtype=torch.int32)
    keys, values = random(total, block, kv_heads, dim), random(total, block, kv_heads, dim)
    taken = 0
    for request, count in enumerate(blocks):
        table[request, :count] = order[taken : taken + count]
        taken += count
    ends = torch.tensor(q_lens).cumsum(0).tolist()
    return {
        "query": random(ends[-1], heads, dim),
        "key": keys.view(total, block, -1),
        "value": values.view(total, block, -1),
        "atten_mask": TRIANGLE,
        "actual_seq_qlen": ends,
        "actual_seq_kvlen": list(kv_lens),
        "block_table": table,
        "learnable_sink": random(heads + 32)[:heads] if sink else None,  # with memory behind it [R92]
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "softmax_scale": dim**-0.5,
        "input_layout": "TND",
        "block_size": block,
        **({"sparse_mode": 4, "pre_tokens": 127, "next_tokens": 0} if window else {"sparse_mode": 3}),
    }

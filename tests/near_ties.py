"""Checks if two greedy answers to a prompt differ only because of a near-tie.

On a GPU the other rows of a batch change the order of a row's sums, and bfloat16 rounds them; docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from npu_gptoss.engine import Engine

NEAR = 0.7  # of log-probability in fp32: right tokens lost up to 0.65; a token of a wrong computation loses about 3
AT_ONCE = 8  # answers whose logits are held, most of a megabyte a token

Tokens = Sequence[int]


def parting(ours: Tokens, theirs: Tokens) -> int | None:
    """The index of the first token that differs; None if the answers are equal or either is cut off."""
    return next((place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)


def regrets(exact: Engine, answers: Iterable[tuple[Tokens, Tokens, Tokens]]) -> list[float | None]:
    """answers: prompt, answer, other answer. By how much `exact`, in fp32, prefers the better of the first two tokens
    that differ, in log-probability; None if none differ. Common prefixes are computed once."""
    # their common prefix, and the two tokens behind it
    parted: list[tuple[tuple[int, ...], int, int] | None] = []
    for prompt, ours, theirs in answers:
        place = parting(ours, theirs)
        parted.append(None if place is None else ((*prompt, *ours[:place]), ours[place], theirs[place]))
    wanted: dict[tuple[int, ...], set[int]] = {}
    for common, one, other in filter(None, parted):
        wanted.setdefault(common, set()).update((one, other))
    found: dict[tuple[tuple[int, ...], int], float] = {}
    chains: list[list[tuple[int, ...]]] = []  # in each, the first begins with all others
    for common in sorted(wanted, reverse=True):
        if chains and chains[-1][0][: len(common)] == common:
            chains[-1].append(common)
        else:
            chains.append([common])
    for begin in range(0, len(chains), AT_ONCE):
        some = chains[begin : begin + AT_ONCE]
        last = [len(chain[0]) - len(chain[-1]) + 1 for chain in some]
        for chain, logits in zip(some, exact.batch_logits([chain[0] for chain in some], last=last), strict=True):
            for common in chain:
                row = logits[len(common) - len(chain[0]) - 1]
                found |= {(common, token): float(row[token]) for token in wanted[common]}
    return [one and abs(found[one[0], one[1]] - found[one[0], one[2]]) for one in parted]


def regrets_where_they_part(
    exact: Engine, prompts: Sequence[Tokens], ours: Sequence[Tokens], theirs: Sequence[Tokens]
) -> list[float]:
    """The regrets of the answers that differ."""
    return [one for one in regrets(exact, zip(prompts, ours, theirs, strict=True)) if one is not None]

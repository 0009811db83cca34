"""Write the prediction of docs/performance.md: the time per output token of 20b on one 910B3, from bytes and launches.

python research/prediction_page.py --write

Nothing of it was measured. A step of vllm-ascend with PIECEWISE graphs is taken as

    bytes / bandwidth  +  small launches x time of one  +  what the host does between two steps

and no shorter than the host, which calls attention once a layer between two graphs. Bytes are the roofline's; launches
are those of the trace table on the same page. Each assumed number is a pair, the better and the worse.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.bench.roofline import decode_work, expected_distinct
from npu_gptoss.doctor.memory import PUBLISHED_20B
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.nominal import memory_bandwidth
from npu_gptoss.tables import markdown
from research.trace_table import SHAPE
from scripts.docs.page_tables import ROOT, Tables

PAGE = "docs/performance.md"
# assumed: the share of the nominal bandwidth that a step reaches; us a small launch takes; ms between two steps
# (scheduler, inputs, sampling, three waits); ms of the host for one layer's attention between two graphs
SHARE, LAUNCH_US, BETWEEN_MS, ATTENTION_MS = (1.0, 0.75), (3, 4), (1, 3), 0.25
# launches that read the bytes: QKV, attention, O, both experts' products a layer; the head
STREAMING, HEAD = 5, 1
MEASURED = 20.0  # ms, the Ascend article's for ten requests
# requests, keys that each sees: the article's 128 tokens in and out, half-way; and a long chat
CASES = ((1, 192), (10, 192), (64, 1024))
BY_HAND = {1: "9 to 11", 10: "21 to 27", 64: "36 to 40"}  # an estimate made before this one, with 20 to 23 launches


@dataclass(frozen=True)
class Prediction:
    """Pairs are the better and the worse case."""

    requests: int
    keys: int
    experts: float
    gigabytes: float
    small_launches: int

    @property
    def bytes_ms(self) -> tuple[float, float]:
        best, worst = (self.gigabytes / (share * memory_bandwidth("Ascend910B3")) * 1e3 for share in SHARE)
        return best, worst

    @property
    def launches_ms(self) -> tuple[float, float]:
        best, worst = (self.small_launches * each / 1e3 for each in LAUNCH_US)
        return best, worst

    @property
    def tpot_ms(self) -> tuple[float, float]:
        host = ATTENTION_MS * PUBLISHED_20B.num_hidden_layers
        best, worst = (
            max(moved + launched, host) + between
            for moved, launched, between in zip(self.bytes_ms, self.launches_ms, BETWEEN_MS, strict=True)
        )
        return best, worst


def counted(page: str, batch: int, *words: str) -> float:
    """Device operations of a row of the trace table."""
    found = re.search(rf"^\| {batch} \| {re.escape(' | '.join(words))} \| ([\d.]+) \|", page, re.M)
    if not found:
        raise ValueError(f"{PAGE}: the trace table has no row {batch}, {', '.join(words)}; run research/trace_table.py")
    return float(found[1])


def small_launches(page: str, requests: int, config: GptOssConfig = PUBLISHED_20B) -> int:
    """Of a PIECEWISE step: those that are not among STREAMING and HEAD."""
    batch = max(known for known in (1, 8, 10) if known <= requests)
    outside = counted(page, batch, "ours, eager") - SHAPE["layers"] * counted(page, batch, "layer", "**ours**")
    layer = (counted(page, batch, "ours, piecewise") - outside) / SHAPE["layers"]
    return round(config.num_hidden_layers * (layer - STREAMING) + outside - HEAD)


def predict(requests: int, keys: int, experts: float | None = None) -> Prediction:
    """experts: distinct ones a layer; None: as uniform routing expects."""
    config = PUBLISHED_20B
    if experts is None:
        experts = expected_distinct(config.num_local_experts, config.num_experts_per_tok, requests)
    work = decode_work(config, [keys] * requests, "bf16", [experts] * config.num_hidden_layers)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return Prediction(requests, keys, experts, work.bytes / 1e9, small_launches(page, requests))


def experts_of(requests: int, keys: int, milliseconds: float) -> tuple[float, float]:
    """The distinct experts a layer at which the worse, and the better, prediction is that long."""
    few, many = predict(requests, keys, 10), predict(requests, keys, 20)
    worse, better = (
        10 + 10 * (milliseconds - few.tpot_ms[case]) / (many.tpot_ms[case] - few.tpot_ms[case]) for case in (1, 0)
    )
    return worse, better


def pair(values: tuple[float, float]) -> str:
    return " to ".join(f"{value:.1f}" for value in values)


def table() -> str:
    head = (
        *("requests", "keys each", "experts a layer", "GB a step", "ms at 1.6 and 1.2 TB/s", "small launches"),
        *("ms at 3 and 4 µs", "**predicted TPOT, ms**", "by hand", "measured"),
    )
    rows = []
    for requests, keys in CASES:
        row = predict(requests, keys)
        measured = f"{MEASURED} (the Ascend article)" if requests == 10 else "–"
        distinct = f"{row.experts:.1f} of {PUBLISHED_20B.num_local_experts}"
        counted_ms = pair(row.bytes_ms), row.small_launches, pair(row.launches_ms), f"**{pair(row.tpot_ms)}**"
        rows.append((requests, keys, distinct, f"{row.gigabytes:.2f}", *counted_ms, BY_HAND[requests], measured))
    requests, keys = CASES[1]
    expected = predict(requests, keys).experts
    lines = [
        *markdown(head, rows),
        "",
        f"The article's {MEASURED} ms are what this arithmetic gives for {pair(experts_of(requests, keys, MEASURED))} "
        f"distinct experts a layer, where uniform routing expects {expected:.1f}.",
    ]
    return "\n".join(lines)


TABLES = Tables(script="research/prediction_page.py", page=PAGE, tables={"prediction": table})


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Write the second prediction of docs/performance.md: the time per output token with packed experts beside BF16.

python research/packed_prediction.py --write

Nothing of it was measured. A step is taken as `prediction_page.py` takes it, on one card of several that share heads
and columns; what differs is the experts' part of it, a layer's touched weights times

    BF16      2 bytes / bandwidth
    packed    the larger of (0.53 + 2 bytes) / bandwidth and vector instructions / their rate,
              then 2 bytes / bandwidth, or / the L2's rate where the room of the touched experts fits there

Bytes of a weight are those that the trace table counts; instructions are those that Huawei's compiler plans for the
expansion. Each assumed number is a pair, the better and the worse.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.bench.roofline import decode_work, expected_distinct
from npu_gptoss.doctor.memory import CARD, PUBLISHED_20B, PUBLISHED_120B, choice_of
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.device_memory import BF16, MXFP4, Part
from npu_gptoss.moe.packed import rows_of
from npu_gptoss.nominal import memory_bandwidth
from npu_gptoss.tables import markdown
from research.prediction_page import ATTENTION_MS, BETWEEN_MS, LAUNCH_US, PAGE, SHARE, counted, pair, small_launches
from scripts.docs.page_tables import ROOT, Tables

# of a 910B3, by the files of CANN's `platform_config`: vector cores, their clock, the elements of 16 bits of one
# instruction a cycle; bytes of L2, and what the cube cores read of it
VECTOR_CORES, HERTZ, LANES = 40, 1.8e9, 128
L2_BYTES, L2_RATE = 192 << 20, 20 * 110 * 1.8e9
# vector instructions as the compiler plans them: on each weight, and on each column of a tile of 4 * rows weights
ON_A_WEIGHT, ON_A_TILE = 19, 7
EXPANSIONS = 2  # launches a layer that stream weights; the others that packing adds are small
# assumed: the share of the vector cores' rate that the expansion reaches; us of a small collective; two of them a layer
VECTOR_SHARE, COLLECTIVE_US, COLLECTIVES = (1.0, 0.5), (15, 40), 2
KEYS = 1024  # of each request
REQUESTS = (1, 8, 32)
LAYOUTS = (("20b", PUBLISHED_20B, 1), *(("120b", PUBLISHED_120B, cards) for cards in (2, 4, 8)))

Pair = tuple[float, float]
BANDWIDTHS: Pair = tuple(share * memory_bandwidth("Ascend910B3") * 1e9 for share in SHARE)


def instructions(inner: int, hidden: int) -> float:
    """Of a weight, over gate and up (2 * inner columns) and down (hidden columns), which has half as many."""
    on_scales = (ON_A_TILE / (4 * rows_of(columns)) for columns in (2 * inner, 2 * inner, hidden))
    return ON_A_WEIGHT + sum(on_scales) / 3


@dataclass(frozen=True)
class Layout:
    """A model cut by so many cards. packed: a card that has most columns, since it keeps whole groups of them."""

    config: GptOssConfig
    cards: int
    requests: int
    packed: bool = False

    @property
    def columns(self) -> int:
        return Part.of(self.config, self.cards).columns(self.config, self.packed)

    @property
    def weights(self) -> float:
        """Of experts, that a step touches in a layer."""
        config = self.config
        touched = expected_distinct(config.num_local_experts, config.num_experts_per_tok, self.requests)
        return touched * 3 * config.hidden_size * self.columns

    @property
    def room_fits(self) -> bool:
        """Whether the L2 holds what the larger projection is expanded to."""
        return self.weights * 2 / 3 * BF16 <= L2_BYTES

    @property
    def others_ms(self) -> Pair:
        """All bytes but the experts', shared by the cards."""
        config = self.config
        work = decode_work(config, [KEYS] * self.requests, "bf16", [0] * config.num_hidden_layers)
        return _ms(work.bytes / self.cards, BANDWIDTHS)

    @property
    def read_ms(self) -> Pair:
        """The experts' product, from memory."""
        return _ms(BF16 * self._all, BANDWIDTHS)

    @property
    def expand_ms(self) -> Pair:
        rates = tuple(share * VECTOR_CORES * HERTZ * LANES for share in VECTOR_SHARE)
        moved = _ms((MXFP4 + BF16) * self._all, BANDWIDTHS)
        computed = _ms(instructions(self.columns, self.config.hidden_size) * self._all, rates)
        return max(moved[0], computed[0]), max(moved[1], computed[1])

    @property
    def room_ms(self) -> Pair:
        """The product of packed experts: in the better case from the L2, where that can be."""
        best, worst = self.read_ms
        return BF16 * self._all / L2_RATE * 1e3 if self.room_fits else best, worst

    @property
    def _all(self) -> float:
        return self.weights * self.config.num_hidden_layers

    @property
    def tpot_ms(self) -> Pair:
        layers = self.config.num_hidden_layers
        launches = launches_of(self.config, self.requests, self.packed)
        parts = [self.others_ms, *((self.expand_ms, self.room_ms) if self.packed else (self.read_ms,))]
        found = []
        for case in (0, 1):
            moved = sum(part[case] for part in parts)
            apart = COLLECTIVES * layers * COLLECTIVE_US[case] / 1e3 if self.cards > 1 else 0
            busy = moved + launches * LAUNCH_US[case] / 1e3 + apart
            found.append(max(busy, ATTENTION_MS * layers) + BETWEEN_MS[case])
        return found[0], found[1]


def _ms(amount: float, rates: Pair) -> Pair:
    return amount / rates[0] * 1e3, amount / rates[1] * 1e3


def launches_of(config: GptOssConfig, requests: int, packed: bool) -> int:
    """Small launches of a PIECEWISE step, from the trace tables on the page."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    found = small_launches(page, requests, config)
    if packed:
        batch = max(known for known in (1, 8, 10) if known <= requests)
        bf16, kept = (counted(page, batch, "experts", way) for way in ("BF16", "MXFP4, packed"))
        found += round((kept - bf16 - EXPANSIONS) * config.num_hidden_layers)
    return found


def layouts(config: GptOssConfig, cards: int, requests: int) -> tuple[Layout, Layout]:
    """In BF16 and packed."""
    return Layout(config, cards, requests), Layout(config, cards, requests, packed=True)


def weight_table() -> str:
    """One weight of a touched expert, in picoseconds of a whole card."""
    one = instructions(PUBLISHED_20B.intermediate_size, PUBLISHED_20B.hidden_size)
    rate = VECTOR_CORES * HERTZ * LANES
    read, moved = (tuple(b / bandwidth * 1e12 for bandwidth in BANDWIDTHS) for b in (BF16, MXFP4 + BF16))
    computed = tuple(one / (share * rate) * 1e12 for share in VECTOR_SHARE)
    l2 = BF16 / L2_RATE * 1e12
    expand = tuple(max(each) for each in zip(moved, computed, strict=True))
    rows = [
        ("**BF16**: the product reads it", f"{BF16}", *_pico(read)),
        ("packed: read, and written to the room", f"{MXFP4:.2f} + {BF16}", *_pico(moved)),
        (f"packed: {one:.1f} vector instructions, meanwhile", "–", *_pico(computed)),
        ("packed: the product reads the room in memory", f"{BF16}", *_pico(read)),
        ("… or in the L2, where it fits", "0", f"{l2:.2f}", "–"),
        (
            "**packed** (room in memory; in the L2)",
            f"{MXFP4 + 2 * BF16:.2f}; {MXFP4 + BF16:.2f}",
            f"{expand[0] + read[0]:.2f}; {expand[0] + l2:.2f}",
            f"{expand[1] + read[1]:.2f}",
        ),
    ]
    return "\n".join(markdown(("a weight that is touched", "bytes of memory", "ps, better", "ps, worse"), rows))


def _pico(values: Pair) -> tuple[str, str]:
    return f"{values[0]:.2f}", f"{values[1]:.2f}"


def step_table() -> str:
    head = (
        *("model", "cards", "requests", "experts' ms, BF16", "expansion, ms", "product, ms"),
        *("**TPOT in BF16, ms**", "**TPOT packed, ms**", "packed / BF16"),
    )
    rows = []
    for name, config, cards in LAYOUTS:
        fits = choice_of(config, cards, KEYS, CARD, 0.95).expanded.fits()
        for requests in REQUESTS:
            plain, kept = layouts(config, cards, requests)
            bf16, packed = plain.tpot_ms, kept.tpot_ms
            product = pair(kept.room_ms) + (" (L2)" if kept.room_fits else "")
            shown = (pair(plain.read_ms), pair(kept.expand_ms), product)
            ratio = " to ".join(f"{p / b:.1f}" for p, b in zip(packed, bf16, strict=True))
            words = (
                (f"**{pair(bf16)}**", f"**{pair(packed)}**", ratio)
                if fits
                else ("does not fit", f"**{pair(packed)}**", "–")
            )
            rows.append((name, cards, requests, *shown, *words))
    return "\n".join([*markdown(head, rows), "", prompt_sentence()])


def prompt_sentence() -> str:
    """What every step of a prompt pays, whose tokens touch all experts."""
    many = 4096
    cases = [(name, cards, layouts(config, cards, many)[1]) for name, config, cards in LAYOUTS[:2]]
    words = " and ".join(
        f"{pair(kept.expand_ms)} ms for {name} on {('one card', 'two cards')[cards - 1]}" for name, cards, kept in cases
    )
    return f"A step of a prompt touches all experts: the expansion adds {words}, however many tokens the step has."


TABLES = Tables(
    script="research/packed_prediction.py",
    page=PAGE,
    tables={"a packed weight": weight_table, "packed prediction": step_table},
)


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

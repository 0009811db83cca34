"""The emulated cards: what the driver says of them. Standard library only.

An A3's card holds two dies, and each is a device of its own (Ascend910_93xx); "A3" is one die.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """soc: the name from the driver. kind: vllm-ascend's name, and that of its builds. cubes: cube cores; there are
    twice as many vector cores. memory: bytes that processes get of its 64 GB.
    """

    name: str
    soc: str
    kind: str
    cubes: int
    memory: int

    @property
    def variables(self) -> dict[str, str]:
        """Variables for `settings`. BUILD: what vllm-ascend's wheel is built for, as in the image for this card."""
        return {"SOC": self.soc, "KIND": self.kind, "BUILD": self.kind, "CUBES": str(self.cubes)}


CARDS = {
    card.name: card
    for card in (
        # 62 420 MiB, "total memory" in logs of vllm-ascend's servers (its issues 4037, of a 910B1, 4404, 6250)
        Card("910B3", "Ascend910B3", "A2", 20, 65_452_113_920),
        # "61.27 GiB" (vllm-ascend's PR 8289), and torch-npu's "61.28 GiB total capacity" on machines of sixteen
        Card("A3", "Ascend910_9391", "A3", 24, 62_745 << 20),
    )
}
KINDS = tuple(card.kind for card in CARDS.values())
DEFAULT = CARDS["910B3"]

"""Nominal bandwidth of devices, for the doctor's share and the roofline's floors, and their memory.

Standard library only.
"""

from __future__ import annotations

# GB/s. 910B: the family figure of CANN's migration guide and of the 9.0 platform files, no official data sheet; B4 as
# community tools have it; a die of a 910C: the CloudMatrix384 paper (arXiv 2506.12708). NVIDIA: data sheets. The
# longest name that fits counts.
BANDWIDTH = {
    "Ascend910B": 1600,
    "Ascend910B4": 800,
    "Ascend910B4-1": 1600,
    **dict.fromkeys((f"Ascend910_93{last}" for last in (62, 72, 81, 82, 91, 92)), 1600),
    "NVIDIA H200": 4800,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H100 PCIe": 2000,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA A100-SXM4-40GB": 1555,
}

# Bytes that a card has for processes. "64 GB": 62 420 MiB, "total memory" in the logs of vllm-ascend's servers (its
# issues 4037, of a 910B1, 4404, 6250); of a die of a 910C "61.27 GiB" (its PR 8289) and torch-npu's "61.28 GiB".
# "32 GB": torch-npu's "29.50 GiB total capacity" in reports of exhausted memory.
# npu-smi shows 65536 MB of each of the first five (its issues 378, 7205, 10525).
MEMORY = {
    **dict.fromkeys(("910B3", "910B1", "910B2", "910B2C", "910B4-1"), 65_452_113_920),
    "910B4": 31_675_383_808,
    **dict.fromkeys(("A3", "910C"), 62_745 << 20),
}

# How the name of a device begins, and its kind in vllm-ascend. An A3 is a 910C, and each of its two dies a device.
KINDS = {"Ascend910B": "A2", "Ascend910_93": "A3"}


def memory_bandwidth(name: str) -> int | None:
    """GB/s of a device by the name from its driver; None if the table lacks it."""
    fitting = [known for known in BANDWIDTH if name.startswith(known) and not _another(name, known)]
    return BANDWIDTH[max(fitting, key=len)] if fitting else None


def kind_of(name: str) -> str:
    """A2, A3, or "" for a device that is neither."""
    return next((kind for known, kind in KINDS.items() if name.startswith(known)), "")


def _another(name: str, known: str) -> bool:
    """True if the digits go on: Ascend910B40 is not Ascend910B4. The digit after the B is the chip's bin."""
    rest = name[len(known) :]
    return known[-1].isdigit() and rest[:1].isdigit()

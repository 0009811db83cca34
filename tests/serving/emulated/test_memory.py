"""vllm-ascend's own count of memory on a card of a 910B3's size, against the doctor's arithmetic.

The emulated card reports the size of the real one; the KV cache has a limit, so nothing of that size is allocated.
"""

from __future__ import annotations

import functools
import re

import pytest

from npu_gptoss.doctor.machine import GIB
from npu_gptoss.doctor.memory import CARD
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.device_memory import BUFFSIZE, RESERVE, Part, fit, hccl_bytes, kv_bytes_per_token
from tests.serving.emulated.rounds import EAGER, turn

UTILISATION = 0.95
ONE_PROMPT = [turn((5,), tokens=1)]


@pytest.fixture
def available(serve):
    """Bytes for the KV cache by `determine_available_memory`, the least of all ranks."""

    @functools.cache
    def reckoned(ranks: int, buffsize: int = BUFFSIZE) -> int:
        _, printed = serve(
            ONE_PROMPT,
            options={**EAGER, "tensor_parallel_size": ranks, "gpu_memory_utilization": UTILISATION, "swap_space": 0},
            variables={
                "ASCEND_EMULATOR_MEMORY": str(CARD),
                "VLLM_LOGGING_LEVEL": "INFO",
                "HCCL_BUFFSIZE": str(buffsize),
            },
        )
        found = re.findall(r"Available memory: (\d+), total memory: (\d+)", printed)
        assert len(found) == ranks, printed[-3000:]
        assert {total for _, total in found} == {str(CARD)}
        return min(int(memory) for memory, _ in found)

    return reckoned


def test_the_doctors_memory_is_vllm_ascends_on_a_real_cards_size(available, checkpoint):
    config = GptOssConfig.from_directory(checkpoint)
    one, two, halved = available(1), available(2), available(2, BUFFSIZE // 2)
    # HCCL's part, to the byte: the variable sizes one of two communicators
    assert halved - two == hccl_bytes(2) - hccl_bytes(2, BUFFSIZE // 2) == 200 << 20
    assert one - two == pytest.approx(hccl_bytes(2) - hccl_bytes(1), abs=16 << 20)  # weights and activations are shared
    for ranks, bytes_ in ((1, one), (2, two)):

        def promised(card: int, ranks: int = ranks) -> int:
            part = Part.of(config, ranks)
            token = kv_bytes_per_token(config, part)
            return token * fit(config, part, 1, card, UTILISATION, hccl=hccl_bytes(ranks)).tokens

        # a small model takes less than the reserve of 2 GiB; the rest of the reserve is the only difference
        assert 0 <= bytes_ - promised(CARD) < RESERVE
        assert promised(64 * GIB) > bytes_, "a card of 64 GiB would be seen"

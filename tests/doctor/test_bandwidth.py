from __future__ import annotations

import torch

from npu_gptoss.doctor import selftest
from npu_gptoss.doctor.machine import GIB, Device
from tests.doctor.machines import only

CARD = Device("npu", "Ascend910B3", 1, 64 * GIB, 60 * GIB)


def test_bandwidth_is_reported_with_its_share_of_nominal():
    only([selftest.judged(1357.4, 1600, CARD)], "ok", "1357 GB/s, 85% of the nominal 1600 GB/s")
    only([selftest.judged(799.0, 1600, CARD)], "warning", "50% of the nominal", "npu-smi info")
    only([selftest.judged(900.0, None, CARD)], "ok", "its nominal bandwidth is not known")


def test_on_a_cpu_there_is_just_the_number(monkeypatch):
    monkeypatch.setattr(selftest, "SECONDS", 0.05)
    host = Device("cpu", "Kunpeng", 64, 256 * GIB, 8 << 20)
    finding = only(selftest.bandwidth(torch.device("cpu"), host), "ok", "memory of Kunpeng moves", "thread(s)")
    assert float(finding.sentence.split(" GB/s")[0].split()[-1]) > 0


def test_the_emulated_device_is_not_measured():
    emulated = Device("npu", "Ascend910B3", 1, 4 * GIB, 4 * GIB, emulated=True)
    only(selftest.bandwidth(torch.device("cpu"), emulated), "not applicable", "says nothing of a 910B")

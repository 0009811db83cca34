"""Memory, copies and operators of the emulated device (on_device/device_cases.py)."""

from __future__ import annotations

import pytest

from npu_gptoss.emulator.launch import Machine
from tests.emulator import machine

FILE = "device_cases.py"
pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("case", machine.cases_of(FILE))
def test_device(case: str) -> None:
    machine.check(FILE, case)


@pytest.mark.parametrize(("cann", "text"), [("8.3.rc2", "8.3.RC2"), ("8.5", "8.5.0")])
def test_cann_version_reaches_torch_npu(cann: str, text: str) -> None:
    code = "import torch_npu; from torch_npu.npu.utils import get_cann_version; print(get_cann_version())"
    assert machine.emulate("-c", code, machine=Machine(cann=cann)).stdout.strip() == text


def test_number_of_devices() -> None:
    code = (
        "import torch; x = torch.ones(2, device='npu:2'); print(torch.npu.device_count(), (x + 1).device)\n"
        "try: x + torch.ones(2, device='npu:1')\n"
        "except RuntimeError as error: print(str(error).splitlines()[0])"
    )
    run = machine.emulate("-c", code, machine=Machine(devices=4), ASCEND_RT_VISIBLE_DEVICES="0,1,2")
    devices, *refusal = run.stdout.splitlines()
    assert devices == "3 npu:2", run.stderr
    assert "at least two devices, npu:2 and npu:1!" in refusal[0], "tensors of two devices"

"""Memory, copies and operators of the emulated device (on_device/device_cases.py)."""

from __future__ import annotations

import pytest
from ascend_emulator.launch import Machine
from ascend_emulator.stacks import STACKS, Stack

from emulator.tests import machine

FILE = "device_cases.py"
pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
@pytest.mark.parametrize("case", machine.cases_of(FILE))
def test_device(case: str, stack: Stack) -> None:
    machine.check(FILE, case, Machine(stack.cann[0]))


@pytest.mark.parametrize(
    ("wanted", "variables", "found"),
    [
        (Machine("8.3.rc2"), {}, "8.3.RC2 8.3.rc2 True False False"),
        (
            Machine("8.5", strict=False, diagnostic_fp32=True),
            {"ASCEND_EMULATOR_TND_WORKSPACE": "1"},
            "8.5.0 8.5 False True True",
        ),
    ],
    ids=["8.3.rc2", "8.5, lenient, float32"],
)
def test_the_machine_reaches_torch_npu_and_the_contracts(wanted: Machine, variables: dict, found: str) -> None:
    code = (
        "import torch_npu; from torch_npu.npu.utils import get_cann_version\n"
        "from ascend_emulator.context import current; it = current()\n"
        "print(get_cann_version(), it.cann, it.strict, it.diagnostic_fp32, it.tnd_max_workspace)"
    )
    assert machine.emulate("-c", code, machine=wanted, **variables).stdout.strip() == found


def test_allocation_beyond_host_memory_fails_with_a_sentence() -> None:
    """Poison makes each byte real: without this refusal the host's kernel would kill the process."""
    code = (
        "import torch; print(torch.ones(2).npu().tolist(), torch.npu.mem_get_info()[1] >> 40)\n"
        "from ascend_emulator.binding import library\n"
        "try: torch.empty(3 << 40, dtype=torch.uint8, device='npu')\n"
        "except RuntimeError as error: print(type(error).__name__, library.aclGetRecentErrMsg().decode())"
    )
    run = machine.emulate("-c", code, machine=Machine(memory=4 << 10))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("[1.0, 1.0] 4\nRuntimeError ")
    assert "take less than the card has (`--num-gpu-blocks-override` for a KV cache)" in run.stdout


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_expandable_segments_hold_tensors_across_pages_and_give_them_back(stack: Stack) -> None:
    """vllm-ascend 0.23 enables them by itself. A segment grows by pages; a tensor across two must be contiguous."""
    code = (
        "import torch\n"
        "free = lambda: torch.npu.mem_get_info()[0] >> 20\n"
        "small = torch.ones(1 << 20, device='npu')\n"  # 4 MiB, then 60 behind it in the same segment
        "large = torch.full((15 << 20,), 2.0, device='npu')\n"
        "print(float((large * 3).sum()) / large.numel(), bool(torch.empty(9, device='npu').isnan().all()))\n"
        "held = free(); del small, large; torch.npu.empty_cache(); print(held < free() == 4096)\n"
        "try: torch.empty(8 << 30, device='npu')\n"
        "except RuntimeError as error: print('out of memory' in str(error))"
    )
    conf = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    run = machine.emulate("-c", code, machine=Machine(stack.cann[0]), **conf)
    assert run.stdout.split() == ["6.0", "True", "True", "True"], run.stdout + run.stderr


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_an_operator_s_result_may_take_memory_that_is_only_cached(stack: Stack) -> None:
    """The allocator waits for the device, frees what it keeps and tries again; what never fits is no deadlock."""
    code = (
        "import torch\n"
        "first = torch.zeros(600 << 20, dtype=torch.int8, device='npu'); del first\n"
        "print(int(torch.ones(700 << 20, dtype=torch.int8, device='npu')[-1]))\n"
        "try: torch.zeros(2 << 30, dtype=torch.int8, device='npu')\n"
        "except RuntimeError as error: print('out of memory' in str(error))"
    )
    run = machine.emulate("-c", code, machine=Machine(stack.cann[0], memory=1), ASCEND_EMULATOR_HANG_SECONDS="1")
    assert run.stdout.split() == ["1", "True"], run.stdout + run.stderr


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

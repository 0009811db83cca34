"""The checks that need torch, in a process of their own: an import that fails, a crash and a hang are findings too.

The child (`python -m npu_gptoss.doctor.probe`) writes a line of JSON to a file before and after each check, so that the
parent knows what it had found and what it was at when it died. The device is opened in the child only.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npu_gptoss.doctor.checkpoint import checkpoint
from npu_gptoss.doctor.checks import SELF_TESTS
from npu_gptoss.doctor.findings import Finding, failed, from_json, guarded, not_applicable, ok, one_line, warning
from npu_gptoss.doctor.kernels import kernels
from npu_gptoss.doctor.machine import ASCEND, CPU, CUDA, Device, Machine

LIMIT = 600  # seconds for everything; it takes a minute
ALONE_LIMIT = 120  # seconds for a self-test in a process of its own, most of them for imports; it takes twenty
ON_NPU = ("attention-operator", "graph-updates")
ON_DEVICE = (*ON_NPU, *SELF_TESTS, "bandwidth")
ALL = ("torch-works", "device", "kernels", "checkpoint", *ON_DEVICE)
CARDS = ("Ascend910B",)


@dataclass(frozen=True)
class Probed:
    findings: list[Finding]
    device: Device | None


# The parent


def probe(here: Machine, model: Path | None) -> Probed:
    """Runs the child and reads its report."""
    if here.version("torch") is None:
        reason = "torch is not installed."
        return Probed([not_applicable(reason, check=check) for check in ALL], None)
    order = {"model": str(model) if model else None, "platform": here.platform()[0], "emulated": here.emulated}
    return read(*_child(order, LIMIT, here.environ))


def alone(name: str, seen: Device) -> list[Finding]:
    """A self-test in a process of its own; one that hangs or crashes takes nothing else along."""
    order = {"only": name, "device": asdict(seen)}
    return [finding for finding in read(*_child(order, ALONE_LIMIT, os.environ)).findings if finding.check == name]


def _child(order: dict[str, Any], limit: int, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Its report, how it ended (empty when well) and what it said."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report"
        report.touch()
        command = [sys.executable, "-m", __spec__.name, json.dumps({**order, "report": str(report)})]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=limit, env=dict(environ)
            )
            how, errors = _ending(run.returncode), run.stderr
        except subprocess.TimeoutExpired:
            how, errors = f"did not end within {limit} s", ""
        return report.read_text(), how, errors


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def read(text: str, how: str, errors: str = "") -> Probed:
    """The child's report. how: how it ended, empty when well; what it was at then becomes a failure."""
    findings, device, at = [], None, "torch-works"
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the line in which it died
            continue
        if "finding" in entry:
            findings.append(from_json(entry["finding"]))
        elif "device" in entry:
            device = Device(**entry["device"])
        else:
            at = entry["begin"]
    if how:
        last = [line for line in errors.strip().splitlines() if line.strip()]
        findings.append(
            failed(
                f"The process that checks this {how}{': ' + one_line(last[-1]) if last else '.'}",
                "The libraries of torch, torch-npu, CANN and the driver do not fit together, or the device hangs: mend "
                "what the checks of versions say; `npu-smi info` or `nvidia-smi` tells the device's state.",
                check=at,
            )
        )
        seen = {finding.check for finding in findings}
        findings += [not_applicable("The process ended before.", check=check) for check in ALL if check not in seen]
    return Probed(findings, device)


# The child


def main(order: dict[str, Any]) -> None:
    with Path(order["report"]).open("a") as report:

        def write(entry: dict[str, Any]) -> None:
            report.write(json.dumps(entry) + "\n")
            report.flush()

        def check(name: str, function: Callable[..., Iterable[Finding]], *arguments: Any) -> list[Finding]:
            write({"begin": name})
            found = guarded(name, function, *arguments)
            for finding in found:
                write({"finding": asdict(finding)})
            return found

        if "only" in order:
            seen = Device(**order["device"])
            check(order["only"], _self_test, order["only"], seen)
            return
        model = Path(order["model"]) if order["model"] else None
        works = check("torch-works", torch_works)
        if works[0].state != "ok":
            for name in ("device", "kernels", "checkpoint", *ON_DEVICE):
                write({"finding": asdict(not_applicable("torch does not work.", check=name))})
            return
        check("checkpoint", checkpoint, model)
        check("kernels", kernels, order["platform"])
        seen: list[Device] = []
        check("device", device, order["platform"], order["emulated"], seen)
        if order["platform"] != ASCEND:
            for name in ON_NPU:
                write({"finding": asdict(not_applicable("torch-npu is for Ascend machines.", check=name))})
        else:
            check("attention-operator", attention_operator)
            check("graph-updates", graph_updates)
        if not seen:
            for name in (*SELF_TESTS, "bandwidth"):
                write({"finding": asdict(not_applicable("There is no usable device.", check=name))})
            return
        write({"device": asdict(seen[0])})
        import torch

        from npu_gptoss.doctor.bandwidth import bandwidth
        from npu_gptoss.doctor.selftest import ALONE

        for name in SELF_TESTS:
            check(name, alone if name in ALONE and seen[0].kind != CPU else _self_test, name, seen[0])
        check("bandwidth", bandwidth, torch.device(seen[0].kind), seen[0])


def torch_works() -> Finding:
    """Importing torch also loads torch-npu, when it is installed, and with it CANN's libraries."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # whatever an extension raises
        return failed(
            f"torch cannot be imported: {one_line(error)}",
            "On an Ascend machine, source CANN's set_env.sh first (a library that is not found is CANN's); else "
            "install torch again.",
        )
    return ok(f"torch {torch.__version__} imports and runs with {torch.get_num_threads()} thread(s).")


def device(platform: str, emulated: bool, seen: list[Device]) -> Finding:
    """Opens the device of this platform; what it is goes into `seen`."""
    import torch

    from npu_gptoss.engine.device import resolve_device
    from npu_gptoss.kernels.platform import DEVICE_TYPES
    from npu_gptoss.moe import keeps_format

    kind = DEVICE_TYPES[platform]
    if platform == CPU:
        seen.append(_cpu())
    else:
        try:
            resolve_device(kind)
            backend = torch.get_device_module(kind)
            backend.set_device(0)  # an NPU tells its memory to a process with a context only
            free, total = backend.mem_get_info()
            name, count = backend.get_device_name(0), backend.device_count()
            # for the offline engine only: a server on an NPU expands them
            mxfp4 = platform == CUDA and keeps_format("mxfp4", torch.bfloat16)
            seen.append(Device(kind, name, count, total, free, emulated, mxfp4))
        except Exception as error:  # the driver's, torch_npu's, or ours in words
            return failed(
                f"There is no {kind} device that works: {one_line(error)}",
                "Mend what the checks of driver, device files and CANN say; NPU_GPTOSS_PLATFORM=cpu uses the CPU "
                "instead.",
            )
    return _device_finding(platform, seen[0])


def _device_finding(platform: str, found: Device) -> Finding:
    from npu_gptoss.doctor.memory import gib

    if platform == CPU:
        return ok(f"{found.name}, {found.count} core(s), {gib(found.free)} of {gib(found.total)} RAM available.")
    what = f"{found.count} × {found.name} with {gib(found.total)} each, {gib(found.free)} free"
    if found.emulated:
        return ok(f"{what}: an emulated Ascend 910B. It tells nothing of a real one's speed.")
    if platform == ASCEND and not found.name.startswith(CARDS):
        return warning(
            f"{what}: this package is made for the Ascend 910B (A2), whose operator contracts it follows.",
            "Rely on the self-test below, and report what it says.",
        )
    return ok(f"{what}.")


def _cpu() -> Device:
    import platform

    from npu_gptoss.model.memory import free_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = platform.processor() or platform.machine() or "CPU"
    with suppress(OSError, StopIteration):  # no Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    with suppress(OSError, ValueError):  # "max" where a control group has no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return Device("cpu", name, os.cpu_count() or 1, total, min(total, free_memory() or total))


def attention_operator() -> Finding:
    from npu_gptoss.serving.ascend import limits

    try:
        objection = limits.operator_objection()
    except ImportError as error:
        objection = f"torch_npu cannot be imported ({one_line(error)}); see torch-npu and torch-works above"
    if objection:
        sentence, _, remedy = objection.rpartition("; ")
        return failed(f"{sentence}.", f"{remedy[:1].upper()}{remedy[1:]}.")
    return ok("npu_fused_infer_attention_score_v2 takes learnable_sink.")


def graph_updates() -> Finding:
    from npu_gptoss.serving.ascend import limits

    if objection := limits.event_objection():
        sentence, _, remedy = objection.rpartition("; ")
        return warning(
            f"{sentence}.", f"Servers capture PIECEWISE graphs instead of FULL_DECODE_ONLY ones; for these {remedy}."
        )
    return ok("Captured attention calls can wait for their lengths (external events).")


def _self_test(name: str, seen: Device) -> Iterator[Finding]:
    import torch

    from npu_gptoss.doctor.selftest import self_test

    if seen.kind != CPU:
        torch.get_device_module(seen.kind).set_device(0)
    yield from self_test(name, torch.device(seen.kind))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

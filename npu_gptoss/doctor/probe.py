"""Runs the checks that need torch in a separate process: a failed import, a crash and a hang become findings.

The child (`python -m npu_gptoss.doctor.probe`) sends the name of each check that begins, and its findings. So the
parent reports findings at once, and knows which check ran when the child died. Only the child opens the device.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from npu_gptoss.doctor.checkpoint import checkpoint
from npu_gptoss.doctor.checks import SELF_TESTS
from npu_gptoss.doctor.findings import Finding, failed, guarded, not_applicable, ok, one_line, warning
from npu_gptoss.doctor.kernels import kernels
from npu_gptoss.doctor.machine import ASCEND, CPU, CUDA, Device, Machine
from npu_gptoss.nominal import kind_of

LIMIT = 600  # seconds for everything; it takes a minute
ALONE_LIMIT = 120  # seconds for a self-test in a process of its own; it takes twenty, mostly for imports
ON_NPU = ("attention-operator", "graph-updates")
ALL = ("torch-works", "device", *ON_NPU, "kernels", "checkpoint", *SELF_TESTS, "bandwidth")


@dataclass(frozen=True)
class End:
    """The end of the child. how: in words, empty when it ended well. errors: its standard error."""

    how: str
    errors: str = ""


# The parent


def probe(here: Machine, model: Path | None, devices: list[Device]) -> Iterator[Finding]:
    """Runs the child and yields its findings in the order of ALL; its device goes into `devices`."""
    if here.version("torch") is None:
        yield from (not_applicable("torch is not installed.", check=check) for check in ALL)
        return
    order = {"model": str(model) if model else None, "platform": here.platform()[0], "emulated": here.emulated}
    yield from findings_of(_child(order, LIMIT, here.environ), devices)


def alone(name: str, seen: Device) -> list[Finding]:
    """Runs a self-test in a separate process. A hang or a crash there ends no other check."""
    order = {"only": name, "device": asdict(seen)}
    found = findings_of(_child(order, ALONE_LIMIT, os.environ), [])
    return [finding for finding in found if finding.check == name]


def _child(order: dict[str, Any], limit: int, environ: Mapping[str, str]) -> Iterator[str | Finding | Device | End]:
    """The child's messages as they come, then its End. A text is the name of a check that begins."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    command = [sys.executable, "-m", __spec__.name, json.dumps({**order, "report": writer.fileno()})]
    deadline, how = time.monotonic() + limit, f"did not end within {limit} s"
    with tempfile.TemporaryFile() as errors, reader:
        options = {"stdout": subprocess.DEVNULL, "stderr": errors, "pass_fds": (writer.fileno(),), "env": dict(environ)}
        process = subprocess.Popen(command, **options)
        writer.close()
        try:
            while reader.poll(max(0.0, deadline - time.monotonic())):
                yield reader.recv()
        except EOFError:
            with suppress(subprocess.TimeoutExpired):
                how = _ending(process.wait(max(0.0, deadline - time.monotonic())))
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        yield End(how, errors.read().decode(errors="replace"))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def findings_of(sent: Iterable[str | Finding | Device | End], devices: list[Device]) -> Iterator[Finding]:
    """The child's report as findings. If the child died, the check that ran has failed, and the rest did not run."""
    seen, at = set(), ALL[0]
    for each in sent:
        if isinstance(each, str):
            at = each
        elif isinstance(each, Device):
            devices.append(each)
        elif isinstance(each, Finding):
            seen.add(each.check)
            yield each
        elif each.how:
            yield _died(each, at)
            missing = (check for check in ALL if check not in seen | {at})
            yield from (not_applicable("The process ended before.", check=check) for check in missing)


def _died(end: End, at: str) -> Finding:
    last = [line for line in end.errors.strip().splitlines() if line.strip()]
    remedy = (
        "torch, torch-npu, CANN and the driver do not fit together, or the device hangs: do as the checks of versions "
        "say; `npu-smi info` or `nvidia-smi` shows the device's state."
    )
    said = f": {one_line(last[-1])}" if last else "."
    return failed(f"The process of this check {end.how}{said}", remedy, check=at)


# The child


def main(order: dict[str, Any]) -> None:
    """Runs the checks in the order of ALL."""
    os.set_inheritable(order["report"], False)  # a process that outlives this one must not hold the pipe open
    with Connection(order["report"], readable=False) as report:

        def check(name: str, function: Callable[..., Finding | Iterable[Finding]], *arguments: Any) -> list[Finding]:
            report.send(name)
            found = []
            for finding in guarded(name, function, *arguments):
                report.send(finding)
                found.append(finding)
            return found

        def skip(reason: str, *names: str) -> None:
            for name in names:
                report.send(not_applicable(reason, check=name))

        if "only" in order:
            check(order["only"], _self_test, order["only"], Device(**order["device"]))
            return
        if check("torch-works", torch_works)[0].state != "ok":
            skip("torch does not work.", *ALL[1:])
            return
        seen: list[Device] = []
        check("device", device, order["platform"], order["emulated"], seen)
        if seen:
            report.send(seen[0])
        if order["platform"] == ASCEND:
            check("attention-operator", attention_operator)
            check("graph-updates", graph_updates)
        else:
            skip("torch-npu is for Ascend machines.", *ON_NPU)
        check("kernels", kernels, order["platform"])
        check("checkpoint", checkpoint, Path(order["model"]) if order["model"] else None)
        if not seen:
            skip("There is no usable device.", *SELF_TESTS, "bandwidth")
            return
        import torch

        from npu_gptoss.doctor.selftest import PREFIX, bandwidth
        from npu_gptoss.verify.self_test.all import ALONE

        for name in SELF_TESTS:
            apart = name.removeprefix(PREFIX) in ALONE and seen[0].kind != CPU
            check(name, alone if apart else _self_test, name, seen[0])
        check("bandwidth", bandwidth, torch.device(seen[0].kind), seen[0])


def torch_works() -> Finding:
    """Importing torch also loads torch-npu, when it is installed, and with it CANN's libraries."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # an extension may raise anything
        remedy = "On an Ascend machine, source CANN's set_env.sh first; else install torch again."
        return failed(f"torch cannot be imported: {one_line(error)}", remedy)
    return ok(f"torch {torch.__version__} imports and runs with {torch.get_num_threads()} thread(s).")


def device(platform: str, emulated: bool, seen: list[Device]) -> Finding:
    """Opens the device of this platform and puts it into `seen`."""
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
            backend.set_device(0)  # an NPU reports its memory only to a process with a context
            free, total = backend.mem_get_info()
            name, count = backend.get_device_name(0), backend.device_count()
            # for the offline engine only: a server on an NPU expands them
            mxfp4 = platform == CUDA and keeps_format("mxfp4", torch.bfloat16)
            seen.append(Device(kind, name, count, total, free, emulated, mxfp4))
        except Exception as error:  # the driver's, torch_npu's, or ours in words
            remedy = "Do as the checks of driver and device files say; NPU_GPTOSS_PLATFORM=cpu uses the CPU instead."
            return failed(f"There is no {kind} device that works: {one_line(error)}", remedy)
    return _device_finding(platform, seen[0])


def _device_finding(platform: str, found: Device) -> Finding:
    from npu_gptoss.doctor.memory import gib

    if platform == CPU:
        return ok(f"{found.name}, {found.count} core(s), {gib(found.free)} of {gib(found.total)} RAM available.")
    what = f"{found.count} × {found.name} with {gib(found.total)} each, {gib(found.free)} free"
    if found.emulated:
        return ok(f"{what}: an emulated {found.name}. Its speed says nothing about a real one.")
    if platform == ASCEND:
        from npu_gptoss.serving.releases import package_folder, seams

        kind = kind_of(found.name)
        built = seams.device_type(package_folder(seams.PACKAGE))
        if kind and built and kind != built:
            ends = f"the installed vllm-ascend is built for {built}, and this is {kind}: a server ends at its start"
            image = "-a3" if kind == "A3" else ""
            remedy = (
                f"Use the image `vllm-ascend:v0.23.0{image}`, or build vllm-ascend's source release on this machine."
            )
            return failed(f"{what}: {ends}.", remedy)
        if not kind:
            sentence = f"{what}: this package is made for Ascend 910B (A2) and 910C (A3), whose contracts it follows."
            return warning(sentence, "Rely on the self-test below, and report its result.")
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
        return failed(f"torch_npu cannot be imported ({one_line(error)}).", "See torch-npu and torch-works above.")
    if objection:
        return failed(f"{objection.finding}.", objection.advice)
    return ok("npu_fused_infer_attention_score_v2 takes learnable_sink.")


def graph_updates() -> Finding:
    from npu_gptoss.serving.ascend import limits

    if objection := limits.event_objection():
        remedy = f"Servers capture PIECEWISE graphs instead of FULL_DECODE_ONLY ones; for these {objection.remedy}."
        return warning(f"{objection.finding}.", remedy)
    return ok("Captured attention calls can wait for their lengths (external events).")


def _self_test(name: str, seen: Device) -> Iterator[Finding]:
    import torch

    from npu_gptoss.doctor.selftest import self_test

    if seen.kind != CPU:
        torch.get_device_module(seen.kind).set_device(0)
    yield from self_test(name, torch.device(seen.kind))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

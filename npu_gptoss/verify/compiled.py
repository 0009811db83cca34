"""`npu-gptoss verify --compile`: Ascend's Triton kernels with Huawei's own compiler, on a machine without an Ascend.

For every kernel that is registered for Ascend and written in Triton: Triton's interpreter against the definition; the
kernel lowered by triton-ascend to linalg and built for this CPU, against the definition; each lowered program given to
`bishengir-compile` for a 910B and a 910C; with --mutate mutations of the kernel's source, which the second step must
notice.
`ascend_emulator.compiler` has the tools; docs/verify.md explains an acceptance.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Platform, platform_override
from npu_gptoss.kernels.platform import TRITON_FOR_ASCEND
from npu_gptoss.kernels.registry import registry
from npu_gptoss.verify.calls import Call, CallSpec, specs_of
from npu_gptoss.verify.cases import on
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.runner import MutationResult, Report, Target, fitting, matches, verify
from npu_gptoss.verify.source_mutations import EQUIVALENT, source_mutations

CPU = torch.device("cpu")
ASCEND = Platform("ascend", frozenset({"torch_npu", "triton", TRITON_FOR_ASCEND}))
INTERPRETER, LOWERED = "interpreter", "lowered"  # the steps that call a kernel, before the names of their calls
CARDS = ("Ascend910B3", "Ascend910B4-1", "Ascend910_9391")  # two A2 and an A3: their names for the compiler
SECONDS = 60  # of a core, of one mutation: then it is caught, because it does not end


def ascend_kernels(wanted: str | None) -> list[Target]:
    """The kernels in Triton for Ascend. Raises InputError where none is named."""
    found = [
        Target(kernel.name, CHECKS.get(f"{kernel.family}.{kernel.mode}"), kernel, kernel.origin)
        for kernel in registry.kernels.values()
        if TRITON_FOR_ASCEND in kernel.capability.features and _in_triton(kernel.module)
    ]
    chosen = [target for target in found if wanted is None or matches(wanted, target)]
    if not chosen:
        names = ", ".join(sorted(target.name for target in found))
        raise InputError(f"{wanted!r} names no kernel that is compiled for Ascend; such kernels are: {names}")
    return sorted(chosen, key=lambda target: target.name)


def _in_triton(module: str) -> bool:
    """The file defines a Triton kernel. Read as text, because importing it may need missing packages."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None and "@triton.jit" in Path(spec.origin).read_text()


def verify_compiled(target: Target, *, seed: int, cases: int, mutate: bool = False) -> Report:
    """All steps of one kernel. Raises InputError where the compiler is not installed.

    details: `programs`, with the plan of `ascend_emulator.compiler.planner`.
    """
    launches, report = compiler("launches"), Report(target)
    made: dict[Any, Any] = {}
    with platform_override(ASCEND):
        for step, launcher in ((LOWERED, launches.lowered(made)), (INTERPRETER, launches.interpreted)):
            with launches.launching(launcher):
                found = verify(target, CPU, seed=seed, cases=cases, ledger=())
            report.calls += [replace(result, call=f"{step}, {result.call}") for result in found.calls]
            report.reasons += [f"{step}: {reason}" for reason in found.reasons]
        if any(call.wrong for call in report.calls if call.call.startswith(LOWERED)):
            return report  # neither a plan nor a mutation says anything of a kernel that is wrong
        plan = compiler("planner").plan
        planned = [(one.program, plan(one.program, CARDS[0])) for one in made.values()]
        report.details = {"programs": [{"program": str(program), "plan": asdict(found)} for program, found in planned]}
        for program, found in planned:
            for card, seen in ((CARDS[0], found), *((card, plan(program, card)) for card in CARDS[1:])):
                kept = report.reasons if seen.refusal else report.notes
                kept.append(f"{program} for {card}: {_planned(seen)}")
        if not planned:
            report.reasons.append("no program was compiled")
        if not mutate:
            return report
        calls = [
            (call, target.check.definition(call.inputs), spec)
            for spec in specs_of(target.kernel, target.check, seed, cases)
            for call in fitting(target, target.check.calls(spec), spec)
        ]
        for kernel in dict.fromkeys(key[0] for key in made):
            for mutation in source_mutations(kernel.src):
                seen = _in_a_child(lambda m=mutation, k=kernel: _first_wrong(target, calls, {k.__name__: m.source}))
                same = (kernel.__name__, mutation.name) in EQUIVALENT
                report.mutations.append(MutationResult(mutation.name, "source", seen, not same, 0.0))
                if seen and same:
                    report.reasons.append(f"caught, and stated as equivalent: {mutation.name} ({seen})")
    return report


def compiler(module: str) -> Any:
    """A module of `ascend_emulator.compiler`. Raises InputError where that cannot be had."""
    try:
        tools = importlib.import_module("ascend_emulator.compiler.tools")
        found = importlib.import_module(f"ascend_emulator.compiler.{module}")
    except ModuleNotFoundError as error:
        raise InputError(
            f"verify --compile needs {error.name}, which is not installed here; make setup-ascend-compiler makes an "
            "environment that has all: .venv-ascend-compiler/bin/npu-gptoss verify --compile"
        ) from error
    try:
        tools.tools()
    except tools.CompilerError as error:
        raise InputError(str(error)) from error
    return found


def _first_wrong(target: Target, kept: list[tuple[Call, Any, CallSpec]], changed: Mapping[str, str]) -> str:
    """The first call that a mutated kernel gets wrong; "" for none."""
    launches = compiler("launches")
    with launches.launching(launches.lowered({}, changed)):
        for call, want, spec in kept:
            try:
                got = target.check.run(on(call.inputs, CPU), target.name)
            except Exception as error:  # a broken kernel may raise anything
                return f"{type(error).__name__}: {error}".splitlines()[0]
            if not target.check.judge(got, want, spec.precision, None).ok:
                return call.name
    return ""


def _in_a_child(work: Callable[[], str]) -> str:
    """The work's answer from a separate process, because a mutated kernel may crash or never end."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            signal.alarm(10 * SECONDS)  # for one that waits; on a busy machine a right one takes long
            torch.set_num_threads(1)  # a pool of the parent's threads has no threads here, and would be waited for
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # libc's words about a broken heap
            os.write(writer, work().encode()[:4096])
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
        return f"it does not end within {SECONDS} s"
    return said if status == 0 else f"it ends its process with {status}"


def _planned(plan: Any) -> str:
    if plan.refusal:
        return f"REFUSED: {plan.refusal}"
    room = compiler("planner").AVAILABLE
    memory = ", ".join(f"{size} of {room.get(space, '?')} bytes of {space}" for space, size in plan.memory.items())
    without = f", without {', '.join(plan.without)}" if plan.without else ""
    return f"accepted, {memory or 'no on-chip memory'}{without}"
